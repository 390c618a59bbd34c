"""Find the state of a planned step among its results, under the same paths in every generation.

In: a step, its abstract state. Out: arrays by path, from what a call of the step returned; the state again, from arrays by path. A
pipeline may have a stack of layers in unequal parts on several stages: then the parts are made one by one.
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
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.run.stacked_leaves import StackedLeaf
from autopar.runtime.own_arrays import make_own

#: Makes an array, or some layers of it, for its path: of the shape and dtype of the whole array, and a sharding.
ArrayOf = Callable[[str, Any, Rows | None], Any]


class CarriedState:
    """The state of a step.

    Args:
        target: the state as `jax.ShapeDtypeStruct`s with the plan's shardings.

    Raises:
        StepSignatureError: the step does not return all of its state.
    """

    def __init__(self, step: ParallelStep[Any], target: Any) -> None:
        self._target = target
        with state_apart(target) as (arrays, _):
            leaves, self._tree = jax.tree.flatten(arrays)
            prepared, names = next(
                (prepared, names)
                for prepared in reversed(step.prepared)
                if (names := state_tree.arguments_of(prepared.plan, arrays)) is not None
            )
        plan = prepared.plan
        roots = [tensor.path.split("/", 1)[0] for tensor in plan.inputs]
        inputs = [i for name in names for i, root in enumerate(roots) if root == name]
        outputs = dict(plan.carried)
        lost = [plan.inputs[i].path for i in inputs if i not in outputs]
        if lost:
            raise StepSignatureError(
                f"`{step.name}` does not return `{lost[0]}` of its state, so peers cannot have a copy of it: return the whole state"
            )
        self._outputs = [outputs[i] for i in inputs]
        paths = flat(state_tree.named(arrays, range(len(leaves))))
        in_parts = {n: prepared.uneven[i] for n, i in enumerate(inputs) if i in prepared.uneven}
        self._in_parts = {path: in_parts[n] for path, n in paths.items() if n in in_parts}

    def arrays(self, returned: Any) -> dict[str, Any]:
        """The state's arrays by path, from the arrays that the planned program returned."""
        leaves = jax.tree.leaves(returned)
        state = jax.tree.unflatten(self._tree, [leaves[i] for i in self._outputs])
        return flat(state_tree.stored(state))

    def made(self, make: ArrayOf) -> Any:
        """The state, of arrays that `make` returns."""
        with state_apart(self._target) as (arrays, rebuild):
            wanted = flat(state_tree.wanted(arrays))
            read = _nested({path: self._made(make, path, struct) for path, struct in wanted.items()})
            values = state_tree.restored(read, arrays)
            make_own(values)
            return rebuild(jax.tree.unflatten(self._tree, values))

    def zeros(self) -> Any:
        """A state of zeros."""

        def zeros(_: str, one: Any, rows: Rows | None) -> Any:
            shape = one.shape if rows is None else rows.shape_of(one.shape)
            local = one.sharding.shard_shape(shape)
            return jax.make_array_from_callback(
                shape, one.sharding, lambda index: np.zeros(local, one.dtype), dtype=one.dtype
            )

        return self.made(zeros)

    def _made(self, make: ArrayOf, path: str, struct: Any) -> Any:
        parts = self._in_parts.get(path)
        if parts is None:
            return make(path, struct, None)
        of_parts = {
            rows: jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=place) for rows, place in parts.items()
        }
        return StackedLeaf({rows: make(path, one, rows) for rows, one in of_parts.items()})


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
