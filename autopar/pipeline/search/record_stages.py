"""Record the planned stages of a step as a `PipelinePlan`.

In: a scheduled and simulated `StagedStep`, the programs and plans of its stages. Out: `PipelinePlan`, with the stages
that hold each argument and result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.stage_programs import StageProgram
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.partition.cluster import Cluster, submeshes_of
from autopar.pipeline.partition.sends import edges_between
from autopar.pipeline.plan import (
    LeafPart,
    OwnSchedule,
    PipelinePlan,
    PipelinePrediction,
    SearchOutcome,
    StagePlan,
    StagesTried,
)
from autopar.pipeline.schedule.dag import side_by_side
from autopar.pipeline.search.stage_search import StagedStep
from autopar.pipeline.search.weight_versions import bytes_with_versions, weight_versions
from autopar.planner.efficiency import efficiency_of
from autopar.plans.plan import Plan
from autopar.plans.records import TensorPlan
from autopar.transforms.program import Program
from autopar.version import versions_of


def recorded(
    program: Program,
    step: StagedStep,
    programs: Sequence[StageProgram],
    plans: Sequence[Plan],
    *,
    cluster: Cluster,
    profiles: Mapping[str, HardwareProfile],
    memory_budget_bytes: float | None,
    num_microbatches: int,
    starts: tuple[int, ...],
    run_layers: tuple[int, ...],
    num_layers: int,
    num_planned: int,
    own_statistics: bool,
    tried: tuple[StagesTried, ...],
    search_time_s: float,
    homes: Mapping[LeafKey, int] | None = None,
    read_state: tuple[int, ...] = (),
    splits_loops: bool = False,
) -> PipelinePlan:
    """The plan of a step in stages. The arguments without a docstring here are fields of `PipelinePlan`.

    Args:
        program: the step with its dims as written.
        step: the stages with the costs of their plans.
        programs, plans: of each stage.
        num_layers: number of layers that stages were cut from.
        homes: the stages that hold arguments which no stage updates, where not the first that reads them.
    """
    schedule, graph = step.schedule, program.graph
    kept = () if step.streamed is None else weight_versions(step.streamed, programs, plans, num_microbatches)
    stages = tuple(
        StagePlan(
            first_layer=stage.first,
            last_layer=stage.last,
            submesh=stage.submesh,
            replicas=stage.replicas,
            cost=cost if stage.replicas else replace(cost, accumulated_bytes=0.0, num_accumulated=0.0),
            plan=replace(plan, memory_budget_bytes=None),  # the budget depends on the schedule
        )
        for stage, cost, plan in zip(step.stages, step.costs, plans, strict=True)
    )
    branches = side_by_side(len(stages), edges_between(step.sends)) if run_layers else ()
    inputs = _placed(graph, programs, plans, "argument", homes or {})
    outputs = _placed(graph, programs, plans, "result", {})
    return PipelinePlan(
        program=program.signature,
        cluster=cluster,
        memory_budget_bytes=memory_budget_bytes,
        strategy=_description(stages, schedule.name, num_microbatches, forks=bool(branches)),
        schedule=schedule.name,
        num_microbatches=num_microbatches,
        starts=starts,
        run_layers=run_layers,
        virtual=1 if run_layers else len(stages) // schedule.num_submeshes,
        own_schedule=None if step.kind is None else OwnSchedule.of(schedule, step.kind),
        stages=stages,
        sends=step.sends,
        inputs=tuple(tensor for tensor, _ in inputs),
        outputs=tuple(tensor for tensor, _ in outputs),
        input_parts=tuple(parts for _, parts in inputs),
        output_parts=tuple(parts for _, parts in outputs),
        carried=graph.carried,
        donated=program.donated,
        prediction=PipelinePrediction(
            step_time_s=step.step_time_s,
            bubble_fraction=step.bubble_fraction,
            stage_bytes=step.peak_bytes if step.streamed is None else bytes_with_versions(step.streamed, kept),
        ),
        efficiency=efficiency_of(
            program.as_traced.graph,
            [tensor for tensor, _ in inputs],
            [(group.num_devices, profiles[group.kind]) for group in cluster.groups],
            _bounds(stages, step),
        ),
        outcome=SearchOutcome(
            status=step.partition.status.value,
            gap=_gap(step.partition.cost_s, step.partition.lower_bound_s),
            num_layers=num_layers,
            num_planned=num_planned,
            among=step.partition.among,
            search_time_s=search_time_s,
        ),
        own_statistics=own_statistics,
        splits_loops=splits_loops,
        token_slices=() if step.kind is None else step.kind.token_slices,
        slice_shares=() if step.kind is None else step.kind.shares,
        weight_versions=kept,
        read_state=read_state,
        tried=tried,
        versions=versions_of(),
        in_tree=program.trace.in_tree,
        out_tree=program.trace.out_tree,
    )


def runs_of_layers(layer_of: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first unit of each run of units of one layer, and the layer of each run.

    >>> runs_of_layers([0, 0, 1, 0])
    ((0, 2, 3), (0, 1, 0))
    """
    starts = tuple(n for n in range(len(layer_of)) if n == 0 or layer_of[n] != layer_of[n - 1])
    return starts, tuple(layer_of[start] for start in starts)


def _bounds(stages: Sequence[StagePlan], step: StagedStep) -> dict[str, float]:
    """Seconds of a step by bottleneck: bubbles, and the bottlenecks of the stages' programs by device time."""
    waiting = step.bubble_fraction * step.step_time_s
    seconds: dict[str, float] = defaultdict(float)
    for stage in stages:
        for bound, time_s in stage.plan.efficiency.bound_s.items() if stage.plan.efficiency else ():
            seconds[bound] += time_s * stage.plan.num_devices
    scale = (step.step_time_s - waiting) / (sum(seconds.values()) or 1.0)
    found = {"pipeline bubbles": waiting, **{bound: scale * time_s for bound, time_s in seconds.items()}}
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _gap(cost: float, bound: float) -> float:
    return max(0.0, (cost - bound) / cost) if cost else 0.0


def _placed(
    graph: Graph,
    programs: Sequence[StageProgram],
    plans: Sequence[Plan],
    kind: Literal["argument", "result"],
    homes: Mapping[LeafKey, int],
) -> list[tuple[TensorPlan, tuple[LeafPart, ...]]]:
    """The shardings and stages of the step's arguments or results. Carried state is on the stage that updates it; other
    leaves at home, or on the first stage that uses or produces them; unused ones on the first stage, replicated."""
    given = kind == "argument"
    values, paths = (graph.inputs, graph.input_paths) if given else (graph.outputs, graph.output_paths)
    found: dict[int, dict[Rows | None, tuple[TensorPlan, int]]] = defaultdict(dict)
    for s, (program, plan) in enumerate(zip(programs, plans, strict=True)):
        ports, tensors = (program.inputs, plan.inputs) if given else (program.outputs, plan.outputs)
        renewed = {position for position, _ in program.program.graph.carried} if given else set[int]()
        for position, (port, tensor) in enumerate(zip(ports, tensors, strict=True)):
            if port.kind != kind:
                continue
            if port.rows not in found[port.value] or position in renewed or homes.get(port.leaf) == s:
                found[port.value][port.rows] = tensor, s
    placed = []
    for position, value in enumerate(values):
        whole = _whole(graph, paths[position], value)
        parts = sorted(found[position].items(), key=lambda item: item[0].start if item[0] else 0)
        if parts:
            largest = max(tensor.num_bytes for _, (tensor, _) in parts)
            whole = replace(parts[0][1][0], path=whole.path, shape=whole.shape, num_bytes=largest)
        placed.append((whole, tuple(_part(s, t, rows) for rows, (t, s) in parts) or (_part(0, whole, None),)))
    return placed


def _part(stage: int, tensor: TensorPlan, rows: Rows | None) -> LeafPart:
    place = None if rows is None else (rows.dim, rows.start, rows.stop)
    return LeafPart(stage=stage, sharding=tensor.sharding, rows=place)


def _whole(graph: Graph, path: str, value: int | None) -> TensorPlan:
    """The plan of a leaf that no stage uses or produces."""
    info = None if value is None else graph.values[value]
    shape = info.shape if info else ()
    return TensorPlan(
        path=path,
        shape=shape,
        dtype=info.dtype if info else "literal",
        role="data",
        sharding=TensorSharding(((),) * len(shape)),
        num_bytes=info.num_bytes if info else 0.0,
    )


def _description(stages: Sequence[StagePlan], schedule: str, num_microbatches: int, *, forks: bool) -> str:
    """A description of the plan in one line."""
    inside = list(dict.fromkeys(stage.plan.strategy for stage in stages))
    submeshes = [submesh.devices for submesh in submeshes_of(stages)]
    sizes = " + ".join(str(len(devices)) for devices in submeshes)
    each, rest = divmod(len(stages), len(submeshes))
    virtual = f", {each} on each submesh" if not forks and each > 1 and not rest else ""
    count = f"{len(stages)} stages on {sizes} devices{virtual}" if len(stages) > 1 else f"one stage on {sizes} devices"
    count += ", branches side by side" if forks else ""
    count += f", each stage on {len(stages[0].places)} submeshes" if stages[0].replicas else ""
    batches = f"{num_microbatches} microbatches" if num_microbatches > 1 else "1 microbatch"
    within = f"; inside: {inside[0]}" if len(inside) == 1 else f"; inside: {' | '.join(inside)}"
    return f"{count}, {schedule}, {batches}{within}"
