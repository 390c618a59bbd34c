"""Run workers over a stream of batches: in lockstep, or each in a thread of its own.

In: a session of `Work`, batches. Out: what the step returns apart from its state. Under a policy by which all workers wait for each other,
one thread dispatches the programs of all, which the devices run side by side; the order of calls is then fixed. Other policies depend
on who is faster: each worker has a thread, which waits until its devices have computed.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import jax

from autopar.api.workers.deal import Deal
from autopar.api.workers.processes import OneProcess
from autopar.api.workers.work import Session, Share, Work, is_lockstep
from autopar.errors import StoreError
from autopar.versions.consistency.policy import Policy
from autopar.versions.snapshot import Snapshot

#: Turns an item of the user's batches into the shares of the workers.
Dealer = Callable[[Any], list[Share]]


class Runner(Protocol):
    """Runs the workers of a session."""

    session: Session

    def results(self, batches: Iterable[Any], deal: Dealer) -> Iterator[list[Any]]:
        """The outputs of updates, as batches are read; None in the place of state."""
        ...

    def finish(self) -> None:
        """Finish what is in flight; workers leave."""
        ...

    def state(self) -> dict[str, Any]:
        """The newest state, by path."""
        ...

    def snapshot(self) -> Snapshot:
        """Everything that changes, between two iterations of each worker."""
        ...

    def load(self, snapshot: Snapshot) -> int:
        """Go on from a snapshot. Returns the number of the batch that must be given next.

        Raises:
            StoreError: it is of another step, or damaged.
        """
        ...


def runner_of(
    work: Work, policy: Policy, num_workers: int, leaves: dict[str, Any], *, is_shared: bool
) -> Lockstep | Threads | OneProcess:
    """Begin to run workers from a state. With several processes, the worker of this one.

    Args:
        leaves: the state by path.
        is_shared: whether programs run on several devices, so that all threads must dispatch them in one order.
    """
    if jax.process_count() > 1:
        return OneProcess(work, policy, num_workers, leaves)
    if is_lockstep(policy):
        return Lockstep(work, leaves)
    return Threads(work, leaves, num_workers, is_fixed=math.isfinite(policy.slack), is_shared=is_shared)


class Lockstep:
    """All workers from one thread."""

    def __init__(self, work: Work, leaves: dict[str, Any]) -> None:
        self.noted = deque[list[Any]]()
        self.session = work.session(leaves, self.noted.append, nullcontext())
        self._is_over = False
        self._num_batches = 0

    def step(self, shares: Sequence[Share]) -> None:
        """Run one iteration of the workers whose turn it is."""
        session = self.session
        turn = [worker for worker in range(len(shares)) if session.store.may_read(worker)]
        for worker in turn:
            session.begin(worker)
            session.compute(worker, shares[worker], wait=False)
        for worker in turn:
            session.finish(worker)
        session.end_round()
        self._num_batches += 1

    def results(self, batches: Iterable[Any], deal: Dealer) -> Iterator[list[Any]]:
        """As `Runner.results`."""
        for batch in batches:
            if self._is_over:
                return
            self.step(deal(batch))
            while self.noted:
                yield self.noted.popleft()
        self.finish()
        while self.noted:
            yield self.noted.popleft()

    def finish(self) -> None:
        """As `Runner.finish`."""
        if not self._is_over:
            self._is_over = True
            for worker in range(self.session.store.num_workers):
                self.session.leave(worker)

    def state(self) -> dict[str, Any]:
        """As `Runner.state`."""
        return self.session.state()

    def snapshot(self) -> Snapshot:
        """As `Runner.snapshot`."""
        _check_runs(is_over=self._is_over)
        return _with(self.session.snapshot(), {"batches": self._num_batches})

    def load(self, snapshot: Snapshot) -> int:
        """As `Runner.load`."""
        dealt = _dealt(snapshot)
        self.session.load(snapshot)
        self._num_batches = dealt["batches"]
        return self._num_batches


class Threads:
    """A thread for each worker."""

    def __init__(
        self, work: Work, leaves: dict[str, Any], num_workers: int, *, is_fixed: bool, is_shared: bool
    ) -> None:
        self.noted = deque[list[Any]]()
        self.deal = Deal(num_workers, is_fixed, at=dict.fromkeys(range(num_workers), 0))
        dispatching: AbstractContextManager[Any] = threading.Lock() if is_shared else nullcontext()
        self.session = work.session(leaves, self._note, dispatching)
        self.errors: list[BaseException] = []
        self._is_paused, self._computing, self._is_over = False, set[int](), False
        self.threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"worker {worker}", daemon=True)
            for worker in range(num_workers)
        ]

    def results(self, batches: Iterable[Any], deal: Dealer) -> Iterator[list[Any]]:
        """As `Runner.results`. Batches are read in the caller's thread, when a worker needs one."""
        for thread in self.threads:
            thread.start()
        source = iter(batches)
        while True:
            with self.deal.changed:
                while self._is_running() and not (self.noted or self.errors or self.deal.wants_batch):
                    self.deal.changed.wait(0.2)  # so that Ctrl-C is handled
                wants = self.deal.wants_batch
            if self.errors:
                self.finish()
            if self.noted:
                yield self.noted.popleft()
            elif wants:
                try:
                    batch = next(source)
                except StopIteration:
                    self.deal.end()
                else:
                    self.deal.add(deal(batch))
            elif not self._is_running() and not self.noted:
                return

    def finish(self) -> None:
        """As `Runner.finish`.

        Raises:
            Exception: what a worker raised.
        """
        self._is_over = True
        self.deal.end()
        for thread in self.threads:
            while thread.is_alive():
                thread.join(0.2)  # so that Ctrl-C is handled
        if self.errors:
            raise self.errors[0]

    def state(self) -> dict[str, Any]:
        """As `Runner.state`."""
        return self.session.state()

    def snapshot(self) -> Snapshot:
        """As `Runner.snapshot`. Workers finish the iteration that they compute, and wait meanwhile."""
        _check_runs(is_over=self._is_over)
        with self._paused():
            if self.errors:
                raise self.errors[0]
            deal, workers = self.deal, range(self.deal.num_workers)
            left = deal.not_computed()
            iterations = [self.session.iteration(worker) for worker in workers]
            first = min(iterations) if deal.is_fixed else min([batch for batch, _ in left], default=deal.num_batches)
            about = {"batches": deal.num_batches, "first": first, "not_computed": left}
            return _with(self.session.snapshot(), about)

    def load(self, snapshot: Snapshot) -> int:
        """As `Runner.load`."""
        dealt = _dealt(snapshot)
        self.session.load(snapshot)
        first = dealt.get("first", dealt["batches"])
        self.deal.restart(first, {(batch, n) for batch, n in dealt.get("not_computed", ())}, dealt["batches"])
        self.deal.at.update({worker: self.session.iteration(worker) for worker in self.deal.at})
        return first

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """A context in which no worker computes."""
        with self.deal.changed:
            self._is_paused = True
            while self._computing:
                self.deal.changed.wait(0.2)
        try:
            yield
        finally:
            with self.deal.changed:
                self._is_paused = False
                self.deal.changed.notify_all()

    @contextmanager
    def _iteration(self, worker: int) -> Iterator[None]:
        """A context in which a worker computes; it begins when nothing is paused."""
        with self.deal.changed:
            while self._is_paused:
                self.deal.changed.wait()
            self._computing.add(worker)
        try:
            yield
        finally:
            with self.deal.changed:
                self.deal.computed(worker)
                self._computing.discard(worker)
                self.deal.changed.notify_all()

    def _note(self, outputs: list[Any]) -> None:
        with self.deal.changed:
            self.noted.append(outputs)
            self.deal.changed.notify_all()

    def _is_running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def _begun(self, worker: int) -> Share | None:
        """Take a share, and then pull; None if there is none. A worker that may skip clocks learns by pulling which is its turn."""
        session = self.session
        if session.store.policy.catches_up:
            session.begin(worker)
            return self.deal.take(worker, session.iteration(worker))
        share = self.deal.take(worker, session.iteration(worker))
        if share is not None:
            session.begin(worker)
        return share

    def _work(self, worker: int) -> None:
        session = self.session
        try:
            while True:
                share = self._begun(worker)
                if share is None or self.errors:
                    break
                with self._iteration(worker):
                    session.compute(worker, share, wait=True)
                    session.finish(worker)
            with self._iteration(worker):
                session.leave(worker)
        except BaseException as error:
            self.errors.append(error)  # the first one is the cause: others fail because they wait for this worker
            session.store.fail(worker, error)
            self.deal.end()
        finally:
            self.deal.leave(worker)


def _check_runs(*, is_over: bool) -> None:
    if is_over:
        raise StoreError(
            "the stream is over, and its workers have left: save during the stream; after it, save the state that `drain()` returns"
        )


def _with(snapshot: Snapshot, dealt: dict[str, Any]) -> Snapshot:
    return Snapshot(snapshot.arrays, {**snapshot.about, "deal": dealt})


def _dealt(snapshot: Snapshot) -> dict[str, Any]:
    """Which examples were dealt, of a snapshot."""
    dealt = snapshot.about.get("deal")
    if not isinstance(dealt, dict) or not isinstance(dealt.get("batches"), int):
        raise StoreError("the snapshot says nothing about batches: it is of a store alone, not of a step")
    return dealt
