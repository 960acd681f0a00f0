"""What a commit costs, on a real vLLM engine, against three other ways to the same bits.

    python -m benchmarks.apply --json

Prints one JSON object on its last line. At each changed fraction the model is brought to new weights by
this project's commit (the digests of prior bits, undo log, samples and cache resets included; ``pause_s`` is
the part of it during which an engine cannot generate), by this project's path through the native loader (for
what cannot be placed), by vLLM's own sparse patches, and by a full ``load_weights``. Each result is compared
with the new weights bit by bit before its time counts. ``stage_s`` is what placing the update costs the
threads that receive it, beforehand. ``loops_s`` is what no commit of this design can undercut: the compiled
loop that digests the elements to be changed, and then the one that changes them, and nothing else.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import engines

FRACTIONS = (0.001, 0.01, 0.05)
CACHE_LINE_BYTES = 64
WARM_UPS = 1

Weights = dict[str, torch.Tensor]


class WrongWeightsError(Exception):
    """A way did not lead to the new weights, so its time means nothing."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apply", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument("--parameters", type=int, default=320_000_000, help="size of the Llama")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each kind")
    options = parser.parse_args(arguments)
    engines.prepare_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must be in this process
    try:
        result = measure(options.parameters, options.runs)
    except WrongWeightsError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if options.json else table(result), flush=True)
    return 0


def measure(parameters: int, runs: int) -> dict[str, Any]:
    from benchmarks.checkpoints import rl_pair
    from vllm_sparse_refit import WeightSynchronizer
    from vllm_sparse_refit.trainer.weights import named_weights

    with tempfile.TemporaryDirectory(prefix="apply-benchmark-") as folder:
        before = Path(folder, "before")
        rl_pair(before, Path(folder, "after"), parameters=parameters)
        old = {name: tensor.clone() for name, tensor in named_weights(before)}
        with engines.engine(before) as llm:
            sync = WeightSynchronizer.connect(llm)
            sync.snapshot(old)  # has the worker discover where everything goes
            subject = Subject(llm)
            fractions = {str(f): subject.measure(old, f, runs) for f in FRACTIONS}
            sync.close()
    return {
        "parameters": sum(tensor.numel() for tensor in old.values()),
        "fractions": fractions,
        "bandwidth_gbps": bandwidth() / 1e9,
        "runs": runs,
        "threads": torch.get_num_threads(),
    }


@dataclass(frozen=True)
class Way:
    """One way to bring the model to new weights."""

    name: str
    run: Callable[[], None]
    end: Callable[[], None] = lambda: None


class Subject:
    """The model of an engine that runs in this process."""

    def __init__(self, llm: Any) -> None:
        from vllm_sparse_refit.worker.extension import live_receiver

        self._llm = llm
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        receiver = live_receiver(worker)
        assert receiver is not None
        self._applier = receiver._applier
        self._runner = worker.model_runner

    def measure(self, old: Weights, fraction: float, runs: int) -> dict[str, float]:
        new = changed(old, fraction)
        self._pauses: list[float] = []
        expected = self._loaded(new)
        ways = [*self._ours(old, new), self._sparse_patches(old, new), self._dense(new)]
        seconds: dict[str, list[float]] = {way.name: [] for way in ways}
        for _ in range(WARM_UPS + runs):
            for way in ways:
                self._loaded(old)
                started = time.perf_counter()
                way.run()
                seconds[way.name].append(time.perf_counter() - started)
                self._check(expected, way.name)
                way.end()
        self._loaded(old)
        medians = {name: statistics.median(found[WARM_UPS:]) for name, found in seconds.items()}
        lines = sum(touched_lines(old[name], new[name]) for name in old)
        # Each line that is touched is read for the digests, and then read and written.
        bound = 3 * lines * CACHE_LINE_BYTES / bandwidth()
        return {
            **medians,
            "pause_s": statistics.median(self._pauses[WARM_UPS:]),
            "stage_s": self._stage_s,
            "vllm_sparse_to_ours": medians["vllm_sparse_s"] / medians["ours_s"],
            "vllm_sparse_to_loops": medians["vllm_sparse_s"] / medians["loops_s"],
            "dense_to_ours": medians["dense_s"] / medians["ours_s"],
            "bound_s": bound,
            "ours_to_bound": medians["ours_s"] / bound,
        }

    def _loaded(self, weights: Weights) -> Weights:
        """The model's tensors after a full load of weights."""
        self._dense(weights).run()
        return {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    def _check(self, expected: Weights, name: str) -> None:
        for key, tensor in self._model.state_dict().items():
            if not torch.equal(raw(tensor), raw(expected[key])):
                raise WrongWeightsError(f"{name} left wrong bits in {key}")

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.get_model()
        return model

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        from vllm_sparse_refit.apply.engine_settings import load_context

        with load_context(self._runner), torch.no_grad():
            yield

    def _ours(self, old: Weights, new: Weights) -> list[Way]:
        from vllm_sparse_refit.apply.sparse_writes import LoaderWriter
        from vllm_sparse_refit.apply.writer import WeightWriter
        from vllm_sparse_refit.codec import kernels
        from vllm_sparse_refit.codec.delta import SparseOperation

        applier = self._applier
        differences = as_deltas(old, new, SparseOperation.ADD)
        absolute = as_deltas(old, new, SparseOperation.OVERWRITE)
        started = time.perf_counter()
        staged = {name: [*map(applier.placed, parts)] for name, parts in differences.items()}
        self._stage_s = time.perf_counter() - started

        def commit() -> None:
            applier.check_transfer(staged)
            if applier.check_prior_bits(staged):
                raise WrongWeightsError("one rank should hold all of every tensor")
            prepared = time.perf_counter()
            applier.apply(staged)
            applier.reset_adapters()
            applier.finish_sparse_delta_refit()
            self._llm.reset_prefix_cache()
            self._pauses.append(time.perf_counter() - prepared)

        writes = [w.arrays for parts in staged.values() for part in parts for w in part.writes]
        before = np.zeros(kernels.before_bytes(writes), np.uint8)

        def loops() -> None:
            threads = torch.get_num_threads()
            kernels.digest_targets(writes, threads=threads)
            kernels.scatter(writes, before=before, threads=threads)

        def native() -> None:
            writer = WeightWriter(sample_limit=64)
            live, sink = applier._live_model(), LoaderWriter(writer)
            applier._load_natively(live, list(absolute), absolute, sink)

        ours = Way("ours_s", commit, applier.release)
        return [ours, Way("loops_s", loops), Way("native_mask_s", native)]

    def _sparse_patches(self, old: Weights, new: Weights) -> Way:
        from vllm.model_executor.model_loader import checkpoint_weight_patch as patching

        patches = []
        for name, tensor in new.items():
            flat = tensor.reshape(-1)
            indices = (flat.view(torch.int16) != old[name].reshape(-1).view(torch.int16)).nonzero()
            indices = indices.squeeze(1)
            patches.append(
                patching.CheckpointWeightPatch(
                    name, tuple(tensor.shape), tensor.dtype, flat[indices], indices
                )
            )

        def run() -> None:
            with self._loading():
                patching.load_checkpoint_weight_patches(self._model, patches)

        return Way("vllm_sparse_s", run)

    def _dense(self, weights: Weights) -> Way:
        def run() -> None:
            with self._loading():
                self._model.load_weights(iter(weights.items()))  # type: ignore[operator]

        return Way("dense_s", run)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: equal numbers may have different bits, and a NaN equals nothing."""
    return tensor.reshape(-1).view(torch.uint8)


def changed(old: Weights, fraction: float) -> Weights:
    """The same with that share of each tensor's bits one step up, in random places."""
    generator = torch.Generator().manual_seed(1)
    new = {}
    for name, tensor in old.items():
        bits = tensor.clone().view(torch.int16)
        bits += (torch.rand(tensor.shape, generator=generator) < fraction).to(torch.int16)
        new[name] = bits.view(tensor.dtype)
    return new


def as_deltas(old: Weights, new: Weights, operation: Any) -> dict[str, list[Any]]:
    """What a worker has staged when such a transfer is prepared."""
    from vllm_sparse_refit.codec.delta import Chunk, make_delta
    from vllm_sparse_refit.config import SyncConfig

    step = SyncConfig().chunk_elements
    deltas: dict[str, list[Any]] = {}
    for name, tensor in new.items():
        before, after = (t.reshape(-1).view(torch.int16) for t in (old[name], tensor))
        shape = tuple(tensor.shape)
        for begin in range(0, after.numel(), step):
            part = slice(begin, begin + step)
            delta = make_delta(
                Chunk(name, shape, tensor.dtype, operation, begin, before[part], after[part])
            )
            if delta is not None:
                deltas.setdefault(name, []).append(delta)
    return deltas


def touched_lines(old: torch.Tensor, new: torch.Tensor) -> int:
    """Cache lines of a tensor that hold a changed element."""
    different = (old.view(torch.int16) != new.view(torch.int16)).reshape(-1)
    per_line = CACHE_LINE_BYTES // old.itemsize
    whole = different[: different.numel() // per_line * per_line].view(-1, per_line)
    return int(whole.any(1).sum())


def bandwidth() -> float:
    """Bytes a second that a copy of 256 MiB reads and writes, with all threads."""
    source = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / statistics.median(seconds)


def table(result: dict[str, Any]) -> str:
    rows = [
        f"{result['parameters']:,} parameters, medians of {result['runs']} runs, milliseconds",
        f"{'changed':>9} {'commit':>9} {'paused':>9} {'loops':>9} {'native':>9} "
        f"{'vLLM sparse':>12} {'dense':>9} {'bound':>8}",
    ]
    for fraction, found in result["fractions"].items():
        rows.append(
            f"{fraction:>9} {found['ours_s'] * 1e3:9.1f} {found['pause_s'] * 1e3:9.1f} "
            f"{found['loops_s'] * 1e3:9.1f} {found['native_mask_s'] * 1e3:9.0f} "
            f"{found['vllm_sparse_s'] * 1e3:12.0f} {found['dense_s'] * 1e3:9.0f} "
            f"{found['bound_s'] * 1e3:8.1f}   vLLM sparse / commit {found['vllm_sparse_to_ours']:.0f}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
