"""Determine the live ranges of the buffers whose sizes depend on the solution.

In: a graph, decisions, stored values. Out: `HeldTensor`s, and the memory usages of the solver's problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.formulate.decisions import Decisions
from autopar.formulate.sharding_lists import ShardingLists, Shardings
from autopar.ir.device_program import Stored
from autopar.ir.graph import Graph, Value
from autopar.ir.mesh import MeshShape
from autopar.rules.grouping import SMALL_SIZE
from autopar.rules.table import traits_of
from autopar.solve.problem import Usage


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A buffer.

    Args:
        node: decision that determines its size.
        start, end: live range [start, end) in nodes of the graph.
        info: value that it holds.
        shardings: its sharding per strategy.
        mesh: shape of the mesh.
        shared: whether it is its producer's own buffer and takes no new memory, per strategy.
    """

    node: int
    start: int
    end: int
    info: Value
    shardings: Shardings
    mesh: MeshShape
    shared: tuple[bool, ...] = ()

    def amounts(self) -> np.ndarray:
        """`num_bytes` under each strategy."""
        return np.array([self.num_bytes(s) for s in range(len(self.shardings))])

    def num_bytes(self, strategy: int) -> float:
        """Bytes on one device under a strategy of its decision."""
        if self.shared and self.shared[strategy]:
            return 0.0
        return self.info.itemsize * self.shardings[strategy].local_size(self.info.shape, self.mesh)


def usages_of(held: Iterable[HeldTensor]) -> tuple[Usage, ...]:
    """The memory usages of buffers for the solver; equal tensors share their amounts."""
    amounts: dict[tuple[object, ...], np.ndarray] = {}
    usages: list[Usage] = []
    for one in held:
        key = (one.info.shape, one.info.itemsize, id(one.shardings), one.shared)
        if key not in amounts:
            amounts[key] = one.amounts()
        usages.append(Usage(one.node, one.start, one.end, amounts[key]))
    return tuple(usages)


def held_tensors(decided: Decisions, stored: Sequence[Stored], lists: ShardingLists) -> list[HeldTensor]:
    """All buffers: arguments are live throughout, stored values over their live range, a shared copy from its first user
    to its last."""
    graph, mesh = decided.graph, lists.mesh
    end, last_use = len(graph.nodes) + 1, _last_uses(graph)
    held = held_arguments(graph, decided.made, mesh) + _held_stored(decided, stored, lists)
    first_use: dict[int, int] = {}
    for flow in decided.flows:
        for n, _ in flow.uses:
            first_use[flow.source] = min(first_use.get(flow.source, end), n)
    for node, one in enumerate(decided.decisions):
        if one.kind == "copy":
            start, stop = first_use.get(node, end - 1), last_use[one.value] + 1
            if start < stop:
                info = graph.values[one.value]
                held.append(HeldTensor(node, start, stop, info, one.shardings, mesh, shared=one.shared))
    return held


def _held_stored(decided: Decisions, stored: Sequence[Stored], lists: ShardingLists) -> list[HeldTensor]:
    """The buffers of stored values; the producer's decision determines their size."""
    values = decided.graph.values
    producers = {
        define.value: (node, strategies, define)
        for node, group, strategies in decided.of_groups()
        for define in group.defines
    }
    held: list[HeldTensor] = []
    for one in stored:
        if one.value in producers and values[one.value].size > SMALL_SIZE:
            node, strategies, define = producers[one.value]
            shardings = lists.shardings(strategies, define.dims, define.pending)
            held.append(HeldTensor(node, one.start, one.end, values[one.value], shardings, lists.mesh))
    return held


def held_arguments(graph: Graph, made: Mapping[int, tuple[int, Shardings]], mesh: MeshShape) -> list[HeldTensor]:
    """The buffers of the step's arguments."""
    end, arguments = len(graph.nodes) + 1, set(graph.inputs)
    return [
        HeldTensor(node, 0, end, graph.values[value], shardings, mesh)
        for value, (node, shardings) in made.items()
        if value in arguments
    ]


def _last_uses(graph: Graph) -> dict[int, int]:
    """The last node that uses each value, or the last node of the innermost loop in which it stays live."""
    ends = {n: loop.stop - 1 for loop in reversed(graph.loops) for n in range(loop.start, loop.stop)}

    def until(n: int) -> int:
        return ends.get(n, n) if traits_of(graph.nodes[n].primitive).held else n

    last = {value: max(until(n) for n, _ in users) for value, users in graph.users.items()}
    return last | {value: len(graph.nodes) for value in graph.outputs if value is not None}
