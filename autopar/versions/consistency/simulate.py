"""Simulate workers and a server by discrete events: what a consistency policy costs in waiting, without weights.

In: a policy, the seconds that each worker computes in each iteration, the seconds of a message.
Out: `SimulatedRun`: updates applied and discarded, seconds, staleness, waiting. The server applies updates in no time,
and messages do not share links.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import StoreError
from autopar.versions.consistency.board import Board, board_of
from autopar.versions.consistency.policy import Policy
from autopar.versions.consistency.table import find


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What happened.

    Args:
        seconds: until the last update was applied.
        num_applied: workers' updates applied; a sum of several counts each.
        num_versions: the number of versions after the first.
        num_discarded: workers' updates discarded.
        staleness: for each worker, how often it read with the slowest worker how many clocks behind.
        waits_s: for each worker, the seconds for which its reads waited.
    """

    seconds: float
    num_applied: int
    num_versions: int
    num_discarded: int
    staleness: tuple[Counter[int], ...]
    waits_s: tuple[float, ...]

    @property
    def updates_per_s(self) -> float:
        return self.num_applied / self.seconds

    @property
    def most_stale(self) -> int:
        """The largest staleness of all reads."""
        return max(max(counts, default=0) for counts in self.staleness)


def simulate(
    policy: str | Policy,
    num_workers: int,
    num_clocks: int,
    compute_s: Callable[[int, int], float],
    message_s: Callable[[int], float] = lambda worker: 0.0,
    *,
    on_read: Callable[[int, float], None] | None = None,
    on_push: Callable[[int, float], None] | None = None,
) -> SimulatedRun:
    """Let every worker pull, compute and push until it has finished `num_clocks` clocks.

    Args:
        compute_s: from a worker and the number of its iteration, seconds.
        message_s: from a worker, the seconds of one pull or push.
        on_read: called with a worker and the seconds when it reads; with `on_push`, a real store can follow the simulation.
        on_push: called when its update arrives.

    Raises:
        StoreError: the policy is unknown, or not defined for this number of workers; or it lets workers wait forever.

    >>> run = simulate("bsp", 2, 10, lambda worker, iteration: 1.0 + worker)
    >>> run.seconds, run.num_applied, run.waits_s
    (20.0, 20, (9.0, 0.0))
    """
    policy = find(policy)
    board = board_of(policy, num_workers)
    staleness = tuple(Counter[int]() for _ in range(num_workers))
    waits_s = [0.0] * num_workers
    waiting: dict[int, float] = dict.fromkeys(range(num_workers), 0.0)
    arrivals: list[tuple[float, int, int]] = []  # of pushes: seconds, number of the event, worker
    num_applied, num_events, last_s = 0, 0, 0.0

    def let_read(board: Board, now_s: float) -> Board:
        nonlocal num_events
        for worker, since_s in list(waiting.items()):
            if board.clocks.of(worker) >= num_clocks:
                del waiting[worker]
            elif not board.must_wait(worker):
                del waiting[worker]
                board = board.read(worker)
                if board.clocks.of(worker) >= num_clocks:  # it has skipped the rest
                    continue
                staleness[worker][board.clocks.staleness(worker)] += 1
                waits_s[worker] += now_s - since_s
                if on_read is not None:
                    on_read(worker, now_s)
                first = board.clocks.of(worker) * policy.period
                busy_s = sum(compute_s(worker, first + number) for number in range(policy.period))
                heapq.heappush(arrivals, (now_s + busy_s + 2 * message_s(worker), num_events, worker))
                num_events += 1
        return board

    board = let_read(board, 0.0)
    while arrivals:
        now_s, _, worker = heapq.heappop(arrivals)
        board, decision = board.pushed(worker)
        if on_push is not None:
            on_push(worker, now_s)
        if decision.groups:
            num_applied += sum(map(len, decision.groups))
            last_s = now_s
        waiting[worker] = now_s
        board = let_read(board, now_s)
    if waiting:
        raise StoreError(
            f"under the policy {policy.name!r} workers {', '.join(map(str, sorted(waiting)))} wait forever after"
            f" {last_s:g} s: {board.reached} clocks are complete, and no update is on its way"
        )
    return SimulatedRun(last_s, num_applied, board.clocks.version, board.num_discarded, staleness, tuple(waits_s))
