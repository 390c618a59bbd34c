"""Find what is known of masks before the step runs.

In: a trace. Out: `KnownMasks`, which says where a value is surely true, false, zero, or so negative that its exponential
is zero. Values computed from constants and positions are evaluated; of values that also depend on data, such as a causal
mask combined with one of padding, the known part is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.frontend.equations import Atom, Equation, LiteralOperand
from autopar.frontend.trace import Trace
from autopar.jax_interop import compat as jax_compat

#: Scores at most this large have the weight zero, as long as the same row has one of usual size: exp(-1e4) is 0 in all
#: floating-point types.
LOW = -1e4
#: Other primitives than those below are evaluated up to this many elements.
_MOST = 1 << 22


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of each element of a value. Arrays may be broadcast views.

    Args:
        false, true: the elements that are surely false or true; for a value that is not Boolean, zero and one.
        low, bottom: the elements that are surely at most `LOW`, or minus infinity.
    """

    false: np.ndarray
    true: np.ndarray
    low: np.ndarray
    bottom: np.ndarray
    value: np.ndarray | None = None

    def mapped(self, function: Callable[[np.ndarray], np.ndarray]) -> Known:
        """The same of a value whose elements are these, in another order."""
        value = None if self.value is None else function(self.value)
        return Known(function(self.false), function(self.true), function(self.low), function(self.bottom), value)


def _of_value(value: Any) -> Known:
    value = np.asarray(value)
    small = _compact(value)
    real = small if small.dtype == bool or np.issubdtype(small.dtype, np.integer) else small.astype(np.float32)
    bottom = np.isneginf(real) if real.dtype == np.float32 else np.zeros_like(real, bool)
    known = Known(real == 0, real == 1, real <= LOW, bottom)
    return replace(known.mapped(lambda one: np.broadcast_to(one, value.shape)), value=value)


def _compact(array: np.ndarray) -> np.ndarray:
    """The array with one element in each dim along which it is broadcast."""
    return array[tuple(slice(0, 1) if not stride and size > 1 else slice(None) for stride, size in _sides(array))]


def _sides(array: np.ndarray) -> list[tuple[int, int]]:
    return list(zip(array.strides, array.shape, strict=True))


def beyond_diagonal(array: np.ndarray, row_dim: int, column_dim: int) -> bool:
    """Whether all elements right of the diagonal are true."""
    return not np.any(np.triu(~_plane(array, row_dim, column_dim), 1))


def in_each_row(array: np.ndarray, row_dim: int, column_dim: int) -> bool:
    """Whether each row has a true element that is not right of the diagonal."""
    return bool(np.all(np.any(np.tril(_plane(array, row_dim, column_dim)), axis=1)))


def _plane(array: np.ndarray, row_dim: int, column_dim: int) -> np.ndarray:
    """The elements by row and column that are true at all positions of the other dims."""
    others = tuple(d for d in range(array.ndim) if d not in (row_dim, column_dim))
    plane = np.all(_compact(array), axis=others)
    plane = plane.T if row_dim > column_dim else plane
    return np.broadcast_to(plane, (array.shape[row_dim], array.shape[column_dim]))


class KnownMasks:
    """What is known of the values of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.constants = dict(trace.constants)
        self.found: dict[int, Known | None] = {}

    def of(self, atom: Atom) -> Known | None:
        """What is known of a value; None if nothing."""
        if isinstance(atom, LiteralOperand):
            return _of_value(atom.value)
        if atom not in self.found:
            self.found[atom] = None
            self.found[atom] = self._compute(atom)
        return self.found[atom]

    def _compute(self, value: int) -> Known | None:
        if value in self.constants:
            dtype = self.trace.avals[value].dtype
            is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
            return None if is_key else _of_value(self.constants[value])
        n = self.trace.producers.get(value)
        if n is None or self.trace.equations[n].piece is not None:
            return None
        equation, shape = self.trace.equations[n], self.trace.avals[value].shape
        if jnp.issubdtype(self.trace.avals[value].dtype, jax.dtypes.extended):  # random keys
            return None
        operands = [self.of(atom) for atom in equation.operands]
        name = equation.primitive
        if name == "iota":
            dim = equation.source.params["dimension"]
            at = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
            return _of_value(np.broadcast_to(at, shape))
        if name in _STRUCTURAL:
            return operands[0] and operands[0].mapped(functools.partial(_STRUCTURAL[name], equation, shape))
        values = [one.value for one in operands if one is not None and one.value is not None]
        if len(values) == len(operands) and values:
            return self._evaluated(equation, values, shape)
        combine = _PARTLY.get(name)
        return combine(shape, operands) if combine else None

    def _evaluated(self, equation: Equation, values: Sequence[np.ndarray], shape: tuple[int, ...]) -> Known | None:
        function = _ELEMENTWISE.get(equation.primitive)
        if function is not None:
            wide = [np.reshape(one, (1,) * len(shape)) if one.ndim == 0 else _compact(one) for one in values]
            return _of_value(np.broadcast_to(function(*wide), shape))
        if max(one.size for one in values) > _MOST or np.prod(shape) > _MOST or equation.source.effects:
            return None
        with jax.ensure_compile_time_eval():
            (result, *_) = jax_compat.bind(equation.source, list(values))
        return _of_value(np.asarray(result))


def _broadcast(equation: Equation, shape: tuple[int, ...], array: np.ndarray) -> np.ndarray:
    dims = equation.source.params["broadcast_dimensions"]
    sides = [1] * len(shape)
    for dim, size in zip(dims, array.shape, strict=True):
        sides[dim] = size
    kept = np.expand_dims(array, tuple(d for d in range(len(shape)) if d not in dims))
    return np.broadcast_to(kept.reshape(sides) if kept.shape != tuple(sides) else kept, shape)


_STRUCTURAL: Mapping[str, Callable[[Equation, tuple[int, ...], np.ndarray], np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda equation, shape, array: (
        np.broadcast_to(_compact(array).reshape(_compact_shape(array, shape)), shape)
        if _only_ones(array.shape, shape)
        else array.reshape(shape)
    ),
    "squeeze": lambda equation, shape, array: np.squeeze(array, equation.source.params["dimensions"]),
    "expand_dims": lambda equation, shape, array: array.reshape(shape),
    "transpose": lambda equation, shape, array: array.transpose(equation.source.params["permutation"]),
    "slice": lambda equation, shape, array: array[
        tuple(
            slice(start, limit, step)
            for start, limit, step in zip(
                equation.source.params["start_indices"],
                equation.source.params["limit_indices"],
                equation.source.params["strides"] or (1,) * array.ndim,
                strict=True,
            )
        )
    ],
    "copy": lambda equation, shape, array: array,
    "stop_gradient": lambda equation, shape, array: array,
}


def _only_ones(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a reshape adds or drops dims of one element only."""
    return [size for size in before if size != 1] == [size for size in after if size != 1]


def _compact_shape(array: np.ndarray, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = iter(compact for compact, size in zip(_compact(array).shape, array.shape, strict=True) if size != 1)
    return tuple(1 if size == 1 else next(sizes) for size in shape)


def _selected(pred: np.ndarray, zero: np.ndarray, *others: np.ndarray) -> np.ndarray:
    result = np.broadcast_arrays(pred, zero, *others)[1]
    for n, other in enumerate(others, 1):
        result = np.where(pred.astype(int) == n, other, result)
    return result


_ELEMENTWISE: Mapping[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "select_n": _selected,
}


def _nothing(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.zeros((1,) * len(shape), bool), shape)


def _fields(one: Known | None, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    if one is None:
        none = _nothing(shape)
        return none, none, none, none
    both = (one.false, one.true, one.low, one.bottom)
    false, true, low, bottom = (np.broadcast_to(field, shape) for field in both)
    return false, true, low, bottom


def _wide(shape: tuple[int, ...], function: Callable[..., np.ndarray], *fields: np.ndarray) -> np.ndarray:
    return np.broadcast_to(function(*map(_compact, fields)), shape)


def _and(shape: tuple[int, ...], operands: Sequence[Known | None]) -> Known:
    (f0, t0, *_), (f1, t1, *_) = (_fields(one, shape) for one in operands)
    none = _nothing(shape)
    return Known(_wide(shape, np.logical_or, f0, f1), _wide(shape, np.logical_and, t0, t1), none, none)


def _or(shape: tuple[int, ...], operands: Sequence[Known | None]) -> Known:
    (f0, t0, *_), (f1, t1, *_) = (_fields(one, shape) for one in operands)
    none = _nothing(shape)
    return Known(_wide(shape, np.logical_and, f0, f1), _wide(shape, np.logical_or, t0, t1), none, none)


def _not(shape: tuple[int, ...], operands: Sequence[Known | None]) -> Known:
    false, true, *_ = _fields(operands[0], shape)
    return Known(true, false, _nothing(shape), _nothing(shape))


def _select(shape: tuple[int, ...], operands: Sequence[Known | None]) -> Known | None:
    if len(operands) != 3:
        return None
    false, true, *_ = _fields(operands[0], shape)
    both = zip(_fields(operands[1], shape), _fields(operands[2], shape), strict=True)

    def chosen(f: np.ndarray, t: np.ndarray, zero: np.ndarray, one: np.ndarray) -> np.ndarray:
        return (f & zero) | (t & one) | (zero & one)

    return Known(*(_wide(shape, chosen, false, true, zero, one) for zero, one in both))


def _converted(shape: tuple[int, ...], operands: Sequence[Known | None]) -> Known | None:
    return operands[0] and Known(operands[0].false, operands[0].true, operands[0].low, operands[0].bottom)


#: Primitives of which something is known where not all operands are.
_PARTLY: Mapping[str, Callable[[tuple[int, ...], Sequence[Known | None]], Known | None]] = {
    "and": _and,
    "or": _or,
    "not": _not,
    "mul": _and,
    "select_n": _select,
    "convert_element_type": _converted,
}
