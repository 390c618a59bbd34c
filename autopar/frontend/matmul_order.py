"""Move a transpose from the large side of a matmul to its small side.

In: `Trace`. Out: `Trace` with the same inputs, outputs and results. JAX writes the scores of grouped-query attention,
`einsum("bqgrk,bsgk->bgrqs")`, as a matmul with the result `(b, g, s, q, r)` and a transpose. The dims `q` and `r` of one
operand change their order, which no layout of the matmul's result expresses, so XLA copies all scores; the gradient
copies them again. Here the matmul reads or writes the scores in their own order, and a query or its gradient is
transposed instead. A transpose that only moves whole groups of dims is free: XLA chooses a layout. It is left alone,
unless it swaps the free dims of a batched matmul: XLA swaps the operands of a plain matmul (where no constraint is in its
way: `runtime.planned_shardings`), but not of a batched one, and then an update of the experts' weights transposes their gradient, and copies the weights and the optimizer state.

The products are the same. The order of summation changes only where two contracted dims change their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from autopar.frontend.equations import Equation, Item, Nest, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.jax_interop import compat as jax_compat
from autopar.rules.table import traits_of


def order_matmuls(trace: Trace) -> Trace:
    """The trace with transposes on the small side of its matmuls; the same trace if there is nothing to move."""
    for find in (_operands_to_fold, _results_to_fold):
        found = find(trace)
        if found.matmuls:
            trace = _rewritten(trace, found)
    return trace


@dataclass(frozen=True, slots=True)
class _Side:
    """One operand of a matmul: its value, and its batch, contracted and free dims in the matmul's order."""

    value: int
    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]

    def read_through(self, value: int, permutation: Sequence[int]) -> _Side:
        """The same operand, read from the value of which it is a transpose."""
        batch, contracted, free = (
            tuple(permutation[dim] for dim in dims) for dims in (self.batch, self.contracted, self.free)
        )
        return _Side(value, batch, contracted, free)


@dataclass(frozen=True, slots=True)
class _Matmul:
    """A matmul to write.

    Args:
        sides: the operands. The result's dims are the batch dims and the free dims of the first and the second.
        transposed: the operands that are transposed to batch, free and contracted dims.
        permutation: the transpose of its result; None if there is none.
        result: the number of the value that is made.
    """

    sides: tuple[_Side, _Side]
    transposed: tuple[bool, bool]
    permutation: tuple[int, ...] | None
    result: int


@dataclass(frozen=True, slots=True)
class _Found:
    """The matmuls to write, by the position of the old one, and the positions of transposes that they replace."""

    matmuls: dict[int, _Matmul]
    folded: set[int]


def _results_to_fold(trace: Trace) -> _Found:
    """Matmuls whose result is transposed."""
    found = _Found({}, set())
    outputs = {value for value in trace.outputs if isinstance(value, int)}
    for n, equation in enumerate(trace.equations):
        made = _producer(trace, equation) if _is_transpose(equation) else None
        if made is None or not _is_matmul(trace.equations[made]):
            continue
        product = trace.equations[made].results[0]
        sides = _sides(trace, trace.equations[made])
        if sides is None or trace.users[product] != [n] or product in outputs:
            continue
        ordered = _result_in_order(trace, sides, equation, product)
        if ordered is not None:
            found.matmuls[made] = ordered
            found.folded.add(n)
    return found


def _result_in_order(trace: Trace, sides: tuple[_Side, _Side], equation: Equation, product: int) -> _Matmul | None:
    """The matmul whose result has the transpose's order; None if that does not pay."""
    permutation = equation.source.params["permutation"]
    num_batch, num_first = len(sides[0].batch), len(sides[0].free)
    num_lhs = num_batch + num_first
    groups = [0 if dim < num_batch else 1 if dim < num_lhs else 2 for dim in permutation]
    swapped = groups == sorted(groups, key=(0, 2, 1).__getitem__)
    if not swapped and groups != sorted(groups):
        return None
    batch, first, second = (
        [dim for dim in permutation if span[0] <= dim < span[1]]
        for span in ((0, num_batch), (num_batch, num_lhs), (num_lhs, len(permutation)))
    )
    shape = trace.avals[product].shape
    moved = [not _in_order(dims, shape) and dims != sorted(dims) for dims in (batch, first, second)]
    transposed = (moved[0] or moved[1], moved[0] or moved[2])
    if any(transposed):
        if not _pays(trace, product, [side.value for side, moves in zip(sides, transposed, strict=True) if moves]):
            return None
    elif not (swapped and batch):
        return None
    placed = tuple(
        _Side(
            side.value,
            tuple(side.batch[dim] for dim in batch),
            side.contracted,
            tuple(side.free[dim - start] for dim in free),
        )
        for side, free, start in zip(sides, (first, second), (num_batch, num_lhs), strict=True)
    )
    (lhs, rhs), (of_lhs, of_rhs) = placed, transposed
    if swapped:
        return _Matmul((rhs, lhs), (of_rhs, of_lhs), None, equation.results[0])
    return _Matmul((lhs, rhs), (of_lhs, of_rhs), None, equation.results[0])


def _operands_to_fold(trace: Trace) -> _Found:
    """Matmuls that read transposes of larger tensors. All users of such a transpose are matmuls, or it remains."""
    found = _Found({}, set())
    outputs = {value for value in trace.outputs if isinstance(value, int)}
    for n, equation in enumerate(trace.equations):
        if not _is_transpose(equation) or n in found.folded or equation.results[0] in outputs:
            continue
        users = trace.users.get(equation.results[0], [])
        if any(not _is_matmul(trace.equations[user]) or user in found.matmuls for user in users):
            continue
        matmuls = [_reading_through(trace, equation, trace.equations[user]) for user in users]
        placed = [one for one in matmuls if one is not None]
        if len(placed) < len(users) or not _pays(trace, equation.results[0], [v for _, small in placed for v in small]):
            continue
        found.folded.add(n)
        for user, (one, _) in zip(users, placed, strict=True):
            found.matmuls[user], merged = _merged(trace, one, outputs)
            found.folded.update(merged)
    return found


def _merged(trace: Trace, matmul: _Matmul, outputs: set[int]) -> tuple[_Matmul, list[int]]:
    """The matmul whose transpose includes the one that alone reads it, and the position of the latter."""
    users = trace.users.get(matmul.result, [])
    if matmul.permutation is None or len(users) != 1 or matmul.result in outputs:
        return matmul, []
    (user,) = users
    equation = trace.equations[user]
    if not _is_transpose(equation):
        return matmul, []
    both = tuple(matmul.permutation[dim] for dim in equation.source.params["permutation"])
    whole = None if both == tuple(sorted(both)) else both
    return _Matmul(matmul.sides, matmul.transposed, whole, equation.results[0]), [user]


def _reading_through(trace: Trace, transpose: Equation, matmul: Equation) -> tuple[_Matmul, list[int]] | None:
    """The matmul that reads the operand of a transpose in that operand's order, and what is transposed instead."""
    sides = _sides(trace, matmul)
    is_first, is_second = (operand == transpose.results[0] for operand in matmul.operands)
    (source,) = transpose.operands
    if sides is None or (is_first and is_second) or not isinstance(source, int):
        return None
    large, small = sides if is_first else sides[::-1]
    through = large.read_through(source, transpose.source.params["permutation"])
    shape = trace.avals[source].shape
    if not _in_order(through.batch, shape):  # all three tensors would be in another order
        return None
    pairs = sorted(zip(through.contracted, small.contracted, strict=True))
    reorders = not _in_order(through.contracted, shape)
    free = tuple(sorted(through.free))
    ordered = _Side(source, through.batch, tuple(dim for dim, _ in pairs), free)
    other = _Side(small.value, small.batch, tuple(dim for _, dim in pairs), small.free)
    result = matmul.results[0]
    permutation = list(range(len(trace.avals[result].shape)))
    start = len(large.batch) + (0 if is_first else len(small.free))
    permutation[start : start + len(free)] = [start + free.index(dim) for dim in through.free]
    instead = [small.value] * reorders + [result] * (not _in_order(through.free, shape))
    made = _Matmul(
        (ordered, other) if is_first else (other, ordered),
        (False, reorders) if is_first else (reorders, False),
        None if permutation == sorted(permutation) else tuple(permutation),
        result,
    )
    return made, instead


def _rewritten(trace: Trace, found: _Found) -> Trace:
    builder = TraceBuilder(trace)
    position = {id(equation): n for n, equation in enumerate(trace.equations)}

    def write(items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, Nest):
                sections = builder.sections(item.sections, write)
                builder.add(Nest(item.kind, item.source, item.enter, sections, item.exit))
                continue
            n = position[id(item)]
            if n in found.matmuls:
                _write_matmul(builder, item, found.matmuls[n])
            elif n not in found.folded:
                builder.add(item)

    write(items_of(trace.equations, trace.regions))
    return builder.finish()


def _write_matmul(builder: TraceBuilder, equation: Equation, matmul: _Matmul) -> None:
    """Append a matmul and its transposes, with the name stack and source line of the old one."""
    params = equation.source.params

    def multiply(values: list[Any]) -> Sequence[Any]:
        operands: list[Any] = []
        sides: list[_Side] = []
        for value, side, moves in zip(values, matmul.sides, matmul.transposed, strict=True):
            placed = _canonical(side) if moves else side
            operands.append(lax.transpose(value, (*side.batch, *side.free, *side.contracted)) if moves else value)
            sides.append(placed)
        lhs, rhs = sides
        product = lax.dot_general(
            *operands,
            dimension_numbers=((lhs.contracted, rhs.contracted), (lhs.batch, rhs.batch)),
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
        return [product if matmul.permutation is None else lax.transpose(product, matmul.permutation)]

    values = [side.value for side in matmul.sides]
    dims = [(side.batch, side.contracted, side.free) for side in matmul.sides]
    what = repr((dims, matmul.transposed, matmul.permutation, equation.params_text))
    (made,) = builder.write(equation, what, values, multiply)
    builder.name(made, matmul.result)


def _canonical(side: _Side) -> _Side:
    """The operand transposed to batch, free and contracted dims."""
    dims = iter(range(len(side.batch) + len(side.free) + len(side.contracted)))
    batch, free, contracted = (tuple(next(dims) for _ in of) for of in (side.batch, side.free, side.contracted))
    return _Side(side.value, batch, contracted, free)


def _sides(trace: Trace, equation: Equation) -> tuple[_Side, _Side] | None:
    """The operands of a matmul; None if an operand is a literal, or the user states the result's sharding."""
    if equation.source.params.get("out_sharding") is not None:
        return None
    contracted, batch = equation.source.params["dimension_numbers"]
    sides: list[_Side] = []
    for value, summed, kept in zip(equation.operands, contracted, batch, strict=True):
        if not isinstance(value, int):
            return None
        free = [dim for dim in range(len(trace.avals[value].shape)) if dim not in summed and dim not in kept]
        sides.append(_Side(value, tuple(kept), tuple(summed), tuple(free)))
    lhs, rhs = sides
    return lhs, rhs


def _producer(trace: Trace, equation: Equation) -> int | None:
    (operand,) = equation.operands
    return trace.producers.get(operand) if isinstance(operand, int) else None


def _in_order(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether dims ascend; a dim of size 1 may be anywhere."""
    long = [dim for dim in dims if shape[dim] != 1]
    return long == sorted(long)


def _pays(trace: Trace, large: int, small: Sequence[int]) -> bool:
    """Whether transposing some values instead of a larger one saves memory traffic. Without any, nothing is saved."""
    return 0 < sum(_bytes(trace, value) for value in small) < _bytes(trace, large)


def _bytes(trace: Trace, value: int) -> float:
    aval = trace.avals[value]
    return math.prod(aval.shape) * jax_compat.itemsize(aval)


def _is_transpose(equation: Equation) -> bool:
    return traits_of(equation.primitive).permutes


def _is_matmul(equation: Equation) -> bool:
    return equation.primitive == "dot_general"
