"""Read pages with O_DIRECT by io_uring: one system call submits many requests, and no thread waits for them.

The `liburing` wheel (the extra `disk`) has the calls; the kernel has to allow io_uring. The wheel reads into a
`bytearray` per request, which O_DIRECT needs to be aligned. A wheel may be built for newer processors than this one, where
its first call ends the process (2026.3.30 needs AVX-512), so another process tries it first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.system.install_command import install_command
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.readers import ReadCounts, Run, read_error, requests_of

#: Requests in flight.
_DEPTH = 64
#: Seconds until a process that tries io_uring is given up.
_TRY_S = 30
#: What it runs: every call that `UringReader` makes.
_READ = """
import os, sys
sys.path.insert(0, sys.argv[1])
import liburing
ring, done = liburing.Ring(), liburing.Cqe()
liburing.io_uring_queue_init(2, ring)
entry = liburing.io_uring_get_sqe(ring)
buffer = bytearray(16)
liburing.io_uring_prep_read(entry, os.open(liburing.__file__, os.O_RDONLY), buffer, 0)
entry.user_data = 1
liburing.io_uring_submit(ring)
liburing.io_uring_wait_cqe(ring, done)
assert (done[0].user_data, done[0].res) == (1, 16)
liburing.io_uring_cqe_seen(ring, done[0])
liburing.io_uring_queue_exit(ring)
"""


class UringEngine:
    """An entry of `reader_table.READERS`."""

    def why_not(self) -> str:
        """See `Engine.why_not`."""
        if not hasattr(os, "O_DIRECT"):
            return "this operating system has no O_DIRECT: use reader='mmap'"
        if (found := importlib.util.find_spec("liburing")) is None:
            return f"the package liburing is missing: {install_command('disk')}, or use reader='direct'"
        return why_no_read(str(Path(found.origin).parents[1]) if found.origin else "")

    def open(self, path: Path) -> UringReader:
        """See `Engine.open`."""
        return UringReader(path)


@functools.cache
def why_no_read(folder: str) -> str:
    """Why another process cannot read by the `liburing` in this folder; empty if it can."""
    command = [sys.executable, "-I", "-S", "-c", _READ, folder]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TRY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no process could try io_uring ({error}): use reader='direct'"
    if tried.returncode == -signal.SIGILL:
        return "the installed liburing needs a newer processor than this one: use reader='direct'"
    if tried.returncode:
        *_, reason = [f"exit status {tried.returncode}", *tried.stderr.splitlines()]
        return f"io_uring does not work here ({reason}): use reader='direct'"
    return ""


@dataclass(slots=True)
class _Reads:
    """The requests of one `start`: their buffers, and how many have not arrived."""

    reader: UringReader
    requests: Sequence[Run]
    buffers: list[bytearray]
    left: int
    error: IndexFileError | None = field(default=None)

    def wait(self) -> NDArray[np.uint8]:
        """See `Pending.wait`."""
        self.reader.finish(self)
        if self.error is not None:
            raise self.error
        parts = [np.frombuffer(buffer, np.uint8).reshape(-1, PAGE_BYTES) for buffer in self.buffers]
        return np.concatenate(parts) if parts else np.zeros((0, PAGE_BYTES), np.uint8)


class UringReader:
    """A `Reader` of io_uring requests."""

    def __init__(self, path: Path) -> None:
        self.counts = ReadCounts()
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._calls: Any = importlib.import_module("liburing")
        self._ring, self._done = self._calls.Ring(), self._calls.Cqe()
        try:
            self._calls.io_uring_queue_init(_DEPTH, self._ring)
        except OSError:
            os.close(self._handle)
            raise
        self._queued: list[tuple[_Reads, int]] = []
        self._in_flight: dict[int, tuple[_Reads, int]] = {}
        self._next_key = 1

    def start(self, runs: Sequence[Run]) -> _Reads:
        """See `Reader.start`."""
        requests = requests_of(runs)
        self.counts.add(requests)
        buffers = [_aligned(run.num_pages * PAGE_BYTES) for run in requests]
        reads = _Reads(self, requests, buffers, len(requests))
        self._queued.extend((reads, at) for at in range(len(requests)))
        self._submit()
        return reads

    def finish(self, reads: _Reads) -> None:
        """Wait until all requests of one `start` have arrived."""
        while reads.left:
            self._wait()
            self._submit()

    def close(self) -> None:
        """See `Reader.close`. Waits for requests in flight: the kernel writes into their buffers."""
        self._queued.clear()
        while self._in_flight:
            self._wait()
        self._calls.io_uring_queue_exit(self._ring)
        os.close(self._handle)

    # -- private ------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Submit as many queued requests as the ring has room for."""
        some, self._queued = (
            self._queued[: _DEPTH - len(self._in_flight)],
            self._queued[_DEPTH - len(self._in_flight) :],
        )
        for reads, at in some:
            entry = self._calls.io_uring_get_sqe(self._ring)
            offset = reads.requests[at].first * PAGE_BYTES
            self._calls.io_uring_prep_read(entry, self._handle, reads.buffers[at], offset)
            entry.user_data = self._next_key
            self._in_flight[self._next_key] = (reads, at)
            self._next_key += 1
        if some:
            self._calls.io_uring_submit(self._ring)

    def _wait(self) -> None:
        """Wait for a request; a signal may end the wait early."""
        try:
            self._calls.io_uring_wait_cqe(self._ring, self._done)
        except InterruptedError:
            return
        self._take(self._done[0])

    def _take(self, completion: Any) -> None:
        """Note the result of one request."""
        reads, at = self._in_flight.pop(completion.user_data)
        run, received, error = reads.requests[at], 0, None
        try:
            received = completion.res
        except OSError as raised:
            error = raised
        self._calls.io_uring_cqe_seen(self._ring, completion)
        reads.left -= 1
        if error is not None or received != len(reads.buffers[at]):
            reads.error = reads.error or read_error(self._path, run, error, received)


def _aligned(num_bytes: int) -> bytearray:
    """A bytearray whose memory starts at a multiple of `PAGE_BYTES`: deleting bytes at its front moves its start."""
    buffer = bytearray(num_bytes + PAGE_BYTES)
    del buffer[: -_address(buffer) % PAGE_BYTES]
    del buffer[num_bytes:]
    assert _address(buffer) % PAGE_BYTES == 0, "this Python copies bytearrays when their front is deleted"
    return buffer


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
