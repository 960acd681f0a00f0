"""How much memory a process really touched, from the kernel's high-water mark."""

import ctypes
import gc
import os
from pathlib import Path


class PeakMemory:
    """How far the resident memory of a process rises from now on.

    The kernel's mark ``VmHWM`` counts pages that were touched, of Python and native code alike, and
    unlike sampling it cannot miss a peak. Each core counts some pages before it adds them up, so readings
    are right to about a quarter of a MiB.
    """

    def __init__(self, process_id: int | None = None) -> None:
        """Start to measure.

        Args:
            process_id: None is this process. Its own free memory is first given back to the kernel,
                else it could be used again without showing.
        """
        if process_id is None:
            _give_back_free_memory()
        self._folder = Path(f"/proc/{process_id or os.getpid()}")
        # 5 sets the high-water mark to what is resident now.
        (self._folder / "clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    def extra_bytes(self) -> int:
        """The most that was resident since the start, above what was at the start."""
        return self._read("VmHWM") - self._before

    def _read(self, field: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
        raise OSError(f"{self._folder}/status has no {field}")


def _give_back_free_memory() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others do not
    if trim is not None:
        trim(ctypes.c_size_t(0))
