"""`parallelize`: one decorator over planner and execute.

In: a user's step. Out: a callable that plans at its first call and from then on dispatches like `jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import execute, planner
from autopar.errors import PlanMismatchError
from autopar.front_ends.call import Call, Results, opened
from autopar.front_ends.libraries import building
from autopar.front_ends.state import state_arguments
from autopar.front_ends.step import Step
from autopar.plan import Plan, load_plan
from autopar.program import Program, program_of_call


@overload
def parallelize(
    step: Callable[..., Any], /, *, plan: Plan | str | Path | None = None, **options: Any
) -> ParallelStep: ...
@overload
def parallelize(
    *, plan: Plan | str | Path | None = None, **options: Any
) -> Callable[[Callable[..., Any]], ParallelStep]: ...
def parallelize(
    step: Callable[..., Any] | None = None, /, *, plan: Plan | str | Path | None = None, **options: Any
) -> Any:
    """Run a step sharded over devices, by a plan that autopar finds.

    Use it bare, `@autopar.parallelize`, for every visible device; or with options,
    `@autopar.parallelize(mesh="2x4", memory_budget_bytes=40e9)`.

    Args:
        step: a function of pytrees of arrays that runs under `jax.jit`, e.g. a Flax train step
            `(state, batch) -> (state, loss)`; or of objects that it changes in place, as Flax NNX modules and
            optimizers. It is not changed.
        plan: a saved plan (a path, or a `Plan`) to run instead of planning; refused for another program.
        options: those of `autopar.plan`: mesh, num_devices, hardware, memory_budget_bytes, pin, static_argnames,
            carry, donate, metadata, logical_axis_rules, solver, time_limit_s, progress; `like` may be another step
            made by `parallelize`, too.

    Raises:
        TypeError: an option that `autopar.plan` does not have.
    """
    parameters = inspect.signature(planner.plan).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "kwargs"]
    for name in options:
        if name not in known:
            raise TypeError(f"`parallelize` got an unknown option {name!r}; it takes plan, {', '.join(known)}")
    if step is None:
        return lambda decorated: ParallelStep(decorated, plan, options)
    return ParallelStep(step, plan, options)


#: After how many plans for the same shapes a user is told of it.
_MANY = 4


class ParallelStep:
    """A step that runs by a plan. Made by `parallelize`."""

    def __init__(self, step: Callable[..., Any], fixed: Plan | str | Path | None, options: Mapping[str, Any]) -> None:
        self.called = Step.of(step, options.get("static_argnames"))
        functools.update_wrapper(self, self.called.function)
        self._options = dict(options)
        like = options.get("like")
        if isinstance(like, ParallelStep):  # on its devices, unless others are given
            self._options = {k: v for k, v in like.options.items() if k in ("mesh", "hardware")} | self._options
        self._fixed = load_plan(fixed) if isinstance(fixed, str | Path) else fixed
        self._known: dict[Any, _Prepared] = {}  # by what a plan is made for
        self._fast: Any = None  # the jitted replay of the last call, where it takes the arguments as they are
        self._fast_key: Any = None
        self._latest: Plan | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What it was decorated with, the plan aside."""
        return dict(self._options)

    @property
    def is_fixed(self) -> bool:
        """Whether it runs by a given plan, and makes none."""
        return self._fixed is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. The first call with new shapes traces, plans and compiles."""
        failed: Exception | None = None
        if self._fast is not None and not kwargs:
            try:
                return self._fast(*args)
            except Exception as error:  # other shapes; arrays that lie elsewhere; or the step's own
                failed = error
        with opened(self.called, args, kwargs) as call:
            known = call.key == self._fast_key
            prepared = self._prepare(call)
            trees = execute.placed(prepared.plan, self._mesh(prepared.plan), call.trees)
            if failed is not None and known and all(map(operator.is_, jax.tree.leaves(trees), jax.tree.leaves(args))):
                raise failed
            if call.is_plain and prepared.results.is_plain:
                self._fast, self._fast_key = prepared.jitted, call.key
            return call.finish(prepared.results, prepared.jitted(*trees))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s); nothing is compiled."""
        return self.planned(*args, **kwargs)[0]

    def planned(self, *args: Any, **kwargs: Any) -> tuple[Plan, Program]:
        """The plan, and the traced program it was made for or has been compared with."""
        with opened(self.called, args, kwargs) as call:
            return self._plan(call)[:2]

    @property
    def latest_plan(self) -> Plan | None:
        """The plan that was made or used last; None before the first."""
        return self._latest

    def init(self, create_state: Callable[..., Any], *create_args: Any, **step_args: Any) -> Any:
        """Build the carried state already sharded: it never exists whole on one device.

        Args:
            create_state: returns the state; must run under `jax.jit`. Where several arguments of the step are state,
                as a model and its optimizer, it returns them as a tuple in the step's order, or as a dict by name.
            create_args: its arguments.
            step_args: the step's other arguments by name (arrays or `jax.ShapeDtypeStruct`s).

        Raises:
            StepSignatureError: where it is not clear which arguments of the step the state is.
        """
        with building(), opened(Step.of(create_state), create_args, {}) as made:
            shapes = jax.eval_shape(made.function, *made.trees)
            results = made.results
            assert results is not None, "it has been traced"
            state = made.result_anew(results, shapes)
            args, kwargs = self.called.by_name(state_arguments(self.called, state, step_args))
            with opened(self.called, args, kwargs) as call:
                plan = self._prepare(call).plan
                mesh = self._mesh(plan)
                leaves = jax.tree.leaves(call.trees)
                known = dict(zip(map(id, leaves), jax.tree.leaves(plan.in_shardings(mesh)), strict=True))
            whole = NamedSharding(mesh, PartitionSpec())
            shardings = [known.get(id(leaf), whole) for leaf in jax.tree.leaves(shapes)]

            def leaves_of(*inner: Any) -> list[Any]:
                # Flat, so that a state that holds freshly made functions (an optax transformation built
                # inside `create_state`) keeps the structure that was planned.
                return jax.tree.leaves(made.function(*inner))

            arrays = jax.jit(leaves_of, out_shardings=shardings)(*made.trees)
            return made.finish(results, jax.tree.unflatten(jax.tree.structure(shapes), arrays))

    def lower(self, *args: Any, mesh: Mesh | None = None, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step as `jax.stages.Lowered`.

        Args:
            mesh: devices to lower for, real or absent (`jax.experimental.topologies`); by default
                the visible ones.
        """
        plan, program = self.planned(*args, **kwargs)
        mesh = self._mesh(plan) if mesh is None else mesh
        return execute.lower(execute.jit_plan(plan, program.trace, mesh), program.trace.arguments, mesh)

    def planning_options(self) -> dict[str, Any]:
        """Its options as `plan_program` takes them: without those that tracing has used, `like` as a plan.

        Raises:
            PlanMismatchError: `like` is a step that has no plan yet.
        """
        options = {k: v for k, v in self._options.items() if k not in ("carry", "donate", "static_argnames")}
        like = options.get("like")
        if isinstance(like, ParallelStep):
            if like.latest_plan is None:
                raise PlanMismatchError(
                    f"`{self.called.name}` is to be laid out like `{like.called.name}`, which has no plan yet: call that"
                    " first, or its `init` or `plan`"
                )
            options["like"] = like.latest_plan
        return options

    # -- inside ------------------------------------------------------------------------------

    def _prepare(self, call: Call) -> _Prepared:
        if call.key not in self._known:
            plan, program, results = self._plan(call)
            jitted = execute.jit_plan(plan, program.trace, self._mesh(plan))
            self._known[call.key] = _Prepared(plan, program, results, jitted)
        return self._known[call.key]

    def _plan(self, call: Call) -> tuple[Plan, Program, Results]:
        known = self._known.get(call.key)
        if known is not None:
            self._latest = known.plan
            return known.plan, known.program, known.results
        self._warn_of_many(call)
        program = program_of_call(call, carry=self._options.get("carry"), donate=self._options.get("donate"))
        assert call.results is not None, "it has been traced"
        plan, program = self._plan_program(program)
        self._latest = plan
        return plan, program, call.results

    def _warn_of_many(self, call: Call) -> None:
        """Say it once, where plan after plan is made for other values of what is no array."""
        alike = [key for key in self._known if call.differs_in(key) is not None]
        if len(alike) == _MANY:
            warnings.warn(
                f"`{self.called.name}` is planned for the {_MANY + 1}th time with the same shapes, because"
                f" {call.differs_in(alike[-1])} is not what it was: what is no array is part of what a plan is made for."
                " Leave it out of the arguments if the step does not need it, or make it an array",
                stacklevel=4,
            )

    def _plan_program(self, program: Program) -> tuple[Plan, Program]:
        if self._fixed is None:
            plan = planner.plan_program(program, **self.planning_options())
            return plan, program.of(plan)
        program = program.of(self._fixed)
        difference = self._fixed.program.difference(program.signature)
        if difference is not None:
            raise PlanMismatchError(
                f"the given plan was made for another program than `{self.called.name}` with these arguments:"
                f" {difference}. Plan again, or call with what it was made for."
            )
        trees = {"in_tree": program.trace.in_tree, "out_tree": program.trace.out_tree}  # not in the file
        return dataclasses.replace(self._fixed, **trees), program

    def _mesh(self, plan: Plan) -> Mesh:
        given = self._options.get("mesh")
        return given if isinstance(given, Mesh) else execute.make_mesh(plan.mesh)


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """A plan, what it was made for, what the step's result is beside its arrays, and the jitted replay."""

    plan: Plan
    program: Program
    results: Results
    jitted: Any
