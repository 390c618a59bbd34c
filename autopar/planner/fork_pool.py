"""Work shared with copies of this process.

In: what answers requests. Out: `Workers`: this process and forks of it, which hold all that it held when they were made.
Nothing that a copy does is needed: what one does not answer, this process does itself.

A copy runs Python, NumPy and the solvers, and never a device. It is killed when the workers are left, so it leaves nothing
behind; where forks are not to be had (other than on Linux, or beside other processes of one job, whose connections would be
copied too) all is done in this process.
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

#: Set to 1, all is done in one process.
PROCESSES = "AUTOPAR_PROCESSES"
_LISTEN_S = 1.0
_DOUBLE = struct.Struct("d")


class LostError(Exception):
    """A copy of this process ended, hung, or could not do what it was asked."""


class Least:
    """A number that all copies see, and that each may lower."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _DOUBLE.size)
        _DOUBLE.pack_into(self._shared, 0, math.inf)

    @property
    def value(self) -> float:
        return float(_DOUBLE.unpack_from(self._shared)[0])

    def lower(self, value: float) -> None:
        """Of two that are told at one time, one may be lost: it may spare work, and nothing depends on it."""
        _DOUBLE.pack_into(self._shared, 0, min(value, self.value))


@contextlib.contextmanager
def workers(answer: Callable[[Request], Answer], most: int, *, patience_s: float) -> Iterator[Workers[Request, Answer]]:
    """This process, and as many copies of it as there are processors for.

    Args:
        answer: what a copy does with a request.
        most: workers that there is work for. patience_s: how long a copy may do nothing before it counts as hung.
    """
    copies: list[_Copy[Request, Answer]] = []
    try:
        with contextlib.suppress(OSError):  # no more processes to be had
            while len(copies) + 1 < min(most, _num_processes()):
                copies.append(_Copy(answer, copies, patience_s))
        yield Workers(copies)
    finally:
        for copy in copies:
            copy.end()


def _num_processes() -> int:
    if sys.platform != "linux" or jax.distributed.is_initialized():
        return 1
    given = os.environ.get(PROCESSES, "")
    return int(given) if given.isdigit() else len(os.sched_getaffinity(0))


class Workers(Generic[Request, Answer]):
    """This process, which is worker 0, and its copies.

    Who shares requests iterates over those that this process answers, and notes each answer; meanwhile the copies answer the
    others, and at the end those come that a copy has lost.

    Attributes:
        answers: to the requests shared last, each with the worker that gave it.
    """

    def __init__(self, copies: Sequence[_Copy[Request, Answer]]) -> None:
        self._copies = copies
        self.answers: dict[Request, tuple[int, Answer]] = {}

    def __len__(self) -> int:
        return 1 + len(self._copies)

    def note(self, request: Request, answer: Answer) -> None:
        """This process has answered a request."""
        self.answers[request] = 0, answer

    def spread(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Share requests: each goes to the next worker that has nothing to do."""
        left = deque(requests)

        def following(_: int) -> Iterator[Request]:
            with contextlib.suppress(IndexError):
                while True:
                    yield left.popleft()

        return self._shared(following)

    def each_its_own(
        self, requests: Mapping[int, Sequence[Request]], may_take: Callable[[Request], bool]
    ) -> Iterator[Request]:
        """Share requests by worker: one that has nothing to do takes from the end of another's what it may."""
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

        return self._shared(following)

    def _shared(self, requests: Callable[[int], Iterator[Request]]) -> Iterator[Request]:
        answers = self.answers = {}
        lost: list[Request] = []

        def ask(worker: int) -> None:
            for request in requests(worker):
                try:
                    answers[request] = worker, self._copies[worker - 1].ask(request)
                except LostError:
                    lost.append(request)

        threads = [threading.Thread(target=ask, args=(worker,), daemon=True) for worker in range(1, len(self))]
        for thread in threads:
            thread.start()
        yield from requests(0)
        for thread in threads:
            thread.join()
        yield from lost


class _Copy(Generic[Request, Answer]):
    """A fork of this process.

    Args:
        others: copies made before.
    """

    def __init__(
        self, answer: Callable[[Request], Answer], others: Sequence[_Copy[Request, Answer]], patience_s: float
    ) -> None:
        self._pipe, theirs = Pipe()
        self._patience_s = patience_s
        with warnings.catch_warnings():
            # Python and JAX warn of locks that other threads hold for ever in the copy. It takes none of JAX's, and if it
            # hangs all the same, that costs its patience.
            warnings.simplefilter("ignore")
            self._pid = os.fork()
        if self._pid == 0:
            for pipe in (self._pipe, *(other._pipe for other in others)):
                pipe.close()
            _serve(theirs, answer)
        theirs.close()

    def ask(self, request: Request) -> Answer:
        try:
            self._pipe.send(request)
            self._await()
            answered, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise LostError from error
        if not answered:
            raise LostError(answer)
        return answer  # type: ignore[no-any-return]

    def _await(self) -> None:
        worked, since = -1, time.monotonic()
        while not self._pipe.poll(_LISTEN_S):
            now = _ticks(self._pid)
            if now != worked:
                worked, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience_s:
                raise LostError("does nothing")

    def end(self) -> None:
        """End the copy, whatever it does."""
        self._pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _serve(pipe: Connection, answer: Callable[[Any], Any]) -> NoReturn:
    """Answer until nobody asks any more, and end without what this process would do at its end."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and so is what users do at the end of a job
        while True:
            request = pipe.recv()
            try:
                reply = pickle.dumps((True, answer(request)))
            except Exception as error:  # whatever it is: who asks does it again, and sees for itself
                reply = pickle.dumps((False, repr(error)))
            pipe.send_bytes(reply)
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _ticks(pid: int) -> int:
    """What a process and those that it waited for have worked, in ticks of the clock."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))
    return -1
