"""Record a candidate as a plan.

In: a `Candidate`, the planned program. Out: `Plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autopar.formulate.formulation import Formulation
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import DeviceProgram
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.ir.verifier import check_explicit
from autopar.planner.candidate import Candidate
from autopar.planner.constraints import constraints_of
from autopar.planner.decision_record import decision_records
from autopar.planner.efficiency import efficiency_of
from autopar.planner.microbatch_record import microbatch_notes, microbatches_of
from autopar.planner.plan_assembly import unfused_reductions_of, with_place_names
from autopar.planner.plan_notes import plan_notes
from autopar.planner.strategy_names import strategy_text
from autopar.plans.plan import Plan
from autopar.plans.records import Outcome, Replicated
from autopar.rules.node_view import of_each_node
from autopar.rules.table import without_rule
from autopar.solve.problem import Solution
from autopar.transforms.program import Program
from autopar.version import versions_of
from autopar.xla_model.step_summary import memory_over_step, seconds_by_bound, seconds_by_node, step_trace


def plan_of(
    candidate: Candidate,
    program: Program,
    unknown: Counter[str],
    pins: Mapping[int, TensorSharding],
    *,
    budget_bytes: float,
    seconds: float,
    memory_bound: bool = False,
) -> Plan:
    """The plan of a candidate.

    Args:
        program: the planned program, without rematerialization.
        unknown: number of uses of each primitive without a usable sharding rule.
        pins: input position -> sharding.
        budget_bytes: the peak memory that the plan may have, per device.
        seconds: planning time.
        memory_bound: whether the fastest plan without a memory limit exceeds the budget.
    """
    parts, solution, graph = candidate.parts, candidate.solution, candidate.formulation.graph
    check_explicit(parts.explicit, graph)
    mesh, own_rates = candidate.formulation.mesh, candidate.formulation.profile
    constraints = constraints_of(candidate.formulation, parts.explicit, pins)
    return Plan(
        program=program.signature,
        mesh=mesh,
        hardware=candidate.formulation.profile.name,
        memory_budget_bytes=budget_bytes,
        strategy=strategy_text(candidate.formulation, solution.choices, parts.inputs),
        inputs=parts.inputs,
        outputs=parts.outputs,
        carried=graph.carried,
        donated=program.donated,
        constraints=constraints,
        decisions=decision_records(candidate.formulation, parts),
        collectives=parts.collectives,
        regions=parts.regions,
        microbatches=microbatches_of(candidate.program, mesh, constraints),
        rematerialized=candidate.rematerialized,
        combine_threshold_bytes=parts.combine_threshold_bytes,
        prefetched_gathers=parts.prefetched_gathers,
        early_reductions=with_place_names(graph, parts.early_reductions),
        unfused_reductions=unfused_reductions_of(graph, parts.device),
        replicated=_replicated(graph, parts.device, unknown, mesh, own_rates),
        prediction=parts.prediction,
        trace=step_trace(graph, parts.device, parts.timeline),
        memory=memory_over_step(graph, parts.device, parts.timeline, mesh, own_rates),
        efficiency=efficiency_of(
            program.as_traced.graph,
            parts.inputs,
            [(mesh.num_devices, own_rates)],
            seconds_by_bound(parts.device, parts.timeline, own_rates),
        ),
        outcome=_outcome(solution, candidate.formulation, seconds, memory_bound),
        notes=(*plan_notes(graph, mesh, unknown, parts.inputs), *microbatch_notes(program, mesh)),
        versions=versions_of(),
        in_tree=program.trace.in_tree,
        out_tree=program.trace.out_tree,
    )


def _replicated(
    graph: Graph, device: DeviceProgram, unknown: Counter[str], mesh: MeshShape, own_rates: HardwareProfile
) -> tuple[Replicated, ...]:
    """The primitives without a usable sharding rule, with their time per step; empty on a single device."""
    if mesh.num_devices == 1 or not unknown:
        return ()
    seconds = seconds_by_node(device, mesh, own_rates)
    nodes: dict[str, list[int]] = {}
    for n, name in enumerate(of_each_node(graph, without_rule)):
        if name and not graph.nodes[n].effect:
            nodes.setdefault(name, []).append(n)
    found = [
        Replicated(
            name=name,
            count=len(uses),
            time_s=sum(seconds.get(n, 0.0) for n in uses),
            source=graph.nodes[uses[0]].source,
        )
        for name, uses in nodes.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.time_s, one.name)))


def _outcome(solution: Solution, formulation: Formulation, seconds: float, memory_bound: bool) -> Outcome:
    return Outcome(
        cost_s=solution.cost,
        lower_bound_s=solution.lower_bound,
        gap=solution.gap if formulation.decisions else 0.0,  # a program of small values has no decisions
        status=solution.status.value,
        num_nodes=len(formulation.decisions),
        num_strategies=sum(d.num_strategies for d in formulation.decisions),
        solve_time_s=seconds,
        memory_bound=memory_bound,
    )
