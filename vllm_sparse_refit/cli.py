"""The command ``vllm-sparse-refit``."""

import argparse
import sys
from collections.abc import Sequence

from vllm_sparse_refit.errors import RefitError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="vllm-sparse-refit")
    commands = parser.add_subparsers(required=True)
    keygen = commands.add_parser(
        "keygen",
        help="make a CURVE key pair",
        description="Make a CURVE key pair: NAME.key, to be given to others, and NAME.key_secret, to be "
        "kept by its owner. One pair serves all workers, another one the trainer.",
    )
    keygen.add_argument("folder", help="where the two files go; made if need be")
    keygen.add_argument("name", help="what the files are called")
    keygen.set_defaults(run=_keygen)
    chosen = parser.parse_args(arguments)
    try:
        chosen.run(chosen)
    except RefitError as error:
        print(f"vllm-sparse-refit: {error}", file=sys.stderr)
        return 1
    return 0


def _keygen(chosen: argparse.Namespace) -> None:
    from vllm_sparse_refit.transport.curve import generate_keys

    public, secret = generate_keys(chosen.folder, chosen.name)
    print(f"public: {public}\nsecret: {secret}")


if __name__ == "__main__":
    sys.exit(main())
