"""Trace a function with abstract arguments to one list of equations.

In: a user's step and its arguments (arrays or `ShapeDtypeStruct`s).
Out: a `Trace`: nested calls are inlined, loops and branches flattened, dead equations eliminated, and values numbered;
pytree paths, name stacks and source lines are kept. Transposes move to the small side of matmuls (`matmul_order`), masks into
the loops that read them (`loop_constants`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.errors import AutoparError, TraceError
from autopar.frontend.flat_jaxpr import Flattener
from autopar.frontend.loop_constants import sink_constants
from autopar.frontend.matmul_order import order_matmuls
from autopar.frontend.pytree_paths import leaf_paths
from autopar.frontend.step import Step
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.jax_interop import compat as jax_compat


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
        step: the user's function, if the traced function wraps it.
        names: the names of the arguments; by default the step's.
        hint: an additional hint for the user if tracing fails.

    Raises:
        TraceError: JAX cannot trace it; JAX's message is included.
        EffectError: it has an ordered side effect, which JAX runs on one device only.
    """
    step = Step.of(function) if step is None else step
    names = step.bind(args, {}).names if names is None else names
    try:
        traced = jax_compat.trace(function, args)
    except AutoparError:
        raise
    except (TypeError, ValueError, jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TraceError(_trace_help(step, hint, error)) from error
    builder = TraceBuilder(
        Trace(
            name=step.name,
            input_paths=tuple(path for name, arg in zip(names, args, strict=True) for path in leaf_paths(arg, name)),
            output_paths=leaf_paths(traced.out_info, "out"),
            in_tree=jax.tree.structure(tuple(args)),
            out_tree=jax.tree.structure(traced.out_info),
        )
    )
    inputs, outputs = Flattener(builder).whole(traced.jaxpr)
    return sink_constants(order_matmuls(builder.finish(outputs, inputs=inputs)))


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
