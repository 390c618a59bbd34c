"""From a function and abstract arguments to one list of equations.

In: a user's step and its arguments (arrays or `ShapeDtypeStruct`s). Out: `Trace`, with every
nested call inlined, loops and branches laid open, dead equations dropped, values numbered afresh, and
pytree paths, name stacks and source lines kept. The graph is made from it, and `execute` replays it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar import jax_compat
from autopar.equations import Equation, Flattener, LiteralOperand, Region
from autopar.errors import StepSignatureError, TraceError


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
    """A whole step as equations over numbered values.

    Args:
        regions: the loops and branches among the equations.
        repeats: of each value, how often a step makes it.
        microbatches: where the batch is split over time, the source of the region that is the loop over its parts.
    """

    name: str
    equations: tuple[Equation, ...]
    regions: tuple[Region, ...]
    avals: tuple[Any, ...]
    repeats: tuple[float, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | LiteralOperand, ...]
    constants: tuple[tuple[int, Any], ...]
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    in_tree: Any  # of the positional arguments, a tuple
    out_tree: Any
    rewritten: tuple[Rewritten, ...] = ()
    microbatches: Any = None


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
    flat = Flattener()
    jaxpr, constants = jax_compat.open_jaxpr(traced.jaxpr)
    env: dict[Any, int | LiteralOperand] = {}
    constant_ids = [flat.new_value(v.aval) for v in jax_compat.constant_vars(jaxpr)]
    env.update(zip(jax_compat.constant_vars(jaxpr), constant_ids, strict=True))
    inputs = [flat.new_value(v.aval) for v in jaxpr.invars]
    env.update(zip(jaxpr.invars, inputs, strict=True))
    outputs = flat.inline(jaxpr, env, None)
    equations, regions, live = flat.finished(outputs)
    known = dict(zip(constant_ids, constants, strict=True)) | flat.constants
    return Trace(
        name=name,
        equations=equations,
        regions=regions,
        avals=tuple(flat.avals),
        repeats=tuple(flat.repeats),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        constants=tuple((value, constant) for value, constant in known.items() if value in live),
        input_paths=input_paths(function, args),
        output_paths=_paths(traced.out_info, "out"),
        in_tree=jax.tree.structure(tuple(args)),
        out_tree=jax.tree.structure(traced.out_info),
    )


def input_paths(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, ...]:
    """Of each leaf of the arguments: `state/params/Dense_0/kernel`."""
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
