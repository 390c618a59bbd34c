"""Cover the nodes that are left after failures by pipelines, with no idle node.

In: pipelines as tuples of nodes, the nodes that failed, and the fewest nodes n0 that hold the model. Out: `Cover`.

A pipeline of n nodes needs a template of size n. Templates of the sizes n0 .. 2 n0 - 1 are enough to cover any number of at least n0
nodes: take n0 as often as it fits, and add the remainder to one of them. A pipeline that lost nodes goes on with a smaller template. One with
fewer than n0 nodes borrows from a pipeline that has more than n0; if none has, all others have n0 at most, and it is merged with another:
at most (n0 - 1) + n0 nodes, the largest template that a merge needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.errors import ClusterError

#: The numbers of the nodes of a pipeline.
Nodes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to a pipeline.

    Args:
        kind: it went on with the nodes that it has left, borrowed a node, was merged into another, or lost all its nodes.
        pipeline: its number before the failure.
        other: the pipeline that lent the node, or into which it was merged.
        node: the borrowed node.
    """

    kind: Literal["shrink", "borrow", "merge", "lost"]
    pipeline: int
    other: int | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Cover:
    """Pipelines after failures.

    Args:
        pipelines: the nodes of each pipeline that goes on.
        before: its number before the failure; of merged ones, that of the pipeline into which they were merged.
        changes: in the order in which they were made.
    """

    pipelines: tuple[Nodes, ...]
    before: tuple[int, ...]
    changes: tuple[Change, ...]


def template_sizes(fewest: int, num_nodes: int, survive: int) -> range:
    """The numbers of nodes for which templates are made.

    At least up to 2 n0 - 1, so that every cover exists, and up to N - f n0, the largest of f + 1 pipelines on N nodes.

    >>> template_sizes(3, 13, 2), template_sizes(3, 9, 2), template_sizes(3, 4, 2)
    (range(3, 8), range(3, 6), range(3, 5))
    """
    return range(fewest, min(num_nodes, max(2 * fewest - 1, num_nodes - survive * fewest)) + 1)


def cover(pipelines: Sequence[Nodes], failed: Collection[int], fewest: int) -> Cover:
    """The pipelines on the nodes that are left, each of at least `fewest` nodes.

    Raises:
        ClusterError: fewer nodes are left than hold the model, or a failed node is in no pipeline.
    """
    known = {node for nodes in pipelines for node in nodes}
    unknown = sorted(set(failed) - known)
    if unknown:
        raise ClusterError(
            f"node {unknown[0]} is in no pipeline; the nodes are {', '.join(map(str, sorted(known)))}: name nodes that run"
        )
    left = {n: [node for node in nodes if node not in failed] for n, nodes in enumerate(pipelines)}
    if sum(map(len, left.values())) < fewest:
        raise ClusterError(
            f"{sum(map(len, left.values()))} of {len(known)} nodes are left, and the model needs {fewest}: start others, and"
            " restore a checkpoint"
        )
    changes: list[Change] = []
    for n, nodes in list(left.items()):
        if not nodes:
            changes.append(Change("lost", n))
            del left[n]
        elif fewest <= len(nodes) < len(pipelines[n]):
            changes.append(Change("shrink", n))
    while True:
        short = min(left, key=lambda n: (len(left[n]), n))
        if len(left[short]) >= fewest:
            break
        lender = max(left, key=lambda n: (len(left[n]), -n))
        if len(left[lender]) > fewest:
            node = left[lender].pop()
            left[short].append(node)
            changes.append(Change("borrow", short, lender, node))
        else:
            into = min((n for n in left if n != short), key=lambda n: (len(left[n]), n))
            left[into] += left.pop(short)
            changes.append(Change("merge", short, into))
    return Cover(tuple(map(tuple, left.values())), tuple(left), tuple(changes))
