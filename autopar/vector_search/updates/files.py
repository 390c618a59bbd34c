"""Change files: the few operations that the log and the page store need, behind a protocol.

`FILES` carries them out. Another implementation can fail or lose what was not synchronized, as a disk does. Operations
raise `OSError`. Bytes that were written are safe from a crash when a later `sync` of the file has returned; names are
when `sync_folder` has.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """Operations on files; a handle is a file descriptor."""

    def open(self, path: Path) -> int:
        """Open a file for reading and writing, and create it if it does not exist."""
        ...

    def write(self, handle: int, parts: bytes | memoryview, offset: int) -> None:
        """Write all bytes at an offset."""
        ...

    def truncate(self, handle: int, size: int) -> None:
        """Change the size of a file."""
        ...

    def sync(self, handle: int) -> None:
        """Wait until the contents and the size of a file are on the device."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names of a folder are on the device."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        ...


def why(error: BaseException) -> str:
    """An error in words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class _SystemFiles:
    """The operations of the operating system."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def write(self, handle: int, parts: bytes | memoryview, offset: int) -> None:
        left = memoryview(parts).cast("B")
        while left:
            written = os.pwrite(handle, left, offset)
            left, offset = left[written:], offset + written

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        os.fdatasync(handle) if hasattr(os, "fdatasync") else os.fsync(handle)

    def sync_folder(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


FILES: Files = _SystemFiles()
