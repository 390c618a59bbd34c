"""A step that runs by a plan: planned at its first call, dispatched like `jit` from then on.

In: a user's step and options. Out: `ParallelStep`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import jax
from jax.sharding import Mesh

from autopar.api.dispatch import Dispatcher, as_written
from autopar.api.elastic.side_by_side import Pipelines, SideBySideStep
from autopar.api.everything import check_no_plan, with_everything
from autopar.api.prepared_step import Prepared, RunBy, built
from autopar.api.report_of_last_steps import report_of_last_steps
from autopar.api.step_plans import StepPlans
from autopar.api.step_report import StepReport
from autopar.errors import OptionError, StepSignatureError
from autopar.frontend.call import Call, opened
from autopar.frontend.state import abstract_of, new_state, state_arguments, state_like
from autopar.frontend.step import Step
from autopar.hardware.profile import HardwareProfile
from autopar.jax_interop.compat import is_traced, shape_struct
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.plan_files import load_plan
from autopar.pipeline.templates.templates import PipelineTemplates
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.runtime.distributed.argument_layout import shard_batch
from autopar.runtime.distributed.cpu_transport import let_arrays_pass
from autopar.runtime.distributed.exchange import among_processes
from autopar.runtime.distributed.local_batch import check_equal
from autopar.runtime.distributed.step_clock import StepClock
from autopar.transforms.program import Program

#: The plans of a step: of one program, or with `stages` of either kind.
P = TypeVar("P", bound=AnyPlan)


class ParallelStep(Generic[P]):
    """A step that runs by a plan. Made by `parallelize`."""

    def __init__(
        self, step: Callable[..., Any], fixed: AnyPlan | str | Path | None, options: Mapping[str, Any]
    ) -> None:
        check_no_plan(options, fixed)
        requested, options = Pipelines.taken_from(options)
        self.runs_pipelines = requested is not None  # several side by side
        if requested is not None and fixed is not None:
            raise OptionError("`plan` has the stages already, and `pipelines` plans some: leave one of the two out")
        options = with_everything(options)
        self.called = Step.of(step, options.get("static_argnames"))
        functools.update_wrapper(self, self.called.function)
        given = load_plan(fixed) if isinstance(fixed, str | Path) else fixed
        like = options.get("like")
        self._like = {"like": like} if isinstance(like, ParallelStep) else {}
        own = {**options, "like": like._plans} if isinstance(like, ParallelStep) else options
        if (
            requested
            or options.get("stages", 1) != 1
            or isinstance(given, PipelinePlan)
            or isinstance(like, PipelinePlan)
        ):
            let_arrays_pass()
        self._plans = StepPlans(self.called, given, own)
        self._dispatch = Dispatcher(self._plans)
        if requested is not None:
            self._dispatch.run_by = functools.partial(_side_by_side, requested, options)
        self.clock: StepClock | None = None  # set by `watch`
        self.observer: Callable[[Any], None] | None = (
            None  # takes the arrays of each result; set by a run under `autopar keep`
        )

    @property
    def name(self) -> str:
        """The name of the user's step."""
        return self.called.name

    @property
    def options(self) -> dict[str, Any]:
        """The options of the decorator, without `plan`."""
        return {**self._plans.options, **self._like}

    @property
    def is_fixed(self) -> bool:
        """Whether the step runs by a given plan and never plans."""
        return self._plans.fixed is not None

    @property
    def latest_plan(self) -> P | None:
        """The plan that was made or used last; None before the first call."""
        return cast("P | None", self._plans.latest)

    @property
    def plans(self) -> tuple[P, ...]:
        """The plans of this step, one for each set of argument shapes, the least recently used first."""
        return tuple(cast("P", prepared.plan) for prepared in self._dispatch.known.values())

    @property
    def prepared(self) -> tuple[Prepared, ...]:
        """The plans of this step ready to run, the least recently used first."""
        return tuple(self._dispatch.known.values())

    @property
    def pipelines(self) -> PipelineTemplates | None:
        """The pipelines that run side by side, and their templates, by which `explain` shows them; None before the first call, or
        without the option `pipelines`."""
        last = next(reversed(self._dispatch.known.values()), None)
        return last.run.templates if last is not None and isinstance(last.run, SideBySideStep) else None

    @property
    def run_by(self) -> RunBy | None:
        """Makes what runs a plan in place of a jitted step, from now on; set by a run under `autopar keep`."""
        return self._dispatch.run_by

    @run_by.setter
    def run_by(self, run_by: RunBy) -> None:
        self._dispatch.run_by = run_by

    def planning_options(self) -> dict[str, Any]:
        """The options for `plan_program`: without those of tracing, and with `like` as a plan.

        Raises:
            PlanMismatchError: `like` is a step without a plan.
        """
        return self._plans.planning_options()

    def profiles(self, plan: PipelinePlan) -> dict[str, HardwareProfile]:
        """The profile of each kind of device of a pipeline plan."""
        return self._plans.profiles(plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. The first call with new shapes traces, plans and compiles.

        Inside a transformation of JAX (`jit`, `grad`, `vmap`, `scan`, `eval_shape`, another planned step) it runs as written, under
        `jax.jit` and without its plan: only the outermost function is planned.
        """
        if is_traced():
            return as_written(self.called, args, kwargs)
        if self.clock is None:
            dispatched = self._dispatch.run(args, kwargs)
        else:
            dispatched = self.clock.timed(lambda: self._dispatch.run(args, kwargs), self._dispatch.probed)
        if self.observer is not None:
            self.observer(dispatched[1])
        return dispatched[0]

    def measured(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pipelined step once, with the same results as a call, and measure when each of its tasks runs.

        `report()` then shows the measured timeline next to the simulated one. Tasks wait for one another on the host, so the step
        takes longer than a call, and is not one of the timed steps. All processes call it together.

        Raises:
            StepSignatureError: it is one program, or has not run with arguments of these shapes yet.
        """
        if self.clock is None:
            return self._dispatch.measured(args, kwargs)[0]
        return self.clock.timed(lambda: self._dispatch.measured(args, kwargs), self._dispatch.probed)[0]

    def plan(self, *args: Any, **kwargs: Any) -> P:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s); nothing is compiled."""
        return self.planned(*args, **kwargs)[0]

    def planned(self, *args: Any, **kwargs: Any) -> tuple[P, Program]:
        """The plan, and the traced program that it was made for or checked against."""
        with opened(self.called, args, kwargs) as call:
            planned = self._plans.of(call)
            return cast("P", planned.plan), planned.program

    def init(self, create_state: Callable[..., Any], /, *create_args: Any, **step_args: Any) -> Any:
        """Build the carried state already sharded: it never exists as a whole on one device, except on CPUs, which share one memory.

        A step that is one program is compiled at the same time, for arguments of these shapes; with several processes, at its first
        call.

        Args:
            create_state: returns the state; must run under `jax.jit`. Where several arguments of the step are state, as a model
                and its optimizer, it returns them as a tuple in the step's order, or as a dict by name.
            create_args: its arguments; the same on every process.
            step_args: the step's other arguments by name (arrays or `jax.ShapeDtypeStruct`s).

        Raises:
            StepSignatureError: it is ambiguous which arguments of the step the state is.
            BatchError: `create_args` differ between processes.
        """
        with new_state(create_state, create_args) as new:
            with self._opened_for("init", new.value, step_args) as call:
                prepared = self._dispatch.prepare(call)
                planned = dict(zip(map(id, jax.tree.leaves(call.trees)), prepared.places, strict=True))
            exchange = among_processes()
            if exchange is not None:
                given = zip(new.call.input_paths, jax.tree.leaves(new.call.trees), strict=True)
                check_equal(exchange, f"`init` of `{self.name}`", dict(given))
            shapes = jax.tree.leaves(new.shapes)
            places = [planned.get(id(leaf), prepared.whole) for leaf in shapes]
            with self._plans.compiled_kept(prepared.plan):
                compiled = prepared.compiling(call.trees)
                with self._dispatch.announced("making the state of"):
                    arrays = built(new.leaves, new.call.trees, shapes, places)
                with self._dispatch.announced("compiling"):
                    compiled()
            return new.finish(arrays)

    def abstract_state(self, create_state: Any, /, *create_args: Any, **step_args: Any) -> Any:
        """The carried state as `jax.ShapeDtypeStruct`s with the plan's shardings; nothing runs.

        Orbax restores into it, as `ocp.args.StandardRestore(abstract_state)`.

        Args:
            create_state: see `init`; or the state itself, as arrays or `jax.ShapeDtypeStruct`s.
            create_args, step_args: see `init`.

        Raises:
            StepSignatureError: it is ambiguous which arguments of the step the state is.
        """
        state = abstract_of(create_state, create_args)
        with self._opened_for("abstract_state", state, step_args) as call:
            leaves, structure = jax.tree.flatten(call.trees)
            laid = [
                jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type, sharding=sharding)
                for one, sharding in zip(
                    map(shape_struct, leaves), self._dispatch.prepare(call).in_shardings, strict=True
                )
            ]
            return state_like(state, step_args, call.rebuilt_arguments(jax.tree.unflatten(structure, laid)))

    def shard_batch(self, batch: Any, *, argument: str | None = None) -> Any:
        """Make a batch into global arrays with the plan's shardings, for the step.

        Each process gives its share of the examples: an equal part of the first dim of each array, in the order of processes, whatever
        the plan. An array that is given whole must be equal on every process; the first batch is checked for that. A single process
        gives the whole batch. In a pipeline, shares go to the processes of the stage that reads the array: call this in the thread that
        calls the step, because transfers between processes keep one order.

        Args:
            batch: an argument of the step, or this process's share of it: a pytree of anything that `numpy.asarray` takes.
            argument: its name, where the pytree is ambiguous.

        Raises:
            BatchError: shapes or dtypes are not the plan's, or what must be equal is not; for the first batch on every process,
                naming those that differ.
            StepSignatureError: there is no plan yet.
        """
        if not self._dispatch.known:
            raise StepSignatureError(
                f"`shard_batch` lays a batch out by the plan, and `{self.name}` has none yet: build its state first, by"
                f" `{self.name}.init(create_state, …)` with the shapes of the whole batch"
            )
        return shard_batch(
            [prepared.arguments for prepared in reversed(self._dispatch.known.values())], batch, argument
        )

    def lower(self, *args: Any, mesh: Mesh | None = None, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step as `jax.stages.Lowered`.

        Args:
            mesh: devices to lower for, real or absent (`jax.experimental.topologies`); by default the visible ones.
        """
        plan, program = self.planned(*args, **kwargs)
        if isinstance(plan, PipelinePlan):
            raise StepSignatureError(
                f"`{self.name}` runs in {len(plan.stages)} stages, each of which is several programs: there is none to"
                " lower. `autopar.verify` compiles those of all stages"
            )
        mesh = self._plans.mesh(plan) if mesh is None else mesh
        return execute.lower(execute.jit_plan(plan, program.trace, mesh), program.trace.arguments, mesh)

    def report(self) -> StepReport:
        """Compare the last steps with the plan: time, memory, MFU, and which part of the prediction may be wrong. For a pipeline also
        the timelines, simulated and, where a step was `measured`, measured.

        It waits until the devices are idle. Steps are timed from call to call, from the second call with the same shapes on: the
        first one compiles.

        Raises:
            StepSignatureError: too few steps have run.
        """
        return report_of_last_steps(self.name, self._dispatch, self._plans)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind the step as a method if it is an attribute of a class: `self` is its first argument."""
        return self if instance is None else BoundStep(self, instance)

    def _opened_for(self, caller: str, state: Any, step_args: Mapping[str, Any]) -> AbstractContextManager[Call]:
        """Open a call with a state, and the other arguments by name."""
        args, kwargs = self.called.by_name(state_arguments(self.called, state, step_args, caller))
        return opened(self.called, args, kwargs)


def _side_by_side(
    requested: Pipelines, options: Mapping[str, Any], plan: Plan, program: Program, mesh: Mesh, may_take: bool
) -> SideBySideStep:
    return SideBySideStep(plan, program, mesh, requested, options, may_take=may_take)


class BoundStep:
    """A planned step as a method of an object: the object is the first argument of each call. Its attributes that are no arrays are
    part of the key of a plan, as for any argument.
    """

    def __init__(self, step: ParallelStep[Any], instance: Any) -> None:
        self._step, self._instance = step, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._instance, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._step, name)
        if name in ("plan", "planned", "lower", "measured"):
            return functools.partial(found, self._instance)
        if name in ("init", "abstract_state"):
            return functools.partial(found, **{self._step.called.parameters[0]: self._instance})
        return found
