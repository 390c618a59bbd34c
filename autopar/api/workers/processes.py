"""Run workers in several processes: each is one, with its own devices, and process 0 also serves the store.

In: `Work`, this process's batches. Out: `OneProcess`, a `Runner` of the worker of this process.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from autopar.api.workers.work import Share, Work, is_lockstep
from autopar.errors import StoreError
from autopar.runtime.distributed.exchange import among_processes
from autopar.versions.consistency.policy import Policy
from autopar.versions.keys import Keys
from autopar.versions.remote.client import StoreClient
from autopar.versions.snapshot import Snapshot
from autopar.versions.store import VersionedStore
from autopar.versions.store_values import Pulled, StoreReport


class ClientAsStore:
    """The calls of a store for the worker of this process."""

    def __init__(self, client: StoreClient, own: VersionedStore | None, policy: Policy, num_workers: int) -> None:
        self.client, self.own, self.policy, self.num_workers = client, own, policy, num_workers
        self.finished = 0  # clocks

    def pull(self, keys: Keys = None, at_least_clock: int = 0, *, worker: int | None = 0) -> Pulled:
        """As `VersionedStore.pull`; None reads the newest weights."""
        return self.client.pull(keys, at_least_clock, newest=worker is None)

    def push(self, keys: Keys, update: Any, *, worker: int = 0) -> None:
        """As `VersionedStore.push`."""
        self.client.push(keys, update)

    def clock(self, *, worker: int = 0) -> int:
        """As `VersionedStore.clock`."""
        self.finished = self.client.clock()
        return self.finished

    def flush(self) -> None:
        """Send what the policy holds back."""
        self.client.flush()

    def leave(self, worker: int = 0) -> None:
        """As `VersionedStore.leave`; process 0 waits until all have left."""
        self.client.__exit__(None, None, None)

    def report(self) -> StoreReport:
        """As `VersionedStore.report`.

        Raises:
            StoreError: the store is that of process 0.
        """
        if self.own is not None:
            return self.own.report()
        raise StoreError("process 0 has the store, and reports on all workers: call `report()` there")


class OneProcess:
    """The worker of this process.

    Args:
        leaves: the state by path; that of process 0 counts.
    """

    def __init__(self, work: Work, policy: Policy, num_workers: int, leaves: Mapping[str, Any]) -> None:
        self.work, self.worker = work, jax.process_index()
        self.noted = deque[list[Any]]()
        keys = [path for path, leaf in leaves.items() if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
        if keys:
            raise StoreError(
                f"`{keys[0]}` is a typed PRNG key, which does not go between processes: keep `jax.random.key_data(key)` in the state"
            )
        exchange = among_processes()
        assert exchange is not None, "there are several processes"
        self._exchange, self._waits = exchange, is_lockstep(policy)
        name = exchange.made_once("naming a store", lambda: uuid.uuid4().hex)
        own = work.new_store(leaves, lambda outputs: None, keeps_results=True) if self.worker == 0 else None
        client = StoreClient(self.worker, servers=1, name=name, own=own)
        self.store = ClientAsStore(client, own, policy, num_workers)
        self.session = work.session_of(self.store, leaves, self.noted.append)
        self._is_over = False
        self._final: dict[str, Any] = {}

    def results(self, batches: Iterable[Any], deal: Callable[[Any], list[Share]]) -> Iterator[list[Any]]:
        """As `Runner.results`: one after each iteration of this worker, of the newest update."""
        for batch in batches:
            if self._is_over:
                return
            (share,) = deal(batch)
            try:
                yielded = self._iteration(share)
            except BaseException as error:
                self._is_over = True
                self.store.client.__exit__(type(error), error, None)  # others that wait for this worker are told
                raise
            yield yielded
        self.finish()

    def _iteration(self, share: Share) -> list[Any]:
        """Run an iteration. Returns the outputs to show."""
        self.session.begin(self.worker)
        self.session.compute(self.worker, share, wait=True)
        self.session.finish(self.worker)
        outputs = self.work.results_in(self._newest)
        return self.noted.popleft() if outputs is None else outputs

    def _newest(self, keys: list[str]) -> Mapping[str, Any]:
        """Results of the newest update; of this clock's where all workers wait for each other."""
        return self.store.pull(keys, self.store.finished if self._waits else 0, worker=None).values

    def finish(self) -> None:
        """As `Runner.finish`. All processes call it; it waits for all."""
        if self._is_over:
            return
        self._is_over = True
        self.session.flush(self.worker)
        self._exchange.judged("draining a stream", None, lambda given: None)
        self._final = self.session.state()
        self._exchange.judged("leaving a store", None, lambda given: None)
        self.session.leave(self.worker)

    def state(self) -> dict[str, Any]:
        """The state, by path, on this process's devices."""
        return dict(self._final)

    def snapshot(self) -> Snapshot:
        """As `Runner.snapshot`.

        Raises:
            StoreError: always: it is of one process.
        """
        raise StoreError("snapshots are of one process: save the state that `drain()` returns")

    def load(self, snapshot: Snapshot) -> int:
        """As `Runner.load`.

        Raises:
            StoreError: always.
        """
        raise StoreError("snapshots are of one process: start from the state that `drain()` returned")
