"""Distribute requests over forks of this process.

In: a function that answers requests. Out: `Workers`: this process and its forks, which share all memory that existed at the
fork. If a fork fails, this process answers its request.

A fork runs Python, NumPy and the solvers, and never uses a device. It is killed when the workers are closed. This process does
all the work where forks are not available: on systems other than Linux, and in a job of several JAX processes, whose
connections a fork would copy.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import jax

Request = TypeVar("Request")
Answer = TypeVar("Answer")

#: Environment variable: the number of processes; 1 disables forks.
PROCESSES = "AUTOPAR_PROCESSES"
_LISTEN_S = 1.0
_DOUBLE = struct.Struct("d")


class LostError(Exception):
    """A worker process ended, hung, or failed."""


class SharedMinimum:
    """A number in shared memory that every worker can read and lower."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _DOUBLE.size)
        _DOUBLE.pack_into(self._shared, 0, math.inf)

    @property
    def value(self) -> float:
        return float(_DOUBLE.unpack_from(self._shared)[0])

    def lower(self, value: float) -> None:
        """Lower the number. One of two concurrent updates may be lost, which is harmless: the number only saves work."""
        _DOUBLE.pack_into(self._shared, 0, min(value, self.value))


@contextlib.contextmanager
def workers(answer: Callable[[Request], Answer], most: int, *, patience_s: float) -> Iterator[Workers[Request, Answer]]:
    """This process, and one fork for each further processor.

    Args:
        answer: handles a request.
        most: the maximum number of workers.
        patience_s: time without CPU use after which a fork counts as hung.
    """
    forks: list[_Fork[Request, Answer]] = []
    try:
        with contextlib.suppress(OSError):  # no more processes are available
            while len(forks) + 1 < min(most, _num_processes()):
                forks.append(_Fork(answer, forks, patience_s))
        yield Workers(forks)
    finally:
        for fork in forks:
            fork.end()


def _num_processes() -> int:
    if sys.platform != "linux" or jax.distributed.is_initialized():
        return 1
    given = os.environ.get(PROCESSES, "")
    return int(given) if given.isdigit() else len(os.sched_getaffinity(0))


class Workers(Generic[Request, Answer]):
    """This process, which is worker 0, and its forks.

    The caller iterates over the requests for this process, and records each answer (`note`). The forks answer the other requests in the
    meantime. Requests whose fork failed come last, to this process.

    Attributes:
        answers: by request of the last distribution, its worker and its answer.
    """

    def __init__(self, forks: Sequence[_Fork[Request, Answer]]) -> None:
        self._forks = forks
        self.answers: dict[Request, tuple[int, Answer]] = {}

    def __len__(self) -> int:
        return 1 + len(self._forks)

    def note(self, request: Request, answer: Answer) -> None:
        """Record this process's answer to a request."""
        self.answers[request] = 0, answer

    def spread(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Distribute requests: each goes to the next idle worker."""
        left = deque(requests)

        def following(_: int) -> Iterator[Request]:
            with contextlib.suppress(IndexError):
                while True:
                    yield left.popleft()

        return self._distributed(following)

    def each_by_worker(
        self, requests: Mapping[int, Sequence[Request]], may_take: Callable[[Request], bool]
    ) -> Iterator[Request]:
        """Distribute one queue of requests to each worker. An idle worker takes requests from the end of the longest queue.

        Args:
            requests: by worker, its queue.
            may_take: whether another worker may take a request.
        """
        left, lock = {worker: list(requests.get(worker, ())) for worker in range(len(self))}, threading.Lock()

        def following(worker: int) -> Iterator[Request]:
            while True:
                with lock:
                    longest = max(left.values(), key=len)
                    others = [request for request in longest if may_take(request)]
                    if left[worker]:
                        one = left[worker].pop(0)
                    elif others:
                        one = others[-1]
                        longest.remove(one)
                    else:
                        return
                yield one

        return self._distributed(following)

    def _distributed(self, requests: Callable[[int], Iterator[Request]]) -> Iterator[Request]:
        answers = self.answers = {}
        lost: list[Request] = []

        def serve(worker: int) -> None:
            for request in requests(worker):
                try:
                    answers[request] = worker, self._forks[worker - 1].answer(request)
                except LostError:
                    lost.append(request)

        threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in range(1, len(self))]
        for thread in threads:
            thread.start()
        yield from requests(0)
        for thread in threads:
            thread.join()
        yield from lost


class _Fork(Generic[Request, Answer]):
    """A fork of this process.

    Args:
        others: earlier forks, whose pipes this one closes.
    """

    def __init__(
        self, answer: Callable[[Request], Answer], others: Sequence[_Fork[Request, Answer]], patience_s: float
    ) -> None:
        self._pipe, theirs = Pipe()
        self._patience_s = patience_s
        with warnings.catch_warnings():
            # Python and JAX warn that other threads' locks are never released in a fork. The fork takes none of JAX's locks;
            # if it hangs nevertheless, it counts as failed after `patience_s`.
            warnings.simplefilter("ignore")
            self._pid = os.fork()
        if self._pid == 0:
            for pipe in (self._pipe, *(other._pipe for other in others)):
                pipe.close()
            _serve(theirs, answer)
        theirs.close()

    def answer(self, request: Request) -> Answer:
        try:
            self._pipe.send(request)
            self._wait()
            answered, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise LostError from error
        if not answered:
            raise LostError(answer)
        return answer  # type: ignore[no-any-return]

    def _wait(self) -> None:
        worked, since = -1, time.monotonic()
        while not self._pipe.poll(_LISTEN_S):
            now = _ticks(self._pid)
            if now != worked:
                worked, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience_s:
                raise LostError(f"no CPU use for {self._patience_s:g} s")

    def end(self) -> None:
        """Kill the fork."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _serve(pipe: Connection, answer: Callable[[Any], Any]) -> NoReturn:
    """Answer requests until the pipe closes, then exit without this process's exit handlers."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and runs users' handlers
        while True:
            request = pipe.recv()
            try:
                reply = pickle.dumps((True, answer(request)))
            except Exception as error:  # the parent repeats the request and raises the error
                reply = pickle.dumps((False, repr(error)))
            pipe.send_bytes(reply)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _ticks(pid: int) -> int:
    """CPU time of a process and its finished children, in clock ticks."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))
    return -1
