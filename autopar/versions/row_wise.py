"""Find out whether an update is elementwise, so that the rows of an array can be on several servers.

In: a server's update and the weights. Out: yes if that is proven from its trace: SGD, Adam and their like are elementwise; LAMB,
Adafactor, norms, and Python functions need whole arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from autopar.rules.elementwise import ELEMENTWISE

#: Parameters of primitives that call a function, as in `jax.jit` and `jax.custom_jvp`.
_CALLED = ("jaxpr", "call_jaxpr")


def is_elementwise(update: Any, weights: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    """Whether each element of the new weights and state depends on this element of the old ones and of the update, and on
    numbers without dims, alone.

    Args:
        update: as for a store.
    """
    if update is None:
        return True
    if not isinstance(update, optax.GradientTransformation):
        return False
    try:
        state = jax.eval_shape(update.init, dict(weights))
        traced = jax.make_jaxpr(update.update)(dict(weights), state, dict(weights))
    except Exception:  # the store says what is wrong with it when it makes the update
        return False
    return _all_elementwise(traced.jaxpr)


def _all_elementwise(jaxpr: Any) -> bool:
    return not jaxpr.constvars and all(map(_is_elementwise, jaxpr.eqns))


def _is_elementwise(equation: Any) -> bool:
    called = next((equation.params[name] for name in _CALLED if name in equation.params), None)
    if called is not None:
        inner = getattr(called, "jaxpr", called)
        return not getattr(called, "consts", ()) and _all_elementwise(inner)
    operands = {operand.aval.shape for operand in equation.invars}
    results = {result.aval.shape for result in equation.outvars}
    if operands | results <= {()}:
        return True
    name = equation.primitive.name
    if name == "broadcast_in_dim":
        return operands <= {()}
    return name in ELEMENTWISE and len(results) == 1 and operands <= {(), *results}
