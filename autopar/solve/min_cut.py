"""Find a minimum cut of a small network with integer capacities, by Dinic's algorithm.

In: arcs with capacities. Out: the nodes on the source's side. The choice of dims to view as two is such a cut, and
running a saved plan repeats that choice. It must not need OR-Tools, which would be faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Arc = tuple[int, int, int]


def source_side(arcs: Iterable[Arc], source: int, sink: int) -> set[int]:
    """The smallest source side of any minimum cut; it is unique.

    Args:
        arcs: tail, head and capacity of each.

    >>> sorted(source_side([(0, 2, 3), (2, 3, 1), (3, 1, 2)], source=0, sink=1))
    [0, 2]
    """
    network = _Network(arcs)
    while True:
        levels = network.levels(source)
        if sink not in levels:
            return set(levels)
        network.fill(levels, source, sink)


class _Network:
    """The residual network: arcs in pairs of an arc and its reverse, with their residual capacities."""

    def __init__(self, arcs: Iterable[Arc]) -> None:
        self.heads: list[int] = []
        self.left: list[int] = []
        self.leaving: dict[int, list[int]] = {}
        for tail, head, capacity in arcs:
            for start, end, room in ((tail, head, capacity), (head, tail, 0)):
                self.leaving.setdefault(start, []).append(len(self.heads))
                self.heads.append(end)
                self.left.append(room)

    def levels(self, source: int) -> dict[int, int]:
        """The distance in arcs from the source to each node that residual capacity reaches."""
        found = {source: 0}
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for arc in self.leaving.get(node, ()):
                head = self.heads[arc]
                if self.left[arc] and head not in found:
                    found[head] = found[node] + 1
                    queue.append(head)
        return found

    def fill(self, levels: dict[int, int], source: int, sink: int) -> None:
        """Push flow along shortest paths until none is left (a blocking flow)."""
        ways = {node: iter(arcs) for node, arcs in self.leaving.items()}
        path: list[int] = []  # arcs from the source
        node = source
        while True:
            if node == sink:
                most = min(self.left[arc] for arc in path)
                for arc in path:
                    self.left[arc] -= most
                    self.left[arc ^ 1] += most
                # Continue from the first saturated arc.
                full = next(n for n, arc in enumerate(path) if not self.left[arc])
                node = self.heads[path[full] ^ 1]
                del path[full:]
                continue
            level = levels[node] + 1
            for arc in ways[node]:
                if self.left[arc] and levels.get(self.heads[arc]) == level:
                    path.append(arc)
                    node = self.heads[arc]
                    break
            else:
                if not path:
                    return
                node = self.heads[path.pop() ^ 1]
