"""`parallelize`: one decorator over planner and execute.

In: a user's step. Out: a callable that plans at its first call and from then on dispatches like `jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import execute, plan_cache, planner
from autopar.compiled_cache import compiled_kept_in
from autopar.errors import PlanMismatchError
from autopar.front_ends.call import Call, Results, opened
from autopar.front_ends.state import abstract_of, new_state, state_arguments, state_like
from autopar.front_ends.step import Step
from autopar.jax_compat import shape_struct
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
            carry, donate, metadata, logical_axis_rules, solver, time_limit_s, progress, cache; `like` may be another
            step made by `parallelize`, too. Here `cache` is on unless it is said otherwise: the plan and the compiled
            program are kept on disk, and a second start finds both.

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

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those it has run by or laid a state out by, one for each shape of its arguments; the last one used comes last."""
        return tuple(prepared.plan for prepared in self._known.values())

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
            return call.finish(prepared.results, self._run(prepared, trees))

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
        with new_state(create_state, create_args) as new:
            with self._opened_for("init", new.value, step_args) as call:
                plan, in_shardings = self._in_shardings(call)
                planned = dict(zip(map(id, jax.tree.leaves(call.trees)), in_shardings, strict=True))
            whole = NamedSharding(self._mesh(plan), PartitionSpec())
            shardings = [planned.get(id(leaf), whole) for leaf in jax.tree.leaves(new.shapes)]
            with self._compiled_kept(plan):
                return new.finish(jax.jit(new.leaves, out_shardings=shardings)(*new.call.trees))

    def abstract_state(self, create_state: Any, *create_args: Any, **step_args: Any) -> Any:
        """The carried state as `jax.ShapeDtypeStruct`s with the shardings of the plan; nothing is run.

        That is what orbax restores into, as `ocp.args.StandardRestore(abstract_state)`.

        Args:
            create_state: as for `init`, or the state itself, as arrays or `jax.ShapeDtypeStruct`s.
            create_args, step_args: as for `init`.

        Raises:
            StepSignatureError: where it is not clear which arguments of the step the state is.
        """
        state = abstract_of(create_state, create_args)
        with self._opened_for("abstract_state", state, step_args) as call:
            leaves, structure = jax.tree.flatten(call.trees)
            laid = [
                jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type, sharding=sharding)
                for one, sharding in zip(map(shape_struct, leaves), self._in_shardings(call)[1], strict=True)
            ]
            return state_like(state, step_args, call.arguments_anew(jax.tree.unflatten(structure, laid)))

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
        used = ("carry", "donate", "static_argnames")
        options = {"cache": True} | {name: value for name, value in self._options.items() if name not in used}
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

    def _opened_for(self, caller: str, state: Any, step_args: Mapping[str, Any]) -> AbstractContextManager[Call]:
        """A call with a state and the other arguments by name."""
        args, kwargs = self.called.by_name(state_arguments(self.called, state, step_args, caller))
        return opened(self.called, args, kwargs)

    def _in_shardings(self, call: Call) -> tuple[Plan, list[NamedSharding]]:
        """The plan of a call, and the sharding of each array of its arguments."""
        plan = self._prepare(call).plan
        return plan, jax.tree.leaves(plan.in_shardings(self._mesh(plan)))

    def _prepare(self, call: Call) -> _Prepared:
        if call.key not in self._known:
            plan, program, results = self._plan(call)
            jitted = execute.jit_plan(plan, program.trace, self._mesh(plan))
            self._known[call.key] = _Prepared(plan, program, results, jitted)
        self._known[call.key] = self._known.pop(call.key)  # the last one used comes last
        return self._known[call.key]

    def _run(self, prepared: _Prepared, trees: Sequence[Any]) -> Any:
        if prepared.is_compiled:
            return prepared.jitted(*trees)
        with self._compiled_kept(prepared.plan):
            result = prepared.jitted(*trees)
        prepared.is_compiled = True
        return result

    def _compiled_kept(self, plan: Plan) -> AbstractContextManager[None]:
        folder = plan_cache.folder_of(self._options.get("cache", True))
        return compiled_kept_in(folder and folder / "compiled" / plan.program.fingerprint)

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


@dataclasses.dataclass(slots=True)
class _Prepared:
    """A plan, what it was made for, what the step's result is beside its arrays, and the jitted replay."""

    plan: Plan
    program: Program
    results: Results
    jitted: Any
    is_compiled: bool = False
