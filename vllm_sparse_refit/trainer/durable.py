"""Files that are whole after a crash: the old content or the new."""

import os
from pathlib import Path


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a file's content; the new one is on the disk when this returns.

    Raises:
        OSError: the old content is still there.
    """
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
