"""Change the state of a store by pushes at the head of a chain, and by what the head sends to replicas.

In: a `StoreState`, a push. Out: the next state, and an `Entry`: what was applied, aggregated before it is replicated. A replica that
applies the entries in order has the weights of the head, bit by bit.

What is pushed and waits for other shares is on the head alone. A worker keeps it until it was applied, and pushes it again if the head dies: the share
and the clock say whether it is new.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autopar.versions.consistency.board import Board
from autopar.versions.remote.wire import packed_update, unpacked_update
from autopar.versions.server_update import Pushed, Update, aggregated
from autopar.versions.store_state import StoreState

#: A share, and the clock in which its update was computed.
Member = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one push brought about.

    Args:
        position: the number of entries before it.
        groups: what was applied together, in order.
        updates: of each group the sum.
        discarded: what was not applied.
    """

    position: int
    groups: tuple[tuple[Member, ...], ...]
    updates: tuple[Update, ...]
    discarded: tuple[Member, ...] = ()

    def packed(self) -> tuple[dict[str, Any], list[Any]]:
        """As JSON and arrays."""
        lines: list[Any] = []
        arrays: list[Any] = []
        for update in self.updates:
            own_lines, own = packed_update(update)
            lines.append([own_lines, len(own)])
            arrays += own
        return {"position": self.position, "groups": self.groups, "lines": lines, "discarded": self.discarded}, arrays

    @classmethod
    def unpacked(cls, message: dict[str, Any], arrays: Sequence[np.ndarray]) -> Entry:
        """The inverse of `packed`."""
        updates: list[Update] = []
        for lines, count in message["lines"]:
            own, arrays = arrays[:count], arrays[count:]
            parts = unpacked_update(lines, [jax.numpy.asarray(one) for one in own])
            updates.append({key: Pushed(whole) for key, whole in parts})
        return cls(
            int(message["position"]),
            tuple(tuple((int(share), int(clock)) for share, clock in group) for group in message["groups"]),
            tuple(updates),
            tuple((int(share), int(clock)) for share, clock in message["discarded"]),
        )


def is_new(state: StoreState, share: int, clock: int) -> bool:
    """Whether the update of a share in a clock has not been pushed before. One of a later clock than the next is not taken: the one
    in between was lost with a server and a worker, and is computed again."""
    own = state.board.clocks.of(share)
    return clock == own or (clock > own and state.board.policy.catches_up)


def pushed(
    state: StoreState, share: int, clock: int, read_version: int, update: Update, position: int
) -> tuple[StoreState, Entry | None]:
    """After the update of a share in a clock, which is new; and what was applied and discarded by it, if anything."""
    board = state.board
    board = replace(
        board,
        clocks=board.clocks.advanced(share, clock),
        read_versions=(*board.read_versions[:share], read_version, *board.read_versions[share + 1 :]),
    )
    board, decision = board.pushed(share)
    pending = {**state.pending, (share, clock): update}
    shards, sums = state.shards, []
    for group in decision.groups:
        updates = [pending.pop((one.worker, one.clock)) for one in group]
        total = aggregated(shards[0].weights, updates)
        shards = tuple(shard.updated([total]) for shard in shards)
        sums.append(total)
    for one in decision.discarded:
        del pending[one.worker, one.clock]
    after = replace(state, board=board, shards=shards, pending=pending)
    if not decision.groups and not decision.discarded:
        return after, None
    groups = tuple(tuple((one.worker, one.clock) for one in group) for group in decision.groups)
    discarded = tuple((one.worker, one.clock) for one in decision.discarded)
    return after, Entry(position, groups, tuple(sums), discarded)


def applied(state: StoreState, entry: Entry) -> StoreState:
    """After an entry of the head."""
    shards = state.shards
    for total in entry.updates:
        shards = tuple(shard.updated([total]) for shard in shards)
    over = {*entry.discarded, *(one for group in entry.groups for one in group)}
    board = _advanced(state.board, entry, over)
    pending = {key: update for key, update in state.pending.items() if key not in over}
    return replace(state, board=board, shards=shards, pending=pending)


def committed(board: Board) -> tuple[int, ...]:
    """For each share, the clock before which all its updates were applied or discarded."""
    waiting: dict[int, int] = {}
    for one in board.pending:
        waiting[one.worker] = min(one.clock, waiting.get(one.worker, one.clock))
    return tuple(waiting.get(share, clock) for share, clock in enumerate(board.clocks.vector) if clock is not None)


def _advanced(board: Board, entry: Entry, over: set[Member]) -> Board:
    clocks, policy = board.clocks, board.policy
    for share, clock in sorted(over):
        clocks = clocks.advanced(share, max(clocks.of(share), policy.turn(share, clock, clocks.num_workers)))
    clocks = replace(
        clocks,
        version=clocks.version + len(entry.groups),
        applied=max([clocks.applied, *(group[0][1] + 1 for group in entry.groups)]),
    )
    complete = policy.complete(clocks)
    return replace(
        board,
        clocks=clocks,
        reached=board.reached if math.isinf(complete) else max(board.reached, int(complete)),
        pending=tuple(one for one in board.pending if (one.worker, one.clock) not in over),
        num_discarded=board.num_discarded + len(entry.discarded),
    )
