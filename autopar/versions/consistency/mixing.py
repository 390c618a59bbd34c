"""Define the matrices by which workers average weights with their neighbors: a table of graphs, or any matrix.

In: the name of a graph, as "ring" or "torus(2, 4)", or a matrix; the number of workers.
Out: a checked `Mixing`. D-PSGD (Lian et al. 2017) converges with a symmetric, doubly stochastic matrix whose second largest
absolute eigenvalue is below 1: the smaller it is, the faster do the workers agree.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from autopar.errors import StoreError

#: Deviation that is rounding, also of a matrix in float32.
_ROUNDING = 1e-6
#: The longest name of a graph that makes sense.
_MOST_LETTERS = 200


@dataclass(frozen=True, slots=True)
class Mixing:
    """How much each worker takes of the weights of each: worker i's new weights are the sum over j of `weights[i][j]` times
    those of worker j.

    Args:
        name: of the graph; "matrix" for one that was given as a matrix.
        weights: symmetric, not negative, each row with the sum 1.
    """

    name: str
    weights: tuple[tuple[float, ...], ...]

    @property
    def num_workers(self) -> int:
        return len(self.weights)

    def neighbors(self, worker: int) -> tuple[int, ...]:
        """The workers with which a worker exchanges weights, in order."""
        return tuple(other for other, weight in enumerate(self.weights[worker]) if weight and other != worker)

    @property
    def second_eigenvalue(self) -> float:
        """The second largest absolute eigenvalue: without gradients, the distance of the workers from their mean shrinks in
        each step at least by this factor. 0 for one worker."""
        return _second_eigenvalue(np.array(self.weights))


def _ring(num_workers: int) -> Sequence[set[int]]:
    return _torus(num_workers, num_workers)


def _complete(num_workers: int) -> Sequence[set[int]]:
    return [set(range(num_workers)) - {worker} for worker in range(num_workers)]


def _torus(num_workers: int, *sizes: int) -> Sequence[set[int]]:
    if not sizes or min(sizes) < 1 or math.prod(sizes) != num_workers:
        raise StoreError(
            f"the graph torus({', '.join(map(str, sizes))}) has {math.prod(sizes) if sizes else 0} workers, and there are"
            f" {num_workers}: give sizes of which the product is {num_workers}"
        )
    numbers = np.arange(num_workers).reshape(sizes)
    shifted = [np.roll(numbers, step, dim).reshape(-1).tolist() for dim in range(numbers.ndim) for step in (-1, 1)]
    return [{other[worker] for other in shifted} - {worker} for worker in range(num_workers)]


def _hypercube(num_workers: int) -> Sequence[set[int]]:
    if num_workers & (num_workers - 1):
        raise StoreError(f"the graph hypercube needs 2, 4, 8, ... workers, and there are {num_workers}")
    return [{worker ^ (1 << bit) for bit in range(num_workers.bit_length() - 1)} for worker in range(num_workers)]


#: From the number of workers, and the numbers in the brackets, the neighbors of each worker. In all of these graphs workers
#: have equally many, so that equal weights for a worker and its neighbors are doubly stochastic.
GRAPHS: Mapping[str, Callable[..., Sequence[set[int]]]] = MappingProxyType(
    {"ring": _ring, "complete": _complete, "torus": _torus, "hypercube": _hypercube}
)


def find_mixing(mixing: str | Mixing | Any, num_workers: int) -> Mixing:
    """The mixing matrix of this graph, or this matrix, checked.

    Args:
        mixing: "ring", "complete", "torus(rows, columns)" of any number of dims, "hypercube"; or a square matrix.

    Raises:
        StoreError: there is no such graph, it is not defined for this number of workers, or the matrix would not lead the
            workers to the mean of their weights.

    >>> find_mixing("ring", 4).weights[0]
    (0.3333333333333333, 0.3333333333333333, 0.0, 0.3333333333333333)
    >>> round(find_mixing("ring", 4).second_eigenvalue, 4)
    0.3333
    """
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise StoreError(f"`workers` is {num_workers!r}: give a whole number of workers, at least 1")
    if isinstance(mixing, str):
        graph = _graph(mixing, num_workers)
        rows = tuple(
            tuple(1 / (1 + len(others)) if other in others or other == worker else 0.0 for other in range(num_workers))
            for worker, others in enumerate(graph)
        )
        return Mixing(mixing, rows)
    name, weights = (mixing.name, mixing.weights) if isinstance(mixing, Mixing) else ("matrix", mixing)
    try:
        matrix = np.array(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise StoreError(f"`mixing` is no matrix of numbers ({error}): give the name of a graph, or one") from None
    _check(matrix, num_workers)
    return Mixing(name, tuple(map(tuple, matrix.tolist())))


def _graph(text: str, num_workers: int) -> Sequence[set[int]]:
    found = re.fullmatch(r"\s*(\w+)\s*(?:\(([\d\s,]*)\))?\s*", text[:_MOST_LETTERS])
    names = ", ".join(map(repr, GRAPHS))
    if found is None or len(text) > _MOST_LETTERS:
        raise StoreError(f'the graph {text[:60]!r} cannot be read: give one of {names}, as "torus(2, 4)", or a matrix')
    name, numbers = found.groups()
    if name not in GRAPHS:
        close = difflib.get_close_matches(name.lower(), GRAPHS, n=1, cutoff=0.5)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise StoreError(f"there is no graph {name!r}.{meant} The graphs are {names}; or give a matrix")
    sizes = [int(number) for number in re.findall(r"\d{1,9}", numbers or "")]
    if sizes and name != "torus":
        raise StoreError(f"the graph {text!r} gives numbers to {name!r}, which takes none")
    return GRAPHS[name](num_workers, *sizes)


def _check(matrix: np.ndarray, num_workers: int) -> None:
    """Refuse a matrix that would not lead all workers to the mean of their weights."""
    if matrix.shape != (num_workers, num_workers):
        raise StoreError(f"`mixing` has the shape {matrix.shape}, and there are {num_workers} workers")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise StoreError(
            f"`mixing` has the weight {matrix[~(matrix >= 0) | ~np.isfinite(matrix)][0]:g}: give weights of 0 to 1"
        )
    wrong = int(np.abs(matrix.sum(1) - 1).argmax())
    if abs(matrix[wrong].sum() - 1) > _ROUNDING:
        raise StoreError(
            f"row {wrong} of `mixing` has the sum {matrix[wrong].sum():g}: a worker's new weights are a mean, so each row has"
            " the sum 1"
        )
    first, second = np.unravel_index(np.abs(matrix - matrix.T).argmax(), matrix.shape)
    if abs(matrix[first, second] - matrix[second, first]) > _ROUNDING:
        raise StoreError(
            f"`mixing` is not symmetric: worker {first} takes {matrix[first, second]:g} of worker {second}, which takes"
            f" {matrix[second, first]:g}. Otherwise the mean of all weights would change"
        )
    parts = _parts(matrix)
    if len(parts) > 1:
        raise StoreError(
            f"`mixing` does not connect workers {parts[0]} with workers {parts[1]}: they would train models of their own"
        )
    if _second_eigenvalue(matrix) > 1 - _ROUNDING:
        raise StoreError(
            "`mixing` has the eigenvalue -1: two groups of workers would exchange their weights for ever, and never agree. Let"
            " workers keep a part of their own weights, as by (matrix + identity) / 2"
        )


def _parts(matrix: np.ndarray) -> list[list[int]]:
    """The workers that weights connect, largest part last."""
    left, parts = set(range(len(matrix))), list[list[int]]()
    while left:
        found = {min(left)}
        while more := {int(other) for worker in found for other in matrix[worker].nonzero()[0]} - found:
            found |= more
        left -= found
        parts.append(sorted(found))
    return sorted(parts, key=len)


def _second_eigenvalue(matrix: np.ndarray) -> float:
    sizes = np.sort(np.abs(np.linalg.eigvalsh((matrix + matrix.T) / 2)))
    return float(sizes[-2]) if len(sizes) > 1 else 0.0
