"""Find the order of a matmul's operands and result in memory, which decides whether their rows are aligned.

In: a graph, a value, how it is split, gathered or scattered. Out: the order of its dims in memory, the alignment of its
rows, and the seconds that matmuls lose where a device's part has rows that are not aligned, or a collective changes that
order.

A matmul reads and writes a matrix in either order, so that XLA copies nothing. It gives the result of an all-gather the
order in which the devices' parts are concatenated, with the gathered dim outermost, and a reduce-scatter the same. Rows
of a matrix whose innermost dim has an odd size, such as a vocabulary of 50,257, are not aligned, and load slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.cost.kernel_time import ALIGNED_BYTES, ITEMSIZE, gemm_seconds
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import Gemm
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.contraction import is_matmul
from autopar.rules.factors import DimFactors
from autopar.rules.grouping import Group
from autopar.rules.strategies import Strategy
from autopar.rules.table import traits_of

#: Dims of a tensor, outermost in memory first.
Order = tuple[int, ...]
#: Contracting dims of the left and the right operand, and their batch dims.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def swaps_halves(permutation: Sequence[int]) -> bool:
    """Whether a permutation swaps two groups of adjacent dims: [a, b] to [b, a]."""
    first = permutation.index(0)
    return list(permutation) == [*range(len(permutation) - first, len(permutation)), *range(len(permutation) - first)]


def order_of(graph: Graph, value: int, order_read: Callable[[int], Order] | None = None) -> Order:
    """The order of a value's dims in memory: a matmul reads the operand of a transpose, or of a cast after one.

    Args:
        order_read: the order in which a node reads its first operand; that of the operand's producer if None.
    """
    producer, rank = graph.producers.get(value), len(graph.values[value].shape)
    node = None if producer is None else graph.nodes[producer]
    operand = node.operands[0] if node is not None and node.operands else None
    if producer is None or node is None or operand is None or len(graph.values[operand].shape) != rank:
        return tuple(range(rank))
    traits = traits_of(node.primitive)
    permutation = node.params["permutation"] if traits.permutes else tuple(range(rank))
    if not traits.casts and not (traits.permutes and rank and swaps_halves(permutation)):
        return tuple(range(rank))
    order = order_read(producer) if order_read else order_of(graph, operand)
    return tuple(permutation.index(dim) for dim in order)


def moved_dim(before: TensorSharding, after: TensorSharding) -> int | None:
    """The dim that a collective gathers, or scatters where `before` is unreduced; None if it does neither."""
    changed = [d for d, (b, a) in enumerate(zip(before.dims, after.dims, strict=True)) if a != b]
    if len(changed) != 1:
        return None
    gathers = len(after.dims[changed[0]]) < len(before.dims[changed[0]])
    return changed[0] if gathers or before.unreduced != after.unreduced else None


def after_moving(order: Order, dim: int) -> Order:
    """The order after a collective that gathers or scatters a dim."""
    return (dim, *(d for d in order if d != dim))


def row_alignment(shape: Sequence[int], order: Order, dtype: str) -> int:
    """The largest power of two, up to `ALIGNED_BYTES`, that divides the bytes of a row."""
    sizes = [shape[dim] for dim in order if shape[dim] != 1]
    return math.gcd(ALIGNED_BYTES, sizes[-1] * ITEMSIZE.get(dtype, 1)) if len(sizes) > 1 else ALIGNED_BYTES


def has_unaligned_dim(shape: Sequence[int], dtype: str) -> bool:
    """Whether rows along some dim of a matrix would not be aligned."""
    return len(shape) > 1 and any(size * ITEMSIZE.get(dtype, 1) % ALIGNED_BYTES for size in shape if size != 1)


def gemm_of(
    dimension_numbers: DimensionNumbers,
    left: Sequence[int],
    right: Sequence[int],
    dtypes: tuple[str, str],
    aligned: Sequence[int],
) -> Gemm:
    """The GEMM of a `dot_general`.

    Args:
        dimension_numbers: contracting dims and batch dims of both operands.
        left, right: shapes of its operands.
        dtypes: of the left operand and of the result.
        aligned: alignment of the rows of both operands and of the result.
    """
    (left_contracting, right_contracting), (left_batch, right_batch) = dimension_numbers
    k = math.prod(left[d] for d in left_contracting)
    batch = math.prod(left[d] for d in left_batch)
    m = math.prod(s for d, s in enumerate(left) if d not in (*left_contracting, *left_batch))
    n = math.prod(s for d, s in enumerate(right) if d not in (*right_contracting, *right_batch))
    return Gemm(batch, m, n, k, *dtypes, (aligned[0], aligned[1], aligned[2]))


def lost_by_moving(
    graph: Graph, value: int, dim: int, places: Sequence[tuple[int, int]], mesh: MeshShape, profile: HardwareProfile
) -> float:
    """Seconds per run that matmuls lose on each device, if devices share the work evenly, because a collective makes a dim of
    their operand, or of their result, the outermost one.

    Args:
        places: node, and 0 or 1 for its operand that is the collective's result; 2 if the collective scatters its result.
    """
    info, usual = graph.values[value], order_of(graph, value)
    moved = row_alignment(info.shape, after_moving(usual, dim), info.dtype)
    if moved >= row_alignment(info.shape, usual, info.dtype):
        return 0.0
    matmuls = (place for place in places if is_matmul(graph.nodes[place[0]]))
    return max(0.0, sum(_lost_by(graph, place, moved, profile) for place in matmuls) / mesh.num_devices)


def _lost_by(graph: Graph, place: tuple[int, int], moved: int, profile: HardwareProfile) -> float:
    """Seconds per run that a matmul loses by the rows of one of its matrices, on a single device.

    Args:
        place: node, and 0 or 1 for an operand, 2 for the result.
        moved: alignment of the rows of that matrix.
    """
    n, position = place
    node = graph.nodes[n]
    values = [*(v for v in node.operands if v is not None), node.results[0]]
    left, right, out = (graph.values[v] for v in values)
    aligned = [row_alignment(graph.values[v].shape, order_of(graph, v), graph.values[v].dtype) for v in values]
    numbers, dtypes = node.params["dimension_numbers"], (left.dtype, out.dtype)
    gemm = gemm_of(numbers, left.shape, right.shape, dtypes, aligned)
    aligned[position] = min(moved, aligned[position])
    slower = gemm_of(numbers, left.shape, right.shape, dtypes, aligned)
    return gemm_seconds(slower, profile) - gemm_seconds(gemm, profile)


@dataclass(frozen=True, slots=True)
class Summed:
    """What matmuls lose if a collective scatters a sum of which every device has one term, such as the gradient of a position
    table with one example per device. XLA then sums nothing, so the order of the sum's dims is the order of what it adds up, and of
    all that elementwise operations make of it or make it of: the activations.

    Args:
        num_terms: the number of terms of the sum.
        lost_s: seconds per step, for each dim that is scattered.
    """

    num_terms: int
    lost_s: tuple[float, ...]

    def by_dim(self, num_parts: int) -> tuple[float, ...]:
        """`lost_s` if the terms are split over so many devices that each has one; else empty."""
        return self.lost_s if num_parts >= self.num_terms else ()


def summed(graph: Graph, value: int, mesh: MeshShape, profile: HardwareProfile) -> Summed:
    """What is lost if a dim of a value is scattered."""
    rank, producer = len(graph.values[value].shape), graph.producer(value)
    axes = () if producer is None else producer.params.get("axes", ())
    term = None if producer is None or traits_of(producer.primitive).reduces != "dims" else producer.operands[0]
    if term is None or len(graph.values[term].shape) != rank + len(axes):
        return Summed(0, (0.0,) * rank)
    shape = graph.values[term].shape
    own = [1 if d in axes else size for d, size in enumerate(shape)]
    usual, places = tuple(range(len(own))), _matmuls_with(graph, term)
    lost: list[float] = []
    for dim in (d for d in usual if d not in axes):
        moved = {dtype: row_alignment(own, after_moving(usual, dim), dtype) for dtype in places}
        worse = [dtype for dtype in places if moved[dtype] < row_alignment(own, usual, dtype)]
        slower = (
            graph.nodes[place[0]].repeat * _lost_by(graph, place, moved[dtype], profile)
            for dtype in worse
            for place in places[dtype]
        )
        lost.append(max(0.0, sum(slower) / mesh.num_devices))
    return Summed(math.prod(shape[d] for d in axes), tuple(lost))


def _matmuls_with(graph: Graph, value: int) -> dict[str, list[tuple[int, int]]]:
    """By dtype, the places of matmuls that read or write a value, or what elementwise operations connect with it."""
    shape, seen, left = graph.values[value].shape, {value}, [value]
    places: dict[str, list[tuple[int, int]]] = {}
    while left:
        one = left.pop()
        known = places.setdefault(graph.values[one].dtype, [])
        producer = graph.producers.get(one)
        known += [(producer, 2)] if producer is not None and is_matmul(graph.nodes[producer]) else []
        uses = [(n, i) for n, i in graph.users.get(one, ()) if n < len(graph.nodes)]
        known += [use for use in uses if is_matmul(graph.nodes[use[0]])]
        for n in {n for n, _ in uses} | ({producer} if producer is not None else set()):
            node = graph.nodes[n]
            if traits_of(node.primitive).elementwise:
                near = {v for v in (*node.operands, *node.results) if v is not None and graph.values[v].shape == shape}
                left += near - seen
                seen |= near
    return places


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matmul of a group, without its place in the graph: both operands and the result.

    Args:
        dtypes: of the left operand, the right one and the result.
        dims: their dims in the group's factors.
        orders: their orders in memory.
        repeat: how often a step runs it.
    """

    dimension_numbers: DimensionNumbers
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    dims: tuple[DimFactors, ...]
    orders: tuple[Order, ...]
    repeat: float

    def lost_s(self, strategy: Strategy, mesh: MeshShape, profile: HardwareProfile) -> float:
        """Seconds per step that are lost on a device because rows of its part are not aligned."""
        shardings = map(strategy.sharding, self.dims)
        local = [sharding.local_shape(shape, mesh) for sharding, shape in zip(shardings, self.shapes, strict=True)]
        aligned = [row_alignment(*of) for of in zip(local, self.orders, self.dtypes, strict=True)]
        if min(aligned) == ALIGNED_BYTES:
            return 0.0
        gemm = gemm_of(self.dimension_numbers, local[0], local[1], (self.dtypes[0], self.dtypes[2]), aligned)
        usual = replace(gemm, aligned_bytes=(ALIGNED_BYTES,) * 3)
        return self.repeat * (gemm_seconds(gemm, profile) - gemm_seconds(usual, profile))


def matmuls_of(graph: Graph, group: Group) -> tuple[Matmul, ...]:
    """The matmuls of a group."""
    nodes = [n for n in group.nodes if is_matmul(graph.nodes[n])]
    if not nodes:
        return ()
    dims = {(n, place): read.dims for read in group.reads for n, place in read.uses}
    dims |= {(one.node, 2): one.dims for one in group.defines}
    return tuple(
        _matmul(graph, graph.nodes[n], tuple(dims[n, place] for place in range(3)))
        for n in nodes
        if all((n, place) in dims for place in range(3))
    )


def _matmul(graph: Graph, node: Node, dims: tuple[DimFactors, ...]) -> Matmul:
    values = [*(v for v in node.operands if v is not None), node.results[0]]
    infos = [graph.values[v] for v in values]
    return Matmul(
        node.params["dimension_numbers"],
        tuple(info.shape for info in infos),
        tuple(info.dtype for info in infos),
        dims,
        tuple(order_of(graph, v) for v in values),
        node.repeat,
    )


def lost_rows(
    before: TensorSharding,
    after: TensorSharding,
    gathered: Sequence[float],
    scattered: Sequence[float],
    of_terms: Sequence[float] = (),
) -> float:
    """What matmuls lose by a resharding; the dim that is gathered last becomes the outermost one.

    Args:
        gathered, scattered: result of `lost_by_moving` for each dim.
        of_terms: what is lost besides for each scattered dim, if every device has one term of a sum; else empty.
    """
    first = next((d for d, axes in enumerate(before.dims) if any(axis not in after.axes for axis in axes)), None)
    lost = 0.0 if first is None else gathered[first]
    split = [d for d, axes in enumerate(after.dims) if any(axis in before.unreduced for axis in axes)]
    return lost + sum(scattered[d] for d in split) + sum(of_terms[d] for d in split if of_terms)
