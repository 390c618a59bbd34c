"""Flatten a jaxpr to one list of equations, including the bodies of loops and branches.

In: a jaxpr from `tracing`.
Out: `Equation`s over numbered values, and `Nest`s for loops and branches. Calls are inlined. A primitive with its own
program (`scan`, `while`, `cond`) becomes a list of *pieces*: one per entering value, then its sections (a body or the
branches), then one per leaving value. So each tensor that crosses a loop's border is a separate decision, and the body
is planned once, together with the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from autopar.errors import EffectError
from autopar.frontend.equations import Atom, Equation, LiteralOperand, Nest, Piece
from autopar.frontend.gather_gradient import as_comparison
from autopar.frontend.trace_builder import TraceBuilder, inlined
from autopar.ir.graph import UNKNOWN_TRIP_COUNT, Phase
from autopar.jax_interop import compat as jax_compat
from autopar.rules.table import traits_of


class Flattener:
    """Appends equations to a builder while it inlines nested calls; the only mutable object of this module."""

    def __init__(self, builder: TraceBuilder) -> None:
        self.builder = builder
        self.zeros: set[int] = set()
        self.repeat = 1.0

    def new_value(self, aval: Any) -> int:
        """A new value, produced as often as the current equation runs."""
        return self.builder.new(aval, self.repeat)

    def whole(self, traced: Any) -> tuple[tuple[int, ...], list[Atom]]:
        """Append the equations of a whole step. Return its inputs and outputs."""
        jaxpr, constants = jax_compat.open_jaxpr(traced)
        env = self._bound(jaxpr, constants)
        inputs = tuple(self.new_value(v.aval) for v in jaxpr.invars)
        env.update(zip(jaxpr.invars, inputs, strict=True))
        return inputs, self.inline(jaxpr, env, None)

    def _bound(self, jaxpr: Any, constants: Sequence[Any]) -> dict[Any, Atom]:
        """Values for a jaxpr's constants."""
        env: dict[Any, Atom] = {}
        for var, constant in zip(jax_compat.constant_vars(jaxpr), constants, strict=True):
            value = env[var] = self.new_value(var.aval)
            self.builder.constants[value] = constant
        return env

    def inline(self, jaxpr: Any, env: dict[Any, Atom], outer_stack: Any) -> list[Atom]:
        """Append a jaxpr's equations."""

        def append(source: Any, operands: Sequence[Atom]) -> Sequence[Atom]:
            own = jax_compat.name_stack_of(source)
            return self._equation(
                source, operands, own if outer_stack is None else outer_stack + own
            )  # inner: relative

        return inlined(jaxpr, env, append)

    def _equation(self, source: Any, operands: Sequence[Any], stack: Any) -> Sequence[Any]:
        open_as = _REGIONS.get(source.primitive.name)
        if open_as is not None:
            return open_as(self, source, operands, stack)
        called = jax_compat.called(source, operands)
        if called is not None:
            return self._call(*called, stack)
        of_zeros = bool(operands) and isinstance(operands[0], int) and operands[0] in self.zeros
        compared = as_comparison(source) if of_zeros else None
        if compared is not None:
            return self._call(compared, operands, stack)
        if (kept := self._plus_zeros(source, operands)) is not None:
            return [kept]
        if traits_of(source.primitive.name).constrains and not source.outvars[0].aval.shape:
            return operands  # a scalar has no dims to shard
        _refuse_ordered_effects(source)
        results = tuple(self.new_value(v.aval) for v in source.outvars)
        is_named = of_zeros and source.primitive.name == "name"  # an identity that names a value for `jax.checkpoint`
        if is_named or (traits_of(source.primitive.name).uniform and any(map(_is_zero, operands[:1]))):
            self.zeros.update(results)
        self.builder.add(self._made(source, tuple(operands), results, stack))
        return results

    def _plus_zeros(self, source: Any, operands: Sequence[Any]) -> Any:
        """The operand to which zeros are added, if any: XLA removes the addition. So are parameters frozen, whose
        updates are set to zero."""
        if len(operands) != 2 or not traits_of(source.primitive.name).adds:
            return None
        aval, (x, y) = source.outvars[0].aval, operands
        for kept, zeros in ((x, y), (y, x)):
            if isinstance(kept, int) and isinstance(zeros, int) and zeros in self.zeros:
                made = self.builder.avals[kept]
                if (made.shape, made.dtype) == (aval.shape, aval.dtype):
                    return kept
        return None

    def _call(self, called: Any, operands: Sequence[Any], stack: Any) -> list[Atom]:
        jaxpr, constants = jax_compat.open_jaxpr(called)
        env = dict(zip(jaxpr.invars, operands, strict=True)) | self._bound(jaxpr, constants)
        return self.inline(jaxpr, env, stack)

    def _made(
        self, source: Any, operands: tuple[Any, ...], results: tuple[int, ...], stack: Any, piece: Piece | None = None
    ) -> Equation:
        text = str(stack)
        return Equation(source, operands, results, stack, module_path(text), phase_of(text), self.repeat, piece)

    # -- regions -----------------------------------------------------------------------------

    def scan(self, source: Any, operands: Sequence[Any], stack: Any) -> Sequence[Any]:
        """Constants, carries and stacks enter; carries and stacks leave."""
        num_consts, num_carry = jax_compat.scan_counts(source)
        trip_count = float(source.params["length"])
        kinds: list[Piece] = _repeat_piece("enter_const", num_consts) + _repeat_piece("enter_carry", num_carry)
        kinds += _repeat_piece("enter_slice", len(operands) - len(kinds))
        nest = Nest("scan", source)
        body = source.params["jaxpr"]
        inner = self._enter(
            nest, zip(kinds, operands, jax_compat.open_jaxpr(body)[0].invars, strict=True), stack, trip_count
        )
        outs = self._section(nest, body, inner, stack, trip_count)
        kinds = [*_repeat_piece("exit_carry", num_carry), *_repeat_piece("exit_stack", len(outs) - num_carry)]
        return self._exit(nest, kinds, [(out,) for out in outs], stack, trip_count)

    def while_loop(self, source: Any, operands: Sequence[Any], stack: Any) -> Sequence[Any]:
        """The constants of condition and body and the carry enter; the carry leaves."""
        params = source.params
        num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
        test, _ = jax_compat.open_jaxpr(params["cond_jaxpr"])
        body, _ = jax_compat.open_jaxpr(params["body_jaxpr"])
        invars = [*test.invars[:num_test], *body.invars]
        kinds: list[Piece] = _repeat_piece("enter_const", num_test + num_body)
        kinds += _repeat_piece("enter_carry", len(operands) - len(kinds))
        nest = Nest("while", source)
        inner = self._enter(nest, zip(kinds, operands, invars, strict=True), stack, UNKNOWN_TRIP_COUNT)
        carry = inner[num_test + num_body :]
        go_on = self._section(nest, params["cond_jaxpr"], [*inner[:num_test], *carry], stack, UNKNOWN_TRIP_COUNT)
        outs = self._section(nest, params["body_jaxpr"], inner[num_test:], stack, UNKNOWN_TRIP_COUNT)
        kinds = ["predicate", *_repeat_piece("exit_carry", len(outs))]
        return self._exit(nest, kinds, [(go_on[0],), *((out,) for out in outs)], stack, UNKNOWN_TRIP_COUNT)

    def cond(self, source: Any, operands: Sequence[Any], stack: Any) -> Sequence[Any]:
        """All branches are planned, with the cost of each as if it ran."""
        branches = source.params["branches"]
        invars = jax_compat.open_jaxpr(branches[0])[0].invars
        nest = Nest("cond", source)
        nest.enter.append(self._made(source, (operands[0],), (), stack, "index"))
        kinds: list[Piece] = _repeat_piece("enter_branch", len(invars))
        inner = self._enter(nest, zip(kinds, operands[1:], invars, strict=True), stack, 1.0)
        outs = [self._section(nest, branch, inner, stack, 1.0) for branch in branches]
        kinds = _repeat_piece("exit_branch", len(outs[0]))
        return self._exit(nest, kinds, list(zip(*outs, strict=True)), stack, 1.0)

    def barrier(self, source: Any, operands: Sequence[Any], stack: Any) -> Sequence[Any]:
        """Each operand passes separately; replay makes one barrier for the compiler."""
        values = [operand for operand in operands if isinstance(operand, int)]
        passed = {value: self.new_value(self.builder.avals[value]) for value in values}
        pieces = [self._made(source, (value,), (passed[value],), stack, "barrier") for value in passed]
        self.builder.add(Nest("barrier", source, pieces))
        return [passed[operand] if isinstance(operand, int) else operand for operand in operands]

    def remat(self, source: Any, operands: Sequence[Any], stack: Any) -> Sequence[Any]:
        """The rematerialized computation is inlined behind a barrier, or XLA's CSE would reuse the forward values."""
        barred = jax_compat.barred_operands(source)
        passed = iter(
            self.barrier(source, [o for o, is_barred in zip(operands, barred, strict=True) if is_barred], stack)
        )
        inner = [next(passed) if is_barred else o for o, is_barred in zip(operands, barred, strict=True)]
        return self._call(source.params["jaxpr"], inner, stack)

    def _enter(self, nest: Nest, pieces: Iterable[tuple[Piece, Any, Any]], stack: Any, trip_count: float) -> list[Atom]:
        """The entering pieces. A scalar literal that no iteration changes needs none."""
        inner: list[Atom] = []
        source = nest.source
        for kind, operand, var in pieces:
            if isinstance(operand, LiteralOperand) and kind in ("enter_const", "enter_branch"):
                inner.append(operand)
                continue
            with _Repeated(self, trip_count):
                value = self.new_value(var.aval)
            inner.append(value)
            with _Repeated(self, trip_count if kind == "enter_slice" else 1.0):
                nest.enter.append(self._made(source, (operand,), (value,), stack, kind))
        return inner

    def _section(self, nest: Nest, jaxpr: Any, operands: Sequence[Any], stack: Any, trip_count: float) -> list[Atom]:
        with self.builder.at([]) as items, _Repeated(self, trip_count):
            outs = self._call(jaxpr, operands, stack)
        nest.sections.append(items)
        return outs

    def _exit(
        self, nest: Nest, kinds: Sequence[Piece], operands: Sequence[tuple[Any, ...]], stack: Any, trip_count: float
    ) -> Sequence[int]:
        """The leaving pieces; returns the outer equation's results in order."""
        outvars = iter(nest.source.outvars)
        results: list[int] = []
        for kind, operand in zip(kinds, operands, strict=True):
            if kind == "predicate":
                nest.exit.append(self._made(nest.source, operand, (), stack, kind))
                continue
            results.append(self.new_value(next(outvars).aval))
            with _Repeated(self, trip_count if kind == "exit_stack" else 1.0):
                nest.exit.append(self._made(nest.source, operand, (results[-1],), stack, kind))
        self.builder.add(nest)
        return results


_REGIONS: dict[str, Callable[..., Sequence[Any]]] = {
    "scan": Flattener.scan,
    "while": Flattener.while_loop,
    "cond": Flattener.cond,
    "optimization_barrier": Flattener.barrier,
    "remat2": Flattener.remat,
    "checkpoint": Flattener.remat,
}


class _Repeated:
    """A context in which new values are produced `trip_count` times as often."""

    def __init__(self, flattener: Flattener, trip_count: float) -> None:
        self.flattener, self.trip_count = flattener, trip_count

    def __enter__(self) -> None:
        self.before = self.flattener.repeat
        self.flattener.repeat *= self.trip_count

    def __exit__(self, *exception: object) -> None:
        self.flattener.repeat = self.before


def _is_zero(operand: Any) -> bool:
    if not isinstance(operand, LiteralOperand):
        return False
    value = np.asarray(operand.value)
    return value.ndim == 0 and value.dtype.names is None and bool(value == 0)  # JAX's `float0` has names


def _repeat_piece(piece: Piece, count: int) -> list[Piece]:
    return [piece] * count


def _refuse_ordered_effects(source: Any) -> None:
    if jax_compat.ordered_effects(source):
        raise EffectError(
            f"`{source.primitive.name}` at {jax_compat.user_source(source) or 'an unknown line'} has an ordered side"
            " effect, which JAX cannot run on several devices. Drop `ordered=True`, or move it out of the step."
        )


@functools.lru_cache(maxsize=65536)
def phase_of(name_stack: str) -> Phase:
    """The phase (forward, backward or update) of a name stack.

    >>> phase_of("transpose(jvp(GPT))/h_0"), phase_of("jvp(GPT)/h_0"), phase_of("")
    ('backward', 'forward', 'update')
    """
    if "transpose(" in name_stack:
        return "backward"
    return "forward" if "jvp(" in name_stack else "update"


@functools.lru_cache(maxsize=65536)
def module_path(name_stack: str) -> str:
    """The module path of a name stack, without transformations.

    >>> module_path("transpose(jvp(GPT))/h_0/attn")
    'GPT/h_0/attn'
    """
    parts = []
    for part in name_stack.split("/"):
        bare = part
        while match := re.fullmatch(r"(?:jvp|transpose|vmap|checkpoint|remat)\((.*)\)", bare):
            bare = match.group(1)
        if bare:
            parts.append(bare)
    return "/".join(parts)
