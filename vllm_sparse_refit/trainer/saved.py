"""A baseline and its version in a folder, for a trainer that restarts."""

import contextlib
import io
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from vllm_sparse_refit.checksum import checksum_hex
from vllm_sparse_refit.codec.dtypes import bits_view, dtype_from_name, dtype_name
from vllm_sparse_refit.errors import BaselineError
from vllm_sparse_refit.trainer.durable import replace_durably
from vllm_sparse_refit.trainer.exported import NamedTensor
from vllm_sparse_refit.trainer.resync import Lineage
from vllm_sparse_refit.weight_version import WeightVersion

_FORMAT: Final = "vllm-sparse-refit-baseline/1"
_INDEX: Final = "baseline.json"
_BITS_SUFFIX: Final = ".bits"


@dataclass(frozen=True)
class SavedBaseline:
    """What :func:`load_baseline` found. ``tensors`` is read, and checked, while it is iterated."""

    version: WeightVersion
    lineage: Lineage
    tensors: Iterator[NamedTensor]


def save_baseline(
    folder: str | os.PathLike[str],
    tensors: Iterable[NamedTensor],
    version: WeightVersion,
    lineage: Lineage,
) -> None:
    """Write tensors, one after the other, and what is known of the engines that hold them.

    Args:
        folder: made if need be; an earlier save in it stays until this one is complete.

    Raises:
        BaselineError: it cannot be written.
    """
    target = Path(folder)
    # Of a name of its own: the earlier one is in use until the index names this one.
    bits = target / f"{uuid.uuid4().hex}{_BITS_SUFFIX}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        with bits.open("wb") as file:
            index = [_write(file, name, tensor) for name, tensor in tensors]
            file.flush()
            os.fsync(file.fileno())
        head = describe(version, lineage) | {"bits": bits.name, "tensors": index}
        replace_durably(target / _INDEX, json.dumps(head).encode())
    except OSError as error:
        with contextlib.suppress(OSError):
            bits.unlink(missing_ok=True)
        raise BaselineError(
            f"the baseline cannot be saved in {str(target)!r} ({error}); free space or choose another "
            "folder"
        ) from error
    for stale in target.glob(f"*{_BITS_SUFFIX}"):
        if stale != bits:
            stale.unlink(missing_ok=True)


def _write(file: io.BufferedIOBase, name: str, tensor: torch.Tensor) -> dict[str, Any]:
    data = _bytes_of(bits_view(tensor).contiguous())
    file.write(data)
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "checksum": checksum_hex(data),
    }


def describe(version: WeightVersion, lineage: Lineage) -> dict[str, Any]:
    """What a trainer that goes on from a baseline must know beside it, as JSON types."""
    start = lineage.start
    return {
        "format": _FORMAT,
        "version": {"label": version.label, "digest": version.digest},
        "incarnations": sorted(lineage.incarnations),
        "fingerprints": sorted(lineage.fingerprints),
        "start": None if start is None else {"label": start.label, "digest": start.digest},
    }


def read_description(index: Mapping[str, Any]) -> tuple[WeightVersion, Lineage]:
    """The reverse of :func:`describe`.

    Raises:
        ValueError: it is of another format.
        KeyError, TypeError: it is no description.
    """
    if index["format"] != _FORMAT:
        raise ValueError(f"it is {index['format']!r}, and this reads {_FORMAT!r}")
    lineage = Lineage()
    lineage.incarnations = set(index["incarnations"])
    lineage.fingerprints = {tuple(each) for each in index["fingerprints"]}
    lineage.start = None if index["start"] is None else WeightVersion(**index["start"])
    return WeightVersion(**index["version"]), lineage


def read_note(folder: str | os.PathLike[str], note: str) -> tuple[WeightVersion, Lineage]:
    """What a trainer noted beside its baseline in files: JSON of :func:`describe`.

    Raises:
        BaselineError: it noted nothing, because it ended within its snapshot.
    """
    try:
        return read_description(json.loads(note))
    except (ValueError, KeyError, TypeError) as error:
        raise BaselineError(
            f"the baseline in {str(folder)!r} belongs to no known version ({type(error).__name__}: "
            f"{error}); snapshot() the weights that the engines hold"
        ) from error


def load_baseline(folder: str | os.PathLike[str]) -> SavedBaseline:
    """Read what :func:`save_baseline` wrote.

    Raises:
        BaselineError: it is missing, incomplete or of another format. The iterator of its tensors
            raises it too, for bytes that are not those that were saved.
    """
    path = Path(folder)
    try:
        index = json.loads((path / _INDEX).read_text())
        version, lineage = read_description(index)
        return SavedBaseline(version, lineage, _tensors(path / index["bits"], index["tensors"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BaselineError(
            f"{str(path)!r} holds no saved baseline ({type(error).__name__}: {error}); snapshot() the "
            "weights that the engines hold"
        ) from error


def _tensors(path: Path, index: list[dict[str, Any]]) -> Iterator[NamedTensor]:
    try:
        with path.open("rb") as file:
            for entry in index:
                yield entry["name"], _read(file, entry)
    except OSError as error:
        raise BaselineError(f"the saved baseline cannot be read ({error})") from error


def _read(file: io.BufferedIOBase, entry: dict[str, Any]) -> torch.Tensor:
    dtype = dtype_from_name(entry["dtype"])
    tensor = torch.empty(entry["shape"], dtype=dtype)
    data = _bytes_of(bits_view(tensor))
    read = file.readinto(data) if len(data) else 0
    if read != len(data) or checksum_hex(data) != entry["checksum"]:
        raise BaselineError(
            f"the saved bits of {entry['name']} are damaged or incomplete; snapshot() the weights that "
            "the engines hold"
        )
    return tensor


def _bytes_of(bits: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = bits.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
