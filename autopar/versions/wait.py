"""Let a reader wait until enough clocks are complete, or say why they never will be.

In: a store's board, as it changes, and who called it. Out: the seconds waited, or an error that names the worker that
others wait for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from autopar.errors import StoreError
from autopar.versions.callers import Callers
from autopar.versions.consistency.board import Board

#: The longest single wait, in seconds: between two, Ctrl-C is handled, and workers that ended are noticed.
PART_OF_A_WAIT_S = 0.2


def wait(
    changed: threading.Condition,
    board_now: Callable[[], Board],
    callers: Callers,
    worker: int | None,
    at_least_clock: int,
    timeout_s: float | None,
) -> float:
    """Wait until a worker may read.

    Args:
        changed: held by the caller; notified when the board has changed.
        worker: None for a reader that is no worker.

    Returns:
        The seconds waited.

    Raises:
        StoreError: the clock cannot be reached any more, or the time is over.
    """
    started_s = time.monotonic()
    while (board := board_now()).must_wait(worker, at_least_clock):
        check_reachable(board, callers, worker, at_least_clock)
        left_s = math.inf if timeout_s is None else timeout_s - (time.monotonic() - started_s)
        if left_s <= 0:
            raise StoreError(
                f"{_name(board, worker)} has waited {timeout_s:g} s for {board.floor(worker, at_least_clock)} complete"
                f" clocks; {board.reached} are complete, and the slowest are workers"
                f" {', '.join(map(str, board.slowest()))}"
            )
        changed.wait(min(PART_OF_A_WAIT_S, left_s))
    return time.monotonic() - started_s


def check_reachable(board: Board, callers: Callers, worker: int | None, at_least_clock: int) -> None:
    """Refuse to wait for clocks that will never be complete.

    Raises:
        StoreError: the reader would wait for itself, or for workers that ended or failed.
    """
    floor, who = board.floor(worker, at_least_clock), _name(board, worker)
    own = () if worker is None else (worker,)
    if not board.can_reach(floor, own):
        raise StoreError(
            f"{who} waits for {floor} complete clocks, which the others cannot reach alone: {board.reached} are complete."
            " Finish its own clocks first, or lower `at_least_clock`"
        )
    stopped = callers.stopped(worker)
    if board.can_reach(floor, {*own, *stopped}):
        return
    slowest = [one for one in board.slowest() if one in stopped] or list(stopped)
    named = "; ".join(f"worker {one}, at clock {board.clocks.vector[one]}, {stopped[one]}" for one in slowest)
    raise StoreError(
        f"{who} waits for {floor} complete clocks, but {named}. Call `store.leave({slowest[0]})` to go on without it"
    )


def _name(board: Board, worker: int | None) -> str:
    return "a reader" if worker is None else f"worker {worker}, at clock {board.clocks.of(worker)},"
