"""Dispatch a planned step with one flattening of its arguments, over a `jax.jit` of flat tuples.

In: `Plan`, `Trace`, a mesh of devices. Out: `JittedStep`, called with what the user's step takes.

`jax.jit` flattens its arguments and builds its result in C++ and shows neither list of arrays. autopar has to look at both:
it donates no array that the user made, and has to know those that a call returned. So the arrays are flattened here, and
`jax.jit` gets two flat tuples.
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
        plan, trace, mesh: as for `jit_plan`.
        may_take: whether arrays that the user made may be donated, because the user said so.
    """

    def __init__(self, plan: Plan, trace: Trace, mesh: Mesh, *, may_take: bool = False) -> None:
        check_mesh(plan.mesh, mesh)
        self._replay = Replay(plan, trace, mesh)
        self.in_tree, self.out_tree = trace.in_tree, trace.out_tree
        whole, start, donated = set(donated_arguments(plan, trace)), 0, list[int]()
        for n, child in enumerate(self.in_tree.children()):
            stop = start + child.num_leaves
            donated += range(start, stop) if n in whole else ()
            start = stop
        others = sorted(set(range(start)) - set(donated))
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
            OtherShapesError: it is planned for other arguments.
        """
        return self.dispatch(flat(self.in_tree, trees))

    def dispatch(self, leaves: Sequence[Any]) -> Any:
        """Run the step on the arrays of its arguments. Later calls may take over, of what it returns, the state."""
        results = self._call(self._of_donated(leaves), self._of_others(leaves))
        self.own_arguments.returned(results)
        return self.out_tree.unflatten(results)

    def lower(self, trees: Sequence[Any]) -> jax.stages.Lowered:
        """Lowered for arguments like these, arrays or `jax.ShapeDtypeStruct`s."""
        leaves = jax.tree.leaves(tuple(trees))
        return self._jitted.lower(self._of_donated(leaves), self._of_others(leaves))

    def use(self, compiled: jax.stages.Compiled) -> None:
        """From now on run what `lower` gave, compiled."""
        self._call = compiled

    def compiled(self, trees: Sequence[Any]) -> jax.stages.Compiled:
        """What runs, for arguments like these; JAX has it compiled already where a call was made."""
        return self._call if isinstance(self._call, jax.stages.Compiled) else self.lower(trees).compile()

    def run(self, donated: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
        """What is jitted: the arrays of the arguments in two tuples, those of the result in one."""
        given = [*donated, *others]
        return tuple(self._replay.run([given[position] for position in self._order]))
