"""Files that fail, or lose what was not synchronized, as a disk and a machine that stops do; for measuring safety.

`FaultyFiles` carries operations out on real files and remembers, since the last synchronization of each file, how to undo
them. `crash` undoes all of these, and applies a random part of them again, in sectors of 512 bytes. So a write may be
lost, kept, or torn, and so may names.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

SECTOR = 512


class Stopped(BaseException):
    """The machine stops here."""


class _Change(NamedTuple):
    """Bytes of a file before and after, from an offset on; None: the file was not there, or is not any more."""

    offset: int
    before: bytes | None
    after: bytes | None
    size_before: int
    size_after: int


@dataclass
class FaultyFiles:
    """An implementation of `updates.files.Files`.

    Args:
        fails_at: number of the operation that fails; None: none.
        error: what it raises; ENOMEM is a `MemoryError`, as of an allocation before the operation; None: the machine
            stops.
        times: how many operations fail from there on.
    """

    draw: np.random.Generator
    fails_at: int | None = None
    error: int | None = None
    times: int = 1
    num_operations: int = 0
    _paths: dict[int, Path] = field(default_factory=dict)
    _changes: dict[Path, list[_Change]] = field(default_factory=dict)
    _names: list[tuple[Path, bytes | None]] = field(default_factory=list)

    def open(self, path: Path) -> int:
        """See `Files.open`."""
        self._step()
        is_new = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if is_new:
            self._names.append((path, None))
        self._paths[handle] = path
        return handle

    def write(self, handle: int, parts: bytes | memoryview, offset: int) -> None:
        """See `Files.write`. A write that fails has written a part."""
        content = bytes(parts)
        is_failing = self._is_failing()
        if is_failing:
            content = content[: int(self.draw.integers(0, len(content) + 1))]
        path, size = self._paths[handle], os.fstat(handle).st_size
        change = _Change(
            offset, os.pread(handle, len(content), offset), content, size, max(size, offset + len(content))
        )
        self._changes.setdefault(path, []).append(change)
        os.pwrite(handle, content, offset)
        if is_failing:
            self._fail()

    def truncate(self, handle: int, size: int) -> None:
        """See `Files.truncate`."""
        self._step()
        path, before = self._paths[handle], os.fstat(handle).st_size
        lost = os.pread(handle, max(0, before - size), size)
        self._changes.setdefault(path, []).append(_Change(size, lost, b"", before, size))
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        """See `Files.sync`."""
        self._step()
        self._changes.pop(self._paths[handle], None)

    def sync_folder(self, folder: Path) -> None:
        """See `Files.sync_folder`."""
        self._step()
        self._names = [each for each in self._names if each[0].parent != folder]

    def remove(self, path: Path) -> None:
        """See `Files.remove`."""
        self._step()
        if path.exists():
            self._names.append((path, path.read_bytes()))
            path.unlink()

    def crash(self) -> None:
        """Leave the files as the device has them after a loss of power."""
        for path, changes in self._changes.items():
            if path.exists():
                self._lose(path, changes)
        for path, content in reversed(self._names):
            if self.draw.random() < 0.5:
                continue  # the change of the name was on the device
            if content is None:
                path.unlink(missing_ok=True)
            elif not path.exists():
                path.write_bytes(content)
        self._changes, self._names = {}, []

    # -- private ------------------------------------------------------------------------------

    def _lose(self, path: Path, changes: list[_Change]) -> None:
        with path.open("r+b") as file:
            for change in reversed(changes):
                if change.size_after < change.size_before or change.before:
                    file.seek(change.offset)
                    file.write(change.before or b"")
                file.truncate(change.size_before)
            keep = self.draw.random()
            for change in changes:
                if change.size_after < change.size_before:
                    if self.draw.random() < keep:
                        file.truncate(change.size_after)
                    continue
                content = change.after or b""
                for at in range(0, len(content), SECTOR):
                    if self.draw.random() < keep:
                        file.seek(change.offset + at)
                        file.write(content[at : at + SECTOR])

    def _is_failing(self) -> bool:
        self.num_operations += 1
        at = self.fails_at
        return at is not None and at <= self.num_operations < at + self.times

    def _step(self) -> None:
        if self._is_failing():
            self._fail()

    def _fail(self) -> None:
        if self.error is None:
            raise Stopped
        raise MemoryError if self.error == errno.ENOMEM else OSError(self.error, os.strerror(self.error))
