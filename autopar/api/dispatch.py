"""Run the calls of a step: prepare a program for each plan, compile it at its first call, and dispatch the next ones fast.

In: a call's arguments, and the step's plans. Out: `Dispatcher.run`: the step's result.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from autopar.api.call_clock import Calls
from autopar.api.measure_step import wait
from autopar.api.prepared_step import Prepared, RunBy, prepared_of
from autopar.api.step_plans import StepPlans
from autopar.errors import StepSignatureError
from autopar.frontend.call import Call, opened
from autopar.frontend.step import Step
from autopar.jax_interop.compat import placed_struct
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.run.step import PipelinedStep
from autopar.runtime import jit as execute
from autopar.runtime.own_arrays import mark_returned
from autopar.system.progress import announced


class Dispatcher:
    """Runs the calls of one step.

    Attributes:
        known: the prepared programs by the key of a call; the last used one comes last.
        last: the program that ran the last call. calls: the times of its calls.
        fast: `last`, if it takes the arguments unchanged.
        run_by: see `prepared_of`.
    """

    def __init__(self, plans: StepPlans) -> None:
        self.called, self.plans = plans.called, plans
        self.known: dict[Any, Prepared] = {}
        self.last: Prepared | None = None
        self.calls = Calls()
        self.fast: Prepared | None = None
        self._fast_key: Any = None
        self.run_by: RunBy | None = None

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Run the step: its result, and the arrays that the planned program returned."""
        failed: Exception | None = None
        fast = None if kwargs else self.fast
        leaves = None if fast is None else fast.run.own_arguments.flattened(args)
        if fast is not None and leaves is not None:
            self.calls.note()
            try:
                result = fast.run.dispatch(leaves)
            except Exception as error:  # other shapes or shardings; or the step's own error
                failed = error
            else:
                return result, result
        mark_returned()
        with opened(self.called, args, kwargs) as call:
            execute.check_not_deleted(call.input_paths, jax.tree.leaves(call.trees))
            known = call.key == self._fast_key
            prepared = self.prepare(call)
            trees = prepared.placed(call.trees, may_take=self._may_take)
            if failed is not None and known and all(map(operator.is_, jax.tree.leaves(trees), jax.tree.leaves(args))):
                raise failed
            is_fast = call.is_plain and prepared.results.is_plain
            self.fast, self._fast_key = (prepared, call.key) if is_fast else (None, None)
            if prepared is not self.last or not prepared.is_compiled:
                self.calls.restart()
            elif failed is None:  # otherwise it was noted above
                self.calls.note()
            self.last = prepared
            arrays = self._run_prepared(prepared, trees)
            return call.finish(prepared.results, arrays), arrays

    def measured(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Like `run`, for a pipelined step, and measure the tasks."""
        with opened(self.called, args, kwargs) as call:
            prepared = self.prepare(call)
            if not isinstance(prepared.run, PipelinedStep):
                raise StepSignatureError(
                    f"`{self.called.name}` is one program: `measured` is for pipelines. `report()` has its time"
                )
            if not prepared.is_compiled or prepared is not self.last:
                raise StepSignatureError(
                    f"`{self.called.name}` is compiled at its first call: make one with arguments of these shapes before it"
                    " is `measured`"
                )
            self.calls.interrupt(wait)
            arrays, prepared.measured = prepared.run.measured(*call.trees)
            return call.finish(prepared.results, arrays), arrays

    def _run_prepared(self, prepared: Prepared, trees: Sequence[Any]) -> Any:
        if prepared.is_compiled:
            return prepared.run(*trees)
        prepared.compiled_for = jax.tree.map(placed_struct, tuple(trees))
        with self.announced("compiling"), self.plans.compiled_kept(prepared.plan):
            arrays = prepared.run(*trees)
        prepared.is_compiled = True
        return arrays

    def announced(self, doing: str) -> AbstractContextManager[None]:
        """Show what is being done, unless the user shows it."""
        return announced(f"{doing} `{self.called.name}`", shown=self.plans.options.get("progress") is None)

    def probed(self, dispatched: tuple[Any, Any]) -> Any:
        """The array of a call's result to wait for."""
        position = None if self.last is None else self.last.probe
        return None if position is None else jax.tree.leaves(dispatched[1])[position]

    def prepare(self, call: Call) -> Prepared:
        """The program for a call; made at the first call with this key."""
        prepared = self.known.pop(call.key, None)
        if prepared is None:
            planned = self.plans.of(call, to_run=True)
            plan, program = planned.plan, planned.program
            devices = self.plans.devices() if isinstance(plan, PipelinePlan) else self.plans.mesh(plan)
            name, own = self.called.name, {"may_take": self._may_take, "run_by": self.run_by}
            prepared = prepared_of(name, plan, program, planned.results, devices, **own)
        else:
            self.plans.latest = prepared.plan
        self.known[call.key] = prepared
        return prepared

    @property
    def _may_take(self) -> bool:
        """Whether arrays that the user made may be donated: only if the user has given `donate`."""
        return self.plans.options.get("donate") is not None


def as_written(called: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the step without its plan, inside a transformation of JAX. Nothing is donated."""
    with opened(called, args, kwargs) as call:
        arrays = jax.jit(call.function)(*call.trees)
        assert call.results is not None, "it has been traced"
        return call.finish(call.results, arrays)
