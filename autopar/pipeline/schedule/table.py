"""List all schedules by name, and build one.

In: a schedule's name or a custom `ScheduleKind`, and the numbers of submeshes, microbatches and stages per submesh.
Out: a verified `Schedule`.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.pipeline.schedule import dag
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.bidirectional import CHIMERA, DUALPIPE
from autopar.pipeline.schedule.in_flight import most_in_flight
from autopar.pipeline.schedule.kind import PipelineShape, Placement, ScheduleKind
from autopar.pipeline.schedule.objective import Objective
from autopar.pipeline.schedule.one_forward_one_backward import INTERLEAVED, ONE_F_ONE_B
from autopar.pipeline.schedule.sequential import GPIPE, INFERENCE, NONE
from autopar.pipeline.schedule.tasks import Edges, Schedule, chain, with_updates
from autopar.pipeline.schedule.token_slices import TERAPIPE, terapipe
from autopar.pipeline.schedule.v_shaped import DUALPIPE_V, ZB_V
from autopar.pipeline.schedule.verifier import check
from autopar.pipeline.schedule.zero_bubble import INTERLEAVED_ZB, ZB_H1

SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            *(NONE, INFERENCE, GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, INTERLEAVED_ZB, ZB_V, DUALPIPE_V),
            *(CHIMERA, DUALPIPE, TERAPIPE),
        )
    }
)

#: All schedules of the package.
KINDS: Mapping[str, ScheduleKind] = MappingProxyType({**SCHEDULES, **ASYNCHRONOUS})


def find(schedule: str | ScheduleKind) -> ScheduleKind:
    """The entry of this name. A `ScheduleKind` is returned unchanged; "terapipe(768, 512)" has these slices of tokens.

    Raises:
        ScheduleError: no schedule has the name, or an entry of one's own has the name of another.
    """
    if isinstance(schedule, ScheduleKind):
        if schedule.token_slices and schedule is terapipe(schedule.token_slices, schedule.shares):
            return schedule
        if schedule.name in dag.DESCRIPTIONS or KINDS.get(schedule.name, schedule) is not schedule:
            raise ScheduleError(f"the name {schedule.name!r} belongs to a schedule of the package: choose another one")
        return schedule
    if not isinstance(schedule, str):
        raise ScheduleError(f"`schedule` is {schedule!r}: give a name or a `ScheduleKind`")
    if schedule in KINDS:
        return KINDS[schedule]
    sliced = re.fullmatch(rf"{TERAPIPE.name}\(([\d, ]+)\)", schedule)
    if sliced:
        return terapipe(tuple(int(tokens) for tokens in sliced[1].split(",") if tokens.strip()))
    similar = (difflib.get_close_matches(schedule.lower(), table, n=2, cutoff=0.5) for table in (SCHEDULES, KINDS))
    close = next((names for names in similar if names), [])
    meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ScheduleError(
        f"there is no schedule {schedule!r}.{meant} The schedules are {', '.join(map(repr, SCHEDULES))}"
    )


def searched(*, trains: bool) -> tuple[ScheduleKind, ...]:
    """The schedules that `schedule="auto"` tries.

    Args:
        trains: whether the step has a backward pass.
    """
    return tuple(kind for kind in SCHEDULES.values() if kind.is_searched and (kind.backward != "none") == trains)


def unmet(kind: ScheduleKind, shape: PipelineShape) -> str | None:
    """Why a schedule cannot be built for a shape, and the way out; None if it can."""
    for name in ("num_submeshes", "num_microbatches", "virtual", "num_updates"):
        if getattr(shape, name) < 1:
            return f"schedule {kind.name!r} needs {name} of at least 1; got {getattr(shape, name)}"
    if shape.num_updates > 1 and not kind.is_asynchronous:
        return (
            f"schedule {kind.name!r} orders one step at a time: leave num_updates=1, or take an asynchronous schedule"
        )
    if kind.requires is not None:
        reason = kind.requires(shape)
    elif shape.virtual in kind.virtuals:
        reason = None
    else:
        reason = f"has {' or '.join(map(str, kind.virtuals))} stages on each submesh, not {shape.virtual}"
    return f"schedule {kind.name!r} {reason}" if reason else None


def build(
    schedule: str | ScheduleKind,
    num_submeshes: int,
    num_microbatches: int,
    *,
    virtual: int = 1,
    edges: Edges | None = None,
    num_updates: int = 1,
) -> Schedule:
    """Order the tasks of a pipeline.

    Args:
        virtual: the number of virtual stages per submesh.
        edges: pairs of stages; the lower one feeds the higher one. By default the stages form a chain.
        num_updates: the number of batches, of `num_microbatches` each, that an asynchronous schedule streams.

    Raises:
        ScheduleError: the name is unknown, the numbers do not suit the schedule, or a custom entry is not legal.

    >>> [str(task) for task in build("1f1b", 2, 2).orders[1]][:2]
    ['forward of microbatch 0 on stage 1', 'backward of microbatch 0 on stage 1']
    """
    kind, shape = find(schedule), PipelineShape(num_submeshes, num_microbatches, virtual, num_updates)
    reason = unmet(kind, shape)
    if reason:
        raise ScheduleError(reason)
    wanted = None if edges is None else tuple(edges)
    return _kept(kind, shape, wanted) if KINDS.get(kind.name) is kind else _build(kind, shape, wanted)


def shapes_with(kind: ScheduleKind, num_stages: int, most_submeshes: int, num_microbatches: int) -> list[PipelineShape]:
    """The shapes in which a schedule has this number of stages on two submeshes or more.

    Args:
        most_submeshes: the largest number of submeshes.
    """
    sizes = ((p, v) for p in range(2, most_submeshes + 1) for v in range(1, num_stages // 2 + 1))
    shapes = (PipelineShape(p, num_microbatches, v) for p, v in sizes if p * v <= 2 * num_stages)
    return [one for one in shapes if unmet(kind, one) is None and len(kind.placement(one)) == num_stages]


def stage_numbers(kind: ScheduleKind, most_submeshes: int, num_microbatches: int) -> list[int]:
    """The numbers of stages that a schedule can have on two submeshes or more, in the usual numbers on each."""
    shapes = (PipelineShape(p, num_microbatches, v) for p in range(2, most_submeshes + 1) for v in kind.virtuals)
    return sorted({len(kind.placement(one)) for one in shapes if unmet(kind, one) is None})


def objective_of(kind: ScheduleKind, num_microbatches: int, virtual: int) -> Objective:
    """The objective by which stages are cut. A kind without one gets that of GPipe, with the in-flight microbatches of its
    orders; the best stages are simulated."""
    if kind.objective is not None:
        return kind.objective(num_microbatches, virtual)
    repeats = num_microbatches * virtual - 1

    def held(after: int, num_submeshes: int) -> float:
        shape = PipelineShape(num_submeshes, num_microbatches, virtual)
        return math.inf if unmet(kind, shape) else most_in_flight(_build(kind, shape, None))[num_submeshes - 1 - after]

    return Objective(
        once_s=lambda cost: cost.pass_s / virtual,
        repeated_s=lambda cost: repeats * cost.pass_s + virtual * cost.update_s,
        in_flight=functools.cache(held),
        transfer_once=1 / virtual,
        transfer_repeated=repeats,
    )


#: A search uses few shapes, each many times.
_KEPT = 16


@functools.lru_cache(_KEPT)
def _kept(kind: ScheduleKind, shape: PipelineShape, edges: tuple[tuple[int, int], ...] | None) -> Schedule:
    return _build(kind, shape, edges)


def _build(kind: ScheduleKind, shape: PipelineShape, edges: Edges | None) -> Schedule:
    orders = with_updates(kind.orders(shape))
    placement = kind.placement(shape)
    needs = kind.needs(orders, chain(len(placement)) if edges is None else edges)
    built = Schedule(kind.name, orders, needs, kind.shares or ((1 / kind.parts, 1 / kind.parts),) * kind.parts)
    _check_sizes(
        built, replace(shape, num_microbatches=kind.parts * shape.num_microbatches * shape.num_updates), placement
    )
    check(built)
    return built


def _check_sizes(built: Schedule, shape: PipelineShape, placement: Placement) -> None:
    """Refuse tasks of other stages, microbatches or submeshes than a kind was asked for."""
    for number, what, wanted in (
        (built.num_submeshes, "submeshes", shape.num_submeshes),
        (built.num_stages, "stages", len(placement)),
        (built.num_microbatches, "microbatches", shape.num_microbatches),
    ):
        if number != wanted:
            raise ScheduleError(
                f"schedule {built.name!r} orders the tasks of {number} {what}, but {wanted} were asked for: `orders` and"
                " `placement` must follow the shape that they get"
            )
    for task, submesh in built.submesh_of().items():
        if submesh not in placement[task.stage]:
            raise ScheduleError(
                f"schedule {built.name!r} runs the {task} on submesh {submesh}, but places its stage on"
                f" {' and '.join(map(str, placement[task.stage]))}: give the entry the `placement` of its orders"
            )
