"""From an assignment to a plan: what was chosen, what it costs, what XLA must be told.

In: `Formulation` and the solver's choices. Out: the parts of a `Plan`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost import halo
from autopar.cost.halo import Extension, Strip
from autopar.formulate.formulation import Decision as Choice
from autopar.formulate.formulation import Flow, Formulation
from autopar.ir.device_program import DeviceProgram, Op, peak_of_temporaries
from autopar.ir.graph import Graph, Node
from autopar.ir.node_names import NodeNames
from autopar.ir.sharding import TensorSharding, replicated
from autopar.plans.records import (
    Awaited,
    CollectiveUse,
    Constraint,
    Decision,
    ManualRegion,
    Prediction,
    Role,
    Separate,
    TensorPlan,
)
from autopar.rules.control_flow import BORDERS, PINNED
from autopar.rules.grouping import SMALL_SIZE
from autopar.rules.indexing import INDEXING
from autopar.rules.manual_regions import gather_of, is_manual
from autopar.xla_model.buffer_assignment import device_program
from autopar.xla_model.latency_hiding import Opinions, Simulation, Timeline


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of a plan that follow from an assignment.

    Args:
        simulation: of the program of one device. timeline: of it, at the device's own rates. most_held: its operations in the
            order in which most is live.
        merge_bytes: the limit to which collectives are merged, where it is not the profile's.
        awaited: what waits for reductions.
    """

    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    constraints: tuple[Constraint, ...]
    decisions: tuple[Decision, ...]
    collectives: tuple[CollectiveUse, ...]
    regions: tuple[ManualRegion, ...]
    prediction: Prediction
    simulation: Simulation
    timeline: Timeline
    most_held: Sequence[Op]
    merge_bytes: int | None = None
    awaited: tuple[Awaited, ...] = ()

    @property
    def device(self) -> DeviceProgram:
        """The program of one device."""
        return self.simulation.program


def assemble(
    f: Formulation, choices: Sequence[int], pins: dict[int, TensorSharding], *, figures_only: bool = False
) -> Assembled:
    """Read an assignment.

    Args:
        figures_only: leave out what XLA is told, and all reasons.
    """
    roles = input_roles(f.graph)
    inputs = tuple(_input_plan(f, choices, position, roles, pins) for position in range(len(f.graph.inputs)))
    outputs = _output_plans(f, choices, inputs, roles)
    if figures_only:
        simulation = Simulation(device_program(f, choices, f.profile), f.mesh, f.profile)
        prediction, timeline, most_held = _predict(f, simulation, simulation.opinions(), (), inputs, outputs)
        return Assembled(inputs, outputs, (), (), (), (), prediction, simulation, timeline, most_held)
    collectives, caused_by = _collectives(f, choices)
    simulation = Simulation(device_program(f, choices, f.profile), f.mesh, f.profile)
    prediction, timeline, most_held = _predict(f, simulation, simulation.opinions(), collectives, inputs, outputs)
    return Assembled(
        inputs=inputs,
        outputs=outputs,
        constraints=_by_name(f.graph, (*_constraints(f, choices), *_small_pins(f, pins), *_small_places(f))),
        decisions=_decisions(f, choices, inputs, caused_by),
        collectives=collectives,
        regions=tuple(_regions(f, choices)),
        prediction=prediction,
        simulation=simulation,
        timeline=timeline,
        most_held=most_held,
    )


def hiding(
    f: Formulation,
    parts: Assembled,
    merge_bytes: int | None,
    simulation: Simulation,
    awaited: tuple[Awaited, ...],
    to_beat: float,
) -> Assembled | None:
    """The same with another limit to which XLA merges collectives, and with reductions awaited early: predicted anew.

    Args:
        merge_bytes: None for the profile's. simulation: of the program in which operations wait.
        to_beat: None is returned where the geometric mean of both opinions cannot be less.
    """
    opinions = simulation.opinions(merge_bytes, to_beat)
    if opinions is None:
        return None
    prediction, timeline, most_held = _predict(f, simulation, opinions, parts.collectives, parts.inputs, parts.outputs)
    return replace(
        parts,
        prediction=prediction,
        simulation=simulation,
        timeline=timeline,
        most_held=most_held,
        merge_bytes=merge_bytes,
        awaited=awaited,
    )


# -- tensors ---------------------------------------------------------------------------------


def input_roles(graph: Graph) -> tuple[Role, ...]:
    """A carried input that a forward or backward node reads is a parameter; one that only the update
    reads is optimizer state; everything else is data."""
    phases: dict[int, set[str]] = defaultdict(set)
    for node in graph.nodes:
        for value in node.operands:
            if value is not None:
                phases[value].add(node.phase)
    carried = {position for position, _ in graph.carried}

    def role(position: int, value: int) -> Role:
        if position not in carried:
            return "data"
        return "parameter" if phases[value] & {"forward", "backward"} else "optimizer"

    return tuple(role(position, value) for position, value in enumerate(graph.inputs))


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


# -- what XLA is told ------------------------------------------------------------------------


def _constraints(f: Formulation, choices: Sequence[int]) -> tuple[Constraint, ...]:
    """Where the partitioner gets no room: a value that leaves its group, at its definition, with any
    pending reduction taken (in one step with the move XLA would gather the operands instead); and
    each operand that its reader wants otherwise, one move at a time."""
    out: list[Constraint] = []
    arguments = set(f.graph.inputs)
    told = {*BORDERS, *PINNED}
    borders = {v for node in f.graph.nodes if node.primitive in told for v in node.results}
    copies = {d.value: d.shardings[choices[n]].resolved() for n, d in enumerate(f.decisions) if d.kind == "copy"}
    flows: dict[int, list[Flow]] = defaultdict(list)
    for flow in f.flows:
        flows[flow.value].append(flow)
    natural: dict[int, TensorSharding] = {}
    for value, (node, shardings) in f.value_made.items():
        sharding = shardings[choices[node]]
        natural[value] = sharding.resolved()
        if value in arguments or f.graph.values[value].size <= SMALL_SIZE:
            continue
        if value in f.written or sharding.unreduced or value in borders:
            path = (natural[value],)
            if len(sharding.unreduced) > 1:
                path = _scattered(f, choices, flows[value], sharding, copies) or path
                natural[value] = path[-1]
            barrier = _is_cut_by_each_reader(f, value, sharding, path[-1])
            out.append(Constraint(value=value, shardings=path, barrier=barrier))
    for flow in f.flows:
        wanted = flow.wanted[choices[flow.target]].resolved()  # of what a loop adds up, XLA takes the sum after it
        if wanted == natural[flow.value]:
            continue
        copy = copies.get(flow.value, wanted)
        moves = (*f.moves(flow.value, natural[flow.value], copy), *f.moves(flow.value, copy, wanted))
        path = tuple(move.result for move in moves)
        uses = flow.uses or _as_outputs(f, flow)
        out += [Constraint(value=flow.value, shardings=path, node=n, operand=i) for n, i in uses]
    return tuple(out)


def _by_name(graph: Graph, constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """Constraints with their places in words, sorted by these; of one place, the last as it was."""
    names = NodeNames(graph)

    def named(one: Constraint) -> Constraint:
        if one.node is None or one.operand is None:
            return replace(one, at=names.value(one.value))
        return replace(one, at=names.reading(one.node, one.operand))

    return tuple(sorted(map(named, constraints), key=lambda one: names.order(one.value, one.node, one.operand)))


def named(graph: Graph, awaited: Sequence[Awaited]) -> tuple[Awaited, ...]:
    """With their places in words."""
    names = NodeNames(graph) if awaited else None
    return tuple(replace(one, at=names.reading(one.node, one.operand)) for one in awaited if names)


def separate_sums(graph: Graph, device: DeviceProgram) -> tuple[Separate, ...]:
    """What a program gives kernels of their own."""
    names = NodeNames(graph) if device.separate else None
    return tuple(
        Separate(at=names.value(graph.nodes[nodes[-1]].results[0]), nodes=nodes) for nodes in device.separate if names
    )


def _is_cut_by_each_reader(f: Formulation, value: int, made: TensorSharding, split: TensorSharding) -> bool:
    """Whether XLA would sum a value whole over several axes and let each reader cut out its part, where the plan has it
    scattered along some of these and then summed over the rest. Products and convolutions it scatters at once; of any
    other sum it makes two steps only if one operation reads it."""
    scattered = {axis for axes in split.dims for axis in axes} & set(made.unreduced)
    if not scattered or scattered.issuperset(made.unreduced):
        return False
    nodes = map(f.graph.nodes.__getitem__, f.groups[f.decisions[f.value_made[value][0]].group].nodes)
    maker = next(node.primitive for node in nodes if value in node.results)
    return maker not in ("dot_general", "conv_general_dilated")


def _scattered(
    f: Formulation,
    choices: Sequence[int],
    flows: Sequence[Flow],
    made: TensorSharding,
    copies: Mapping[int, TensorSharding],
) -> tuple[TensorSharding, ...]:
    """The steps of a sum that is pending over several axes, where all readers want the same of it split; else
    nothing. Told to sum all of it first, XLA would, and then cut; told the split of each step, it scatters."""
    steps: set[tuple[TensorSharding, ...]] = set()
    for flow in flows:
        if flow.value in copies and f.decisions[flow.target].kind != "copy":
            continue
        moves = f.moves(flow.value, made, flow.wanted[choices[flow.target]])
        steps.add(tuple(move.result.resolved() for move in moves if move.kind == "reduce-scatter"))
    return steps.pop() if len(steps) == 1 else ()


def _regions(f: Formulation, choices: Sequence[int]) -> Iterator[ManualRegion]:
    """The nodes of which each device runs its own part."""
    for choice, chosen in zip(f.decisions, choices, strict=True):
        if choice.kind != "group":
            continue
        group, strategy = f.groups[choice.group], choice.strategies[chosen]
        region = group.region
        if region is not None and is_manual(group, strategy):
            pending, node = group.defines[0].pending, f.graph.nodes[region.node]
            yield ManualRegion(
                node=region.node,
                primitive=node.primitive,
                path=node.path,
                operands=tuple(strategy.sharding(dims) for dims in region.operands),
                results=tuple(strategy.sharding(dims, pending) for dims in region.results),
                reduction=group.defines[0].reduction,
            )


def _small_places(f: Formulation) -> Iterator[Constraint]:
    """Where a gather looks, or a scatter writes, is whole if too few to plan for. Left open, XLA splits the places as it
    splits what is made of them, and on meshes of several axes its partitioner may then fail."""
    for n, node in enumerate(f.graph.nodes):
        places = node.operands[1] if node.primitive in INDEXING else None
        if places is not None and f.graph.values[places].size <= SMALL_SIZE:
            whole = replicated(len(f.graph.values[places].shape))
            yield Constraint(value=places, shardings=(whole,), node=n, operand=1)


def _small_pins(f: Formulation, pins: dict[int, TensorSharding]) -> Iterator[Constraint]:
    """A value too small to plan for that is pinned to be split is whole where it is used: else the
    partitioner would carry the split on to large values. So is the output that renews it, until it leaves."""
    renewed = dict(f.graph.carried)
    small = {position for position, sharding in pins.items() if any(sharding.dims)} - set(f.input_decision)
    whole = {f.graph.inputs[p]: (replicated(len(pins[p].dims)),) for p in small}
    for n, node in enumerate(f.graph.nodes):
        for i, value in enumerate(node.operands):
            if value in whole:
                yield Constraint(value=value, shardings=whole[value], node=n, operand=i)
    for position in sorted(small & set(renewed)):
        after, before = f.graph.outputs[renewed[position]], f.graph.inputs[position]
        if after is not None and after != before:
            yield Constraint(value=after, shardings=whole[before], node=len(f.graph.nodes), operand=renewed[position])


def _as_outputs(f: Formulation, flow: Flow) -> tuple[tuple[int, int], ...]:
    """Where an output or a renewed input reads a value: after the last node, by output position."""
    target = f.decisions[flow.target]
    if target.kind == "copy":
        return ()
    position = target.position if target.kind == "output" else dict(f.graph.carried)[target.position]
    return ((len(f.graph.nodes), position),)


# -- collectives -----------------------------------------------------------------------------


def _collectives(
    f: Formulation, choices: Sequence[int]
) -> tuple[tuple[CollectiveUse, ...], dict[int, tuple[int, ...]]]:
    """All collectives, and per decision the positions of those on its flows."""
    uses: list[CollectiveUse] = []
    caused: dict[int, list[int]] = defaultdict(list)
    input_path = dict(zip(f.graph.inputs, f.graph.input_paths, strict=True))
    renewed = {f.graph.outputs[out]: f.graph.input_paths[i] for i, out in f.graph.carried}
    readers: dict[int, list[int]] = defaultdict(list)
    for flow in f.flows:
        readers[flow.source].append(flow.target)
    for flow in f.flows:
        times = f.graph.values[flow.value].repeat
        for step in f.collectives(flow, choices):
            node = _node_of(f, flow)
            caused[flow.source].append(len(uses))
            caused[flow.target].append(len(uses))
            uses.append(
                CollectiveUse(
                    kind=step.kind,
                    axes=step.axes,
                    num_bytes=step.num_bytes,
                    num_times=round(times),
                    time_s=times * f.time(step.kind, step.axes, step.num_bytes, combinable=flow.combinable),
                    cause=_cause(f, flow, step.kind, input_path, renewed, readers),
                    path=node.path if node else input_path.get(flow.value, ""),
                    source=node.source if node else "",
                    phase="update" if flow.value in renewed else f.decisions[flow.target].phase,
                    combinable=flow.combinable,
                )
            )
    sent: dict[Strip, int] = {}
    for index, choice in enumerate(f.decisions):
        uses += _small_sums(f, choice, choices[index])
        for strip, use in _halos(f, f.extensions(index, choices[index]), input_path):
            if strip not in sent:  # else XLA sends it once for all its readers
                sent[strip] = len(uses)
                uses.append(use)
            caused[index].append(sent[strip])
    for node in f.graph.nodes:
        uses += _told(f, node)
    return tuple(uses), {node: tuple(positions) for node, positions in caused.items()}


def _small_sums(f: Formulation, choice: Choice, chosen: int) -> list[CollectiveUse]:
    if choice.kind != "group":
        return []
    uses = _inside(f, choice, chosen)
    for define in f.groups[choice.group].defines:
        info = f.graph.values[define.value]
        axes = choice.strategies[chosen].sharding(define.dims, define.pending).unreduced
        if info.size > SMALL_SIZE or not axes:
            continue
        node = f.graph.nodes[define.node]
        uses.append(
            CollectiveUse(
                kind="all-reduce",
                axes=axes,
                num_bytes=info.num_bytes,
                num_times=round(info.repeat),
                time_s=info.repeat * f.time("all-reduce", axes, info.num_bytes, combinable=True),
                cause=f"{define.reduction} of a few elements ({node.primitive})",
                path=node.path,
                source=node.source,
                phase=node.phase,
                combinable=True,
            )
        )
    return uses


def _halos(
    f: Formulation, extensions: Sequence[Extension], input_path: dict[int, str]
) -> Iterator[tuple[Strip, CollectiveUse]]:
    for one in extensions:
        node = f.graph.nodes[one.node]
        for strip in one.strips:
            made = f.graph.producer(strip.value)
            of = f"`{input_path[strip.value]}`" if made is None else f"the {made.primitive} result"
            yield (
                strip,
                CollectiveUse(
                    kind=halo.KIND,
                    axes=strip.axes,
                    num_bytes=strip.num_bytes,
                    num_times=round(node.repeat),
                    time_s=node.repeat * halo.strip_time(strip, f.mesh, f.profile),
                    cause=f"exchange the halo of {of}",
                    path=node.path,
                    source=node.source,
                    phase=node.phase,
                ),
            )


def _told(f: Formulation, node: Node) -> Iterator[CollectiveUse]:
    """What the program itself sends, inside a `shard_map`."""
    for kind, axes, num_bytes, times in node.params.get("collectives", ()):
        repeat = times * node.repeat
        yield CollectiveUse(
            kind=kind,
            axes=axes,
            num_bytes=num_bytes,
            num_times=round(repeat),
            time_s=repeat * f.time(kind, axes, num_bytes, combinable=False),
            cause="the step's own, in a shard_map",
            path=node.path,
            source=node.source,
            phase=node.phase,
            combinable=True,
        )


def _inside(f: Formulation, choice: Choice, chosen: int) -> list[CollectiveUse]:
    """What a node that is run as a manual region sends by itself."""
    sent = gather_of(f.groups[choice.group], choice.strategies[chosen], f.graph, f.mesh)
    if sent is None:
        return []
    node = f.graph.nodes[sent.node]
    use = CollectiveUse(
        kind="all-gather",
        axes=sent.axes,
        num_bytes=sent.num_bytes,
        num_times=round(node.repeat),
        time_s=node.repeat * f.time("all-gather", sent.axes, sent.num_bytes, combinable=False),
        cause=f"join the parts of a {node.primitive}",
        path=node.path,
        source=node.source,
        phase=node.phase,
        combinable=True,
    )
    return [use]


def _node_of(f: Formulation, flow: Flow) -> Node | None:
    """The node to blame: the maker of the value; for an input, the first reader."""
    first_reader = f.graph.nodes[flow.uses[0][0]] if flow.uses else None
    return f.graph.producer(flow.value) or first_reader


def _cause(
    f: Formulation,
    flow: Flow,
    kind: str,
    input_path: dict[int, str],
    renewed: dict[int | None, str],
    readers: Mapping[int, Sequence[int]],
) -> str:
    if flow.value in input_path:
        return (
            f"gather `{input_path[flow.value]}` for use" if kind == "all-gather" else f"move `{input_path[flow.value]}`"
        )
    if flow.value in renewed:
        return f"put back the updated `{renewed[flow.value]}`"
    maker = f.graph.nodes[f.graph.producers[flow.value]].primitive
    if kind in ("all-reduce", "reduce-scatter"):
        target = f.decisions[flow.target]
        what = "gradient" if target.phase == "update" or _only_updates(f, flow, readers) else f"{maker} result"
        return f"sum the {what}"
    return f"{'gather' if kind == 'all-gather' else 'move'} the {maker} result"


def _only_updates(f: Formulation, flow: Flow, readers: Mapping[int, Sequence[int]]) -> bool:
    """Whether a shared copy is read by the update alone."""
    of_copy = readers.get(flow.target, ()) if flow.uses == () else ()
    return bool(of_copy) and all(f.decisions[r].phase == "update" for r in of_copy)


# -- reasons ---------------------------------------------------------------------------------


def _decisions(
    f: Formulation,
    choices: Sequence[int],
    inputs: Sequence[TensorPlan],
    caused_by: dict[int, tuple[int, ...]],
) -> tuple[Decision, ...]:
    prices = _local_prices(f, choices)
    renewed = dict(f.graph.carried)
    out: list[Decision] = []
    for position, tensor in enumerate(inputs):
        if position not in f.input_decision:
            continue
        value = f.graph.inputs[position]
        node = f.input_decision[position]
        uses = f.graph.users.get(value)
        source = f.graph.nodes[uses[0][0]].source if uses else ""
        decision = _decision(f, choices, prices, node, value, tensor.path, tensor.role, None, source, caused_by)
        after = f.graph.outputs[renewed[position]] if position in renewed else None
        update = f.value_made[after][0] if after in f.value_made else node
        if update != node:  # a parameter answers for its update and the sum of its gradient too
            positions = sorted({*decision.collectives, *caused_by.get(update, ())})
            cost = decision.cost_s + float(prices[update][choices[update]])
            decision = replace(decision, cost_s=cost, collectives=tuple(positions))
        out.append(decision)
    for node, choice in enumerate(f.decisions):
        if choice.kind != "group":
            continue
        shown = _representative(f, choice)
        if shown is not None:
            value, n = shown
            maker = f.graph.nodes[n]
            out.append(
                _decision(f, choices, prices, node, value, maker.path, "activation", maker, maker.source, caused_by)
            )
    return tuple(out)


def _representative(f: Formulation, choice: Choice) -> tuple[int, int] | None:
    """The value that stands for a group in the report: the largest that leaves it before the update."""
    group = f.groups[choice.group]
    candidates = [
        (f.graph.values[d.value].num_bytes, -d.node, d.value)
        for d in group.defines
        if d.value in f.written and f.graph.nodes[d.node].phase != "update"
    ]
    if not candidates:
        return None
    _, negative_node, value = max(candidates)
    return value, -negative_node


def _local_prices(f: Formulation, choices: Sequence[int]) -> list[np.ndarray]:
    """Per decision, the price of each of its strategies with all other decisions as they are."""
    prices = [costs.astype(float).copy() for costs in f.problem.node_costs]
    for edge in f.problem.edges:
        prices[edge.source] += edge.costs[:, choices[edge.target]]
        prices[edge.target] += edge.costs[choices[edge.source], :]
    return prices


def _decision(
    f: Formulation,
    choices: Sequence[int],
    prices: Sequence[np.ndarray],
    node: int,
    value: int,
    path: str,
    kind: str,
    maker: Node | None,
    source: str,
    caused_by: dict[int, tuple[int, ...]],
) -> Decision:
    info = f.graph.values[value]
    _, shardings = f.value_made[value]
    chosen = choices[node]
    price = prices[node]
    others = [s for s in range(len(shardings)) if shardings[s] != shardings[chosen] and np.isfinite(price[s])]
    best = min(others, key=lambda s: float(price[s]), default=None)
    return Decision(
        path=path,
        kind=kind,  # type: ignore[arg-type]
        primitive=maker.primitive if maker else "",
        phase=maker.phase if maker else f.decisions[node].phase,
        source=source,
        shape=info.shape,
        dtype=info.dtype,
        sharding=shardings[chosen],
        cost_s=float(price[chosen]),
        runner_up=None if best is None else shardings[best],
        runner_up_extra_s=0.0 if best is None else float(price[best] - price[chosen]),
        collectives=caused_by.get(node, ()),
        value=value,
    )


# -- totals ----------------------------------------------------------------------------------


def _predict(
    f: Formulation,
    simulation: Simulation,
    opinions: Opinions,
    collectives: Sequence[CollectiveUse],
    inputs: Sequence[TensorPlan],
    outputs: Sequence[TensorPlan],
) -> tuple[Prediction, Timeline, Sequence[Op]]:
    """The prediction, and what it was read off: the last two of `Assembled` that are not told."""
    device, (own_rates, estimated) = simulation.program, opinions
    by_kind: dict[str, float] = defaultdict(float)
    for use in collectives:
        by_kind[use.kind] += use.time_s
    by_role: dict[str, float] = defaultdict(float)
    for tensor in inputs:
        by_role[tensor.role] += tensor.num_bytes
    renewed = {out for _, out in f.graph.carried}
    # XLA orders first for memory, then for overlap, as far as memory allows: it ends between the two.
    as_it_stands, overlapped = peak_of_temporaries(device), estimated or own_rates
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
        temporary_bytes=max(as_it_stands, overlapped.temporary_bytes),
        output_bytes=sum(tensor.num_bytes for n, tensor in enumerate(outputs) if n not in renewed),
    )
    most_held = device.ops if as_it_stands >= overlapped.temporary_bytes else overlapped.order
    return prediction, own_rates, most_held
