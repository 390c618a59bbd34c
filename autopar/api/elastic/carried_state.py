"""Find the state of a planned step among its results, under the same paths in every generation.

In: a step, its abstract state. Out: arrays by path, from what a call of the step returned; the state again, from arrays by path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autopar.api.checkpoint import state_tree
from autopar.api.parallel_step import ParallelStep
from autopar.errors import StepSignatureError
from autopar.frontend.state import state_apart
from autopar.pipeline.plan import PipelinePlan
from autopar.runtime.own_arrays import make_own


class CarriedState:
    """The state of a step.

    Args:
        target: the state as `jax.ShapeDtypeStruct`s with the plan's shardings.

    Raises:
        StepSignatureError: the plan is a pipeline, or the step does not return all of its state.
    """

    def __init__(self, step: ParallelStep[Any], target: Any) -> None:
        self._target = target
        with state_apart(target) as (arrays, _):
            self._leaves, self._tree = jax.tree.flatten(arrays)
            plan, names = next(
                (plan, names)
                for plan in reversed(step.plans)
                if (names := state_tree.arguments_of(plan, arrays)) is not None
            )
        if isinstance(plan, PipelinePlan):
            raise StepSignatureError(
                f"`{step.name}` is planned as a pipeline, and `restore_or_init` of a run under `autopar keep` takes steps of one program"
            )
        roots = [tensor.path.split("/", 1)[0] for tensor in plan.inputs]
        inputs = [i for name in names for i, root in enumerate(roots) if root == name]
        outputs = dict(plan.carried)
        lost = [plan.inputs[i].path for i in inputs if i not in outputs]
        if lost:
            raise StepSignatureError(
                f"`{step.name}` does not return `{lost[0]}` of its state, so peers cannot have a copy of it: return the whole state"
            )
        self._outputs = [outputs[i] for i in inputs]

    def arrays(self, returned: Any) -> dict[str, Any]:
        """The state's arrays by path, from the arrays that the planned program returned."""
        leaves = jax.tree.leaves(returned)
        state = jax.tree.unflatten(self._tree, [leaves[i] for i in self._outputs])
        return flat(state_tree.stored(state))

    def made(self, make: Callable[[str, Any], Any]) -> Any:
        """The state, of arrays that `make` returns for a path and a struct."""
        with state_apart(self._target) as (arrays, rebuild):
            wanted = flat(state_tree.wanted(arrays))
            read = _nested({path: make(path, struct) for path, struct in wanted.items()})
            values = state_tree.restored(read, arrays)
            make_own(values)
            return rebuild(jax.tree.unflatten(self._tree, values))

    def zeros(self) -> Any:
        """A state of zeros."""
        return self.made(
            lambda _, one: jax.make_array_from_callback(
                one.shape, one.sharding, lambda index: np.zeros(one.sharding.shard_shape(one.shape), one.dtype)
            )
        )


_SEPARATOR = "\0"


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by their path."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{_SEPARATOR}{key}" if prefix else key)
    return found


def _nested(by_path: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in by_path.items():
        *outer, last = path.split(_SEPARATOR)
        at = tree
        for key in outer:
            at = at.setdefault(key, {})
        at[last] = value
    return tree
