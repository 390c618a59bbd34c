"""From a function and abstract arguments to one list of equations.

In: a user's step and its arguments (arrays or `ShapeDtypeStruct`s). Out: `Trace`, with every
nested call inlined, loops and branches laid open, dead equations dropped, values numbered afresh, and
pytree paths, name stacks and source lines kept. The graph is made from it, and `execute` replays it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from autopar.errors import AutoparError, TraceError
from autopar.frontend.equations import Equation, LiteralOperand, Region
from autopar.frontend.flat_jaxpr import Flattener
from autopar.frontend.pytree_paths import leaf_paths
from autopar.frontend.step import Step
from autopar.jax_interop import compat as jax_compat


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


@dataclass(frozen=True)
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

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """Of each value that an equation makes, the equation."""
        return {value: n for n, equation in enumerate(self.equations) for value in equation.results}

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the positional arguments."""
        return jax.tree.unflatten(self.in_tree, [jax_compat.shape_struct(self.avals[value]) for value in self.inputs])


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    step: Step | None = None,
    names: Sequence[str] | None = None,
    hint: str = "",
) -> Trace:
    """Trace a function of positional arguments.

    Args:
        step: the user's function, where the traced one stands for it.
        names: of the arguments; by default the step's.
        hint: more for the user, where JAX cannot trace it.

    Raises:
        TraceError: where JAX cannot trace it; JAX's own message follows ours.
        EffectError: where it has an ordered side effect, which JAX runs on one device only.
    """
    step = Step.of(function) if step is None else step
    names = step.bind(args, {}).names if names is None else names
    try:
        traced = jax_compat.trace(function, args)
    except AutoparError:
        raise
    except (TypeError, ValueError, jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TraceError(_trace_help(step, hint, error)) from error
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
        name=step.name,
        equations=equations,
        regions=regions,
        avals=tuple(flat.avals),
        repeats=tuple(flat.repeats),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        constants=tuple((value, constant) for value, constant in known.items() if value in live),
        input_paths=tuple(path for name, arg in zip(names, args, strict=True) for path in leaf_paths(arg, name)),
        output_paths=leaf_paths(traced.out_info, "out"),
        in_tree=jax.tree.structure(tuple(args)),
        out_tree=jax.tree.structure(traced.out_info),
    )


def _trace_help(step: Step, hint: str, error: Exception) -> str:
    try:
        where = f" ({inspect.getsourcefile(step.function)}:{inspect.getsourcelines(step.function)[1]})"
    except (TypeError, OSError):
        where = ""
    return (
        f"JAX could not trace `{step.name}`{where}, so there is nothing to plan. The function must run under `jax.jit`: no"
        f" Python branches on array values, no side results.{hint}"
        f" JAX said:\n\n{type(error).__name__}: {error}"
    )
