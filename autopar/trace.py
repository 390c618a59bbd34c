"""From a function and abstract arguments to one flat list of equations.

In: a user's step and its arguments (arrays or `ShapeDtypeStruct`s). Out: `Trace`, with every
nested call inlined, dead equations dropped, values numbered afresh, and pytree paths, name stacks
and source lines kept. The graph is made from it, and `execute` replays it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar import jax_compat
from autopar.errors import EffectError, StepSignatureError, TraceError
from autopar.graph.ir import Phase


@dataclass(frozen=True, slots=True)
class LiteralOperand:
    """A scalar written into the program."""

    value: Any


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive application; operands and results are positions in `Trace.avals`."""

    source: Any  # JAX's own equation: primitive, parameters, context
    operands: tuple[int | LiteralOperand, ...]
    results: tuple[int, ...]
    name_stack: Any
    path: str
    phase: Phase

    @property
    def primitive(self) -> str:
        return self.source.primitive.name


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Equations that see a dim as two, and the one that they stand for (`factoring.rewrite`).

    Args:
        start, stop: of the equations; the results are those of the last.
        source: JAX's equation as it was; None where there was none, for a reshape from one form to the other.
        operand_shapes: of what it took; None for a literal.
        pairs: value and dim of the first of the two, wherever these dims stand in the trace.
    """

    start: int
    stop: int
    source: Any
    operand_shapes: tuple[tuple[int, ...] | None, ...]
    pairs: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole step as equations over numbered values."""

    name: str
    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | LiteralOperand, ...]
    constants: tuple[tuple[int, Any], ...]
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    in_tree: Any  # of the positional arguments, a tuple
    out_tree: Any
    rewritten: tuple[Rewritten, ...] = ()


def trace(function: Callable[..., Any], args: Sequence[Any]) -> Trace:
    """Trace a function of positional arguments.

    Raises:
        TraceError: where JAX cannot trace it; JAX's own message follows ours.
        EffectError: where it has an ordered side effect, which JAX runs on one device only.
    """
    name = getattr(function, "__qualname__", None) or type(function).__name__
    try:
        traced = jax_compat.trace(function, args)
    except (TypeError, ValueError, jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TraceError(_trace_help(function, name, error)) from error
    flat = _Flattener()
    jaxpr, constants = jax_compat.open_jaxpr(traced.jaxpr)
    env: dict[Any, int | LiteralOperand] = {}
    constant_ids = [flat.new_value(v.aval) for v in jax_compat.constant_vars(jaxpr)]
    env.update(zip(jax_compat.constant_vars(jaxpr), constant_ids, strict=True))
    inputs = [flat.new_value(v.aval) for v in jaxpr.invars]
    env.update(zip(jaxpr.invars, inputs, strict=True))
    outputs = flat.inline(jaxpr, env, None)
    equations, constants_used = _without_dead(flat.equations, outputs, dict(zip(constant_ids, constants, strict=True)))
    return Trace(
        name=name,
        equations=equations,
        avals=tuple(flat.avals),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        constants=(*constants_used.items(), *flat.constants.items()),
        input_paths=_input_paths(function, args),
        output_paths=_paths(traced.out_info, "out"),
        in_tree=jax.tree.structure(tuple(args)),
        out_tree=jax.tree.structure(traced.out_info),
    )


class _Flattener:
    """Collects equations while nested calls are inlined; the one mutable object of this module."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}

    def new_value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def inline(self, jaxpr: Any, env: dict[Any, Any], outer_stack: Any) -> list[int | LiteralOperand]:
        """Append a jaxpr's equations. `env` is one call's own: JAX shares `Var`s between calls of a
        cached jaxpr, so values are numbered afresh each time."""

        def read(atom: Any) -> int | LiteralOperand:
            return LiteralOperand(atom.val) if isinstance(atom, jax_compat.Literal) else env[atom]

        for source in jaxpr.eqns:
            own = jax_compat.name_stack_of(source)
            stack = own if outer_stack is None else outer_stack + own  # inner stacks are relative
            operands = tuple(read(atom) for atom in source.invars)
            called = jax_compat.called_jaxpr(source)
            if called is not None:
                inner, constants = jax_compat.open_jaxpr(called)
                results = self._inline_call(inner, constants, operands, stack)
                env.update(zip(source.outvars, results, strict=True))
                continue
            _refuse_ordered_effects(source)
            results = tuple(self.new_value(v.aval) for v in source.outvars)
            env.update(zip(source.outvars, results, strict=True))
            text = str(stack)
            self.equations.append(Equation(source, operands, results, stack, module_path(text), phase_of(text)))
        return [read(atom) for atom in jaxpr.outvars]

    def _inline_call(
        self, jaxpr: Any, constants: Sequence[Any], operands: Sequence[int | LiteralOperand], stack: Any
    ) -> list[int | LiteralOperand]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, constant in zip(jax_compat.constant_vars(jaxpr), constants, strict=True):
            env[var] = self.new_value(var.aval)
            self.constants[env[var]] = constant
        return self.inline(jaxpr, env, stack)


def _refuse_ordered_effects(source: Any) -> None:
    if jax_compat.ordered_effects(source):
        raise EffectError(
            f"`{source.primitive.name}` at {jax_compat.user_source(source) or 'an unknown line'} has an ordered side"
            " effect, which JAX cannot run on several devices. Drop `ordered=True`, or move it out of the step."
        )


def _without_dead(
    equations: Sequence[Equation], outputs: Iterable[int | LiteralOperand], constants: dict[int, Any]
) -> tuple[tuple[Equation, ...], dict[int, Any]]:
    """Drop equations that nothing reads; an equation with an effect always stays."""
    live = {v for v in outputs if isinstance(v, int)}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.source.effects or any(r in live for r in equation.results):
            kept.append(equation)
            live.update(v for v in equation.operands if isinstance(v, int))
    kept.reverse()
    return tuple(kept), {v: c for v, c in constants.items() if v in live}


@functools.lru_cache(maxsize=65536)
def phase_of(name_stack: str) -> Phase:
    """Forward, backward or update, read off a name stack.

    >>> phase_of("transpose(jvp(GPT))/h_0"), phase_of("jvp(GPT)/h_0"), phase_of("")
    ('backward', 'forward', 'update')
    """
    if "transpose(" in name_stack:
        return "backward"
    return "forward" if "jvp(" in name_stack else "update"


@functools.lru_cache(maxsize=65536)
def module_path(name_stack: str) -> str:
    """The module path in a name stack, without the transformations around its parts.

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


def _input_paths(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, ...]:
    names = argument_names(function, len(args))
    return tuple(path for name, arg in zip(names, args, strict=True) for path in _paths(arg, name))


def check_leaves(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Refuse an argument that holds anything but arrays and numbers.

    Raises:
        StepSignatureError: naming its path and type.
    """
    for name, arg in zip(argument_names(function, len(args)), args, strict=True):
        for path, leaf in zip(_paths(arg, name), jax.tree.leaves(arg), strict=True):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
                raise StepSignatureError(
                    f"`{path}` is a {type(leaf).__name__}, but a step takes arrays, numbers and pytrees of them. Close"
                    " over it in the step, or leave it out of the pytree"
                )


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional parameters; `arg3` where there is none."""
    try:
        parameters = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        parameters = []
    return [parameters[i] if i < len(parameters) else f"arg{i}" for i in range(count)]


def _paths(tree: Any, root: str) -> tuple[str, ...]:
    """`root/params/Dense_0/kernel` for each leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple("/".join([root, *(_key_text(key) for key in path)]) for path, _ in leaves)


def _key_text(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")


def _trace_help(function: Callable[..., Any], name: str, error: Exception) -> str:
    try:
        where = f" ({inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]})"
    except (TypeError, OSError):
        where = ""
    return (
        f"JAX could not trace `{name}`{where}, so there is nothing to plan. The function must run under `jax.jit`: no"
        " Python branches on array values, no side results, arguments that are arrays or pytrees of arrays."
        f" JAX said:\n\n{type(error).__name__}: {error}"
    )
