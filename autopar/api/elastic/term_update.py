"""Update the state from terms, such as gradients, that several devices or pipelines have added up.

In: a cut step, the plan whose shardings the state keeps. Out: `TermUpdate`: one program over all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.errors import MicrobatchError
from autopar.jax_interop.partition_spec import named_shardings
from autopar.plans.plan import Plan
from autopar.runtime.replay import Replay
from autopar.transforms.microbatch.worker_programs import Term, WorkerCut


class TermUpdate:
    """The update of a cut step.

    Args:
        plan: of the whole step; its state and results keep their shardings, and XLA chooses those between.
        places: the sharding of each given array.
        combined: from the given arrays to the terms of the whole batch; traced.
    """

    def __init__(
        self,
        plan: Plan,
        cut: WorkerCut,
        mesh: Mesh,
        places: Sequence[NamedSharding],
        combined: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None:
        self._inputs, self._combined = cut.update.inputs, combined
        donated, read = set(plan.donated), [one.index for one in self._inputs if one.source != "term"]
        self._donated = [i for i in read if i in donated]
        self._kept = [i for i in read if i not in donated]
        bare = replace(plan, constraints=(), early_reductions=(), regions=(), unfused_reductions=())
        self._replay = Replay(bare, cut.update.program.as_written.trace, mesh)
        in_shardings = named_shardings([tensor.sharding for tensor in plan.inputs], mesh)
        out_shardings = named_shardings([tensor.sharding for tensor in plan.outputs], mesh)
        self._jitted = jax.jit(
            self._updated,
            in_shardings=(
                [in_shardings[i] for i in self._donated],
                [in_shardings[i] for i in self._kept],
                tuple(places),
            ),
            out_shardings=tuple(out_shardings),
            donate_argnums=(0,),
        )

    def __call__(self, leaves: Sequence[Any], given: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The step's results.

        Args:
            leaves: of the step's arguments. State is donated.
        """
        return self._jitted([leaves[i] for i in self._donated], [leaves[i] for i in self._kept], tuple(given))

    def _updated(self, donated: Sequence[Any], kept: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
        leaves = dict(zip([*self._donated, *self._kept], [*donated, *kept], strict=True))
        terms = self._combined(given)
        inputs = [terms[one.index] if one.source == "term" else leaves[one.index] for one in self._inputs]
        return tuple(self._replay.run(inputs))


def check_terms(terms: Sequence[Term], name: str, way_out: str) -> None:
    """Refuse results that have a value for each example.

    Raises:
        MicrobatchError: there is one.
    """
    for term in terms:
        if term.kind == "rows":
            raise MicrobatchError(
                f"`{name}` returns a value for each example ({term.where}), and no process has those of the microbatches of others: return"
                f" their sum or mean, or {way_out}"
            )
