"""Write an attention as a call of a fused kernel, forward and backward, as equations of a trace.

In: a `Formula`, and the values of its operands in a section. Out: `Call`: the equations of the forward and of the backward pass, of
which each part can be written where it belongs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.absent_cudnn import without_cudnn
from autopar.rules.table import traits_of
from autopar.transforms.attention.formula import MASKED, Formula
from autopar.transforms.attention.masks import Expression
from autopar.transforms.attention.named_dims import Dim, evaluated
from autopar.transforms.attention.sources import Multiple

#: The dims of a tensor, by role, in the order of a kernel: batch, tokens, heads, features.
Layout = tuple[tuple[Dim, ...], ...]
#: An attention of arrays `[batch, tokens, heads, features]`.
Kernel = Callable[..., Any]


class UnsupportedError(Exception):
    """A kernel cannot compute an attention."""


def _cudnn(query: Any, key: Any, value: Any, *, bias: Any, mask: Any, scale: float, is_causal: bool) -> Any:
    """cuDNN's flash attention."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedError(f"cuDNN's attention computes in bfloat16 or float16, not in {query.dtype}")
    if value.shape != key.shape or key.dtype != query.dtype or value.dtype != query.dtype:
        raise UnsupportedError("cuDNN's attention needs keys and values of one shape and queries of their dtype")
    if bias is not None:
        bias = jnp.maximum(bias, -0.7 * float(jnp.finfo(query.dtype).max)).astype(query.dtype)
    options = {"bias": bias, "mask": mask, "scale": scale, "is_causal": is_causal, "implementation": "cudnn"}
    try:
        return jax.nn.dot_product_attention(query, key, value, **options)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedError(str(error)) from error


#: The kernels, by name. Read-only.
KERNELS: Mapping[str, Kernel] = {"cudnn": _cudnn}


@dataclass(frozen=True)
class Call:
    """The equations of an attention by a kernel.

    Args:
        inputs: the variables of queries, keys, values, and what the bias reads.
        d_out: the variable of the gradient of the output; None without a backward pass.
        before: cheap equations of the forward pass that do not depend on the kernel: layouts and masks.
        kernel: the kernel, and the equations of the forward pass that depend on it.
        backward: the equations of the backward pass.
        kept: the variables that the forward pass computes and the backward pass reads.
        results: by matmul that is replaced, the variable of its result.
    """

    inputs: tuple[Any, ...]
    d_out: Any
    before: tuple[Any, ...]
    kernel: tuple[Any, ...]
    backward: tuple[Any, ...]
    kept: tuple[Any, ...]
    results: Mapping[int, Any]

    @property
    def kernel_results(self) -> tuple[Any, ...]:
        """The kept variables that cannot be computed again at no cost."""
        made = {variable for equation in self.kernel for variable in equation.outvars}
        return tuple(variable for variable in self.kept if variable in made)


def call_of(formula: Formula, sources: Mapping[str, Multiple], reads: Sequence[int], kernel: str) -> Call:
    """The call of a kernel.

    Args:
        sources: by role, one of the operand's sources.
        reads: the values that the bias reads, in the order of `bias_parts`.

    Raises:
        UnsupportedError: the kernel cannot compute it.
    """
    dims, writer = formula.dims, _Layouts(formula)
    roles, operands = ("query", "key", "value"), {role: value for role, (value, _) in sources.items()}
    factors = {f"d_{role}": factor for role, (_, factor) in sources.items()}
    scale = formula.scale * factors["d_query"] * factors["d_key"]
    values = [operands[role] for role in roles] + list(reads)
    role_of = {n: role for role, at in formula.roles.outputs.items() for n in at}
    has_backward = "d_out" in operands
    _check_bias(formula, dims.trace.avals[operands["query"]].dtype)
    exits = {n: formula.roles.results[n][-1] for n in role_of}

    def function(*arrays: Any) -> list[Any]:
        own = [writer.placed(x, dims.names(operands[role]), role) for role, x in zip(roles, arrays[:3], strict=True)]
        bias = writer.bias(dict(zip(bias_parts(formula), arrays[3 : len(values)], strict=True)))
        options = bias | {"scale": scale, "is_causal": formula.is_causal}
        attend = lambda q, k, v: KERNELS[kernel](q, k, v, **options)  # noqa: E731
        if not has_backward:
            made: dict[str, Any] = {"out": attend(*own)}
        else:
            out, gradient = jax.vjp(attend, *own)
            d_out = writer.placed(arrays[-1], dims.names(operands["d_out"]), "out").astype(out.dtype)
            made = dict(zip(("out", "d_query", "d_key", "d_value"), (out, *gradient(d_out)), strict=True))
        return [writer.restored(made[role], role, factors.get(role, 1.0), exits[n]) for n, role in role_of.items()]

    given = [*values, *([operands["d_out"]] if has_backward else [])]
    with without_cudnn():
        jaxpr = jax_compat.staged(function, [dims.trace.avals[value] for value in given])
    d_out = jaxpr.invars[-1] if has_backward else None
    results = dict(zip(role_of, jaxpr.outvars, strict=True))
    return _cut_in_two(jaxpr, tuple(jaxpr.invars[: len(values)]), d_out, results)


def _cut_in_two(jaxpr: Any, inputs: tuple[Any, ...], d_out: Any, results: Mapping[int, Any]) -> Call:
    """The equations of both passes, as those of the forward pass and those that need the gradient of the output."""
    late, costly = (set[Any]() if d_out is None else {d_out}), set[Any]()
    before, kernels, backward = list[Any](), list[Any](), list[Any]()
    for equation in jaxpr.eqns:
        read = {v for v in equation.invars if not isinstance(v, jax_compat.Literal)}
        if not late.isdisjoint(read):
            backward.append(equation)
            late.update(equation.outvars)
        elif not costly.isdisjoint(read) or not _is_cheap(equation):
            kernels.append(equation)
            costly.update(equation.outvars)
        else:
            before.append(equation)
    forward = {v for equation in (*before, *kernels) for v in equation.outvars}
    read_late = [v for equation in backward for v in equation.invars if not isinstance(v, jax_compat.Literal)]
    kept = tuple(v for v in dict.fromkeys(read_late) if v in forward)
    return Call(inputs, d_out, tuple(before), tuple(kernels), tuple(backward), kept, results)


def _is_cheap(equation: Any) -> bool:
    """Whether an equation only lays out or combines elements."""
    traits = traits_of(equation.primitive.name)
    return traits.lays_out or traits.elementwise or not equation.invars


def _check_bias(formula: Formula, dtype: Any) -> None:
    """Refuse a bias that has more digits than the kernel's operands, in whose dtype the kernel reads it.

    Raises:
        UnsupportedError: it has.
    """
    if formula.bias is None or formula.bias.is_mask:
        return
    for part in formula.bias.parts():
        own = formula.dims.trace.avals[part.origin].dtype
        if part.kind == "iota" or jax.numpy.promote_types(own, dtype) != dtype:
            what = "positions" if part.kind == "iota" else str(own)
            raise UnsupportedError(f"its bias is computed from {what}, and the kernel reads a bias in {dtype}")


def bias_parts(formula: Formula) -> tuple[Expression, ...]:
    """What the bias of an attention reads."""
    return () if formula.bias is None else formula.bias.parts()


class _Layouts:
    """Converts between the dims of a step and those of a kernel."""

    def __init__(self, formula: Formula) -> None:
        self.formula, self.dims = formula, formula.dims
        grouped = bool(formula.groups)
        count = len(formula.roles.batch)
        heads = formula.roles.batch[-1:] if count > 1 or (grouped and count) else ()
        batch = formula.roles.batch[: count - len(heads)]
        queries, keys = (*heads, *formula.groups), heads
        features, values = (formula.roles.features,), (formula.roles.values,)
        self.layouts: dict[str, Layout] = {
            "query": (batch, (formula.queries,), queries, features),
            "key": (batch, (formula.roles.keys,), keys, features),
            "value": (batch, (formula.roles.keys,), keys, values),
            "out": (batch, (formula.queries,), queries, values),
        }
        for role in ("query", "key", "value"):
            self.layouts[f"d_{role}"] = self.layouts[role]
        self.scores: Layout = (batch, queries, (formula.queries,), (formula.roles.keys,))

    def placed(self, array: Any, names: Sequence[Dim | None], role: str) -> Any:
        """An operand in the order of the kernel."""
        layout = self.layouts[role]
        order = [name for group in layout for name in group]
        kept = array.reshape([size for size, name in zip(array.shape, names, strict=True) if name is not None])
        own = [name for name in names if name is not None]
        moved = jnp.transpose(kept, [own.index(name) for name in order])
        return moved.reshape([math.prod(self.dims.size(name) for name in group) for group in layout])

    def restored(self, array: Any, role: str, factor: float, value: int) -> Any:
        """A result in the order and the dtype of a value of the step; a gradient by a multiple of the kernel's operand."""
        aval, names = self.dims.trace.avals[value], self.dims.names(value)
        if factor != 1:
            array = array.astype(jnp.float32) / factor
        order = [name for group in self.layouts[role] for name in group]
        split = array.reshape([self.dims.size(name) for name in order])
        moved = jnp.transpose(split, [order.index(name) for name in names if name is not None])
        return moved.reshape(aval.shape).astype(aval.dtype)

    def bias(self, given: Mapping[Expression, Any]) -> dict[str, Any]:
        """The bias or the mask of a kernel, `[batch, heads, queries, keys]`."""
        bias = self.formula.bias
        if bias is None:
            return {"bias": None, "mask": None}
        axes = tuple(name for group in self.scores for name in group)
        arrays = {part: self._on_axes(array, part.names, axes) for part, array in given.items()}
        arrays |= {mask: jnp.asarray(is_true) for mask, is_true in bias.given.items()}
        leaves = {value: one.computed(jnp, arrays.get) for value, one in bias.leaves.items() if _is_known(one, arrays)}
        leaves[bias.scores] = jnp.zeros((1,) * len(axes), jnp.float32)
        made = evaluated(self.dims, axes, bias.equations, leaves, jnp)[bias.result]
        made = jnp.broadcast_to(made, [self._size(i, made, axes, name) for i, name in enumerate(axes)])
        sizes = iter(made.shape)
        made = made.reshape([math.prod(next(sizes) for _ in group) for group in self.scores])
        return {"bias": None, "mask": made > MASKED} if bias.is_mask else {"bias": made, "mask": None}

    def _size(self, axis: int, made: Any, axes: Sequence[Dim], name: Dim) -> int:
        """The size of an axis of the bias: whole dims of queries and keys; the batch and the heads whole or 1."""
        group = next(group for group in self.scores if name in group)
        is_whole = group in self.scores[2:] or any(made.shape[axes.index(one)] > 1 for one in group)
        return self.dims.size(name) if is_whole else made.shape[axis]

    @staticmethod
    def _on_axes(array: Any, names: Sequence[Dim | None], axes: Sequence[Dim]) -> Any:
        own = [name for name in names if name is not None]
        kept = array.reshape([size for size, name in zip(array.shape, names, strict=True) if name is not None])
        order = [name for name in axes if name in own]
        moved = jnp.transpose(kept, [own.index(name) for name in order])
        sizes = dict(zip(order, moved.shape, strict=True))
        return moved.reshape([sizes.get(name, 1) for name in axes])


def _is_known(one: Expression, arrays: Mapping[Expression, Any]) -> bool:
    """Whether all that an expression reads is known."""
    if one in arrays or one.kind == "literal":
        return True
    return one.kind == "function" and all(_is_known(operand, arrays) for operand in one.operands)


def part_of(inputs: Sequence[Any], equations: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """A part of a jaxpr, to append to a trace."""
    return SimpleNamespace(invars=list(inputs), eqns=list(equations), outvars=list(outputs))
