"""Follow the state of a model over the nodes of pipelines: who holds what, what is lost, and who copies what from whom.

In: for each template, which cells each of its nodes holds. A *cell* is a part of an array of the state that no template divides further. Out:
how many failures leave every cell on some node, the nodes of new pipelines in the order that copies least, and the copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.templates.cover import Nodes


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The parts of all arrays of the state.

    Args:
        num_bytes: of each cell, float[cells]: a part of four bits has half a byte.
        array: the number of the array of each cell, int[cells].
        paths: of the arrays.
        synced: whether pipelines add up gradients of a cell, bool[cells].
    """

    num_bytes: np.ndarray
    array: np.ndarray
    paths: tuple[str, ...]
    synced: np.ndarray

    def bytes_of(self, held: np.ndarray) -> int:
        """Bytes of the cells of a mask."""
        return int(self.num_bytes[held].sum())


@dataclass(frozen=True, slots=True)
class Copy:
    """What one node gets.

    Args:
        source: the node that sends; None for state that no node has left, which is read from a checkpoint.
        paths: of the arrays, of which parts are copied.
    """

    source: int | None
    target: int
    num_bytes: int
    paths: tuple[str, ...]


#: For each size of a template, which cells each node holds: bool[nodes, cells].
Held = Mapping[int, np.ndarray]


def holders(pipelines: Sequence[Nodes], held: Held) -> dict[int, np.ndarray]:
    """The cells of each node, bool[cells]; the nodes of a pipeline are in the order of its template."""
    return {node: held[len(nodes)][place] for nodes in pipelines for place, node in enumerate(nodes)}


def num_copies(pipelines: Sequence[Nodes], held: Held) -> int:
    """The number of nodes with the state that is on the fewest."""
    return int(np.sum([*holders(pipelines, held).values()], axis=0).min())


def placed(nodes: Nodes, has: Mapping[int, np.ndarray], wanted: np.ndarray, num_bytes: np.ndarray) -> Nodes:
    """The nodes of a pipeline in the order of its template that leaves the most bytes where they are.

    Args:
        has: the cells of each node before.
        wanted: the cells of each place, bool[places, cells].
    """
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - explaining a saved plan must not need it

    before = np.array([has[node] for node in nodes])
    kept = (before[:, None, :] & wanted[None, :, :]) @ num_bytes.astype(float)
    rows, places = linear_sum_assignment(kept, maximize=True)
    return tuple(nodes[row] for row in rows[np.argsort(places)])


def copies(pipelines: Sequence[Nodes], has: Mapping[int, np.ndarray], held: Held, cells: Cells) -> tuple[Copy, ...]:
    """What the nodes of new pipelines copy, each cell from the node that sends least so far.

    Args:
        has: the cells of each node that is left.
    """
    sends: dict[int, float] = dict.fromkeys(has, 0.0)
    found: defaultdict[tuple[int | None, int], list[int]] = defaultdict(list)
    nodes = sorted(has)
    on = np.array([has[node] for node in nodes])
    for target, wanted in holders(pipelines, held).items():
        for cell in np.flatnonzero(wanted & ~has[target]).tolist():
            sources = [nodes[n] for n in np.flatnonzero(on[:, cell]).tolist()]
            source = min(sources, key=lambda node: (sends[node], node), default=None)
            if source is not None:
                sends[source] += cells.num_bytes[cell]
            found[source, target].append(cell)
    return tuple(
        Copy(
            source,
            target,
            int(cells.num_bytes[of].sum()),
            tuple(cells.paths[n] for n in sorted({*cells.array[of].tolist()})),
        )
        for (source, target), of in sorted(
            found.items(), key=lambda item: (item[0][1], -1 if item[0][0] is None else item[0][0])
        )
    )
