"""Check by numbers that a cone computes attention, and find its scale, its mask, its bias and its gradients.

In: a `Cone`. Out: a `Formula`; None if the cone computes something else. The cone is evaluated in float64 on random numbers, with
small sizes of its loops, and compared with

    S = scale * Q K^T + bias,  P = softmax(S),  O = P V,
    dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(P * dP)),  dQ = scale * dS K,  dK = scale * dS^T Q.

All functions inside a cone are smooth but for masks and the maximum that a softmax subtracts, so no special case hides between the
numbers. How the step is written does not matter: its scale may be on the queries, its softmax in any form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.frontend.equations import Equation
from autopar.rules.table import traits_of
from autopar.transforms.attention.cones import Cone
from autopar.transforms.attention.masks import Expression, ExpressionReader, causal
from autopar.transforms.attention.named_dims import Dim, NamedDims, UnnamedDimError, evaluated
from autopar.transforms.attention.roles import OPERAND_OF, OtherFormulaError, Roles, require, roles_of
from autopar.transforms.attention.sections import Sections

#: A masked score is at most this. A larger one, such as -10,000, still has a weight in a row that is masked as a whole.
MASKED = -1e8
_TOLERANCE = 1e-9
#: The sizes at which a cone is evaluated.
_BATCH, _QUERIES, _GROUP, _KEYS, _FEATURES, _VALUES = 2, 3, 2, 4, 2, 3


@dataclass(frozen=True)
class Bias:
    """What is added to the scores before the softmax, or masks them.

    Args:
        equations: the equations from the scores to the softmax's operand.
        leaves: by origin, the other values that they read.
        given: masks that are replaced by one value, because the kernel applies a causal mask.
        scores, result: the origins of the scores, for which it is computed at 0, and of the softmax's operand.
        is_mask: whether it only masks.
    """

    equations: tuple[int, ...]
    leaves: Mapping[int, Expression]
    given: Mapping[Expression, bool]
    scores: int
    result: int
    is_mask: bool

    def parts(self) -> tuple[Expression, ...]:
        """What it reads: values of the step, and masks of positions that are not causal."""
        return tuple(dict.fromkeys(part for one in self.leaves.values() for part in self._parts(one)))

    def _parts(self, one: Expression) -> Iterator[Expression]:
        if one in self.given or one.kind == "literal":
            return
        if one.kind == "function" and not one.is_position:
            for operand in one.operands:
                yield from self._parts(operand)
        else:
            yield one


@dataclass(frozen=True)
class Formula:
    """An attention.

    Args:
        queries: the dim of positions of queries.
        bias: None if nothing is added to the scores and no mask but a causal one is applied.
    """

    cone: Cone
    dims: NamedDims
    roles: Roles
    queries: Dim
    scale: float
    is_causal: bool
    bias: Bias | None

    @property
    def groups(self) -> tuple[Dim, ...]:
        """The dims of query heads that share a key head."""
        return tuple(name for name in self.roles.rows if name != self.queries)


def formula_of(sections: Sections, cone: Cone, *, through_masks: bool = True) -> Formula | None:
    """The formula of a cone; None if it does not compute attention.

    Args:
        through_masks: whether a bias that is computed from masks is read as a mask.
    """
    try:
        return _Check(sections, cone, through_masks).formula()
    except (UnnamedDimError, OtherFormulaError):
        return None


class _Check:
    """The check of one cone.

    Raises:
        UnnamedDimError, OtherFormulaError: it does not compute attention.
    """

    def __init__(self, sections: Sections, cone: Cone, through_masks: bool) -> None:
        self.sections, self.equations, self.cone = sections, sections.trace.equations, cone
        self.dims, self.roles = roles_of(sections, cone)
        reader = ExpressionReader(sections, through_masks=through_masks)
        self.leaves = {value: reader.read(value, self.dims.names(value)) for value in cone.leaves}
        masks = {mask for one in self.leaves.values() for mask in one.masks()}
        found = {mask: causal(mask, self.roles.keys, self.dims.size) for mask in masks}
        #: Causal masks, and whether they are true where a key may be read.
        self.causal = {mask: one[1] for mask, one in found.items() if one is not None}
        along = {one[0] for one in found.values() if one is not None}
        require(len(along) <= 1 and along <= set(self.roles.rows))
        self.queries = along.pop() if along else max(self.roles.rows, key=self.dims.size)
        roles = self.roles
        self.names = (*roles.batch, *roles.rows, roles.keys, roles.features, roles.values)
        require(len(set(self.names)) == len(self.names))
        sizes = dict.fromkeys(roles.batch, _BATCH) | dict.fromkeys(roles.rows, _GROUP) | {self.queries: _QUERIES}
        self.sizes = sizes | {roles.keys: _KEYS, roles.features: _FEATURES, roles.values: _VALUES}
        self.scores = self.equations[roles.scores].results[0]
        self.result = self._softmax_operand()
        self.rng = np.random.default_rng(0)

    def formula(self) -> Formula:
        """The formula."""
        bias = Bias(tuple(self._above(self.result)), self.leaves, self.causal, self.scores, self.result, True)
        parts, scales, are_masks = bias.parts(), set[float](), list[bool]()
        for flips in (False, True):  # every mask is once true and once false
            drawn = self._drawn(flips)
            scale, without = self._scale(drawn, is_constant=not parts)
            scales.add(scale)
            are_masks.append(bool(((without == 0) | (without <= MASKED)).all()))
            self._compare(drawn, scale)
        require(len(scales) == 1)
        if not all(are_masks):
            bias = Bias(bias.equations, bias.leaves, bias.given, bias.scores, bias.result, is_mask=False)
        is_causal = bool(self.causal)
        return Formula(self.cone, self.dims, self.roles, self.queries, scales.pop(), is_causal, bias if parts else None)

    # -- scale, masks and bias ---------------------------------------------------------------

    def _scale(self, drawn: Mapping[Expression, Any], *, is_constant: bool) -> tuple[float, Any]:
        """The scale, and what is added to the scores but for a causal mask. Check that nothing else happens to the scores.

        Args:
            is_constant: whether nothing but constants is added. A softmax ignores one number.
        """
        at_random = self._numbers(self._shape(self.dims.names(self.scores)), float)
        added = self._operand_at(drawn, np.zeros_like(at_random))
        at_one = self._operand_at(drawn, np.ones_like(at_random))
        slope = np.where(at_one == added, 0.0, at_one - np.where(np.isinf(added), 0.0, added))
        kept = slope != 0
        require(bool(kept.any()) and bool((added[~kept] <= MASKED).all()))
        scale = float(f"{slope[kept][0]:.12g}")
        require(scale > 0 and np.allclose(slope[kept], scale, rtol=_TOLERANCE, atol=0))
        operand = self._operand_at(drawn, at_random)
        require(np.allclose(operand[kept], scale * at_random[kept] + added[kept], rtol=_TOLERANCE))
        require(bool((operand[~kept] <= MASKED).all()))
        self.kept = kept
        without = self._operand_at({**drawn, **{m: np.asarray(t) for m, t in self.causal.items()}}, 0 * at_random)
        if self.causal:
            seen = np.broadcast_to(self._below(), added.shape)
            require(np.array_equal(without[seen], added[seen]) and bool((added[~seen] <= MASKED).all()))
        require(not is_constant or np.ptp(without) == 0)
        return scale, without

    def _operand_at(self, drawn: Mapping[Expression, Any], scores: Any) -> Any:
        """The softmax's operand for given scores."""
        given = self._leaves_at(drawn) | {self.scores: scores}
        with np.errstate(all="ignore"):
            made = evaluated(self.dims, self.names, self._above(self.result), given, np, self.sizes)[self.result]
        return np.broadcast_to(made, np.broadcast_shapes(made.shape, scores.shape))

    def _leaves_at(self, drawn: Mapping[Expression, Any]) -> dict[int, Any]:
        return {value: one.computed(np, drawn.get) for value, one in self.leaves.items()}

    def _below(self) -> Any:
        """A causal mask at the sizes of the evaluation."""
        rows, columns = self._positions(self.queries), self._positions(self.roles.keys)
        return columns <= rows

    def _positions(self, name: Dim) -> Any:
        return np.arange(self.sizes[name]).reshape([-1 if one == name else 1 for one in self.names])

    def _softmax_operand(self) -> int:
        """The origin of the scores from which the softmax subtracts its maximum, or which it exponentiates."""
        (operand,) = self.sections.reads(self.cone.exponential)
        while (n := self.sections.producer(operand)) is not None and n in self.cone.inside:
            read = self.sections.reads(n)
            if traits_of(self.equations[n].primitive).lays_out and len(read) == 1:
                (operand,) = read
            elif len(read) == 2 and _is_difference(self.equations[n]) and self._has_no_keys(read[1]):
                return read[0]
            else:
                break
        return operand

    def _has_no_keys(self, value: int) -> bool:
        """Whether a value is constant along the keys."""
        while self.roles.keys in self.dims.names(value):
            n = self.sections.producer(value)
            if n is None or not traits_of(self.equations[n].primitive).lays_out or len(self.sections.reads(n)) != 1:
                return False
            (value,) = self.sections.reads(n)
        return True

    def _above(self, value: int) -> list[int]:
        """The equations of the cone on which a value depends."""
        found, pending, inside = set[int](), [value], set(self.cone.inside)
        while pending:
            n = self.sections.producer(pending.pop())
            if n is not None and n in inside and n not in found:
                found.add(n)
                pending += self.sections.reads(n)
        return sorted(found)

    # -- random numbers ----------------------------------------------------------------------

    def _drawn(self, flips: bool) -> dict[Expression, Any]:
        """Random numbers for the parts of masks and biases, and true positions.

        Args:
            flips: whether masks have the opposite values of those of the first draw.
        """
        self.rng = np.random.default_rng(0)
        drawn: dict[Expression, Any] = {}
        for part in dict.fromkeys(p for one in self.leaves.values() for p in (*one.masks(), *one.parts)):
            if part.kind == "iota" and part.along is not None:
                drawn[part] = self._positions(part.along)
            elif part in self.causal:
                drawn[part] = self._below() if self.causal[part] else ~self._below()
            elif part.kind != "literal":
                is_mask = part.kind == "function"
                dtype = bool if is_mask else self.sections.trace.avals[part.origin].dtype
                numbers = self._numbers(self._shape(part.names), dtype)
                drawn[part] = ~numbers if flips and numbers.dtype == bool else numbers
        return drawn

    def _shape(self, names: Sequence[Dim | None]) -> list[int]:
        return [self.sizes[name] if name in names else 1 for name in self.names]

    def _numbers(self, shape: Sequence[int], dtype: Any) -> Any:
        if np.dtype(dtype) == np.bool_:
            return self.rng.random(shape) < 0.7
        if np.issubdtype(dtype, np.integer):
            return self.rng.integers(1, _KEYS, shape)
        return self.rng.standard_normal(shape)

    # -- the comparison ----------------------------------------------------------------------

    def _compare(self, drawn: Mapping[Expression, Any], scale: float) -> None:
        """Compare all outputs with the formula."""
        operands = self.roles.operands
        by_role = {role: self._numbers(self._shape(self.dims.names(v)), float) for role, v in operands.items()}
        q, k, v, d_out = (by_role.get(role) for role in ("query", "key", "value", "d_out"))
        assert q is not None and k is not None and v is not None
        keys, rows = self._axes(self.roles.keys), self._axes(*self.roles.rows)
        scores = _total(q * k, self._axes(self.roles.features))
        given = self._leaves_at(drawn) | {self.scores: scores}
        d_p = None if d_out is None else _total(d_out * v, self._axes(self.roles.values))
        others = set(self.cone.entries) - {self.roles.scores}
        given |= {self.equations[n].results[0]: d_p for n in others}
        with np.errstate(all="ignore"):
            made = evaluated(self.dims, self.names, self.cone.inside, given, np, self.sizes)
            z = np.broadcast_to(made[self.result], np.broadcast_shapes(scores.shape, made[self.result].shape))
            p = np.exp(z - z.max(axis=keys, keepdims=True))
            p = p / _total(p, keys)
        expected = {"out": _total(p * v, keys)}
        if d_out is not None:
            d_z = p * (d_p - _total(p * d_p, keys)) * self.kept * scale
            expected["d_value"] = _total(p * d_out, rows)
            expected |= {"d_query": _total(d_z * k, keys), "d_key": _total(d_z * q, rows)}
        inside = {result for n in self.cone.inside for result in self.equations[n].results}
        for role, at in self.roles.outputs.items():
            for n in at:
                (inner,) = (value for value in self.sections.reads(n) if value in inside)
                product = np.broadcast_to(made[inner], z.shape) * by_role[OPERAND_OF[role]]
                found = _total(product, keys if role in ("out", "d_query") else rows)
                close = np.allclose(found, expected[role], rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
                require(found.shape == expected[role].shape and close)

    def _axes(self, *names: Dim) -> tuple[int, ...]:
        return tuple(self.names.index(name) for name in names)


def _is_difference(equation: Equation) -> bool:
    traits = traits_of(equation.primitive)
    return traits.elementwise and traits.linear == "all" and not traits.adds


def _total(array: Any, axes: tuple[int, ...]) -> Any:
    return array.sum(axis=axes, keepdims=True)
