"""Compare architectures after syncs with plain, fresh engines, and write docs/models.md.

``python -m tests.models_table`` does all of them; names select some, and ``--json`` only prints the results.
The engines run in a child process, which is started again for the rest should one of them end it.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
_BEGIN, _END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
_RESULT = "result: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; none means all of them")
    parser.add_argument("--json", action="store_true", help="print results, do not write the table")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from tests.architectures import FAMILIES

    names = options.names or list(FAMILIES)
    if options.here:
        for name in names:
            result = _outcome(name)
            print(_RESULT + json.dumps({name: result}), flush=True)
            if "error" in result:
                return  # what is left of that engine would be in the way of the next
        return
    results: dict[str, dict[str, Any]] = {}
    while remaining := [name for name in names if name not in results]:
        for result in _in_a_process(remaining):
            print(json.dumps(result), flush=True)
            results |= result
        if remaining[0] not in results:
            results[remaining[0]] = {"error": "the process died"}
    if not options.json:
        _write(results)


def _in_a_process(names: list[str]) -> Iterator[dict[str, dict[str, Any]]]:
    """Results of ``names``, as far as one process comes with them."""
    command = [sys.executable, "-m", "tests.models_table", "--here", *names]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(_RESULT):
                yield json.loads(line.removeprefix(_RESULT))


def _outcome(name: str) -> dict[str, Any]:
    try:
        return compare(name)
    except Exception as error:  # what vLLM does not run here
        text = str(error).strip() or type(error).__name__
        return {"error": text.splitlines()[-1][:300]}


def compare(name: str) -> dict[str, Any]:
    """Sync one architecture twice and compare it with a plain engine of the last checkpoint.

    Returns:
        ``{"routes", "weights", "outputs"}``, the first by rank, the others whether they are equal; or
        ``{"refused": reason}``.
    """
    from tests import conftest  # noqa: F401  # sets the environment
    from tests.architectures import FAMILIES
    from tests.checkpoints import build_checkpoint, perturb_checkpoint
    from tests.engine import engines
    from vllm_sparse_refit import SyncConfig, WeightSynchronizer
    from vllm_sparse_refit.errors import UnsupportedModelError

    family = FAMILIES[name]
    ask = getattr(engines, family.runs)
    if family.runs == "generate" and family.engine.get("tensor_parallel_size", 1) > 1:
        ask = functools.partial(ask, tokens=2)  # two ranks on two cores are slow
    with tempfile.TemporaryDirectory(prefix="models-table-") as folder:
        steps = [Path(folder) / str(number) for number in range(3)]
        build_checkpoint(steps[0], name)
        for number, fraction in enumerate((0.02, 0.3)):
            perturb_checkpoint(
                steps[number], steps[number + 1], fraction=fraction, seed=number, change="values"
            )
        settings = _settings(family.engine, steps[0])
        checksums = engines.checksums
        if family.runs == "load":  # no outputs that would tell of derived tensors
            checksums = engines.tensor_checksums
            settings["worker_extension_cls"] = "tests.engine.extensions.TensorChecksums"
        with engines.engine(steps[0], **settings) as llm:
            start = checksums(llm), ask(llm)
            sync = WeightSynchronizer.connect(llm, config=SyncConfig(ignore=family.ignore))
            try:
                sync.snapshot(steps[0])
                for step in steps[1:]:
                    sync.sync(step)
            except UnsupportedModelError as error:
                return {
                    "refused": str(error).replace(str(steps[0]), "its path"),
                    "unchanged": (checksums(llm), ask(llm)) == start,
                }
            synced = checksums(llm), ask(llm)
            routes = [reply["routes"] for reply in sync.status()]
        with engines.engine(steps[-1], plugins=None, **settings) as llm:
            fresh = checksums(llm), ask(llm)
    return {
        "routes": routes,
        "weights": synced[0] == fresh[0] and synced[0] != start[0],
        "outputs": synced[1] == fresh[1] and (synced[1] != start[1] or family.runs == "load"),
    }


def _settings(settings: Any, folder: Path) -> dict[str, Any]:
    """A draft model named DRAFT is the checkpoint that the engine starts from."""
    result = dict(settings)
    if "speculative_config" in result:
        speculative = dict(result["speculative_config"])
        if speculative.get("model") == "DRAFT":
            speculative["model"] = str(folder)
        result["speculative_config"] = speculative
    return result


def _write(results: dict[str, dict[str, Any]]) -> None:
    """Put the table between its marks, and leave the rest of the document as it is."""
    head = (
        "| architecture | placement | native | shadow | after two syncs |\n"
        "|---|---:|---:|---:|---|\n"
    )
    table = head + "".join(_row(name, result) for name, result in results.items())
    text = DOCUMENT.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    DOCUMENT.write_text(f"{before}{_BEGIN}\n\n{table}\n{_END}{after}")


def _row(name: str, result: dict[str, Any]) -> str:
    counts = " | ".join(
        " + ".join(str(rank[route]) for rank in result.get("routes", ()))
        for route in ("placement", "native", "shadow")
    )
    return f"| {name} | {counts} | {_verdict(result)} |\n"


def _verdict(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"vLLM does not run it here: {result['error']}"
    if "refused" in result:
        return f"refused: {result['refused']}"
    if result["weights"] and result["outputs"]:
        return "exact"
    return f"WRONG: weights equal {result['weights']}, outputs equal {result['outputs']}"


if __name__ == "__main__":
    main()
