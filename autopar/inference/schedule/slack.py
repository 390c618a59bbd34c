"""Decide when an engine's devices may do other work, such as a microbatch of training, without making requests late.

In: what the iterations of an engine have given, and when; the time of the other work. Out: `Slack`. It knows no device and no clock.

A piece of work that takes `w` seconds delays the next token of every running request by `w`. A request with `n` tokens since its first
one at time `f` has its next token at `now + step + w`, and then `n` intervals between tokens; so its time per output token (TPOT) stays
within the guard if

    now + step + w <= f + n * tpot_s.

Iterations that are faster than the guard make room for the next piece of work. A request without a token yet would get its first one later, so while
one waits or its prompt is computed, nothing else runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable

from autopar.inference.schedule.requests import Shape, Update

#: How many of the last times of a program or a piece of work are looked at; the largest counts.
_REMEMBERED = 8


class Slack:
    """The room that the requests of one engine leave.

    Args:
        tpot_s: the guard: the most seconds per output token, on average over a request.
    """

    def __init__(self, tpot_s: float) -> None:
        self.tpot_s = tpot_s
        self._tokens: dict[str, tuple[float, int]] = {}  # when a request had its first token, and the number of tokens
        self._times: dict[Hashable, deque[float]] = {}

    def note_update(self, update: Update, now_s: float) -> None:
        """Take note of the tokens that an iteration has given."""
        each = zip(update.names, update.slots.tolist(), update.num_new.tolist(), strict=True)
        for name, slot, num_new in each:
            first_s, num = self._tokens.get(name, (now_s, 0))
            if slot in update.ended:
                self._tokens.pop(name, None)
            elif num_new:
                self._tokens[name] = first_s, num + num_new

    def note_time(self, kind: Hashable, seconds: float) -> None:
        """Take note of the time of an iteration, by its `Shape`, or of a piece of work, by its kind."""
        self._times.setdefault(kind, deque(maxlen=_REMEMBERED)).append(seconds)

    def seconds(self, kind: Hashable) -> float | None:
        """The largest of the last times; None if there are none."""
        times = self._times.get(kind)
        return max(times) if times else None

    def may_run(self, kind: Hashable, running: Collection[str], num_waiting: int, now_s: float) -> bool:
        """Whether a piece of work may run now. No iteration is in flight.

        Args:
            running, num_waiting: the names of the requests that run, and the number of those that wait.
        """
        if not running and not num_waiting:
            return True
        self._tokens = {name: each for name, each in self._tokens.items() if name in running}
        step_s = max(
            (max(times) for key, times in self._times.items() if isinstance(key, Shape) and not key.rows), default=None
        )
        work_s = self.seconds(kind)
        if num_waiting or step_s is None or work_s is None or len(self._tokens) < len(running):
            return False
        end_s = now_s + step_s + work_s
        return all(end_s <= first_s + num * self.tpot_s for first_s, num in self._tokens.values())
