"""Represent a simulated step: start and end of each operation, and the exposed communication.

In: built by `simulation`. Out: `Timeline`; `Timelines`, two of one program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.ir.device_program import Op


class Ran(NamedTuple):
    """An operation with its start and end times.

    Args:
        exposed_s: exposed time of a collective.
        trips: executions per step; `start_s` to `end_s` spans all of them.
    """

    op: Op
    start_s: float
    end_s: float
    exposed_s: float = 0.0
    num_iterations: float = 1.0

    def within(self, at_s: float, count: float) -> Ran:
        """The operation inside a loop of `count` iterations that starts at `at_s`."""
        return Ran(
            self.op,
            at_s + count * self.start_s,
            at_s + count * self.end_s,
            count * self.exposed_s,
            count * self.num_iterations,
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one step on one device.

    Args:
        step_time_s: from the first operation to the last.
        compute_s: time of kernels, including the overhead of starting and finishing collectives.
        exposed_s: kind of collective -> exposed time; positive entries only.
        num_collectives: kind of collective -> count after combining.
        temporary_bytes: peak of live temporaries (neither arguments nor outputs) in this order.
        ran: operations by start time, without collectives that take no time.
        order: operations in scheduled order, with loop bodies expanded and both the start and the end of a collective.
    """

    step_time_s: float
    compute_s: float
    exposed_s: Mapping[str, float] = field(hash=False)
    num_collectives: Mapping[str, int] = field(hash=False)
    temporary_bytes: float = 0.0
    ran: tuple[Ran, ...] = field(default=(), repr=False)
    order: tuple[Op, ...] = field(default=(), repr=False)


class Timelines(NamedTuple):
    """Two timelines of one schedule: at the device's own rates, and by XLA's estimator if the profile has one."""

    by_rates: Timeline
    estimated: Timeline | None
