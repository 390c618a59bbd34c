"""Define the state of a store as one value, and how a worker's clock changes it.

In: the updates that a worker pushed in an iteration. Out: the next state. A store replaces its state by one assignment,
so an interruption or an error in an update leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax

from autopar.errors import StoreError
from autopar.versions.consistency.board import Board
from autopar.versions.consistency.policy import Decision
from autopar.versions.held import Held, after_iteration
from autopar.versions.server_update import Update
from autopar.versions.shards import Shard

#: Moves a worker's update to its shards.
Send = Callable[[int, Update], Update]


@dataclass(frozen=True, slots=True)
class StoreState:
    """Everything in a store that changes.

    Args:
        pending: updates that are not applied, by worker and clock.
        iterations: the number of iterations that each worker has finished.
        held: what each worker holds back.
        sent_at_once: keys that no policy holds back.
        holds: whether the store holds back for its workers; those of a served store do it themselves.
    """

    board: Board
    shards: tuple[Shard, ...]
    pending: Mapping[tuple[int, int], Update]
    iterations: tuple[int, ...]
    held: tuple[Held, ...]
    sent_at_once: frozenset[str] = frozenset()
    holds: bool = True

    @property
    def period(self) -> int:
        """The iterations of a worker, as the store counts them, for each of its clocks."""
        return self.board.policy.period if self.holds else 1

    @property
    def sends_at_once(self) -> bool:
        """Whether what is pushed in an iteration is sent in any case."""
        return not self.holds or (self.board.policy.period == 1 and self.board.policy.send is None)

    def read(self, worker: int) -> StoreState:
        """After a worker has read."""
        board = self.board.read(worker)
        return self if board is self.board else replace(self, board=board)

    def finished(self, worker: int, update: Update, send: Send) -> StoreState:
        """After a worker has finished an iteration in which it pushed `update`.

        Raises:
            StoreError: the worker has donated an array that it pushed.
        """
        for key, pushed in update.items():
            if isinstance(pushed.whole, jax.Array) and pushed.whole.is_deleted():
                raise StoreError(
                    f"the update of {key!r} was donated after it was pushed: push a copy, or donate it later"
                )
        count = self.iterations[worker] + 1
        iterations = (*self.iterations[:worker], count, *self.iterations[worker + 1 :])
        sent, rest = update, Held()
        if self.holds:
            sent, rest = after_iteration(self.board.policy, self.held[worker], count, update, self.sent_at_once)
        after = replace(self, iterations=iterations, held=self._with_held(worker, rest))
        return after if sent is None else after._pushed(worker, send(worker, sent))

    def left(self, worker: int, send: Send) -> StoreState:
        """After a worker has left; what it holds back is pushed first."""
        self.board.clocks.of(worker)
        held, state = self.held[worker], self
        if held.update:
            state = replace(self, held=self._with_held(worker, Held()))._pushed(worker, send(worker, held.update))
        board, decision = state.board.left(worker)
        return replace(state, board=board)._applied(decision)

    def _pushed(self, worker: int, update: Update) -> StoreState:
        pending = {**self.pending, (worker, self.board.clocks.of(worker)): update}
        board, decision = self.board.pushed(worker)
        return replace(self, board=board, pending=pending)._applied(decision)

    def _applied(self, decision: Decision) -> StoreState:
        pending, shards = dict(self.pending), self.shards
        for group in decision.groups:
            updates = [pending.pop((one.worker, one.clock)) for one in group]
            shards = tuple(shard.updated(updates) for shard in shards)
        for one in decision.discarded:
            del pending[one.worker, one.clock]
        return replace(self, shards=shards, pending=pending)

    def _with_held(self, worker: int, held: Held) -> tuple[Held, ...]:
        return (*self.held[:worker], held, *self.held[worker + 1 :])
