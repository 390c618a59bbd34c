"""Tune a recipe by hand with everything that autopar's plans get besides their shardings.

In: a recipe, a step, its arguments. Out: the recipe's price by autopar's planner with all inputs pinned, and the hand's
program with autopar's kernels:

- **one-hot**: the loss's gradient by comparison instead of a scatter. Autopar's front end writes the trace so; here the
  same trace is lowered.
- **column reductions**: each in its own kernel, where the planner finds that to be faster for the recipe's shardings.
- **early reductions**: barriers that start reductions early, where the planner finds them for the recipe's shardings.
- **combiner**: combine thresholds from 1 to 120 MiB beside XLA's default of 30 MiB, by the options that a plan sets. All
  that autopar chooses from are among them.

The trace is replayed with the hand's shardings only: its inputs and outputs, and its own `with_sharding_constraint`s. All
else is left to XLA's partitioner, as in the hand's program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

import autopar
from autopar.frontend.trace import Trace
from autopar.frontend.user_shardings import constraint_params
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop.compilation import module_bytes
from autopar.plans.plan import Plan
from autopar.plans.records import Constraint
from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for
from autopar.runtime.xla_options import compiler_options
from autopar.transforms.program import Program
from benchmarks.plans.recipes import Recipe

#: Combine thresholds above and below XLA's default of 30 MiB, the nearest first.
LARGER_MIB, SMALLER_MIB = (60, 120), (15, 8, 7.5, 1)
#: All of them; `None` leaves the default.
LIMITS_MIB: tuple[float | None, ...] = (None, *LARGER_MIB, *SMALLER_MIB)
#: More than any recipe takes: the price of one that does not fit is known, too.
_NO_BUDGET = 1e15


@dataclass(frozen=True, slots=True)
class Extras:
    """What a program by hand has besides the user's shardings.

    Args:
        constraints: the expert's constraints on activations and gradients.
        limit_mib: combine threshold; None for XLA's default.
        kernels: the one-hot gradient and separate column reductions.
        early_reductions: reductions that start early; only with `kernels`.
    """

    constraints: bool = False
    limit_mib: float | None = None
    kernels: bool = False
    early_reductions: bool = False

    @staticmethod
    def of(row: Mapping[str, Any]) -> Extras:
        """Those of a row of the table."""
        return Extras(**{name: row[name] for name in asdict(Extras())})

    def one_flag_away(self) -> Iterator[Extras]:
        """All that differ in one thing."""
        yield from (replace(self, limit_mib=limit) for limit in LIMITS_MIB if limit != self.limit_mib)
        yield replace(self, constraints=not self.constraints)
        if self.kernels:
            yield replace(self, early_reductions=not self.early_reductions)
        if not self.early_reductions:
            yield replace(self, kernels=not self.kernels)


@dataclass(frozen=True, slots=True)
class Priced:
    """A recipe with the planner's plan of it, all inputs pinned.

    Args:
        program: the step with the expert's or the user's constraints, in the form that was planned.
    """

    recipe: Recipe
    plan: Plan
    program: Program

    @property
    def price_s(self) -> float:
        return self.plan.prediction.step_time_s

    @property
    def peak_bytes(self) -> float:
        return self.plan.prediction.peak_bytes

    def with_kernels(self, mesh: Mesh | None = None, *, early: bool = False) -> Any:
        """The step, jitted, with the one-hot gradient and separate column reductions; without a mesh of devices, it can
        only be lowered.

        Args:
            early: whether reductions that the plan starts early do so.
        """
        hand = replace(
            self.plan,
            constraints=_of_hand(self.program.trace),
            regions=(),
            early_reductions=self.plan.early_reductions if early else (),
            combine_threshold_bytes=None,
        )
        return jit_plan(hand, self.program.trace, mesh or abstract_mesh(self.plan.mesh))


def price(recipe: Recipe, step: Any, args: tuple[Any, Any], hardware: str, *, of_user: bool = False) -> Priced:
    """Plan the expert's step, or the user's, with all inputs pinned; nothing is compiled."""
    parallel = autopar.parallelize(
        recipe.user_step(step, args) if of_user else recipe.expert_step(step, args),
        mesh=recipe.mesh,
        hardware=hardware,
        pin=recipe.pins(args, recipe.mesh),
        memory_budget_bytes=_NO_BUDGET,
        dims_as_written=True,
        rematerialize=False,
        cache=False,
    )
    plan, program = parallel.planned(*args)
    return Priced(recipe, plan, program.of(plan))


@dataclass(frozen=True, slots=True)
class Programs:
    """All programs of one recipe and step; what they take from plans is planned once."""

    recipe: Recipe
    step: Any
    args: tuple[Any, Any]
    hardware: str
    _priced: dict[bool, Priced] = field(default_factory=dict, compare=False, repr=False)

    def priced(self, constraints: bool) -> Priced:
        """The plan of the user's step, or of the expert's."""
        if constraints not in self._priced:
            made = price(self.recipe, self.step, self.args, self.hardware, of_user=not constraints)
            self._priced[constraints] = made
        return self._priced[constraints]

    def has(self, extras: Extras) -> bool:
        """Whether the recipe has such a program, and it is none that has another name too."""
        if extras.constraints and not self.recipe.has_more_constraints:
            return False
        if extras.limit_mib is not None and self.recipe.num_gpus == 1:
            return False
        return not extras.early_reductions or bool(self.priced(extras.constraints).plan.early_reductions)

    def lowered(self, extras: Extras) -> tuple[bytes, dict[str, int] | None]:
        """The lowered step, and XLA's options for it."""
        if extras.kernels:
            jitted = self.priced(extras.constraints).with_kernels(early=extras.early_reductions)
        else:
            by = self.recipe.by_expert if extras.constraints else self.recipe.by_user
            jitted = by(self.step, self.args)
        options = None
        if extras.limit_mib is not None:
            options = combiner_options(extras.limit_mib, self.priced(extras.constraints).plan)
        return module_bytes(lower_for("cuda", jitted, self.args)), options


def combiner_options(limit_mib: float | None, plan: Plan) -> dict[str, int]:
    """XLA's options for a combine threshold, as autopar sets them; empty for XLA's default."""
    threshold = None if limit_mib is None else round(limit_mib * 2**20)
    return compiler_options(replace(plan, combine_threshold_bytes=threshold))


def _of_hand(trace: Trace) -> tuple[Constraint, ...]:
    """The step's own `with_sharding_constraint`s."""
    found = []
    for equation in trace.equations:
        if equation.primitive == "sharding_constraint" and (dims := constraint_params(equation.source).get("dims")):
            (value,) = equation.results
            found.append(Constraint(value=value, shardings=(TensorSharding(tuple(axes or () for axes in dims)),)))
    return tuple(found)
