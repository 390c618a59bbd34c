"""`parallelize(step, consistency=...)` without stages: a step that data-parallel workers run around versioned weights.

In: a user's step, a policy, options. Out: `WorkersStep`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.api.dispatch import as_written
from autopar.api.workers.division import check_options, divided
from autopar.api.workers.gradient_work import GradientWork
from autopar.api.workers.local_work import LocalWork, check_outer
from autopar.api.workers.processes import OneProcess
from autopar.api.workers.report import report_of, workers_plan
from autopar.api.workers.run import Lockstep, Threads, runner_of
from autopar.api.workers.traced_step import (
    TracedStep,
    arguments_of,
    check_state_first,
    of_all_processes,
    on_shares,
    state_arguments_of,
    traced_step,
)
from autopar.api.workers.work import Share, Work, is_lockstep
from autopar.errors import StepSignatureError
from autopar.frontend.call import Call, opened
from autopar.frontend.step import Step
from autopar.jax_interop.compat import is_traced, shape_struct
from autopar.plans.workers_plan import WorkersPlan
from autopar.report.workers import WorkersReport
from autopar.runtime import jit as execute
from autopar.versions.consistency.policy import Policy
from autopar.versions.consistency.table import check_suits, find
from autopar.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Divided:
    """A step for arguments of certain shapes, divided and planned."""

    traced: TracedStep
    work: Work


@dataclass(slots=True)
class _Run:
    """Workers that run.

    Args:
        returned: the state that the last call returned, by its leaves; None in a stream.
    """

    divided: Divided
    runner: Lockstep | Threads | OneProcess
    returned: list[Any] | None = None


class WorkersStep:
    """A step that workers run under a consistency policy. Made by `parallelize`.

    Raises:
        StoreError: the policy is unknown, or not defined for the number of workers.
    """

    def __init__(
        self, step: Callable[..., Any], consistency: str | Policy, plan: Any, options: Mapping[str, Any]
    ) -> None:
        check_options(options, plan)
        self.called = Step.of(step, options.get("static_argnames"))
        functools.update_wrapper(self, self.called.function)
        self.policy = find(consistency)
        self._options = dict(options)
        if options.get("outer") is not None:
            check_outer(options["outer"])
        self._divided: dict[Any, Divided] = {}
        self._run: _Run | None = None  # not drained
        self._last: _Run | None = None
        self._unused: Sequence[Any] | None = None  # the state of a stream without batches

    @property
    def name(self) -> str:
        """The name of the user's step."""
        return self.called.name

    @functools.cached_property
    def division(self) -> Any:
        """Each worker's devices."""
        found = divided(self._options)
        check_suits(self.policy, found.num_workers)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on one batch: every worker computes on its share, and the server updates the state.

        The state stays with the server from call to call, as long as each call is given the state that the last one returned.

        Raises:
            StepSignatureError: under this policy workers are at different batches at the same time: use `stream`.
        """
        if is_traced():
            return as_written(self.called, args, kwargs)
        if not is_lockstep(self.policy) or self.policy.period > 1 or jax.process_count() > 1:
            why = "there are several processes" if jax.process_count() > 1 else f"the policy is {self.policy.name!r}"
            raise StepSignatureError(
                f"{why}, so there is no state after each batch: workers are at different batches, push once in several, or would"
                f" send all of it. Iterate over `{self.name}.stream(state, batches)`, then take the state from `{self.name}.drain()`"
            )
        with opened(self.called, args, kwargs) as call:
            leaves = jax.tree.leaves(call.trees)
            execute.check_not_deleted(call.input_paths, leaves)
            made = self._of(call)
            run = self._continued(made, leaves)
            assert isinstance(run.runner, Lockstep), "the policy says so"
            run.runner.step(made.work.deal(leaves))
            outputs = run.runner.noted.popleft()
            run.runner.noted.clear()
            state = run.runner.state()
            paths = made.traced.paths
            for position, output in made.traced.pairs:
                outputs[output] = state[paths[position]]
            run.returned = [state[paths[position]] for position, _ in made.traced.pairs]
            return made.traced.whole_result(outputs)

    def stream(self, state: Any, batches: Iterable[Any], /, **others: Any) -> Iterator[Any]:
        """Run the step over batches, and iterate over what it returns apart from the state, such as losses.

        There is one result per update: under a policy that waits for all workers one per batch, else one per worker's push. With
        `outer` there is one per iteration, the mean over workers that wait for each other. When the iteration ends, or is left, `drain()`
        returns the state.

        Args:
            state: the step's first argument; a tuple of the first arguments where several are state.
            batches: for each batch the remaining argument; a tuple where there are several. All have the same shapes.
            others: further arguments by name, the same in each call.

        Raises:
            StepSignatureError: the last stream was not drained, or the arguments do not fit the step.
        """
        self._check_drained()
        first = state_arguments_of(self.called, state, others)
        return self._streamed(first, iter(batches), others)

    def drain(self) -> Any:
        """Finish what is in flight, and return the state.

        Batches that were given to the workers are computed; what they pushed is applied. With `outer`, the weights are the server's, and
        the rest of the state is worker 0's.

        Raises:
            StepSignatureError: nothing was run since the last `drain()`.
            Exception: what a worker raised.
        """
        if self._unused is not None and self._run is None:
            unused, self._unused = self._unused, None
            return unused[0] if len(unused) == 1 else tuple(unused)
        if self._run is None:
            raise StepSignatureError(
                f"`{self.name}` has nothing to drain: iterate over `{self.name}.stream(state, batches)` first"
            )
        run, self._run = self._run, None
        run.runner.finish()
        traced, state = run.divided.traced, run.runner.state()
        leaves: list[Any] = [None] * len(traced.paths)
        for path, leaf in state.items():
            leaves[traced.paths.index(path)] = leaf
        return traced.state(leaves)

    def snapshot(self) -> Snapshot:
        """Everything that changes in the present run, between two iterations of each worker: state, clocks, what was pushed and not
        applied, and which examples were computed. `StoreCheckpoints` writes it.

        Raises:
            StepSignatureError: nothing runs.
            StoreError: the stream is over.
        """
        if self._run is None:
            raise StepSignatureError(
                f"`{self.name}` does not run: there is nothing to save but the state that `drain()` returned"
            )
        return self._run.runner.snapshot()

    def resume(self, snapshot: Snapshot, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        """Begin a run from a snapshot of this step.

        Args:
            args, kwargs: the step's arguments, as for `plan`; the state is only read for its shapes.

        Returns:
            The state, and the number of the first batch that is needed: call the step with this very state, or give it to `stream` with
            batches from this one on. Workers that were ahead skip what they computed.

        Raises:
            StoreError: the snapshot is of another step, policy or number of workers, or damaged.
        """
        self._check_drained()
        with opened(self.called, args, kwargs) as call:
            made, leaves = self._of(call), jax.tree.leaves(call.trees)
        zeros = [
            jax.numpy.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
            for leaf in leaves
        ]
        run = self._new_run(made, zeros)
        try:
            first = run.runner.load(snapshot)
        except BaseException:
            self._run = None
            raise
        state = run.runner.state()
        for position, _ in made.traced.pairs:
            leaves[position] = state[made.traced.paths[position]]
        run.returned = [leaves[position] for position, _ in made.traced.pairs]
        return made.traced.state(leaves), first

    def report(self) -> WorkersReport:
        """Versions, staleness, waiting and bytes of each worker in the present run, or in the last one.

        Raises:
            StepSignatureError: nothing has run yet.
        """
        if self._last is None:
            raise StepSignatureError(f"`{self.name}` has not run yet, so there is nothing to report on")
        store = self._last.runner.session.store
        return report_of(self._planned(self._last.divided), self.policy, store.report())

    def plan(self, *args: Any, **kwargs: Any) -> WorkersPlan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s): those of the parts, and what the policy costs in bytes and
        waiting. Nothing is compiled."""
        with opened(self.called, args, kwargs) as call:
            return self._planned(self._of(call))

    # -- helpers -----------------------------------------------------------------------------

    def _streamed(self, state: Sequence[Any], batches: Iterator[Any], others: Mapping[str, Any]) -> Iterator[Any]:
        self._check_drained()
        first = next(batches, self)
        if first is self:
            self._unused = state
            return
        with opened(self.called, arguments_of(self.called, state, first, others), others) as call:
            leaves = jax.tree.leaves(call.trees)
            execute.check_not_deleted(call.input_paths, leaves)
            made, key = self._of(call), call.key
            check_state_first(made.traced, call, len(state))
            run = self._continued(made, leaves)
            run.returned = None
        skeleton = jax.tree.map(lambda leaf: shape_struct(leaf) if hasattr(leaf, "shape") else leaf, tuple(state))
        del state, leaves, call  # so that the stream does not keep the first state alive
        counter = itertools.count()

        def deal(batch: Any) -> list[Share]:
            number = next(counter)
            with opened(self.called, arguments_of(self.called, skeleton, batch, others), others) as call:
                if call.key != key:
                    raise StepSignatureError(
                        f"batch {number} of the stream has other shapes than the first: give batches of the same shapes, and leave out"
                        " a smaller last one"
                    )
                return made.work.deal(jax.tree.leaves(call.trees))

        for outputs in run.runner.results(itertools.chain([first], batches), deal):
            yield made.traced.rest(outputs)

    def _planned(self, made: Divided) -> WorkersPlan:
        return workers_plan(self.name, self.policy, self.division, made.work)

    def _of(self, call: Call) -> Divided:
        """The step divided for a call's shapes."""
        if call.key not in self._divided:
            key, options, carry = call.key, self._options, self._options.get("carry")
            if self.division.own is not None:
                call = of_all_processes(call, self.division.num_workers, carry)
            traced = traced_step(call, carry)
            outer = options.get("outer")
            work: Work
            if outer is None:
                own = bool(options.get("per_microbatch_statistics"))
                work = GradientWork(traced, self.division, self.policy, own_statistics=own)
            else:
                local = on_shares(call, traced, self.division.num_workers, carry)
                work = LocalWork(traced, local, self.division, self.policy, outer)
            self._divided[key] = Divided(traced, work)
            return self._divided[key]
        return self._divided[call.key]

    def _new_run(self, made: Divided, leaves: Sequence[Any]) -> _Run:
        division = self.division
        state = made.traced.state_leaves(leaves)
        runner = runner_of(made.work, self.policy, division.num_workers, state, is_shared=division.is_shared)
        self._run = self._last = _Run(made, runner)
        return self._run

    def _continued(self, made: Divided, leaves: Sequence[Any]) -> _Run:
        """The run of the last call, if this one continues it; else a new one."""
        run = self._run
        if run is not None and run.returned is None:
            self._check_drained()
        if run is not None and run.returned is not None and run.divided is made:
            given = [leaves[position] for position, _ in made.traced.pairs]
            if all(one is other for one, other in zip(given, run.returned, strict=True)):
                return run
        return self._new_run(made, leaves)

    def _check_drained(self) -> None:
        if self._run is not None and self._run.returned is None:
            raise StepSignatureError(
                f"the last stream of `{self.name}` was not drained: take its state from `{self.name}.drain()` first"
            )
