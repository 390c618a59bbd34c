"""The cheapest cut between two nodes of a small network, by Dinic's algorithm, in whole numbers.

In: arcs with capacities. Out: the nodes on the source's side. Which dims of a step are seen as two is found by it, and a step
that runs by a saved plan has to find the same again: OR-Tools, which would do it faster, is not needed for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Arc = tuple[int, int, int]


def source_side(arcs: Iterable[Arc], source: int, sink: int) -> set[int]:
    """The fewest nodes that a cheapest cut can have on the side of the source; there is one such set.

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
    """Arcs in pairs, of which one is the way back: what may still flow through each."""

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
        """Arcs from the source to each node that can still be reached."""
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
        """Push flow along shortest ways until none is left."""
        ways = {node: iter(arcs) for node, arcs in self.leaving.items()}
        path: list[int] = []  # arcs from the source
        node = source
        while True:
            if node == sink:
                most = min(self.left[arc] for arc in path)
                for arc in path:
                    self.left[arc] -= most
                    self.left[arc ^ 1] += most
                # On from the first arc that is full.
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
