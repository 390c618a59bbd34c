"""Keep versioned weights that workers pull and push: a parameter server in one process.

In: arrays by key, an update function, a consistency policy. Out: `VersionedStore`, whose versions its workers read. The
model is that of the Parameter Server (Li et al. 2014) with the clocks of SSP (Ho et al. 2013).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.errors import StoreError
from autopar.versions.callers import Callers
from autopar.versions.checked_update import checked
from autopar.versions.consistency.board import board_of
from autopar.versions.consistency.policy import Policy
from autopar.versions.consistency.table import find
from autopar.versions.exchange import exchange_of
from autopar.versions.gather import kept_of
from autopar.versions.held import Held, added
from autopar.versions.keys import Keys, selected
from autopar.versions.layout.layout import Layout
from autopar.versions.layout.servers import Server
from autopar.versions.layout_choice import Place
from autopar.versions.progress import Progress
from autopar.versions.remote.server import serve
from autopar.versions.server_update import Update
from autopar.versions.shards import shards_of
from autopar.versions.snapshot import Snapshot, loaded, taken
from autopar.versions.store_state import StoreState
from autopar.versions.store_values import Pulled, StoreReport
from autopar.versions.terms import TermsUpdate
from autopar.versions.wait import wait
from autopar.versions.worker import Worker


class VersionedStore:
    """Weights by key that several workers, in threads of one process, pull and push.

    In each clock a worker pulls weights, computes, pushes updates and calls `clock()`. Its pushes of one clock are one
    update. The policy says when it is applied, and for how long a pull waits. Calls of different workers may come from
    different threads; those of one worker come one after another.

    Args:
        values: arrays by key; they are copied.
        update: what the server does with an update, or with the sum of the updates of a clock: None adds it to the weights;
            an optax transformation, for each shard with a state of its own; or a function from the weights and the sum, both
            by key, to the new weights. It runs for one shard at a time, and has no state. Or a `ServerUpdate`, for one shard.
        workers: the number of workers; they are numbered from 0.
        consistency: the name of a policy, as `"bsp"`, `"ssp(3)"` or `"async"`, or a `Policy`.
        shards: a device or a sharding for each shard; None for one shard that stays where its arrays are.
        servers: for each shard, the link and update rate of its machine, and the worker on it, whose own exchange with it is no
            traffic: with one for each worker, the store is decentralized. Keys, and the rows of large arrays where `update` treats
            elements alike, are laid out so that the slowest server takes least time. None for equal machines.
        layout: which shard has which keys and rows, in place of a planned one (`autopar.extend.layouts`).

    Raises:
        StoreError: an argument that cannot be.

    >>> import numpy as np
    >>> store = VersionedStore({"w": np.zeros(2, np.float32)}, workers=2)
    >>> for worker in (0, 1):
    ...     store.push("w", np.full(2, 1.0 + worker, np.float32), worker=worker)
    ...     store.clock(worker=worker)
    1
    1
    >>> pulled = store.pull("w")
    >>> pulled.values["w"].tolist(), pulled.versions
    ([3.0, 3.0], {0: 1})
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        update: Any = None,
        workers: int = 1,
        consistency: str | Policy = "bsp",
        shards: Sequence[Place] | None = None,
        servers: Sequence[Server] | None = None,
        layout: Layout | None = None,
    ) -> None:
        board = board_of(find(consistency), workers)
        made, self._division, owners = shards_of(
            values, update, shards, servers=servers, layout=layout, num_workers=workers
        )
        self._shapes = self._division.shapes
        terms = update.takes if isinstance(update, TermsUpdate) else {}
        self._taken = {key: (one.shape, one.dtype) for key, one in terms.items()} or self._division.kinds
        self._taken_shapes = {key: shape for key, (shape, _) in self._taken.items()}
        self._exchange = exchange_of(made, self._division, owners, {key: one.place for key, one in terms.items()})
        at_once = frozenset(key for key, one in terms.items() if not one.may_wait)
        self._state = StoreState(board, made, {}, (0,) * workers, (Held(),) * workers, at_once)
        self._changed, self._callers = threading.Condition(), Callers()
        self._progress = Progress.of(workers)

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, in the order of strings."""
        return tuple(self._shapes)

    @property
    def kinds(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each key."""
        return self._division.kinds

    @property
    def num_workers(self) -> int:
        """The number of workers at the start."""
        return self._state.board.clocks.num_workers

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self._state.shards)

    @property
    def policy(self) -> Policy:
        """The consistency policy."""
        return self._state.board.policy

    def pull(
        self,
        keys: Keys = None,
        at_least_clock: int = 0,
        *,
        worker: int | None = 0,
        to: Place | None = None,
        timeout_s: float | None = None,
    ) -> Pulled:
        """Read weights, after as many clocks are complete as the policy requires.

        Args:
            keys: a key, a list of keys, a range of keys (`slice("a", "c")`: from "a" to before "c"), or rows by key
                (`{"embedding": [3, 7]}`); None for all keys.
            at_least_clock: a number of clocks that must be complete, if that is more than the policy requires.
            worker: the worker that reads; None for a reader that is no worker, which gets the newest version.
            to: the device or sharding to copy the arrays to.
            timeout_s: seconds after which to give up waiting.

        Raises:
            StoreError: unknown keys or rows; or the clock cannot be reached any more, because a worker ended or failed; or
                the time is over.
        """
        chosen = selected(keys, self._shapes)
        if not isinstance(at_least_clock, int) or isinstance(at_least_clock, bool):
            raise StoreError(f"`at_least_clock` is {at_least_clock!r}: give a whole number of clocks")
        with self._changed:
            if worker is not None:
                self._called(worker)
                state = self._state
                if state.iterations[worker] % state.period:  # the worker goes on with what it pulled at the start
                    kept = kept_of(self._progress.before[worker], chosen, to)
                    if kept is not None:
                        return Pulled(*kept, state.board.clocks.of(worker))
            wait_s = wait(self._changed, lambda: self._state.board, self._callers, worker, at_least_clock, timeout_s)
            if worker is not None:
                self._progress.note(worker, self._state.board, wait_s)
                self._state = self._state.read(worker)
            state = self._state
        values, versions = self._exchange.pull(state.shards, chosen, worker, to)
        if worker is None:
            return Pulled(values, versions, state.board.reached)
        if state.period > 1:
            whole = (key for key, rows in chosen.items() if rows is None)
            of = self._division.shards_of
            self._progress.before[worker] |= {
                key: (values[key], {one: versions[one] for one in of(key)}) for key in whole
            }
        return Pulled(values, versions, state.board.clocks.of(worker))

    def may_read(self, worker: int) -> bool:
        """Whether a pull of a worker would not wait."""
        return not self._state.board.must_wait(worker)

    def push(self, keys: Keys, update: Any, *, worker: int = 0) -> None:
        """Add to a worker's update of its present clock; nobody sees it before the worker calls `clock()`.

        Args:
            keys: as for `pull`.
            update: an array by key, of the shape and dtype of what `pull` returns for these keys; for a single key, also the
                array alone. What is pushed twice is added up, as are rows that occur twice.

        Raises:
            StoreError: unknown keys or rows, or an array that does not fit.
        """
        parts = self._division.update(checked(update, keys, selected(keys, self._taken_shapes), self._taken))
        self._called(worker)
        state = self._state
        if state.sends_at_once:
            parts = self._exchange.push(worker, parts)
        number, before = self._progress.opened[worker]
        count = state.iterations[worker]  # what was pushed before the last clock is done with
        self._progress.opened[worker] = (count, added(before, parts) if number == count else parts)

    def clock(self, *, worker: int = 0) -> int:
        """Finish a worker's clock: its update is now the policy's to apply.

        Returns:
            The worker's clock after it: the number of clocks that it has finished or skipped.
        """
        with self._changed:
            self._called(worker)
            state = self._state
            number, update = self._progress.opened[worker]
            self._state = state.finished(worker, update if number == state.iterations[worker] else {}, self._sending)
            self._progress.opened[worker] = (self._state.iterations[worker], {})  # keeps no array longer than needed
            self._changed.notify_all()
            return self._state.board.clocks.of(worker)

    def leave(self, worker: int = 0) -> None:
        """Take a worker out of the clocks, so that nobody waits for it; what it pushed since its last clock is dropped."""
        with self._changed:
            self._state = self._state.left(worker, self._sending)
            self._callers.failures.pop(worker, None)
            self._changed.notify_all()

    def worker(self, index: int, to: Place | None = None) -> Worker:
        """One worker's view of the store, as a context: it leaves at the end, and after an error others stop waiting for it.
        Its pulls go `to` its device or sharding.
        """
        self._state.board.clocks.of(index)
        return Worker(self, index, to)

    def fail(self, worker: int, error: BaseException) -> None:
        """Say that a worker has failed: pulls that wait for it raise an error, until `leave(worker)` takes it out."""
        with self._changed:
            self._state.board.clocks.of(worker)
            self._callers.failures[worker] = error
            self._changed.notify_all()

    def report(self) -> StoreReport:
        """Versions, clocks, staleness, waiting and bytes until now."""
        with self._changed:
            board = self._state.board
            return StoreReport(
                versions=tuple(shard.version for shard in self._state.shards),
                clocks=board.clocks.vector,
                iterations=self._state.iterations,
                num_discarded=board.num_discarded,
                staleness=tuple(map(Counter, self._progress.staleness)),
                waits_s=tuple(self._progress.waits_s),
                traffic={key: replace(traffic) for key, traffic in self._exchange.transport.traffic.items()},
            )

    def at_worker(self, worker: int) -> None:
        """Say that all shards are on a worker's machine: what it exchanges with them is no traffic."""
        self._exchange = self._exchange.at_worker(worker)

    def snapshot(self) -> Snapshot:
        """Everything that changes in the store, at one time."""
        with self._changed:
            return taken(self._state, self._progress)

    def load(self, snapshot: Snapshot) -> None:
        """Replace everything that changes by a snapshot of a store that was made with the same arguments.

        Raises:
            StoreError: it is of another store, or damaged; the store is as it was.
        """
        with self._changed:
            self._state, self._progress = loaded(snapshot, self._state, self._exchange.targets)
            self._changed.notify_all()

    def serve(self, name: str = "store", server: int = 0, *, layout: Layout | None = None) -> None:
        """Serve the store to workers in other processes (`StoreClient`), until all have left. Call
        `jax.distributed.initialize` first.

        Args:
            name: of the store; the same in all its servers and workers.
            server: the number of this server, from 0; each has other keys, or other rows of them by the `layout`.

        Raises:
            StoreError: workers failed or died, by name; or the policy cannot be served.
        """
        serve(self, name, server, layout)

    # -- helpers -----------------------------------------------------------------------------

    def _called(self, worker: int) -> None:
        self._state.board.clocks.of(worker)
        self._callers.called(worker)

    def _sending(self, worker: int, update: Update) -> Update:
        """Move what was not moved when it was pushed."""
        return update if self._state.sends_at_once else self._exchange.push(worker, update)
