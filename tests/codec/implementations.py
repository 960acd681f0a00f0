"""The implementations of the codec's loops that this machine can run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_sparse_refit.codec import kernels, portable

NUMPY = "numpy"
# The extension module, None if there is none.
compiled: Any = kernels.compiled  # type: ignore[attr-defined]


def _compiled() -> list[str]:
    """Instruction sets of the compiled loops, those that are used by default first."""
    if compiled is None:
        return []
    default = compiled.instructions()
    able = [default]
    for name in ("avx512", "avx2", "portable"):
        try:
            compiled.use_instructions(name)
        except ValueError:
            continue
        if name != default:
            able.append(name)
    compiled.use_instructions(default)
    return able


COMPILED = _compiled()
ALL = [NUMPY, *COMPILED]
# All compiled ones differ in one loop only.
NUMPY_AND_COMPILED = ALL[:2]


@contextmanager
def running(name: str) -> Iterator[None]:
    """Make ``kernels`` use this implementation, and afterwards the one that it used before."""
    loops = kernels._loops
    instructions = None if compiled is None else compiled.instructions()
    try:
        if name == NUMPY:
            kernels._loops = portable
        else:
            assert compiled is not None
            kernels._loops = compiled
            compiled.use_instructions(name)
        assert kernels.implementation() == name
        yield
    finally:
        kernels._loops = loops
        if compiled is not None:
            compiled.use_instructions(instructions)
