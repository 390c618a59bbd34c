"""`parallelize`: one decorator over planner and execute.

In: a user's step. Out: a callable that plans at its first call and from then on dispatches like `jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import jax
from jax.sharding import Mesh

from autopar import execute, planner
from autopar.calls import Calls
from autopar.errors import PlanMismatchError, StepSignatureError
from autopar.jax_compat import shape_and_dtype
from autopar.measure_step import FEWEST_STEPS, measure
from autopar.plan import Plan, load_plan
from autopar.planner import Program, program_of
from autopar.step_report import StepReport
from autopar.trace import check_leaves


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
            `(state, batch) -> (state, loss)`. It is not changed.
        plan: a saved plan (a path, or a `Plan`) to run instead of planning; refused for another program.
        options: those of `autopar.plan`: mesh, num_devices, hardware, memory_budget_bytes, pin, carry,
            donate, solver, time_limit_s, progress.

    Raises:
        TypeError: an option that `autopar.plan` does not have.
    """
    known = inspect.signature(planner.plan).parameters
    for name in options:
        if name not in known or known[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            takes = ", ".join(n for n, p in known.items() if p.kind is inspect.Parameter.KEYWORD_ONLY)
            raise TypeError(f"`parallelize` got an unknown option {name!r}; it takes plan, {takes}")
    if step is None:
        return lambda decorated: ParallelStep(decorated, plan, options)
    return ParallelStep(step, plan, options)


class ParallelStep:
    """A step that runs by a plan. Made by `parallelize`."""

    def __init__(self, step: Callable[..., Any], fixed: Plan | str | Path | None, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._name = getattr(step, "__qualname__", None) or type(step).__name__
        self._options = dict(options)
        self._fixed = load_plan(fixed) if isinstance(fixed, str | Path) else fixed
        self._known: dict[Any, tuple[Plan, Program, Any]] = {}  # signature -> plan, program, jitted replay
        self._fast: Any = None  # the jitted replay of the last call
        self._fast_signature: Any = None
        self._calls = Calls()  # of the last one

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
        if kwargs:
            args = self._positional(args, kwargs)
        if self._fast is not None:
            self._calls.note()
            try:
                return self._fast(*args)
            except Exception:
                if _signature(self._step, args) == self._fast_signature:
                    raise
        self._fast = self._prepare(args)[2]
        self._fast_signature = _signature(self._step, args)
        self._calls.start_anew()
        return self._fast(*args)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s); nothing is compiled."""
        return self.planned(*args, **kwargs)[0]

    def planned(self, *args: Any, **kwargs: Any) -> tuple[Plan, Program]:
        """The plan, and the traced program it was made for or has been compared with."""
        return self._plan(self._positional(args, kwargs))

    def init(self, create_state: Callable[..., Any], *create_args: Any, **step_args: Any) -> Any:
        """Build the carried state already sharded: it never exists whole on one device.

        Args:
            create_state: returns the state; must run under `jax.jit`.
            create_args: its arguments.
            step_args: the step's other arguments by name (arrays or `jax.ShapeDtypeStruct`s).

        Raises:
            StepSignatureError: where it is not clear which argument of the step the state is.
        """
        parameters = inspect.signature(self._step).parameters
        names = list(parameters)
        missing = [n for n in names if n not in step_args and parameters[n].default is inspect.Parameter.empty]
        if set(step_args) - set(names) or len(missing) != 1:
            raise StepSignatureError(
                f"`init` needs every argument of `{self._name}` but the state, by name. It takes {', '.join(names)};"
                f" given: {', '.join(step_args) or 'none'}. Call `.init(create_state, rng,"
                f" {', '.join(f'{n}=…' for n in names[1:])})`"
            )
        shapes, structure = jax.tree.flatten(jax.eval_shape(create_state, *create_args))
        state = jax.tree.unflatten(structure, shapes)
        args = self._positional((), {missing[0]: state, **step_args})
        position = [n for n in names if n == missing[0] or n in step_args].index(missing[0])
        plan = self._prepare(args)[0]
        shardings = jax.tree.leaves(plan.in_shardings(self._mesh(plan))[position])

        def leaves_of(*inner: Any) -> list[Any]:
            # Flat, so that a state that holds freshly made functions (an optax transformation built
            # inside `create_state`) keeps the structure that was planned.
            return jax.tree.leaves(create_state(*inner))

        return jax.tree.unflatten(structure, jax.jit(leaves_of, out_shardings=shardings)(*create_args))

    def lower(self, *args: Any, mesh: Mesh | None = None, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step as `jax.stages.Lowered`.

        Args:
            mesh: devices to lower for, real or absent (`jax.experimental.topologies`); by default
                the visible ones.
        """
        args = self._positional(args, kwargs)
        plan, program = self._plan(args)
        mesh = self._mesh(plan) if mesh is None else mesh
        return execute.lower(execute.jit_plan(plan, program.trace, mesh), args, mesh)

    def report(self) -> StepReport:
        """The steps run last beside what the plan predicted: time, memory, utilisation, and which part may be off.

        Waits until the devices have done all that was asked of them. Steps are timed from call to call, from the second
        call with the same shapes on; the first, which compiles, does not count.

        Raises:
            StepSignatureError: too few steps have run.
        """
        plan, program, jitted = self._known.get(self._fast_signature, (None, None, None))
        if plan is None or program is None or self._calls.num_steps < FEWEST_STEPS:
            raise StepSignatureError(
                f"`{self._name}` has run too few steps to report on: call it at least {FEWEST_STEPS + 2} times with"
                f" arguments of the same shapes; the first compiles, and {self._calls.num_steps} have been timed since"
            )
        return measure(plan, program, jitted, self._calls, self._mesh(plan), self._options.get("hardware"))

    # -- inside ------------------------------------------------------------------------------

    def _prepare(self, args: Sequence[Any]) -> tuple[Plan, Program, Any]:
        signature = _signature(self._step, args)
        if signature not in self._known:
            plan, program = self._plan(args)
            self._known[signature] = (plan, program, execute.jit_plan(plan, program.trace, self._mesh(plan)))
        return self._known[signature]

    def _plan(self, args: Sequence[Any]) -> tuple[Plan, Program]:
        known = self._known.get(_signature(self._step, args))
        if known is not None:
            return known[0], known[1]
        carry, donate = self._options.get("carry"), self._options.get("donate")
        program = program_of(self._step, args, carry=carry, donate=donate)
        if self._fixed is None:
            plan = planner.plan_program(program, **self._planning_options())
            return plan, program.of(plan)
        program = program.of(self._fixed)
        difference = self._fixed.program.difference(program.signature)
        if difference is not None:
            raise PlanMismatchError(
                f"the given plan was made for another program than `{self._name}` with these arguments: {difference}."
                " Plan again, or call with what it was made for."
            )
        trees = {"in_tree": program.trace.in_tree, "out_tree": program.trace.out_tree}  # not in the file
        return dataclasses.replace(self._fixed, **trees), program

    def _planning_options(self) -> dict[str, Any]:
        return {name: value for name, value in self._options.items() if name not in ("carry", "donate")}

    def _mesh(self, plan: Plan) -> Mesh:
        given = self._options.get("mesh")
        return given if isinstance(given, Mesh) else execute.make_mesh(plan.mesh)

    def _argument_names(self) -> list[str]:
        return list(inspect.signature(self._step).parameters)

    def _positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not kwargs:
            return tuple(args)
        try:
            bound = inspect.signature(self._step).bind(*args, **kwargs)
        except TypeError as error:
            takes = ", ".join(self._argument_names())
            raise StepSignatureError(f"`{self._name}` takes {takes}: {error}") from None
        return tuple(bound.arguments.values())


def _signature(step: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a plan depends on: structure, shapes and dtypes; refuses leaves that have none."""
    check_leaves(step, args)
    leaves, structure = jax.tree.flatten(tuple(args))
    return structure, tuple(map(shape_and_dtype, leaves))
