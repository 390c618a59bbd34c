"""Keep the tasks of a schedule that does not follow from its name, as a plan's file has them.

In: a schedule and its entry.
Out: `OwnSchedule`, data that gives the schedule back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.table import KINDS, build
from autopar.pipeline.schedule.task_text import tasks_of, text_of
from autopar.pipeline.schedule.tasks import Edges, Schedule, synchronous_needs
from autopar.pipeline.schedule.verifier import check


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSchedule:
    """The tasks of a schedule that is not one of the package, or in an order of their own, as `schedule.task_text` writes
    them.

    Args:
        description: its sentence.
        orders: the tasks of each submesh.
        needs: a task and those that it depends on, for each task; empty for those of a synchronous step.
    """

    description: str
    orders: tuple[str, ...]
    needs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, kind: ScheduleKind) -> OwnSchedule | None:
        """The tasks of a schedule; None if they follow from the name of its entry."""
        description = kind.description
        if kind.token_slices:  # the plan has them
            return None
        if KINDS.get(kind.name) is kind:
            virtual = schedule.num_stages // schedule.num_submeshes
            printed = build(kind, schedule.num_submeshes, schedule.num_microbatches, virtual=virtual)
            if schedule.orders == printed.orders:
                return None
            description += " The order follows planned times."
        needs = {} if kind.needs is synchronous_needs else schedule.needs
        return cls(
            description=description,
            orders=tuple(map(text_of, schedule.orders)),
            needs=tuple((text_of([task]), text_of(on)) for task, on in needs.items()),
        )

    def of_first(self, num_microbatches: int) -> OwnSchedule:
        """The tasks of the first microbatches."""

        def kept(text: str) -> str:
            return text_of([task for task in tasks_of(text) if task.microbatch < num_microbatches])

        needs = ((kept(one), kept(on)) for one, on in self.needs)
        return replace(self, orders=tuple(map(kept, self.orders)), needs=tuple(both for both in needs if both[0]))

    def schedule(self, name: str, edges: Edges) -> Schedule:
        """The schedule with these tasks.

        Raises:
            ScheduleError: they are not legal.
        """
        orders = tuple(map(tasks_of, self.orders))
        needs = {task: tasks_of(on) for one, on in self.needs for task in tasks_of(one)}
        built = Schedule(name, orders, needs or synchronous_needs(orders, edges))
        check(built)
        return built
