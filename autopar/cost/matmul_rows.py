"""Find the order of a matmul's operands and result in memory, which decides whether their rows are aligned.

In: a graph, a value, how it is gathered or scattered. Out: the order of its dims in memory, the alignment of its rows,
and the seconds that matmuls lose where a collective changes that order.

A matmul reads and writes a matrix in either order, so that XLA copies nothing. It gives the result of an all-gather the
order in which the devices' parts are concatenated, with the gathered dim outermost, and a reduce-scatter the same. Rows
of a matrix whose innermost dim has an odd size, such as a vocabulary of 50,257, are not aligned, and load slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.cost.kernel_time import ALIGNED_BYTES, ITEMSIZE, gemm_seconds
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import Gemm
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.contraction import is_matmul
from autopar.rules.table import traits_of

#: Dims of a tensor, outermost in memory first.
Order = tuple[int, ...]


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
    node: Node, left: Sequence[int], right: Sequence[int], dtypes: tuple[str, str], aligned: Sequence[int]
) -> Gemm:
    """The GEMM of a `dot_general`.

    Args:
        left, right: shapes of its operands.
        dtypes: of the left operand and of the result.
        aligned: alignment of the rows of both operands and of the result.
    """
    (left_contracting, right_contracting), (left_batch, right_batch) = node.params["dimension_numbers"]
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
    lost = 0.0
    for n, place in places:
        node = graph.nodes[n]
        if not is_matmul(node):
            continue
        values = [*(v for v in node.operands if v is not None), node.results[0]]
        left, right, out = (graph.values[v] for v in values)
        aligned = [row_alignment(graph.values[v].shape, order_of(graph, v), graph.values[v].dtype) for v in values]
        gemm = gemm_of(node, left.shape, right.shape, (left.dtype, out.dtype), aligned)
        aligned[place] = moved
        slower = gemm_of(node, left.shape, right.shape, (left.dtype, out.dtype), aligned)
        lost += (gemm_seconds(slower, profile) - gemm_seconds(gemm, profile)) / mesh.num_devices
    return max(lost, 0.0)


def lost_rows(
    before: TensorSharding, after: TensorSharding, gathered: Sequence[float], scattered: Sequence[float]
) -> float:
    """What matmuls lose by a resharding; the dim that is gathered last becomes the outermost one.

    Args:
        gathered, scattered: result of `lost_by_moving` for each dim.
    """
    first = next((d for d, axes in enumerate(before.dims) if any(axis not in after.axes for axis in axes)), None)
    lost = 0.0 if first is None else gathered[first]
    return lost + sum(
        scattered[d] for d, axes in enumerate(after.dims) if any(axis in before.unreduced for axis in axes)
    )
