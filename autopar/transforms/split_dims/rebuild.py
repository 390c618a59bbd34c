"""Run an equation with two dims in place of one.

In: JAX's equation, its operands with the dims already in two, and the form of each tensor. Out: its results, by the
same primitive with other parameters. These functions are traced (`jax_compat.staged`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.jax_interop import compat as jax_compat
from autopar.rules.reduction import REDUCTION_TRAITS
from autopar.rules.table import TRAITS

#: For each dim of a tensor, the sizes it has in the rewritten tensor: `(2304,)` unchanged, `(3, 768)` as two dims.
Form = tuple[tuple[int, ...], ...]
Rebuild = Callable[[Any, Sequence[Any], Sequence[Form], Sequence[Form]], Sequence[Any]]


def shape_of(form: Form) -> tuple[int, ...]:
    """The shape of a tensor in this form.

    >>> shape_of(((8,), (3, 768)))
    (8, 3, 768)
    """
    return tuple(size for sizes in form for size in sizes)


def _places(form: Form, dim: int) -> tuple[int, ...]:
    """Positions that a dim has in the rewritten tensor."""
    first = sum(len(sizes) for sizes in form[:dim])
    return tuple(range(first, first + len(form[dim])))


def _all_places(form: Form, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(place for dim in dims for place in _places(form, dim))


def _with(source: Any, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    return jax_compat.bind(source.replace(params={**source.params, **changed}), operands)


def _seen_as(operand: Any, shape: Sequence[int]) -> Any:
    return operand if operand.shape == tuple(shape) else jax.lax.reshape(operand, tuple(shape))


def _elementwise(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    return jax_compat.bind(source, operands)


def _broadcast(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    """Broadcast; an operand's dim of size 1 becomes the outer one of two dims, and the inner one is new."""
    dims = source.params["broadcast_dimensions"]
    places = [p for d, sizes in zip(dims, before[0], strict=True) for p in _places(after[0], d)[: len(sizes)]]
    return _with(source, operands, shape=shape_of(after[0]), broadcast_dimensions=tuple(places))


def _transpose(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    return _with(source, operands, permutation=_all_places(before[0], source.params["permutation"]))


def _squeeze(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    dims = [d % len(before[0]) for d in source.params["dimensions"]]
    return _with(source, operands, dimensions=_all_places(before[0], dims))


def _reshape(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    order = source.params.get("dimensions")
    order = None if order is None else _all_places(before[0], order)
    return [jax.lax.reshape(operands[0], shape_of(after[0]), order)]


def _reduce(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    return _with(source, operands, axes=_all_places(before[0], source.params["axes"]))


def _dot(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    numbers = source.params["dimension_numbers"]
    moved = tuple(tuple(_all_places(form, dims) for form, dims in zip(before, pair, strict=True)) for pair in numbers)
    return _with(source, operands, dimension_numbers=moved)


def _split(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    axis = source.params["axis"]
    place, *inner = _places(before[0], axis)
    if not inner:
        return _with(source, operands, axis=place)
    parts = _with(source, operands, axis=place, sizes=(1,) * len(after))
    return [_seen_as(part, shape_of(form)) for part, form in zip(parts, after, strict=True)]


def _concatenate(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    """Concatenate along a new first dim, then move that dim to its place.

    Concatenating at its place saves no transpose, and costs more by XLA's estimate, because the parts have size 1 along
    that dim.
    """
    dim = source.params["dimension"]
    place, *inner = _places(after[0], dim)
    if not inner:
        return _with(source, operands, dimension=place)
    part = after[0][dim][1]
    parts = [
        _seen_as(operand, (1, *shape_of((*form[:dim], (part,), *form[dim + 1 :]))))
        for operand, form in zip(operands, before, strict=True)
    ]
    (concatenated,) = _with(source, parts, dimension=0)
    return [jax.lax.transpose(concatenated, [*range(1, place + 1), 0, *range(place + 1, concatenated.ndim)])]


def _slice(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    starts, limits, strides = [], [], []
    given = source.params["strides"] or (1,) * len(before[0])
    for d, sizes in enumerate(before[0]):
        start, limit = source.params["start_indices"][d], source.params["limit_indices"][d]
        if len(sizes) == 1:
            starts, limits, strides = [*starts, start], [*limits, limit], [*strides, given[d]]
            continue
        starts += [start // sizes[1], 0]
        limits += [limit // sizes[1], sizes[1]]
        strides += [1, 1]
    return [_seen_as(jax.lax.slice(operands[0], starts, limits, strides), shape_of(after[0]))]


def _pad(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    operand, value = operands
    amounts: list[tuple[int, int, int]] = []
    for d, (low, high, between) in enumerate(source.params["padding_config"]):
        if len(after[0][d]) == 1:
            amounts.append((low, high, between))
            continue
        part = after[0][d][1]
        amounts += [(low // part, high // part, 0), (0, 0, 0)]
    sizes = [s - low - high for s, (low, high, _) in zip(shape_of(after[0]), amounts, strict=True)]
    if any(between for _, _, between in amounts):
        sizes = list(operand.shape)
    return _with(source, [_seen_as(operand, sizes), value], padding_config=tuple(amounts))


def _stack(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    return _with(source, operands, axis=_places(after[0], source.params["axis"])[0])


def _unstack(source: Any, operands: Sequence[Any], before: Sequence[Form], after: Sequence[Form]) -> Sequence[Any]:
    return _with(source, operands, axis=_places(before[0], source.params["axis"])[0])


ELEMENTWISE = frozenset(name for name, traits in TRAITS.items() if traits.elementwise)
_REDUCTIONS = [name for name, traits in REDUCTION_TRAITS.items() if traits.reduces == "dims"]

#: Primitives that can run with two dims in place of one.
REBUILD: dict[str, Rebuild] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot,
    "split": _split,
    "concatenate": _concatenate,
    "slice": _slice,
    "pad": _pad,
    "stack": _stack,
    "unstack": _unstack,
}
