"""Rules of Fourier transforms, decompositions and solves: only their batch dims can be split.

In: `NodeView`. Out: `LINEAR_ALGEBRA`, part of the table. Such an operation mixes all elements of its trailing dims. So
these need replication, and the leading dims, a batch of matrices or rows, are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from autopar.rules.factors import DimNames, Rule, build_rule
from autopar.rules.node_view import NodeView, RuleFunction
from autopar.rules.traits import Traits, with_traits


def _batched(view: NodeView, core: int, flops: Callable[[tuple[int, ...]], float]) -> Rule:
    """All tensors share their batch dims: the leading dims of the first operand, without its last `core`.

    Args:
        flops: the operations per matrix or row of the batch, as a function of the shape of the first operand's last
            dims.
    """
    first = view.operand_shapes[0]
    batch = len(first) - core

    def names(shape: tuple[int, ...]) -> DimNames:
        return [(d,) if d < batch and len(shape) >= batch else () for d in range(len(shape))]

    return build_rule(
        [names(shape) for shape in view.operand_shapes],
        [names(shape) for shape in view.result_shapes],
        view.operand_shapes,
        view.result_shapes,
        flops_per_point=flops(first[batch:]),
    )


def _fft(view: NodeView) -> Rule:
    """5 n log2(n) real operations for n elements, the usual count of a complex transform."""
    lengths = view.params["fft_lengths"]
    size = math.prod(lengths)
    return _batched(view, len(lengths), lambda _: 5.0 * size * max(1.0, math.log2(max(1, size))))


def _cubic(shape: tuple[int, ...], times: float) -> float:
    """`times` m n min(m, n) for a matrix of m rows and n columns."""
    return times * math.prod(shape) * min(shape, default=1)


def _linear(shape: tuple[int, ...]) -> float:
    return float(math.prod(shape))


def _triangular_solve(view: NodeView) -> Rule:
    """One multiply and one add per element of the triangle and right-hand side.

    The right-hand sides are independent, but XLA's partitioner all-gathers both operands if they are split.
    """
    sides = view.operand_shapes[1][-1 if view.params["left_side"] else -2]
    return _batched(view, 2, lambda shape: _linear(shape) * sides)


def _tridiagonal_solve(view: NodeView) -> Rule:
    """Eight operations per row and right-hand side; the first operand is a diagonal."""
    return _batched(view, 1, lambda shape: 8.0 * _linear(shape) * view.operand_shapes[3][-1])


#: Operations as multiples of m n min(m, n): of the textbook algorithm, or, if it is iterative, by LAPACK's manual.
_DECOMPOSITIONS: dict[str, float] = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "geqp3": 4 / 3,
    "geqrf": 4 / 3,
    "hessenberg": 10 / 3,
    "householder_product": 4 / 3,
    "lu": 2 / 3,
    "ormqr": 2.0,
    "qr": 8 / 3,
    "schur": 25.0,
    "svd": 20.0,
    "tridiagonal": 4 / 3,
}

LINEAR_ALGEBRA: dict[str, RuleFunction] = {
    "fft": _fft,
    **{name: partial(_batched, core=2, flops=partial(_cubic, times=times)) for name, times in _DECOMPOSITIONS.items()},
    "cholesky_update": partial(_batched, core=2, flops=partial(_cubic, times=1.0)),
    "lu_pivots_to_permutation": partial(_batched, core=1, flops=_linear),
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": _tridiagonal_solve,
}

#: Primitives that XLA lowers to a library call.
_CALLS = ("fft", "cholesky", "triangular_solve", "eigh", "svd", "qr", "lu")
LINEAR_ALGEBRA_TRAITS = with_traits(LINEAR_ALGEBRA, dict.fromkeys(_CALLS, Traits(library=True)))
