"""List all schedules by name, and build one.

In: a schedule's name or a custom `ScheduleKind`, and the numbers of submeshes, microbatches and stages per submesh.
Out: a verified `Schedule`.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind
from autopar.pipeline.schedule.one_forward_one_backward import INTERLEAVED, ONE_F_ONE_B
from autopar.pipeline.schedule.sequential import GPIPE, INFERENCE, NONE
from autopar.pipeline.schedule.tasks import Edges, Schedule, chain, with_updates
from autopar.pipeline.schedule.verifier import check
from autopar.pipeline.schedule.zero_bubble import ZB_H1

SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {kind.name: kind for kind in (NONE, INFERENCE, GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1)}
)


def find(schedule: str | ScheduleKind) -> ScheduleKind:
    """The entry of this name. A `ScheduleKind` is returned unchanged.

    Raises:
        ScheduleError: no schedule has the name.
    """
    if isinstance(schedule, ScheduleKind):
        return schedule
    if schedule in SCHEDULES:
        return SCHEDULES[schedule]
    close = difflib.get_close_matches(schedule.lower(), SCHEDULES, n=2, cutoff=0.5)
    meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ScheduleError(
        f"there is no schedule {schedule!r}.{meant} The schedules are {', '.join(map(repr, SCHEDULES))}"
    )


def unmet(kind: ScheduleKind, shape: PipelineShape) -> str | None:
    """Why a schedule cannot be built for a shape, and the way out; None if it can."""
    for name in ("num_submeshes", "num_microbatches", "virtual"):
        if getattr(shape, name) < 1:
            return f"schedule {kind.name!r} needs {name} of at least 1; got {getattr(shape, name)}"
    reason = kind.requires(shape)
    return f"schedule {kind.name!r} {reason}" if reason else None


def build(
    schedule: str | ScheduleKind,
    num_submeshes: int,
    num_microbatches: int,
    *,
    virtual: int = 1,
    edges: Edges | None = None,
) -> Schedule:
    """Order the tasks of a pipeline.

    Args:
        virtual: the number of virtual stages per submesh.
        edges: pairs of stages; the lower one feeds the higher one. By default the stages form a chain.

    Raises:
        ScheduleError: the name is unknown, the numbers do not suit the schedule, or a custom entry is not legal.

    >>> [str(task) for task in build("1f1b", 2, 2).orders[1]][:2]
    ['forward of microbatch 0 on stage 1', 'backward of microbatch 0 on stage 1']
    """
    kind, shape = find(schedule), PipelineShape(num_submeshes, num_microbatches, virtual)
    reason = unmet(kind, shape)
    if reason:
        raise ScheduleError(reason)
    wanted = None if edges is None else tuple(edges)
    return _kept(kind, shape, wanted) if SCHEDULES.get(kind.name) is kind else _build(kind, shape, wanted)


#: A search uses few shapes, each many times.
_KEPT = 16


@functools.lru_cache(_KEPT)
def _kept(kind: ScheduleKind, shape: PipelineShape, edges: tuple[tuple[int, int], ...] | None) -> Schedule:
    return _build(kind, shape, edges)


def _build(kind: ScheduleKind, shape: PipelineShape, edges: Edges | None) -> Schedule:
    orders = with_updates(kind.orders(shape))
    num_stages = 1 + max(task.stage for order in orders for task in order)
    built = Schedule(kind.name, orders, kind.needs(orders, chain(num_stages) if edges is None else edges))
    check(built)
    return built
