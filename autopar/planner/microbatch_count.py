"""How many microbatches: the number whose step is fastest among those that fit; and what a plan says of them.

In: a function that plans for a number of them. Out: the best plan. A step that fits as it is, is planned once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from autopar.errors import BudgetError, MicrobatchError, TimeLimitError
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import replicated
from autopar.planner.memory_search import NothingFitsError
from autopar.plans.plan import Plan
from autopar.plans.records import Constraint, Microbatches, Tried
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program


def fastest_that_fits(planned: Callable[[int], Plan], num_examples: Callable[[], int]) -> Plan:
    """The fastest plan among 1, 2, 4, ... microbatches. More are tried while nothing fits, and while memory limits the
    plan and more made it faster; or while values are computed again, which more microbatches may save.

    Args:
        planned: raises `NothingFitsError` where no plan fits.
        num_examples: asked for where one microbatch is not enough.

    Raises:
        BudgetError: that of one microbatch, where no number fits.
        MicrobatchError: where one microbatch does not fit and the batch cannot be split.
        TimeLimitError: the solver found no plan in its time, before any that fits.
    """
    best: Plan | None = None
    first: NothingFitsError | None = None
    tried: list[Tried] = []
    count = 1
    while count == 1 or num_examples() % count == 0:
        try:
            plan = planned(count)
        except NothingFitsError as short:
            first = first or short
            tried.append(Tried(count=count, step_time_s=inf, peak_bytes=inf))
        except MicrobatchError as error:
            if best is None:
                assert first is not None
                told = first.told(split_over_time=False)
                raise MicrobatchError(f"{told} More microbatches are no way out: {error}") from None
            break
        except TimeLimitError:
            if best is None:
                raise
            break
        else:
            tried.append(_tried(count, plan))
            slower = best is not None and plan.prediction.step_time_s >= best.prediction.step_time_s
            best = best if slower else plan
            if not plan.outcome.memory_bound or (slower and not plan.recomputed):
                break
        count *= 2
    if best is None:
        assert first is not None
        words = ", ".join(str(one.count) for one in tried)
        raise BudgetError(f"{first.told(split_over_time=False)} Of {words} microbatches, none fits.")
    if best.microbatches is None:
        return best
    others = tuple(one for one in tried if one.count != best.microbatches.count)
    return replace(best, microbatches=replace(best.microbatches, tried=others))


def _tried(count: int, plan: Plan) -> Tried:
    told = plan.prediction
    return Tried(
        count=count, step_time_s=told.step_time_s, peak_bytes=told.peak_bytes, recomputes=bool(plan.recomputed)
    )


def microbatches_of(program: Program, mesh: MeshShape, constraints: Sequence[Constraint]) -> Microbatches | None:
    """What the loop over microbatches sums from trip to trip."""
    source, graph = program.trace.microbatches, program.graph
    if source is None:
        return None
    loops = [region for region in program.trace.regions if region.kind in ("scan", "while")]
    loop = next(loop for loop, region in zip(graph.loops, loops, strict=True) if region.source is source)
    split = {one.value: one.shardings[-1] for one in constraints if one.node is None}
    carried = [graph.nodes[leave].results[0] for _, leave in loop.carries]
    infos = [(graph.values[value], split.get(value, replicated(len(graph.values[value].shape)))) for value in carried]
    return Microbatches(
        count=program.num_microbatches,
        num_examples=_num_examples(program),
        accumulated_bytes=sum(info.itemsize * sharding.local_size(info.shape, mesh) for info, sharding in infos),
        num_accumulated=len(carried),
        own_statistics=program.own_statistics,
    )


def _num_examples(program: Program) -> int:
    """Of the batch; of a stage, which sees one microbatch at a time, of that. It may have one example, and then no dim."""
    try:
        return num_examples(program.graph)
    except MicrobatchError:
        if program.num_microbatches > 1:
            raise
        return 1


def microbatch_notes(program: Program, mesh: MeshShape) -> tuple[str, ...]:
    """A microbatch has fewer examples than the batch: perhaps too few to split over devices."""
    axes = [size for size in mesh.axis_sizes if size > 1]
    whole = num_examples(program.graph) if program.num_microbatches > 1 else 1
    each = whole // program.num_microbatches
    if not any(whole % size == 0 and each % size for size in axes):
        return ()
    return (
        f"a microbatch has {each} of {whole} examples, which not every axis of the mesh divides that divides the batch:"
        " fewer microbatches can be split better over devices",
    )
