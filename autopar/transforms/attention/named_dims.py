"""Evaluate equations with a name for each dim, at any sizes.

In: `Sections`, and equations. Out: `NamedDims`: dims of one loop have one name, by the sharding rules; and `evaluated`, which
computes the equations on arrays that have one axis for each name. An axis of size 1 is a dim that the array lacks or along which it
is constant, so nothing is broadcast before it must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.frontend.equations import Equation, LiteralOperand
from autopar.frontend.from_jaxpr import node_params
from autopar.rules.node_view import NodeView
from autopar.rules.smooth import REDUCTIONS, smooth_function
from autopar.rules.table import rule_for, traits_of
from autopar.transforms.attention.sections import Sections

#: A dim of a value.
Dim = tuple[int, int]


class UnnamedDimError(Exception):
    """A dim is split, merged, or used twice, so that it has no name of its own."""


class NamedDims:
    """Names of the dims of values: dims that a sharding rule gives one factor have one name.

    Raises:
        UnnamedDimError: a dim has no name.
    """

    def __init__(self, sections: Sections, equations: Iterable[int]) -> None:
        self.sections, self.trace = sections, sections.trace
        self._parent: dict[Dim, Dim] = {}
        for n in equations:
            self._unite(self.trace.equations[n])

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(self.trace.avals[value].shape)

    def names(self, value: int) -> tuple[Dim | None, ...]:
        """The name of each dim of a value; None for a dim of size 1.

        Raises:
            UnnamedDimError: two dims have the same name.
        """
        origin = self.sections.origin(value)
        found = tuple(None if size == 1 else self._find((origin, dim)) for dim, size in enumerate(self.shape(origin)))
        named = [name for name in found if name is not None]
        if len(set(named)) < len(named):
            raise UnnamedDimError
        return found

    def size(self, name: Dim) -> int:
        """The size of the dims with a name."""
        return self.shape(name[0])[name[1]]

    def _find(self, dim: Dim) -> Dim:
        while (parent := self._parent.setdefault(dim, dim)) != dim:
            dim = parent
        return dim

    def _unite(self, equation: Equation) -> None:
        factors = factors_of(self.sections, equation)
        if factors is None:
            raise UnnamedDimError
        first: dict[int, Dim] = {}
        for atom, dims in zip((*equation.operands, *equation.results), (*factors[0], *factors[1]), strict=True):
            for d, factor in enumerate(dims):
                if factor is not None and isinstance(atom, int):
                    own = self._find((self.sections.origin(atom), d))
                    self._parent[own] = self._find(first.setdefault(factor, own))


def factors_of(
    sections: Sections, equation: Equation
) -> tuple[list[tuple[int | None, ...]], list[tuple[int | None, ...]]] | None:
    """The factor of each dim of the operands and of the results, by the sharding rule; None for a dim of size 1.

    Returns:
        None if a dim has no factor, or several.
    """
    avals = sections.trace.avals
    shapes = [tuple(avals[a].shape) if isinstance(a, int) else () for a in (*equation.operands, *equation.results)]
    count = len(equation.operands)
    view = NodeView(equation.primitive, node_params(equation.source), tuple(shapes[:count]), tuple(shapes[count:]))
    rule = rule_for(view)
    if rule is None:
        return None
    found: list[tuple[int | None, ...]] = []
    for shape, term in zip(shapes, (*rule.operands, *rule.results), strict=True):
        if any(size > 1 and len(factors) != 1 for size, factors in zip(shape, term, strict=True)):
            return None
        found.append(tuple(factors[0] if size > 1 else None for size, factors in zip(shape, term, strict=True)))
    return found[:count], found[count:]


def evaluated(
    dims: NamedDims,
    names: Sequence[Dim],
    equations: Sequence[int],
    given: Mapping[int, Any],
    xp: Any,
    size: Mapping[Dim, int] | None = None,
) -> dict[int, Any]:
    """Compute equations on arrays with one axis for each name, in their order.

    Args:
        names: the names, one for each axis.
        given: arrays by origin; they replace what an equation would compute.
        xp: numpy or `jax.numpy`.
        size: the size of each name; by default the real one.

    Returns:
        All arrays by origin.
    """
    trace, found = dims.trace, dict(given)
    sizes = {name: dims.size(name) if size is None else size[name] for name in names}
    axis = {name: i for i, name in enumerate(names)}

    def read(atom: Any) -> Any:
        return atom.value if isinstance(atom, LiteralOperand) else found[dims.sections.origin(atom)]

    for n in equations:
        equation = trace.equations[n]
        if any(result in found for result in equation.results):
            continue
        (result,) = equation.results
        operands = [read(atom) for atom in equation.operands]
        traits, kept = traits_of(equation.primitive), {name for name in dims.names(result) if name}
        read_names = [name for atom in equation.operands if isinstance(atom, int) for name in dims.names(atom) if name]
        gone = tuple(axis[name] for name in dict.fromkeys(read_names) if name not in kept)
        if traits.contraction:
            left, right = operands
            found[result] = _summed(xp, left * right, gone, sizes, names)
        elif equation.primitive in REDUCTIONS:
            if REDUCTIONS[equation.primitive] == "sum":
                found[result] = _summed(xp, operands[0], gone, sizes, names)
            else:
                found[result] = xp.max(operands[0], axis=gone, keepdims=True)
        elif traits.lays_out and not traits.elementwise:
            found[result] = operands[0]
        else:
            literals = [atom.value for atom in equation.operands if isinstance(atom, LiteralOperand)]
            function = smooth_function(equation.primitive, literals)
            assert function is not None, equation.primitive
            found[result] = function(xp, equation.source.params, *operands)
    return found


def _summed(xp: Any, array: Any, axes: Sequence[int], sizes: Mapping[Dim, int], names: Sequence[Dim]) -> Any:
    """The sum over axes, which an array that is constant along them does not have."""
    times = 1
    for axis in axes:
        if array.shape[axis] == 1:
            times *= sizes[names[axis]]
    return xp.sum(array, axis=tuple(axes), keepdims=True) * times
