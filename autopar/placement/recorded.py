"""Replay the recorded times of an engine's iterations.

In: the seconds of iterations by shape, in the order in which they ran. Out: `Recording`, which gives each of them once, and then begins
again. A shape that was not recorded takes its predicted time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.inference.schedule.requests import Shape


class Recording:
    """Recorded seconds, to be used for one simulation.

    Args:
        seconds: by shape, at least one each.
    """

    def __init__(self, seconds: Mapping[Shape, Sequence[float]]) -> None:
        self._seconds = {shape: tuple(each) for shape, each in seconds.items() if each}
        self._next = dict.fromkeys(self._seconds, 0)

    def next_s(self, shape: Shape) -> float | None:
        """The seconds of the next iteration of a shape; None if the shape was not recorded."""
        seconds = self._seconds.get(shape)
        if seconds is None:
            return None
        at = self._next[shape]
        self._next[shape] = (at + 1) % len(seconds)
        return seconds[at]
