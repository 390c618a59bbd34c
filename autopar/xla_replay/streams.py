"""Run kernels on one stream and transfers on others, which share links and multiprocessors.

In: kernels and transfers in the order in which XLA issues them. Out: the time, and the seconds that kernels waited for
each kind of transfer. Transfers of one stream run one after the other; those on one link at one time share its rate;
kernels slow down while a transfer occupies multiprocessors.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

#: Work left of a task that counts as done, in seconds: far below the clock of a GPU.
_DONE_S = 1e-13


@dataclass(slots=True, eq=False)
class Transfer:
    """A collective or a host transfer.

    Args:
        kind: e.g. `all-reduce`.
        stream: transfers of one stream run in order.
        link: transfers on one link share it.
        seconds: duration on an idle link.
        slows_by: fraction of the kernels' rate that it takes while it runs.
        start_s: when it began; None before that.
        end_s: when it ended; None before that.
    """

    kind: str
    stream: str
    link: str
    seconds: float
    slows_by: float = 0.0
    label: str = ""
    left_s: float = 0.0
    start_s: float | None = None
    end_s: float | None = None


@dataclass(slots=True)
class Streams:
    """The state of a device's streams; `now` is the time at which the next kernel can begin."""

    now: float = 0.0
    queues: dict[str, deque[Transfer]] = field(default_factory=dict)
    finished: list[Transfer] = field(default_factory=list)

    def run(self, seconds: float) -> float:
        """Run a kernel, and return its start time."""
        start, left = self.now, seconds
        while left > _DONE_S:
            rate = 1.0 - max((one.slows_by for one in self._active()), default=0.0)
            left -= self._advance(left / rate) * rate
        return start

    def start(self, transfer: Transfer) -> Transfer:
        """Issue a transfer behind those of its stream."""
        transfer.left_s = transfer.seconds
        self.queues.setdefault(transfer.stream, deque()).append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> dict[str, float]:
        """Wait until a transfer is done. Return the seconds waited, by the kind of transfer that ran at the time."""
        waited: dict[str, float] = {}
        while transfer.end_s is None:
            running = self.queues[transfer.stream][0].kind
            waited[running] = waited.get(running, 0.0) + self._advance(math.inf)
        return waited

    def skip(self, seconds: float) -> None:
        """Advance the clock by the time of kernels that are not replayed one by one."""
        end = self.now + seconds
        while end - self.now > _DONE_S:
            self._advance(end - self.now)

    def drain(self) -> dict[str, float]:
        """Wait for everything that was issued."""
        waited: dict[str, float] = {}
        for queue in self.queues.values():
            while queue:
                for kind, seconds in self.wait(queue[-1]).items():
                    waited[kind] = waited.get(kind, 0.0) + seconds
        return waited

    def _active(self) -> list[Transfer]:
        return [queue[0] for queue in self.queues.values() if queue]

    def _advance(self, at_most: float) -> float:
        """Advance the clock, at most to the end of the next transfer. Return the seconds advanced."""
        active = self._active()
        shares: dict[str, int] = {}
        for one in active:
            shares[one.link] = shares.get(one.link, 0) + 1
            if one.start_s is None:
                one.start_s = self.now
        passed = min((at_most, *(one.left_s * shares[one.link] for one in active)))
        assert math.isfinite(passed), "a wait for a transfer that was never issued"
        self.now += passed
        for one in active:
            one.left_s -= passed / shares[one.link]
            if one.left_s <= _DONE_S:
                one.end_s = self.now
                self.finished.append(self.queues[one.stream].popleft())
        return passed
