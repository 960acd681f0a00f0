"""What the compiled loops offer; kernels.py documents each of them."""

from typing import Any

import numpy.typing as npt

_Array = npt.NDArray[Any]

def find_changes(
    old: _Array,
    new: _Array,
    operation: int,
    begin: int,
    locations: _Array,
    values: _Array,
    /,
) -> int: ...
def code_changes(
    old: _Array,
    new: _Array,
    operation: int,
    begin: int,
    locations: _Array,
    values: _Array,
    gaps: _Array,
    wide: _Array,
    nibbles: _Array,
    escapes: _Array,
    /,
) -> tuple[int, int, int, int, int]: ...
def write_gaps(locations: _Array, gaps: _Array, wide: _Array, /) -> int: ...
def read_gaps(gaps: _Array, wide: _Array, first: int, end: int, locations: _Array, /) -> int: ...
def write_nibbles(codes: _Array, nibbles: _Array, escapes: _Array, /) -> int: ...
def read_nibbles(nibbles: _Array, escapes: _Array, codes: _Array, /) -> int: ...
def write_plane(codes: _Array, plane: int, out: _Array, /) -> None: ...
def read_plane(plane_bytes: _Array, plane: int, codes: _Array, /) -> None: ...
def zigzag(values: _Array, codes: _Array, /) -> None: ...
def unzigzag(codes: _Array, /) -> None: ...
def scatter(
    target: _Array,
    locations: _Array,
    values: _Array,
    operation: int,
    stride: int,
    shift: int,
    before: _Array | None,
    done: _Array | None,
    /,
) -> None: ...
def digest_run(bits: _Array, begin: int, /) -> tuple[int, int]: ...
def digest_places(bits: _Array, locations: _Array, /) -> tuple[int, int]: ...
def use_instructions(name: str, /) -> None: ...
def instructions() -> str: ...
