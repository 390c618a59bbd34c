"""List the collectives of a plan with their causes.

In: an `ExplicitProgram`, and the reductions that XLA makes of several. Out: `CollectiveUse`s, and the collectives that each
decision causes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost.collectives import collective
from autopar.formulate.decisions import Flow
from autopar.formulate.formulation import Formulation
from autopar.ir.device_program import Reassociated
from autopar.ir.explicit_program import Communicate, ExplicitProgram
from autopar.ir.graph import Node, Phase
from autopar.plans.records import CollectiveUse

#: The order of a plan's collectives: resharding by flow, then the collectives of groups by decision, then the program's own.
_ORDER = {"reshard": 0, "region": 1, "context": 1, "reduction": 1, "halo": 1, "program": 2}
_WITHIN = {"region": 0, "context": 0, "reduction": 1, "halo": 2}
#: Causes whose collectives XLA combines with others, although a node waits for each.
_COMBINED = ("region", "context", "program")


def collective_uses(
    f: Formulation, explicit: ExplicitProgram, reassociated: Sequence[Reassociated] = ()
) -> tuple[tuple[CollectiveUse, ...], dict[int, tuple[int, ...]]]:
    """All collectives, and by decision the positions of those that its flows and halos cause.

    Args:
        reassociated: reductions that XLA makes of several; each is listed once.
    """
    causes, merged = _Causes(f, explicit), _Merged(explicit, reassociated)
    uses: list[CollectiveUse] = []
    caused: dict[int, list[int]] = defaultdict(list)
    for op in sorted((op for op in explicit.communications if op.kind != "cut"), key=_place):
        position, num_bytes = merged.place(op, len(uses))
        for decision in op.decisions if op.cause in ("reshard", "halo") else ():
            caused[decision].append(position)
        if position < len(uses):
            continue
        op = replace(op, num_bytes=num_bytes)
        node, phase = causes.of(op)
        uses.append(
            CollectiveUse(
                kind=op.collective,
                axes=op.axes,
                num_bytes=op.num_bytes,
                num_times=round(op.num_times),
                time_s=op.num_times * f.time(op.collective, op.axes, op.num_bytes, combinable=op.combinable),
                cause=causes.cause(op),
                path=node.path if node else causes.path(op),
                source=node.source if node else "",
                phase=phase,
                combinable=op.combinable or op.cause in _COMBINED,
            )
        )
    return tuple(uses), {node: tuple(positions) for node, positions in caused.items()}


def _place(op: Communicate) -> tuple[int, int, int]:
    """The sort key of a communication. Communications of one flow or decision stay in program order."""
    first = min(op.flows) if op.flows else min(op.decisions, default=0)
    return _ORDER[op.cause], first, _WITHIN.get(op.cause, 0)


class _Merged:
    """The positions of the reductions that XLA makes of several, each at its first part."""

    def __init__(self, explicit: ExplicitProgram, reassociated: Sequence[Reassociated]) -> None:
        self.explicit = explicit
        self.whole = {(one.kind, one.axes, value): one for one in reassociated for value in one.values}
        self.first: dict[Reassociated, int] = {}

    def place(self, op: Communicate, position: int) -> tuple[int, float]:
        """The position of a collective and its payload.

        Args:
            position: where it stands if it is no further part of a reduction.
        """
        if op.operand is None or op.cause != "reshard":
            return position, op.num_bytes
        one = self.whole.get((op.collective, op.axes, self.explicit.arrays[op.operand].value))
        return (position, op.num_bytes) if one is None else (self.first.setdefault(one, position), one.num_bytes)


class _Causes:
    """The cause of each communication, as a text."""

    def __init__(self, f: Formulation, explicit: ExplicitProgram) -> None:
        self.f, self.graph, self.explicit = f, f.graph, explicit
        self.input_path = dict(zip(f.graph.inputs, f.graph.input_paths, strict=True))
        self.updated_path = {f.graph.outputs[out]: f.graph.input_paths[i] for i, out in f.graph.carried}
        self.users: dict[int, list[int]] = defaultdict(list)
        for flow in f.flows:
            self.users[flow.source].append(flow.target)

    def of(self, op: Communicate) -> tuple[Node | None, Phase]:
        """The node and the phase of a communication. The node of a reshard is the producer of the value, or the first user of an
        input; the node of any other communication is the one that communicates."""
        if op.cause != "reshard":
            node = self.graph.nodes[op.node]
            return node, node.phase
        flow = self.f.flows[min(op.flows)]
        first_user = self.graph.nodes[flow.uses[0][0]] if flow.uses else None
        phase = "update" if flow.value in self.updated_path else self.f.decisions[flow.target].phase
        return self.graph.producer(flow.value) or first_user, phase

    def path(self, op: Communicate) -> str:
        return self.input_path.get(self.f.flows[min(op.flows)].value, "")

    def cause(self, op: Communicate) -> str:
        if op.cause == "reshard":
            return self._of_flow(self.f.flows[min(op.flows)], op.kind)
        if op.cause == "halo":
            assert op.operand is not None
            value = self.explicit.arrays[op.operand].value
            producer = self.graph.producer(value)
            name = f"`{self.input_path[value]}`" if producer is None else f"the result of `{producer.primitive}`"
            return f"exchange the halo of {name}"
        primitive = self.graph.nodes[op.node].primitive
        if op.cause == "context":
            return f"share the tokens of `{primitive}`"
        if op.cause == "reduction":
            return f"reduce the partial {op.reduction} of `{primitive}`"
        return (
            f"combine the partial results of `{primitive}`"
            if op.cause == "region"
            else "called by the step in a shard_map"
        )

    def _of_flow(self, flow: Flow, kind: str) -> str:
        moved = "all-gather" if kind == "all-gather" else "reshard"
        if flow.value in self.input_path:
            path = self.input_path[flow.value]
            return f"{moved} `{path}`"
        if flow.value in self.updated_path:
            return f"{moved} the updated `{self.updated_path[flow.value]}`"
        producer = self.graph.nodes[self.graph.producers[flow.value]].primitive
        if collective(kind).is_sum:
            is_gradient = self.f.decisions[flow.target].phase == "update" or _only_updates(self.f, flow, self.users)
            return f"reduce the {'gradient' if is_gradient else f'result of `{producer}`'}"
        return f"{moved} the result of `{producer}`"


def _only_updates(f: Formulation, flow: Flow, users: Mapping[int, Sequence[int]]) -> bool:
    """Whether a flow leads to a shared copy that only the optimizer update reads."""
    of_copy = users.get(flow.target, ()) if flow.uses == () else ()
    return bool(of_copy) and all(f.decisions[r].phase == "update" for r in of_copy)
