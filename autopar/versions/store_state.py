"""Define the state of a store as one value, and how a worker's clock changes it.

In: the updates that a worker pushed in an iteration. Out: the next state. A store replaces its state by one assignment,
so an interruption or an error in an update leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from autopar.errors import StoreError
from autopar.versions.consistency.board import Board
from autopar.versions.consistency.policy import Decision, Part
from autopar.versions.host_memory.memory_kinds import on_device
from autopar.versions.server_update import Pushed, Update
from autopar.versions.shards import Shard

#: Moves a worker's update to its shards.
Send = Callable[[int, Update], Update]


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker has pushed and not sent.

    Args:
        num_clocks: for each key, for how many clocks it has been held back.
    """

    update: Update = field(default_factory=dict)
    num_clocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreState:
    """Everything in a store that changes.

    Args:
        pending: updates that are not applied, by worker and clock.
        iterations: the number of iterations that each worker has finished.
        held: what each worker holds back.
        sent_at_once: keys that no policy holds back.
    """

    board: Board
    shards: tuple[Shard, ...]
    pending: Mapping[tuple[int, int], Update]
    iterations: tuple[int, ...]
    held: tuple[Held, ...]
    sent_at_once: frozenset[str] = frozenset()

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
        held = self.held[worker]
        update = added(held.update, update)
        if count % self.board.policy.period:
            return replace(self, iterations=iterations, held=self._with_held(worker, replace(held, update=update)))
        sent, rest = self._divided(update, held.num_clocks)
        return replace(self, iterations=iterations, held=self._with_held(worker, rest))._pushed(
            worker, send(worker, sent)
        )

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

    def _divided(self, update: Update, num_clocks: Mapping[str, int]) -> tuple[Update, Held]:
        """What is sent in this clock, in the policy's order, and what is held back."""
        send = self.board.policy.send
        if send is None:
            return update, Held()
        parts = [
            Part(key, pushed.num_bytes, _magnitude(pushed), num_clocks.get(key, 0))
            for key, pushed in update.items()
            if key not in self.sent_at_once
        ]
        sent = {key: pushed for key, pushed in update.items() if key in self.sent_at_once}
        sent |= {part.key: update[part.key] for part in send(parts)}
        rest = {key: pushed for key, pushed in update.items() if key not in sent}
        return sent, Held(rest, {key: num_clocks.get(key, 0) + 1 for key in rest})

    def _with_held(self, worker: int, held: Held) -> tuple[Held, ...]:
        return (*self.held[:worker], held, *self.held[worker + 1 :])


def added(first: Update, second: Update) -> Update:
    """The sum of two updates of a worker."""
    if not first:
        return second
    both = {key: first[key].plus(second[key]) for key in second if key in first}
    return {**first, **second, **both}


def _magnitude(pushed: Pushed) -> float:
    """The mean absolute value; waits for the device."""
    arrays = [values for _, values in pushed.rows] + [factors.product() for factors in pushed.factors]
    arrays += [] if pushed.whole is None else [pushed.whole]
    size = sum(array.size for array in arrays)
    return sum(float(jnp.abs(on_device(array)).sum()) for array in arrays) / size if size else 0.0
