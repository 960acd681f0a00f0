"""``make fuzz``: coverage-guided fuzzing with atheris; prints the executions of each target.

python -m tests.fuzz.run decode_checksummed --seconds 60
"""

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["vllm_sparse_refit"]):
    from tests.fuzz import targets

TARGETS = ("decode", "decode_checksummed", "metadata", "message")


def main() -> None:
    """Fuzz one target; a crash, a hang or too much memory ends with an error status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    server = targets.LiveServer() if options.target == "message" else None
    target = server.message if server is not None else getattr(targets, options.target)
    with tempfile.TemporaryDirectory() as folder:
        for number, payload in enumerate(targets.seeds(options.target)):
            (Path(folder) / str(number)).write_bytes(payload)
        limits = ["-rss_limit_mb=2048", "-timeout=10", "-max_len=65536", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *limits, f"-max_total_time={options.seconds}", folder], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
