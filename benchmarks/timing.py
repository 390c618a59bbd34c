"""Time contenders fairly on a shared machine: they take turns, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def take_turns(contenders: Mapping[str, Callable[[], float]], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Run every contender once per round, in an order that rotates so that none is always first.

    Args:
        contenders: functions that run once and return the measured seconds.
        rounds: number of measured rounds.
        warmup: number of earlier rounds that are discarded.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(warmup + rounds):
        offset = round_number % len(names)
        for name in names[offset:] + names[:offset]:
            seconds = contenders[name]()
            if round_number >= warmup:
                times[name].append(seconds)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each contender's times."""
    return {name: statistics.median(one) for name, one in times.items()}


def median_s(call: Callable[[], Any], rounds: int) -> float:
    """Median seconds from a call until its results are ready; the first call, which may compile, is discarded."""
    times: list[float] = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


class TimedLoop:
    """A training loop that runs one timed step at a time.

    Args:
        step: `(state, batch) -> (state, loss)`; may donate the state.
    """

    def __init__(self, step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def run(self) -> float:
        """Seconds from the call until its results are ready."""
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.step(self.state, self.batch))
        return time.perf_counter() - start
