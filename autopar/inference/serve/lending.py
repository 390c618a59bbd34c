"""Run other work, such as a train step in microbatches, in the gaps of engines.

In: engines that share their devices, a train step, its state and batches. Out: `Lending`. Between two iterations the engine asks whether a
microbatch may run now (`Slack`). While it runs, no iteration does, so requests wait for the rest of one microbatch at most.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax

from autopar.api.microbatched_step import MicrobatchedStep, Microbatches
from autopar.inference.schedule.slack import Slack
from autopar.inference.serve.iterations import Iterations, Processed

#: The guard, as a multiple of the time of a decode step, if there is none.
GUARD_FACTOR = 1.2


class Work(Protocol):
    """Work in pieces."""

    @property
    def next_kind(self) -> Hashable | None:
        """The kind of the next piece: pieces of one kind take about the same time. None if there is none."""
        ...

    def run(self) -> None:
        """Run the next piece, to its end."""
        ...


class Training:
    """A train step that runs in the gaps of an engine (`Work`). Made by `Engine.lend`.

    Args:
        batches: taken when the step before has ended.
        lock: of the engine. end: called with the lock when no more is to run in gaps.

    Attributes:
        state: after the last whole step. results: what each step has returned besides the state.
        num_steps, num_microbatches: run so far.
    """

    def __init__(
        self,
        step: MicrobatchedStep,
        state: Any,
        batches: Iterable[Any],
        lock: AbstractContextManager[Any],
        end: Callable[[], None],
    ) -> None:
        self.state, self.results = state, list[Any]()
        self.num_steps = self.num_microbatches = 0
        self._step, self._batches = step, iter(batches)
        self._lock, self._end = lock, end
        self._error: BaseException | None = None
        self._current: Microbatches | None = None
        self._begin()

    def _begin(self) -> None:
        self._current = None
        for batch in self._batches:
            self._current = self._step.begin_with(self.state, batch)
            break

    def piece_seconds(self, clock: Callable[[], float]) -> Mapping[Any, float]:
        """The seconds of each kind of piece; see `Microbatches.seconds`."""
        return {} if self._current is None else self._current.seconds(clock)

    @property
    def next_kind(self) -> Hashable | None:
        """See `Work`."""
        return None if self._current is None else self._current.next_kind

    def run(self) -> None:
        """See `Work`. An exception ends the training, and is raised by `finish` and `stop`."""
        assert self._current is not None
        try:
            is_update = self._current.next_kind == "update"
            jax.block_until_ready(self._current.run())
            if is_update:
                self.state, rest = self._current.state_and_rest()
                self.results.append(rest)
                self.num_steps += 1
                self._begin()
            else:
                self.num_microbatches += 1
        except Exception as error:  # the engine's buffers are no part of it
            self._error, self._current = error, None

    def finish(self) -> Any:
        """Run what is left of the batches now, while requests wait, and return the state."""
        while self.next_kind is not None:
            with self._lock:  # other threads may step the engine in between
                if self.next_kind is not None:
                    self.run()
        return self.stop()

    def stop(self) -> Any:
        """Run no more, and return the state after the last whole step. What was computed of the next one is dropped.

        Raises:
            Exception: what the step or the batches have raised.
        """
        with self._lock:
            self._current = None
            self._end()
        if self._error is not None:
            raise self._error
        return self.state


class Lending:
    """Work that runs in the gaps of engines.

    Args:
        members: the engines on the same devices. tpot_s: see `Slack`. clock: seconds.

    Attributes:
        seconds: the time that the work took so far.
    """

    def __init__(self, work: Work, members: list[Iterations], tpot_s: float, clock: Callable[[], float]) -> None:
        self.work, self.seconds = work, 0.0
        self._members, self._tpot_s, self._clock = members, tpot_s, clock
        self._slack: dict[int, Slack] = {}

    def note_time(self, kind: Hashable, seconds: float, member: Iterations | None = None) -> None:
        """Take note of the time of a piece of work, or of an iteration of a member."""
        for each in self._members if member is None else [member]:
            self._slack_of(each).note_time(kind, seconds)

    def note(self, member: Iterations, processed: Processed) -> None:
        """Take note of the results of an iteration."""
        slack = self._slack_of(member)
        slack.note_time(processed.shape, processed.seconds)
        slack.note_update(processed.update, processed.ended_s)

    def run_in_gap(self) -> bool:
        """Run the next piece of the work if there is room for it. Returns whether it ran."""
        kind = self.work.next_kind
        if kind is None or not self._has_room(kind):
            return False
        for member in self._members:
            member.process_all()
        if not self._has_room(kind):
            return False
        started = self._clock()
        self.work.run()
        took = self._clock() - started
        self.seconds += took
        self.note_time(kind, took)
        return True

    def _has_room(self, kind: Hashable) -> bool:
        now = self._clock()
        awake = [member for member in self._members if not member.runner.is_asleep]
        return all(
            self._slack_of(each).may_run(kind, each.scheduler.running, each.scheduler.num_waiting, now)
            for each in awake
        )

    def _slack_of(self, member: Iterations) -> Slack:
        return self._slack.setdefault(id(member), Slack(self._tpot_s))
