"""Assemble what an assignment means: shardings of inputs and outputs, collectives, and predictions.

In: a `Formulation`, the solver's choices. Out: `Assembled`, the parts of a `Plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost.context_method import context_of
from autopar.formulate.explicit import explicit_program
from autopar.formulate.formulation import Formulation
from autopar.ir.device_program import DeviceProgram
from autopar.ir.explicit_program import ExplicitProgram
from autopar.ir.graph import Graph
from autopar.ir.node_names import NodeNames
from autopar.ir.sharding import TensorSharding, replicated
from autopar.planner.collective_uses import collective_uses
from autopar.plans.records import (
    CollectiveUse,
    EarlyReduction,
    ManualRegion,
    Prediction,
    Role,
    TensorPlan,
    UnfusedReduction,
)
from autopar.rules.manual_regions import is_manual
from autopar.xla_model.buffer_assignment import device_program
from autopar.xla_model.simulation import Simulation
from autopar.xla_model.timeline import Timeline, Timelines


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of a plan that follow from an assignment.

    Args:
        explicit: the program with explicit collectives.
        simulation: the simulation of one device's program.
        timeline: the timeline of that program at the device's own rates.
        combine_threshold_bytes: XLA's combine threshold; None for the profile's.
        early_reductions: reductions that barriers start early.
    """

    explicit: ExplicitProgram
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    collectives: tuple[CollectiveUse, ...]
    regions: tuple[ManualRegion, ...]
    prediction: Prediction
    simulation: Simulation
    timeline: Timeline
    combine_threshold_bytes: int | None = None
    early_reductions: tuple[EarlyReduction, ...] = ()

    @property
    def device(self) -> DeviceProgram:
        """The program of one device."""
        return self.simulation.program

    @property
    def prefetched_gathers(self) -> int:
        """The number of all-gathers in scans that run one iteration ahead."""
        return sum(len(loop.prefetched) for loop in self.device.loops)


def assemble(
    f: Formulation, choices: Sequence[int], pins: dict[int, TensorSharding], *, figures_only: bool = False
) -> Assembled:
    """The parts of a plan.

    Args:
        choices: by decision, the position of its strategy.
        pins: input position -> sharding.
        figures_only: whether to leave out collectives and manual regions.
    """
    roles = input_roles(f.graph)
    inputs = tuple(_input_plan(f, choices, position, roles, pins) for position in range(len(f.graph.inputs)))
    outputs = _output_plans(f, choices, inputs, roles)
    explicit = explicit_program(f, choices)
    simulation = Simulation(device_program(f, explicit), f.mesh, f.profile)
    if figures_only:
        prediction, timeline = _predict(f, simulation.timelines(), (), inputs, outputs)
        return Assembled(explicit, inputs, outputs, (), (), prediction, simulation, timeline)
    collectives, _ = collective_uses(f, explicit, simulation.program.reassociated)
    prediction, timeline = _predict(f, simulation.timelines(), collectives, inputs, outputs)
    return Assembled(
        explicit=explicit,
        inputs=inputs,
        outputs=outputs,
        collectives=collectives,
        regions=tuple(_regions(f, choices)),
        prediction=prediction,
        simulation=simulation,
        timeline=timeline,
    )


def predicted_again(
    f: Formulation,
    parts: Assembled,
    combine_threshold_bytes: int | None,
    simulation: Simulation,
    early_reductions: tuple[EarlyReduction, ...],
    to_beat: float,
) -> Assembled | None:
    """The same parts with another combine threshold and early reductions, and their prediction; None where the plan takes
    `to_beat` seconds or longer.

    Args:
        combine_threshold_bytes: XLA's combine threshold; None for the profile's.
        simulation: the simulation of one device's program, with the barriers of the early reductions.
    """
    timelines = simulation.timelines(combine_threshold_bytes, to_beat)
    if timelines is None:
        return None
    if parts.collectives and simulation.program.reassociated != parts.device.reassociated:
        collectives, _ = collective_uses(f, parts.explicit, simulation.program.reassociated)
        parts = replace(parts, collectives=collectives)
    prediction, timeline = _predict(f, timelines, parts.collectives, parts.inputs, parts.outputs)
    return replace(
        parts,
        prediction=prediction,
        simulation=simulation,
        timeline=timeline,
        combine_threshold_bytes=combine_threshold_bytes,
        early_reductions=early_reductions,
    )


# -- tensors ---------------------------------------------------------------------------------


def input_roles(graph: Graph) -> tuple[Role, ...]:
    """The role of each input. A carried input is a parameter if the forward or backward pass reads it, and optimizer state if
    only the update does. All other inputs are data, except arguments that hold frozen parameters."""
    phases: dict[int, set[str]] = defaultdict(set)
    for node in graph.nodes:
        for value in node.operands:
            if value is not None:
                phases[value].add(node.phase)
    carried = {position for position, _ in graph.carried}
    frozen = _frozen_arguments(graph, carried)

    def role(position: int, value: int) -> Role:
        if position not in carried:
            return "parameter" if graph.input_paths[position].split("/")[0] in frozen else "data"
        return "parameter" if phases[value] & {"forward", "backward"} else "optimizer"

    return tuple(role(position, value) for position, value in enumerate(graph.inputs))


def frozen_inputs(graph: Graph, roles: Sequence[Role]) -> list[int]:
    """The positions of the parameters that the step does not change; none if it computes no gradients."""
    if all(node.phase != "backward" for node in graph.nodes):
        return []
    carried, parameters = dict(graph.carried), [i for i, role in enumerate(roles) if role == "parameter"]
    return [i for i in parameters if i not in carried or graph.outputs[carried[i]] == graph.inputs[i]]


def _frozen_arguments(graph: Graph, carried: set[int]) -> set[str]:
    """The arguments beside the batch that hold frozen parameters, such as the base weights of LoRA: floating-point arrays
    with no common leading dim, as the examples of a batch have."""
    arguments: dict[str, list[int]] = defaultdict(list)
    for position, path in enumerate(graph.input_paths):
        arguments[path.split("/")[0]].append(position)
    constant = {name: of for name, of in arguments.items() if carried.isdisjoint(of)}
    if len(constant) < 2 or not carried or all(node.phase != "backward" for node in graph.nodes):
        return set()
    found = set[str]()
    for name, positions in constant.items():
        infos = [graph.values[graph.inputs[position]] for position in positions]
        leading = {info.shape[:1] for info in infos if info.shape}
        if len(leading) > 1 and all("float" in info.dtype for info in infos):
            found.add(name)
    return found if len(found) < len(constant) else set()


def _input_plan(
    f: Formulation, choices: Sequence[int], position: int, roles: Sequence[Role], pins: dict[int, TensorSharding]
) -> TensorPlan:
    value = f.graph.inputs[position]
    info = f.graph.values[value]
    if position in f.input_decision:
        node, shardings = f.value_made[value]
        sharding = shardings[choices[node]]
    else:
        sharding = pins.get(position, replicated(len(info.shape)))
    return TensorPlan(
        path=f.graph.input_paths[position],
        shape=info.shape,
        dtype=info.dtype,
        role=roles[position],
        sharding=sharding,
        num_bytes=info.itemsize * sharding.local_size(info.shape, f.mesh),
        pinned=position in pins,
    )


def _output_plans(
    f: Formulation, choices: Sequence[int], inputs: Sequence[TensorPlan], roles: Sequence[Role]
) -> tuple[TensorPlan, ...]:
    from_input = {out: position for position, out in f.graph.carried}
    decided = {d.position: n for n, d in enumerate(f.decisions) if d.kind == "output"}
    plans = []
    for position, value in enumerate(f.graph.outputs):
        info = f.graph.values[value] if value is not None else None
        shape, dtype = (info.shape, info.dtype) if info else ((), "float32")
        role: Role = "data"
        if position in from_input:
            source = inputs[from_input[position]]
            sharding, role, shape, dtype = source.sharding, source.role, source.shape, source.dtype
        elif position in decided:
            node = decided[position]
            sharding = f.decisions[node].shardings[choices[node]]
        else:
            sharding = replicated(len(shape))
        num_bytes = info.itemsize * sharding.local_size(shape, f.mesh) if info else 0.0
        plans.append(
            TensorPlan(
                path=f.graph.output_paths[position],
                shape=shape,
                dtype=dtype,
                role=role,
                sharding=sharding,
                num_bytes=num_bytes,
            )
        )
    return tuple(plans)


# -- options for XLA ---------------------------------------------------------------------------


def with_place_names(graph: Graph, early_reductions: Sequence[EarlyReduction]) -> tuple[EarlyReduction, ...]:
    """Early reductions with the names of their places."""
    names = NodeNames(graph) if early_reductions else None
    return tuple(replace(one, at=names.reading(one.node, one.operand)) for one in early_reductions if names)


def unfused_reductions_of(graph: Graph, device: DeviceProgram) -> tuple[UnfusedReduction, ...]:
    """The reductions that the device program keeps out of multi-output fusion."""
    names = NodeNames(graph) if device.unfused else None
    return tuple(
        UnfusedReduction(at=names.value(graph.nodes[nodes[-1]].results[0]), nodes=nodes)
        for nodes in device.unfused
        if names
    )


def _regions(f: Formulation, choices: Sequence[int]) -> Iterator[ManualRegion]:
    """The nodes that run as manual regions."""
    for choice, chosen in zip(f.decisions, choices, strict=True):
        if choice.kind != "group":
            continue
        group, strategy = f.groups[choice.group], choice.strategies[chosen]
        region = group.region
        if region is not None and is_manual(group, strategy):
            node, made = f.graph.nodes[region.node], zip(region.results, group.defines, strict=True)
            context = context_of(group, strategy, f.graph, f.mesh, f.profile)
            yield ManualRegion(
                node=region.node,
                primitive=node.primitive,
                path=node.path,
                operands=tuple(strategy.sharding(dims) for dims in region.operands),
                results=tuple(strategy.sharding(dims, define.pending) for dims, define in made),
                reduction=group.defines[0].reduction,
                method=None if context is None else context.method,
            )


# -- prediction ------------------------------------------------------------------------------


def _predict(
    f: Formulation,
    timelines: Timelines,
    collectives: Sequence[CollectiveUse],
    inputs: Sequence[TensorPlan],
    outputs: Sequence[TensorPlan],
) -> tuple[Prediction, Timeline]:
    """The prediction, and the timeline at the device's own rates."""
    own_rates, estimated = timelines
    by_kind: dict[str, float] = defaultdict(float)
    for use in collectives:
        by_kind[use.kind] += use.time_s
    by_role: dict[str, float] = defaultdict(float)
    for tensor in inputs:
        by_role[tensor.role] += tensor.num_bytes
    carried = {out for _, out in f.graph.carried}
    prediction = Prediction(
        step_time_s=own_rates.step_time_s,
        compute_s=own_rates.compute_s,
        exposed_s=dict(own_rates.exposed_s),
        collective_s=dict(sorted(by_kind.items())),
        xla_step_time_s=estimated.step_time_s if estimated else None,
        xla_exposed_s=dict(estimated.exposed_s) if estimated else None,
        parameter_bytes=by_role["parameter"],
        optimizer_bytes=by_role["optimizer"],
        data_bytes=by_role["data"],
        temporary_bytes=own_rates.temporary_bytes,
        output_bytes=sum(tensor.num_bytes for n, tensor in enumerate(outputs) if n not in carried),
    )
    return prediction, own_rates
