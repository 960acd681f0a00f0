"""Update a running vLLM engine with what one training step changed, and prove that it is exact.

Run ``python -m benchmarks.demo``. It needs no GPU, no network and no model files: it trains a small
Llama, starts a real vLLM engine on the checkpoint from before the last step, sends that step's
changes to it, and compares it with a second engine that is started from the checkpoint after.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import engines

MIB = 1 << 20
NEW_TOKENS = 16
SHOWN_TOKENS = 6


@dataclass(frozen=True)
class _State:
    """All that must be equal between two engines of the same weights."""

    completions: list[engines.Completion]
    checksums: engines.Checksums


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 0 when both engines are equal, 1 when anything differs."""
    options = _parse(arguments)
    engines.prepare_environment()
    started = time.perf_counter()
    print("Update a running vLLM engine, and compare it with one that was restarted.\n")
    with contextlib.ExitStack() as stack:
        folder = options.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="refit-demo-")))
        equal = _run(folder / "before", folder / "after", options)
    if options.keep is not None:
        print(f"The two checkpoints are in {options.keep}.")
    print(f"Took {time.perf_counter() - started:.0f} s.")
    return 0 if equal else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo",
        description="Update a running vLLM engine and compare it with a restarted one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--parameters", type=int, default=20_000_000, help="size of the Llama to train"
    )
    parser.add_argument("--lr", type=float, default=2e-6, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="write the two checkpoints there and keep them"
    )
    return parser.parse_args(arguments)


def _run(before: Path, after: Path, options: argparse.Namespace) -> bool:
    with _phase("load torch, transformers and vLLM"):
        import torch
        import vllm  # noqa: F401 - so that the engines' phases show their own time
        from transformers.utils import logging as transformers_logging

        from benchmarks.checkpoints import shape_for, train_pair
        from vllm_sparse_refit import WeightSynchronizer

        transformers_logging.disable_progress_bar()
    shape = shape_for(options.parameters)
    with _phase(
        f"train a Llama of {shape.parameters / 1e6:.1f} M parameters, save two checkpoints"
    ):
        train_pair(before, after, shape=shape, lr=options.lr, seed=options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    prompts = [
        torch.randint(shape.vocabulary, (length,), generator=generator).tolist()
        for length in (32, 8, 50)
    ]

    with contextlib.ExitStack() as running:
        with _phase('start engine 1 from "before", with its worker in a process of its own'):
            llm = running.enter_context(engines.engine(before))
        with _phase("  generate"):
            old = _state(llm, prompts)
        with _phase("  connect and take a snapshot of the weights that the engine holds"):
            sync = WeightSynchronizer.connect(llm)
            sync.snapshot(before)
        with _phase('  sync the running engine to "after", over ZeroMQ'):
            report = sync.sync(after)
        with _phase("  generate"):
            synced = _state(llm, prompts)
        with _phase("  shut engine 1 down"):
            running.close()
    with contextlib.ExitStack() as running:
        with _phase('start engine 2 from "after", for comparison'):
            llm = running.enter_context(engines.engine(after))
        with _phase("  generate"):
            fresh = _state(llm, prompts)
        with _phase("  shut engine 2 down"):
            running.close()

    print("\nThe sync")
    share = report.wire_bytes / report.dense_bytes
    rows = [
        (
            "changed",
            f"{report.changed_elements:,} of {report.total_elements:,} elements, "
            f"{report.changed_fraction:.2%}",
        ),
        (
            "sent",
            f"{report.wire_bytes / MIB:.2f} MiB instead of {report.dense_bytes / MIB:.2f} MiB, "
            f"{share:.2%}",
        ),
        ("time", f"{report.sync_s:.3f} s, of which generation was paused {report.pause_s:.3f} s"),
        ("version", str(report.version)),
    ]
    for name, value in rows:
        print(f"  {name:<9} {value}")
    _print_tokens(old, synced, fresh)
    return _print_verdict(old, synced, fresh)


@contextlib.contextmanager
def _phase(what: str) -> Iterator[None]:
    print(f"{what:<75}", end="", flush=True)
    started = time.perf_counter()
    yield
    print(f"{time.perf_counter() - started:7.2f} s", flush=True)


def _state(llm: object, prompts: list[list[int]]) -> _State:
    return _State(engines.generate(llm, prompts, tokens=NEW_TOKENS), engines.checksums(llm))


def _print_tokens(old: _State, synced: _State, fresh: _State) -> None:
    print(f"\nThe first {SHOWN_TOKENS} tokens that follow prompt 1, with their log-probabilities")
    titles = ("engine 1 before", "engine 1 after sync", "engine 2 (fresh)")
    print("  step" + "".join(f"{title:>24}" for title in titles))
    columns = [state.completions[0] for state in (old, synced, fresh)]
    for step in range(SHOWN_TOKENS):
        cells = "".join(f"{c.tokens[step]:>10}{c.chosen[step]:>14.8f}" for c in columns)
        print(f"  {step:>4}{cells}")


def _print_verdict(old: _State, synced: _State, fresh: _State) -> bool:
    """Compare engine 1 after the sync with engine 2, and say what came out."""
    problems: list[str] = []
    moved = engines.differing(old.checksums, synced.checksums)
    if not moved or old.completions == synced.completions:
        problems.append("the sync changed nothing, so this comparison proves nothing")
    if different := engines.differing(synced.checksums, fresh.checksums):
        problems.append(f"{len(different)} tensors differ, first {different[0]}")
    for number, (one, other) in enumerate(
        zip(synced.completions, fresh.completions, strict=True), start=1
    ):
        if one.tokens != other.tokens:
            problems.append(f"the tokens that follow prompt {number} differ")
        elif one.logprobs != other.logprobs:
            problems.append(f"the log-probabilities of prompt {number} differ")

    compared = sum(len(step) for one in fresh.completions for step in one.logprobs)
    tokens = sum(len(one.tokens) for one in fresh.completions)
    print("\nEngine 1 after the sync, compared with engine 2")
    print(
        f"  {len(fresh.checksums)} parameters and buffers, every bit (by vLLM's checksums); "
        f"the sync changed {len(moved)}"
    )
    print(
        f"  {tokens} tokens and {compared} log-probabilities of {len(fresh.completions)} prompts, "
        "without tolerance"
    )
    for problem in problems:
        print(f"DIFFERENT: {problem}")
    if not problems:
        print("EQUAL: the updated engine is bit for bit the engine started from the new checkpoint")
    return not problems


if __name__ == "__main__":
    sys.exit(main())
