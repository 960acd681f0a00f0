"""The extension module: that it is there, and that no arguments make it crash."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.codec import implementations
from vllm_sparse_refit.codec import kernels

Array = npt.NDArray[Any]
if_compiled = pytest.mark.skipif(
    implementations.compiled is None, reason="there is nothing compiled"
)


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="nothing was to be compiled without a compiler"
)
def test_the_loops_were_compiled_where_a_compiler_is() -> None:
    assert implementations.compiled is not None
    assert kernels.implementation() in {"avx512", "avx2", "portable"}


@if_compiled
def test_instructions_that_are_missing_are_refused_and_change_nothing() -> None:
    before = kernels.implementation()
    with pytest.raises(ValueError, match="lacks these instructions"):
        implementations.compiled.use_instructions("mmx")
    assert kernels.implementation() == before


def test_an_implementation_is_restored() -> None:
    before = kernels.implementation()
    for outer in implementations.ALL:
        with implementations.running(outer):
            for inner in implementations.ALL:
                with implementations.running(inner):
                    assert kernels.implementation() == inner
                assert kernels.implementation() == outer
    assert kernels.implementation() == before


def zeros(size: int, dtype: npt.DTypeLike = np.uint8) -> Array:
    return np.zeros(size, dtype)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def write(**changes: Any) -> kernels.ArrayWrite:
    """A small write that is right but for the changes."""
    return kernels.ArrayWrite(zeros(4), np.arange(2), zeros(2), kernels.XOR)._replace(**changes)


# What follows the writes in calls that take a list of them.
AFTER_WRITES: dict[str, tuple[Any, ...]] = {
    "scatter": (None, None, 1),
    "count_different": (zeros(8), 1, 1),
    "digest_targets": (zeros(2, np.uint64), 1),
}


def wrong_writes() -> list[Any]:
    u16, i32 = np.uint16, np.int32
    return [
        (),
        None,
        write()[:6],
        write(values=zeros(1)),
        write(values=zeros(2, u16)),
        write(where=zeros(2, u16)),
        write(where=zeros(3, i32)),
        write(where=None),
        write(where=2**63),
        write(where=3),
        write(operation=0),
        write(operation=4),
        write(operation="add"),
        write(stride=0),
        write(stride=2**63),
        write(shift=3),
        write(shift=-1),
        write(target=zeros(8)[::2]),
        write(target=zeros(2, np.complex128), values=zeros(2, np.complex128)),
        write(target=None),
        write(where=np.array([0, 9])),
        write(where=np.array([0, -9])),
        write(canonical=np.arange(3)),
        write(canonical=zeros(2, u16)),
        write(canonical=1),
    ]


def chunk(**changes: Any) -> tuple[Any, ...]:
    """A chunk for code_changes, right but for what is changed."""
    right = {
        "old": zeros(4, np.uint16),
        "new": zeros(4, np.uint16),
        "operation": 3,
        "begin": 0,
        "is_wide": False,
    }
    return tuple((right | changes).values())


def coding(*chunks: Any, **changes: Any) -> tuple[str, tuple[Any, ...]]:
    """A call of code_changes, right but for what is changed."""
    right = {
        "chunks": [*(chunks or [chunk()])],
        "locations": zeros(32),
        "values": zeros(64),
        "coded": zeros(len(chunks or "1") * (18 * 4 + 32)),
    }
    return "code_changes", tuple((right | changes).values())


def wrong_codings() -> list[tuple[str, tuple[Any, ...]]]:
    u16 = np.uint16
    wrong_chunks = [
        (),
        None,
        chunk()[:4],
        chunk(new=zeros(5, u16)),
        chunk(new=zeros(8)),
        chunk(new=None),
        chunk(new=zeros(8, u16)[::2]),
        chunk(old=zeros(4, np.complex128), new=zeros(4, np.complex128)),
        chunk(operation=0),
        chunk(operation=4),
        chunk(operation="add"),
        chunk(begin=-1),
        chunk(begin=2**31 - 3),
        chunk(begin=2**63 - 3, is_wide=True),
        chunk(begin=2**63),
    ]
    return [
        *(coding(wrong) for wrong in wrong_chunks),
        *(coding(chunk(), wrong) for wrong in wrong_chunks),
        coding(chunks=(chunk(),)),
        coding(chunks=None),
        coding(locations=zeros(15)),
        coding(chunk(is_wide=True), locations=zeros(31)),
        coding(locations=zeros(40)[1:]),
        coding(locations=read_only(zeros(32))),
        coding(values=zeros(15)),
        coding(values=zeros(72)[1:]),
        coding(values=read_only(zeros(64))),
        coding(coded=zeros(18 * 4 + 31)),
        coding(chunk(), chunk(), coded=zeros(2 * (18 * 4 + 32) - 1)),
        coding(coded=zeros(112)[1:]),
        coding(coded=read_only(zeros(104))),
        coding(coded=None),
    ]


def wrong_parts() -> list[Any]:
    return [
        None,
        (),
        (2,),
        (3, b"123"),
        (0, b""),
        (16, bytes(16)),
        (2, b"123"),
        (2, None),
        ("2", b"12"),
    ]


def wrong_calls() -> list[tuple[str, tuple[Any, ...]]]:
    u16, i32, i64, u64 = np.uint16, np.int32, np.int64, np.uint64
    strided = zeros(8)[::2]
    c16 = zeros(4, np.complex128)
    return [
        ("find_changes", (zeros(4), zeros(5), 1, 0, zeros(5, i32), zeros(10))),
        ("find_changes", (zeros(4), zeros(2, u16), 1, 0, zeros(4, i32), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 1, 0, zeros(4, i32), zeros(8, u16))),
        ("find_changes", (zeros(4), zeros(4), 1, 0, zeros(3, i32), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 1, 0, zeros(4, i32), zeros(7))),
        ("find_changes", (zeros(4), zeros(4), 1, 0, zeros(4, u16), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 0, 0, zeros(4, i32), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 4, 0, zeros(4, i32), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 1, -1, zeros(4, i32), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 1, 2**31 - 3, zeros(4, i32), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 1, 2**63 - 3, zeros(4, i64), zeros(8))),
        ("find_changes", (c16, c16, 1, 0, zeros(4, i32), zeros(8, np.complex128))),
        ("find_changes", (strided, zeros(4), 1, 0, zeros(4, i32), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 1, 0, zeros(8, i32)[::2], zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 1, 0, zeros(4, i32), read_only(zeros(8)))),
        ("find_changes", (zeros(4), None, 1, 0, zeros(4, i32), zeros(8))),
        *wrong_codings(),
        ("write_gaps", (zeros(0, i32), zeros(0), zeros(0, u64))),
        ("write_gaps", (np.arange(4), zeros(4), zeros(4, u64))),
        ("write_gaps", (np.arange(4), zeros(3), zeros(2, u64))),
        ("write_gaps", (np.arange(4), zeros(3), zeros(3, i32))),
        ("write_gaps", (np.arange(4), zeros(3, u16), zeros(3, u64))),
        ("write_gaps", (np.arange(4, dtype=u16), zeros(3), zeros(3, u64))),
        ("write_gaps", (np.arange(4), read_only(zeros(3)), zeros(3, u64))),
        ("read_gaps", (zeros(3), zeros(0, u64), 0, 9, zeros(3, i32))),
        ("read_gaps", (zeros(3), zeros(0, u64), 0, 9, zeros(5, i32))),
        ("read_gaps", (zeros(0), zeros(0, u64), 0, 9, zeros(0, i32))),
        ("read_gaps", (zeros(3), zeros(0, u64), 9, 9, zeros(4, i32))),
        ("read_gaps", (zeros(3), zeros(0, u64), 0, 2**31 + 1, zeros(4, i32))),
        ("read_gaps", (zeros(3), zeros(0, u64), 0, 2**63 + 1, zeros(4, i64))),
        ("read_gaps", (zeros(3), zeros(0, u64), -1, 9, zeros(4, i64))),
        ("read_gaps", (zeros(3, u16), zeros(0, u64), 0, 9, zeros(4, i32))),
        ("read_gaps", (zeros(3), zeros(0, i32), 0, 9, zeros(4, i32))),
        ("read_gaps", (zeros(3), zeros(0, u64), 0, 9, zeros(4, u16))),
        ("read_gaps", (zeros(3), zeros(0, u64), 0, 9, read_only(zeros(4, i32)))),
        ("write_nibbles", (zeros(3), zeros(1), zeros(3))),
        ("write_nibbles", (zeros(3), zeros(3), zeros(3))),
        ("write_nibbles", (zeros(3), zeros(2), zeros(2))),
        ("write_nibbles", (zeros(3), zeros(2), zeros(3, u16))),
        ("write_nibbles", (zeros(3), zeros(2, u16), zeros(3))),
        ("write_nibbles", (c16, zeros(2), c16)),
        ("read_nibbles", (zeros(1), zeros(0), zeros(3))),
        ("read_nibbles", (zeros(3), zeros(0), zeros(3))),
        ("read_nibbles", (zeros(2), zeros(0, u16), zeros(3))),
        ("read_nibbles", (zeros(2, u16), zeros(0), zeros(3))),
        ("read_nibbles", (zeros(2), c16, c16)),
        ("write_planes", (None,)),
        ("write_planes", ((2, b"1234"),)),
        *(("write_planes", ([(2, b"1234"), wrong],)) for wrong in wrong_parts()),
        ("read_plane", (zeros(3), 2, zeros(3, u16))),
        ("read_plane", (zeros(3), -1, zeros(3, u16))),
        ("read_plane", (zeros(2), 0, zeros(3, u16))),
        ("read_plane", (zeros(4), 0, zeros(3, u16))),
        ("read_plane", (zeros(3, u16), 0, zeros(3, u16))),
        ("read_plane", (zeros(4), 0, c16)),
        ("zigzag", (zeros(3), zeros(2))),
        ("zigzag", (zeros(3), zeros(3, u16))),
        ("zigzag", (c16, c16)),
        ("unzigzag", (c16,)),
        ("unzigzag", (read_only(zeros(3)),)),
        *((name, ([w], *rest)) for name, rest in AFTER_WRITES.items() for w in wrong_writes()),
        ("scatter", (None, None, None, 1)),
        ("scatter", ((write(),), None, None, 1)),
        ("scatter", ([write(target=read_only(zeros(4)))], None, None, 1)),
        ("scatter", ([write()], zeros(2), None, 1)),
        ("scatter", ([write()], zeros(9), None, 1)),
        ("scatter", ([write(), write()], zeros(8), None, 1)),
        ("scatter", ([write()], read_only(zeros(8)), None, 1)),
        ("scatter", ([write()], "before", None, 1)),
        ("scatter", ([write()], None, zeros(2), 1)),
        ("scatter", ([write()], None, zeros(0), 1)),
        ("scatter", ([write()], zeros(8), read_only(zeros(1)), 1)),
        ("scatter", ([write()], zeros(8), "done", 1)),
        ("count_different", ([write()], zeros(8), 0, 1)),
        ("count_different", ([write()], zeros(2), 1, 1)),
        ("count_different", ([write()], None, 1, 1)),
        ("digest_targets", ([write()], zeros(1, np.uint64), 1)),
        ("digest_targets", ([write()], zeros(3, np.uint64), 1)),
        ("digest_targets", ([write()], zeros(2), 1)),
        ("digest_targets", ([write()], read_only(zeros(2, np.uint64)), 1)),
    ]


REFUSALS = (ValueError, TypeError, OverflowError)
# What Python itself says of numbers, of what is no buffer, and of read-only ones.
PYTHONS = (
    "bytes-like object",
    "function takes exactly",
    "integer",
    "too big",
    "argument must be",
    "read-only",
)


def arrays_in(arguments: Iterable[Any]) -> Iterator[Array]:
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from arrays_in(argument)


@if_compiled
def test_the_compiled_loops_refuse_wrong_buffers() -> None:
    for name, arguments in wrong_calls():
        called = f"{name}{arguments}"
        loop: Callable[..., Any] = getattr(implementations.compiled, name)
        arrays = list(arrays_in(arguments))
        written = [array.copy() for array in arrays]
        with pytest.raises(REFUSALS) as refusal:
            pytest.fail(f"{called} returned {loop(*arguments)}")
        message = str(refusal.value)
        assert refusal.type is ValueError or any(own in message for own in PYTHONS), called
        for array, before in zip(arrays, written, strict=True):
            assert np.array_equal(array, before), called


@if_compiled
def test_every_wrong_call_differs_from_a_right_one() -> None:
    """The loops that wrong calls are made of accept the same arguments once they are right."""
    right: list[tuple[str, tuple[Any, ...]]] = [
        ("find_changes", (zeros(4), zeros(4), 1, 2**31 - 4, zeros(4, np.int32), zeros(8))),
        ("find_changes", (zeros(4), zeros(4), 3, 2**63 - 4, zeros(4, np.int64), zeros(8))),
        coding(chunk(begin=2**31 - 4), chunk(begin=2**63 - 4, is_wide=True)),
        coding(locations=zeros(16), values=zeros(16)),
        ("write_gaps", (np.arange(4), zeros(3), zeros(3, np.uint64))),
        ("read_gaps", (zeros(3), zeros(0, np.uint64), 0, 2**31, zeros(4, np.int32))),
        ("read_gaps", (zeros(3), zeros(0, np.uint64), 0, 2**63, zeros(4, np.int64))),
        ("write_nibbles", (zeros(3), zeros(2), zeros(3))),
        ("read_nibbles", (zeros(2), zeros(0), zeros(3))),
        ("write_planes", ([(2, b"1234"), (1, b""), (8, bytes(8))],)),
        ("read_plane", (zeros(3), 1, zeros(3, np.uint16))),
        ("zigzag", (zeros(3), zeros(3))),
        ("unzigzag", (zeros(3),)),
        ("scatter", ([write(), write(where=1, canonical=np.arange(2))], zeros(16), zeros(1), 2)),
        ("count_different", ([write()], zeros(8), 1, 1)),
        ("digest_targets", ([write()], zeros(2, np.uint64), 1)),
    ]
    for name, arguments in right:
        getattr(implementations.compiled, name)(*arguments)
    assert {name for name, _ in right} == {name for name, _ in wrong_calls()}


@if_compiled
def test_wrong_calls_leak_no_buffer() -> None:
    for name, arguments in wrong_calls():
        for argument in arguments:
            if isinstance(argument, np.ndarray) and argument.base is None:
                with pytest.raises(REFUSALS):
                    getattr(implementations.compiled, name)(*arguments)
                break
    held = bytearray(4)
    with pytest.raises(ValueError, match="one width"):
        implementations.compiled.write_nibbles(zeros(3, np.uint16), held, held)
    held.append(0)  # refused while anything still holds its memory
