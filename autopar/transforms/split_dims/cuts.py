"""Recognize nodes that cut a dim into equal parts, or concatenate equal parts into one dim.

In: a node and its tensors' shapes. Out: the size of a part. For example, three projections of 768 computed by one
matmul are a dim of 2,304 that `split` cuts. Their gradients are concatenated by `concatenate`, or by `pad` and
additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from autopar.ir.graph import Tensor
from autopar.rules.node_view import NodeView


def part_size(view: NodeView, tensor: Tensor, dim: int) -> int | None:
    """The size of the equal parts that a node cuts an operand's dim into, or concatenates into a result's dim.

    None if the node does neither, or the parts are not equal.

    >>> part_size(NodeView("split", {"axis": 1, "sizes": (2, 2)}, ((3, 4),), ((3, 2), (3, 2))), ("operand", 0), 1)
    2
    """
    known = _CUTS.get(view.primitive)
    if known is None or tensor != (known[0], 0):
        return None
    shape = view.operand_shapes[0] if known[0] == "operand" else view.result_shapes[0]
    part = known[1](view, dim)
    return part if part is not None and 0 < part < shape[dim] and shape[dim] % part == 0 else None


def _split(view: NodeView, dim: int) -> int | None:
    sizes = view.params["sizes"]
    return sizes[0] if dim == view.params["axis"] and len(set(sizes)) == 1 else None


def _concatenate(view: NodeView, dim: int) -> int | None:
    sizes = {shape[dim] for shape in view.operand_shapes}
    return sizes.pop() if dim == view.params["dimension"] and len(sizes) == 1 else None


def _slice(view: NodeView, dim: int) -> int | None:
    """A slice takes one of the parts."""
    start, size = view.params["start_indices"][dim], view.result_shapes[0][dim]
    stride = (view.params.get("strides") or (1,) * (dim + 1))[dim]
    return size if stride == 1 and size and start % size == 0 else None


def _pad(view: NodeView, dim: int) -> int | None:
    """A pad places one part among zeros."""
    low, high, between = view.params["padding_config"][dim]
    size = view.operand_shapes[0][dim]
    return size if between == 0 and size and min(low, high) >= 0 and low % size == 0 else None


def _stacked(view: NodeView, dim: int) -> int | None:
    return 1 if dim == view.params["axis"] else None


#: By primitive: the tensor with the whole dim, and a function for the size of its parts.
_CUTS: dict[str, tuple[Literal["operand", "result"], Callable[[NodeView, int], int | None]]] = {
    "split": ("operand", _split),
    "slice": ("operand", _slice),
    "unstack": ("operand", _stacked),
    "concatenate": ("result", _concatenate),
    "pad": ("result", _pad),
    "stack": ("result", _stacked),
}
CUTTING = frozenset(_CUTS)
