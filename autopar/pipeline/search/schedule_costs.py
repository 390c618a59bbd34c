"""Change costs of stages to what a schedule has of them: an unsplit backward pass, replicas of stages, versions of weights, and corrections.

In: the cost of a stage, of all runs of layers, or tables of them.
Out: the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.partition.problem import CostTables, PartitionProblem, Stage, StageCost
from autopar.pipeline.schedule.kind import ScheduleKind

Cost = Callable[[int, int, SubmeshShape], StageCost | None]


def unsplit_backward(cost: StageCost) -> StageCost:
    """The cost with an unsplit backward pass."""
    return replace(cost, backward_s=cost.backward_s + cost.weight_s, weight_s=0.0, kept_bytes=0.0, passed_bytes=0.0)


def combining(
    costs: Sequence[StageCost], stages: Sequence[Stage], profiles: Mapping[str, HardwareProfile], kind: ScheduleKind
) -> list[StageCost]:
    """The costs of stages whose updates read what other replicas accumulated, too, or correct weights: an update reads and writes
    velocities, and weights and velocities are read, and the former written, to move them back. Weights take about as many bytes as
    what is accumulated for them."""
    last = len(stages) - 1
    passes = [len(stage.replicas) + 5 * (kind.reads.corrects and n < last) for n, stage in enumerate(stages)]
    read_bytes = [count * cost.accumulated_bytes for count, cost in zip(passes, costs, strict=True)]
    rates = [profiles[stage.submesh.shape.kind].memory_bytes_per_s for stage in stages]
    return [
        replace(cost, update_s=cost.update_s + num_bytes / rate) if num_bytes else cost
        for cost, num_bytes, rate in zip(costs, read_bytes, rates, strict=True)
    ]


def exchanging(
    cost: Cost, tables: CostTables | None, exchanged_s: Callable[[StageCost, SubmeshShape], float]
) -> tuple[Cost, CostTables | None]:
    """Costs and tables of stages whose replicas exchange what they accumulate before the update; bounds may lack it."""

    def with_exchange(found: StageCost, shape: SubmeshShape) -> StageCost:
        return replace(found, update_s=found.update_s + exchanged_s(found, shape))

    def of(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        found = cost(first, last, shape)
        return found and with_exchange(found, shape)

    return of, tables and replace(tables, cost=lambda shape: with_exchange(tables.cost(shape), shape))


def keeping_versions(problem: PartitionProblem, kind: ScheduleKind, num_microbatches: int) -> PartitionProblem:
    """The problem with stages that keep versions of their weights: at least a + b n copies beside one with n stages after. A stage has
    a microbatch in flight for itself and one for each later stage, so the latter are part of what each microbatch in flight holds. A
    version takes about as many bytes as what is accumulated."""
    always, for_each = kind.reads.least_further(num_microbatches)
    tables, bound = problem.tables, problem.bound

    def with_versions(found: StageCost) -> StageCost:
        return replace(
            found,
            state_bytes=found.state_bytes + (always - for_each) * found.accumulated_bytes,
            flight_bytes=found.flight_bytes + for_each * found.accumulated_bytes,
        )

    def cost(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        found = problem.cost(first, last, shape)
        return found and with_versions(found)

    return replace(
        problem,
        cost=cost,
        bound=bound and (lambda first, last, shape: with_versions(bound(first, last, shape))),
        tables=tables
        and CostTables(
            lambda shape: with_versions(tables.cost(shape)), lambda shape: with_versions(tables.bound(shape))
        ),
    )


def unsplit_costs(cost: Cost) -> Cost:
    """The costs with an unsplit backward pass."""

    def of(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        found = cost(first, last, shape)
        return found and unsplit_backward(found)

    return of


def unsplit_tables(tables: CostTables) -> CostTables:
    """The tables with an unsplit backward pass; bounds may be split, as they are bounds of the sum of the parts."""
    return replace(tables, cost=lambda shape: unsplit_backward(tables.cost(shape)))
