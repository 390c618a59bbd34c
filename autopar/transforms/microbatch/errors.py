"""Explain why a step cannot be split into microbatches.

In: a graph, its batch dims, and a node. Out: text that names the operation, its module and its source line.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.transforms.microbatch.batch_dims import Batch, Places


@dataclass(frozen=True, slots=True)
class Refusals:
    """Writes the reasons why a step cannot run in microbatches.

    Args:
        own_statistics: whether each microbatch already has statistics of its own.
    """

    graph: Graph
    places: Places
    batch: Batch
    own_statistics: bool

    def of(self, n: int) -> str:
        """A node, by its operation, module and line."""
        node = self.graph.nodes[n]
        module = f" in `{node.path}`" if node.path else ""
        return f"`{node.primitive}`{module} {self._line(n)} ({node.phase})"

    def _line(self, n: int) -> str:
        """The source line of a node. A node from a library's jitted function has none: then the line of the nearest
        node that has one."""
        if self.graph.nodes[n].source:
            return f"at {self.graph.nodes[n].source}"
        waiting, seen = [n], {n}
        for one in waiting:
            node = self.graph.nodes[one]
            adjacent = (m for v in (*node.operands, *node.results) if v is not None for m, _ in self.graph.touching[v])
            for other in adjacent:
                if other not in seen:
                    if self.graph.nodes[other].source:
                        return f"near {self.graph.nodes[other].source}"
                    seen.add(other)
                    waiting.append(other)
        return "at an unknown line"

    def meeting(self, n: int) -> str:
        """Why a node cannot run on a part of the examples."""
        node = self.graph.nodes[n]
        held = {
            place for v in (*node.operands, *node.results) if v is not None for place in self.batch.places.get(v, ())
        }
        if self.places.rules[n] is None:
            return (
                "it has no sharding rule, so it is unknown whether examples meet in it. Give it one with"
                " `register_rule`"
            )
        if len(held) > 1 and any(len(self.batch.places.get(v, ())) > 1 for v in node.results):
            return "in it each example meets all others, so a microbatch's result is not a part of the batch's"
        return (
            f"it does not run on a part of the {self.batch.size} examples by itself: it reorders, joins or cuts them,"
            " or was made for one shape"
        )

    def feedback(self, n: int, value: int) -> str:
        """Why a node cannot read a value computed from a reduction over the batch."""
        origin = self._origin(value)
        made = f"the result of {self.of(origin)}" if origin is not None else "a result"
        change = (
            ""
            if self.own_statistics
            else ". Each microbatch would have its own, so the step would compute something"
            " else; where that is what you want, allow it with `per_microbatch_statistics=True`"
        )
        return (
            f"it takes {made}, which is a reduction over all {self.batch.size} examples, back to single examples"
            f"{change}"
        )

    def _origin(self, value: int) -> int | None:
        """The first reduction over the batch that a value is computed from."""
        waiting, seen = [value], set[int]()
        made = self.graph.producers
        while waiting:
            one = waiting.pop(0)
            if one in seen or one not in made:
                continue
            seen.add(one)
            if one not in self.batch.places and self.batch.touches(self.graph.nodes[made[one]]):
                return made[one]
            waiting += [v for v in self.graph.nodes[made[one]].operands if v is not None]
        return None
