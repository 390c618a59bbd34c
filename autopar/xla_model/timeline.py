"""When the operations of a device's program run, and what of its collectives nothing hides.

In: made by `simulation`. Out: `Timeline`; `Opinions`, two of one program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.ir.device_program import Op


class Ran(NamedTuple):
    """An operation and when it runs.

    Args:
        exposed_s: of a collective, what no kernel hides.
        trips: how often a step runs it; from `start_s` to `end_s` are all its trips together, as if they were one.
    """

    op: Op
    start_s: float
    end_s: float
    exposed_s: float = 0.0
    trips: float = 1.0

    def within(self, at_s: float, count: float) -> Ran:
        """The same in a loop of so many trips that begins at `at_s`."""
        return Ran(
            self.op,
            at_s + count * self.start_s,
            at_s + count * self.end_s,
            count * self.exposed_s,
            count * self.trips,
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one step on one device.

    Args:
        step_time_s: from the first operation to the last.
        compute_s: kernels alone, with what it takes to start and end collectives.
        exposed_s: by kind of collective, what no kernel hides; above zero only.
        num_collectives: by kind, after merging.
        temporary_bytes: what is live in this order besides arguments and outputs, at most.
        ran: the operations as they start; a collective that runs in no time is left out.
        order: the operations in this order, loops laid open; of a collective its start and its end.
    """

    step_time_s: float
    compute_s: float
    exposed_s: Mapping[str, float] = field(hash=False)
    num_collectives: Mapping[str, int] = field(hash=False)
    temporary_bytes: float = 0.0
    ran: tuple[Ran, ...] = field(default=(), repr=False)
    order: tuple[Op, ...] = field(default=(), repr=False)


class Opinions(NamedTuple):
    """Two timelines of one program: by the device's own rates, and as XLA's estimator has it, where there is one."""

    by_rates: Timeline
    estimated: Timeline | None
