"""Group the nodes of a program: find a sharding rule for each node, and the nodes that share one strategy.

In: a `Graph`, pinned inputs. Out: `ProgramGroups`, which is the same on every mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.rules.grouping import Group, form_groups
from autopar.rules.table import rules_of


@dataclass(frozen=True, slots=True)
class ProgramGroups:
    """Groups of nodes, and the number of uses of each primitive without a usable rule."""

    groups: tuple[Group, ...]
    unknown: Counter[str]


def program_groups(graph: Graph, pinned: Container[int] = ()) -> ProgramGroups:
    """The groups of a graph.

    Args:
        pinned: positions of inputs whose sharding is fixed, so that no group decides it.
    """
    rules, unknown = rules_of(graph)
    absorbable = frozenset(position for position in range(len(graph.inputs)) if position not in pinned)
    return ProgramGroups(form_groups(graph, rules, absorbable), unknown)
