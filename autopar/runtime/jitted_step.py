"""Dispatch a planned step with one flattening of its arguments, over a `jax.jit` of flat tuples.

In: a `Plan`, a `Trace`, and a mesh of devices.
Out: a `JittedStep`, called with the arguments of the user's step.

`jax.jit` flattens arguments and unflattens results in C++ and exposes neither list. autopar needs both: it donates no
array that the user made, so it must know which arrays a call returned. So arrays are flattened here, and `jax.jit` gets
two flat tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.frontend.trace import Trace
from autopar.jax_interop.partition_spec import check_mesh, named_shardings
from autopar.plans.plan import Plan
from autopar.runtime.jit import donated_arguments, flat, jit_options
from autopar.runtime.own_arrays import OwnArguments, items
from autopar.runtime.replay import Replay


class JittedStep:
    """One planned program, jitted.

    Args:
        plan, trace, mesh: the arguments of `jit_plan`.
        may_take: whether donated arrays that the user made may be overwritten, by the user's option.
    """

    def __init__(self, plan: Plan, trace: Trace, mesh: Mesh, *, may_take: bool = False) -> None:
        check_mesh(plan.mesh, mesh)
        self._replay = Replay(plan, trace, mesh)
        self.in_tree, self.out_tree = trace.in_tree, trace.out_tree
        donated = [position for leaves in donated_arguments(plan, trace).values() for position in leaves]
        others = sorted(set(range(self.in_tree.num_leaves)) - set(donated))
        structs = jax.tree.leaves(trace.arguments)
        self.own_arguments = OwnArguments(self.in_tree, structs, donated, dict(plan.carried), may_take=may_take)
        self._order = np.argsort([*donated, *others]).tolist()
        self._of_donated, self._of_others = items(donated), items(others)
        shardings = tuple(named_shardings([tensor.sharding for tensor in plan.inputs], mesh))
        self._jitted = jax.jit(
            self.run,
            in_shardings=(self._of_donated(shardings), self._of_others(shardings)),
            out_shardings=tuple(named_shardings([tensor.sharding for tensor in plan.outputs], mesh)),
            donate_argnums=(0,) if donated else (),
            **jit_options(plan, mesh),
        )
        self._call: Any = self._jitted

    def __call__(self, *trees: Any) -> Any:
        """Run the step.

        Raises:
            OtherShapesError: the step was planned for other arguments.
        """
        return self.dispatch(flat(self.in_tree, trees))

    def dispatch(self, leaves: Sequence[Any]) -> Any:
        """Run the step on the leaves of its arguments. Later calls may reuse the memory of the returned state."""
        results = self._call(self._of_donated(leaves), self._of_others(leaves))
        self.own_arguments.returned(results)
        return self.out_tree.unflatten(results)

    def lower(self, trees: Sequence[Any]) -> jax.stages.Lowered:
        """Lower the step for arguments like these, arrays or `jax.ShapeDtypeStruct`s."""
        leaves = jax.tree.leaves(tuple(trees))
        return self._jitted.lower(self._of_donated(leaves), self._of_others(leaves))

    def use(self, compiled: jax.stages.Compiled) -> None:
        """Use the compiled result of `lower` for all later calls."""
        self._call = compiled

    def compiled(self, trees: Sequence[Any]) -> jax.stages.Compiled:
        """The compiled program for arguments like these. JAX has it in its cache after a call."""
        return self._call if isinstance(self._call, jax.stages.Compiled) else self.lower(trees).compile()

    def run(self, donated: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
        """The function to jit: the leaves of the arguments in two tuples, those of the result in one."""
        leaves = [*donated, *others]
        return tuple(self._replay.run([leaves[position] for position in self._order]))
