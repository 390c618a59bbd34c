"""`parallelize(step, stages=..., consistency=...)`: a step whose batches stream through stages without waiting for updates.

In: a user's step, the name of an asynchronous schedule, options. Out: `StreamedStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autopar.api import make_plan as plan_step
from autopar.api.call_clock import Calls
from autopar.api.measure_stages import measure_stages
from autopar.api.measure_step import FEWEST_STEPS, wait
from autopar.api.parallel_step import ParallelStep
from autopar.api.step_report import StepReport
from autopar.api.stream_snapshot import stream_loaded, stream_taken
from autopar.api.workers.traced_step import (
    TracedStep,
    arguments_of,
    check_is_plain,
    check_state_first,
    state_arguments_of,
    taken_apart,
)
from autopar.errors import CheckpointError, OptionError, StepSignatureError
from autopar.frontend.call import Call, opened
from autopar.jax_interop.compat import shape_struct
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.run.step import PipelinedStep
from autopar.pipeline.run.stream import Stream, StreamedPipeline
from autopar.pipeline.schedule.corrections import Consistency
from autopar.runtime import jit as execute
from autopar.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Ready:
    """A step ready to stream batches of certain shapes."""

    traced: TracedStep
    run: PipelinedStep
    pipeline: StreamedPipeline


@dataclass(slots=True)
class _InFlight:
    """Batches in flight.

    Args:
        state: the arguments that are state, as shapes. leaves: of all arguments at the start.
        last: the results of the last batch for which they are complete.
        finished: all results, with the state, once no batch is in flight any more.
    """

    ready: Ready
    key: Any
    state: Sequence[Any]
    leaves: Sequence[Any]
    stream: Stream
    last: Sequence[Any] = ()
    finished: list[Any] | None = None


class StreamedStep(ParallelStep[PipelinePlan]):
    """A step whose batches stream through stages. Made by `parallelize` with `stages` and `consistency`.

    Called like a function, it runs one batch alone, and its result is that of a synchronous step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        consistency: Consistency,
        plan: AnyPlan | str | Path | None,
        options: Mapping[str, Any],
    ) -> None:
        plan_step.check_options([name for name in options if name not in plan_step.option_names()], "plan")
        self.kind, self.corrections = consistency.kind, consistency.corrections
        if options.get("schedule", "auto") not in ("auto", self.kind.name):
            raise OptionError(
                f"`schedule` is {options['schedule']!r} and `consistency` {self.kind.name!r}: an asynchronous pipeline has a"
                " schedule of its own; leave `schedule` out"
            )
        super().__init__(step, plan, options if plan is not None else {**options, "schedule": self.kind.name})
        self._ready: dict[Any, Ready] = {}
        self._in_flight: _InFlight | None = None
        self._untouched: Any = None  # the state of a stream without batches
        self._num_updates = 0
        #: The times of batches with one key of a call.
        self._calls, self._timed = Calls(), None

    @property
    def num_updates(self) -> int:
        """The number of updates of all streams, those of the batches in flight included. PipeMare anneals step sizes by it: set it
        to that of a checkpoint, or to 0 for another training.

        Raises:
            StepSignatureError: it is set while batches are in flight, or to no number of updates.
        """
        flight = self._in_flight
        return self._num_updates + (flight.stream.num_batches if flight is not None else 0)

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        if self._in_flight is not None:
            raise StepSignatureError(
                f"`num_updates` of `{self.name}` was set while batches are in flight: take the state from `{self.name}.drain()`"
                " first"
            )
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StepSignatureError(
                f"`num_updates` of `{self.name}` was set to {number!r}: give a number of updates, 0 or more"
            )
        self._num_updates = number

    def stream(self, state: Any, batches: Iterable[Any], /, **others: Any) -> Iterator[Any]:
        """Run the step over batches, and iterate over what it returns apart from the state, such as losses, in their order.

        When the iteration ends, or is left, the last batches are in flight: `drain()` finishes them and returns the state. Results are
        arrays of JAX, which are computed while later batches are dispatched.

        Args:
            state: the step's first argument; a tuple of the first arguments where several are state. None continues after the last
                stream, with its batches in flight.
            batches: for each batch the remaining argument; a tuple where there are several. All have the same shapes.
            others: further arguments by name, the same in each call.

        Raises:
            StepSignatureError: the last stream was not drained, or the arguments do not fit the step.
            ScheduleError: the step cannot run asynchronously.
        """
        if state is not None:
            self._check_drained()
        if state is None and (self._in_flight is None or self._in_flight.finished is not None):
            raise StepSignatureError(
                f"`{self.name}.stream` was given None as the state, which continues a stream, and nothing is in flight: give the"
                " state"
            )
        first = () if state is None else state_arguments_of(self.called, state, others)
        return self._streamed(state, first, iter(batches), others)

    def drain(self) -> Any:
        """Finish the batches in flight, and return the state; after a stream without batches, the state as it was given.

        Raises:
            StepSignatureError: nothing was streamed since the last `drain()`, or an interrupt has lost the batches in flight.
        """
        untouched, self._untouched = self._untouched, None
        if self._in_flight is None and untouched is not None:
            return untouched
        if self._in_flight is None:
            raise StepSignatureError(
                f"`{self.name}` has nothing to drain: iterate over `{self.name}.stream(state, batches)` first"
            )
        flight, self._in_flight = self._in_flight, None
        self._num_updates += flight.stream.num_batches
        outputs = flight.finished
        if outputs is None:
            late, outputs = flight.stream.drain()
            flight.last = late[-1] if late else flight.last
        return _state(flight, outputs)

    def report(self) -> StepReport:
        """Compare the last batches of streams with the plan, from batch to batch after filling: as for a step's `report`, with
        the versions of the weights and the delay of gradients. If none was streamed, of the last steps that ran alone.

        Raises:
            StepSignatureError: too few batches have followed each other.
        """
        if not self._ready:
            return super().report()
        if self._calls.num_steps < FEWEST_STEPS:
            filled = max(one.pipeline.program.filled for one in self._ready.values())
            raise StepSignatureError(
                f"`{self.name}` has streamed too few batches to report on: stream at least {filled + FEWEST_STEPS + 1} of the"
                f" same shapes; the first {filled} fill the pipeline"
            )
        ready = self._ready[self._timed]
        plan, devices, profiles = ready.run.plan, self._plans.devices(), self._plans.profiles(ready.run.plan)
        return measure_stages(plan, ready.traced.program, self._calls, devices, profiles, None, streams=True)

    def snapshot(self) -> Snapshot:
        """All live versions of the weights and all batches in flight, after the last batch whose results were taken.
        `StoreCheckpoints` writes it.

        Raises:
            StepSignatureError: nothing is in flight, or an interrupt has lost it.
            CheckpointError: there are several processes.
        """
        flight = self._in_flight
        if flight is None or flight.finished is not None:
            raise StepSignatureError(
                f"`{self.name}` has no batches in flight: there is nothing to save but the state that `drain()` returns"
            )
        if jax.process_count() > 1:
            raise CheckpointError("snapshots are of one process: save the state that `drain()` returns")
        kept = {output for _, output in flight.ready.traced.pairs}
        last = {n: value for n, value in enumerate(flight.last) if n in kept and value is not None}
        return stream_taken(flight.stream, last)

    def resume(self, snapshot: Snapshot, state: Any, batch: Any, /, **others: Any) -> tuple[None, int]:
        """Go on from a snapshot of this step, with the plan and the devices that it had.

        Args:
            state, batch, others: arguments as for `stream`, of which only shapes are read.

        Returns:
            None, which `stream` takes as the state, and the number of the first batch that is needed.

        Raises:
            StepSignatureError: the last stream was not drained.
            StoreError: the snapshot is of another step or plan, or damaged.
        """
        self._check_drained()
        first = state_arguments_of(self.called, state, others)
        with opened(self.called, arguments_of(self.called, first, batch, others), others) as call:
            ready, leaves = self._ready_for(call), jax.tree.leaves(call.trees)
            check_state_first(ready.traced, call, len(first))
            stream, last = stream_loaded(snapshot, ready.pipeline)
            self._in_flight = _InFlight(ready, call.key, _skeleton(first), leaves, stream)
        count = len(ready.run.plan.outputs)
        self._in_flight.last = [last.get(n) for n in range(count)]
        self._num_updates = stream.num_before
        return None, stream.num_batches

    # -- helpers -----------------------------------------------------------------------------

    def _streamed(
        self, given: Any, state: Sequence[Any], batches: Iterator[Any], others: Mapping[str, Any]
    ) -> Iterator[Any]:
        flight = None if state else self._in_flight
        for number, batch in enumerate(batches):
            if flight is None:
                self._check_drained()
                flight = self._started(state, batch, others)
                self._in_flight, self._untouched = flight, None
            if self._in_flight is not flight:
                raise StepSignatureError(
                    f"`{self.name}` was drained during the iteration over its stream: end the iteration first"
                )
            with opened(self.called, arguments_of(self.called, flight.state, batch, others), others) as call:
                if call.key != flight.key:
                    raise StepSignatureError(
                        f"batch {number} of the stream has other shapes than the first: give batches of the same shapes, and leave"
                        " out a smaller last one"
                    )
                self._time(flight)
                outputs = flight.stream.push(jax.tree.leaves(call.trees))
            if outputs is not None:
                flight.last = outputs
                yield flight.ready.traced.rest(outputs)
        if flight is None and self._in_flight is None:  # no batch came
            self._untouched = given
        if flight is not None and flight.ready.pipeline.program.lag:  # results that are not complete yet
            late, flight.finished = flight.stream.drain()
            flight.last = late[-1] if late else flight.last
            yield from map(flight.ready.traced.rest, late)

    def _time(self, flight: _InFlight) -> None:
        """Note the start of a batch, once the pipeline is filled: then each takes as long as a step."""
        if flight.key != self._timed:
            self._calls.restart()
            self._timed = flight.key
        filled = flight.ready.pipeline.program.filled
        if flight.stream.num_batches == filled:
            self._calls.interrupt(wait)
        if flight.stream.num_batches >= filled:
            self._calls.note()

    def _check_drained(self) -> None:
        if self._in_flight is not None:
            raise StepSignatureError(
                f"the last stream of `{self.name}` was not drained: take its state from `{self.name}.drain()` first, or give None"
                " as the state to go on"
            )

    def _started(self, state: Sequence[Any], batch: Any, others: Mapping[str, Any]) -> _InFlight:
        """A stream for a state and batches like this one."""
        with opened(self.called, arguments_of(self.called, state, batch, others), others) as call:
            leaves = jax.tree.leaves(call.trees)
            execute.check_not_deleted(call.input_paths, leaves)
            ready = self._ready_for(call)
            check_state_first(ready.traced, call, len(state))
            return _InFlight(ready, call.key, _skeleton(state), leaves, ready.pipeline.start(leaves, self._num_updates))

    def _ready_for(self, call: Call) -> Ready:
        found = self._ready.get(call.key)
        if found is not None:
            return found
        check_is_plain(call, "a stream needs")
        prepared = self._dispatch.prepare(call)
        run, plan = prepared.run, prepared.plan
        if not isinstance(run, PipelinedStep) or not isinstance(plan, PipelinePlan):
            raise StepSignatureError(
                f"`{self.name}` was planned as one program, so there are no stages to stream batches through: ask for a number of"
                " `stages`, or leave `consistency` out"
            )
        if plan.schedule != self.kind.name and len(plan.stages) > 1:
            raise OptionError(
                f"`consistency` is {self.kind.name!r}, but the given plan is for {plan.schedule!r}: plan again with"
                f" `consistency`, or give that of the plan"
            )
        traced = taken_apart(call, prepared.program, plan.carried, self._plans.of(call).results)
        spans = zip(traced.names, traced.spans, strict=True)
        of_batch = [n for name, span in spans if name not in traced.state_names for n in span]
        with self._plans.compiled_kept(plan):
            self._ready[call.key] = Ready(traced, run, run.streamed(self.kind, of_batch, self.corrections))
        return self._ready[call.key]


def _state(flight: _InFlight, outputs: Sequence[Any]) -> Any:
    """The state, from the results that are carried. What no batch reads is that of the last batch."""
    pairs = flight.ready.traced.pairs
    whole = {output: flight.last[output] if outputs[output] is None else outputs[output] for _, output in pairs}
    flight.ready.run.renewed([whole.get(n) for n in range(len(outputs))])
    leaves = list(flight.leaves)
    for position, output in pairs:
        leaves[position] = whole[output]
    return flight.ready.traced.state(leaves)


def _skeleton(state: Sequence[Any]) -> Any:
    """State as shapes."""
    return jax.tree.map(lambda leaf: shape_struct(leaf) if hasattr(leaf, "shape") else leaf, tuple(state))
