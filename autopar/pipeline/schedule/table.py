"""All schedules by name, and how one is built.

In: a name (or an entry of one's own) and the numbers of submeshes, microbatches and stages on each submesh. Out:
`Schedule`, checked.
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
    """The entry of that name; an entry itself is taken as it is.

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
    """Why a schedule cannot be built for a shape, and the way out; None where it can."""
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
        virtual: stages on each submesh.
        edges: which stage feeds which, always from a lower to a higher number. By default each feeds the next.

    Raises:
        ScheduleError: no such schedule, not for these numbers, or (of an entry of one's own) not legal.

    >>> [str(task) for task in build("1f1b", 2, 2).orders[1]][:2]
    ['forward of microbatch 0 on stage 1', 'backward of microbatch 0 on stage 1']
    """
    kind, shape = find(schedule), PipelineShape(num_submeshes, num_microbatches, virtual)
    reason = unmet(kind, shape)
    if reason:
        raise ScheduleError(reason)
    if edges is None and SCHEDULES.get(kind.name) is kind:
        return _of_chain(kind, shape)
    return _built(kind, shape, edges)


#: A search asks for few shapes, and for each again and again.
_KEPT = 16


@functools.lru_cache(_KEPT)
def _of_chain(kind: ScheduleKind, shape: PipelineShape) -> Schedule:
    return _built(kind, shape, None)


def _built(kind: ScheduleKind, shape: PipelineShape, edges: Edges | None) -> Schedule:
    orders = with_updates(kind.orders(shape))
    num_stages = 1 + max(task.stage for order in orders for task in order)
    built = Schedule(kind.name, orders, kind.needs(orders, chain(num_stages) if edges is None else edges))
    check(built)
    return built
