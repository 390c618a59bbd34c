"""Run batches through an asynchronous pipeline, without waiting for updates.

In: a `Pipeline`, and its asynchronous schedule.
Out: `StreamedPipeline.start`, a `Stream`: it takes batch after batch, and gives the state back when all are done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from autopar.errors import StepSignatureError
from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.pieces import Layout, pieces_of
from autopar.pipeline.cut.pieces_by_version import versioned
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.given_to_updates import GivenToUpdates, corrected_updates
from autopar.pipeline.run.instructions import absent, by_leaf
from autopar.pipeline.run.levels import levels_of
from autopar.pipeline.run.moved_back import MovingBack
from autopar.pipeline.run.piece_programs import StagePieces
from autopar.pipeline.run.sent_by_pieces import ProgramsOfPieces
from autopar.pipeline.run.stacked_leaves import assembled
from autopar.pipeline.run.stream_listing import Streamed, StreamListing
from autopar.pipeline.run.stream_program import Store, StreamProgram, Window
from autopar.pipeline.schedule.corrections import Corrections
from autopar.pipeline.schedule.kind import ScheduleKind


@dataclass(frozen=True, slots=True)
class _State:
    """Where a carried result is after any number of batches."""

    base: int
    is_constant: bool
    sharding: NamedSharding
    absent: Any

    def read(self, store: Store, num_batches: int) -> Any:
        return store.get((self.base, None if self.is_constant else num_batches), self.absent)


class StreamedPipeline:
    """A pipeline that streams batches.

    Args:
        pipeline: the step, with one submesh for each stage.
        kind: an asynchronous schedule.
        num_microbatches: the number of microbatches per batch, which is one update.
        of_batch: positions of arguments that are new in each batch.
        names: the path of each argument.
        corrections: of updates and backward passes; None for none.

    Raises:
        ScheduleError: the step cannot run asynchronously.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        kind: ScheduleKind,
        num_microbatches: int,
        of_batch: Collection[int],
        names: Sequence[str],
        compiler_options: Mapping[str, Any] | None = None,
        corrections: Corrections | None = None,
    ) -> None:
        self.pipeline = pipeline
        stages = pipeline.stages
        layouts = [Layout(one.program.program.of(one.plan).trace, one.program.inputs) for one in stages]
        levels = levels_of([one.program for one in stages], layouts)
        whole = [pieces_of(layout, level) for layout, level in zip(layouts, levels, strict=True)]
        outputs = [one.program.outputs for one in stages]
        paths = dict(enumerate(names))
        sources = versioned(layouts, whole, outputs, pipeline.carried, of_batch, paths)
        corrected = corrected_updates(
            kind, corrections, layouts, whole, outputs, pipeline.carried, num_microbatches, paths
        )
        each = zip(stages, sources.stages, layouts, corrected, strict=True)
        pieces = [StagePieces(stage, own.pieces, layout, how) for stage, own, layout, how in each]
        programs = ProgramsOfPieces(pieces, pipeline.instances, pipeline.arguments, num_microbatches, compiler_options)
        self.streamed = Streamed(
            pieces, sources, pipeline.arguments, programs, pipeline.carried, num_microbatches, MovingBack(pieces)
        )
        self.program = StreamProgram(self.streamed, kind)
        self.corrected = GivenToUpdates(self.streamed, self.program.key, kind, corrections)
        self.batch_leaves = frozenset(leaf for leaf in pipeline.homes if leaf[0] in of_batch)
        self.state = dict(self._state())

    def start(self, leaves: Sequence[Any], num_before: int = 0) -> Stream:
        """A stream that begins with this state.

        Args:
            leaves: the leaves of the step's arguments; those of the batch are not read.
            num_before: the number of updates of earlier streams.
        """
        return Stream(self, leaves, num_before)

    def _state(self) -> Any:
        listing = StreamListing(self.streamed, {})
        for argument, result in self.pipeline.carried.items():
            home, slot = listing.homes[argument]
            base, number = self.program.key(listing.named(argument, home, slot))
            stage = self.streamed.stages[home]
            port = next(
                port for port in stage.stage.program.inputs if port.kind == "argument" and port.leaf == argument
            )
            sharding = stage.shardings[port]
            yield result, _State(base, number is None, sharding, absent(stage.avals()[port], sharding))


class Stream:
    """Batches in flight.

    Args:
        leaves: the leaves of the step's arguments at its start; None for a stream whose arrays are filled in.
        num_before: the number of updates of earlier streams.

    Attributes:
        num_batches: the number of batches taken so far.
    """

    def __init__(self, streamed: StreamedPipeline, leaves: Sequence[Any] | None, num_before: int) -> None:
        self.whole, self.num_batches, self.num_before = streamed, 0, num_before
        self.store: Store = {}
        self._is_broken = False
        if leaves is None:
            return
        state = [leaf for leaf in streamed.pipeline.homes if leaf not in streamed.batch_leaves]
        window = streamed.program.batch(0).on(self.store)
        streamed.pipeline.arguments.place(leaves, window, state)
        self.store.update(streamed.corrected.at_start())

    def push(self, leaves: Sequence[Any]) -> list[Any] | None:
        """Dispatch the tasks that begin with a batch.

        Args:
            leaves: the leaves of the step's arguments; those of the state are not read.

        Returns:
            The results of the earliest batch for which they were not returned yet, by position, with None for carried ones;
            None if they are not complete.
        """
        run, program = self.whole.program.batch(self.num_batches), self.whole.program
        self.check()
        self._is_broken = True  # until all is dispatched
        first = Window(self.store, run.keys, self.num_batches)
        self.whole.pipeline.arguments.place(leaves, first, self.whole.batch_leaves)
        self.store.update(self.whole.corrected.of_update(self.num_batches, self.num_before))
        window = run.on(self.store)
        for one in run.steps:
            one.run(window)
        found = self._results(run.results, window) if self.num_batches >= program.lag else None
        self.num_batches += 1
        self._is_broken = False
        return found

    def drain(self) -> tuple[list[list[Any]], list[Any]]:
        """Dispatch the tasks of all batches in flight.

        Returns:
            The results that `push` has not returned, and the state, by position of the result, with None for others.
        """
        self.check()
        self._is_broken = True
        run, lag = self.whole.program.end(self.num_batches), self.whole.program.lag
        window = run.on(self.store)
        for one in run.steps:
            one.run(window)
        late = min(lag, self.num_batches)
        each = len(run.results) // late if late else 0
        rest = [self._results(run.results[n * each : (n + 1) * each], window) for n in range(late)]
        parts = by_leaf({leaf: one.read(self.store, self.num_batches) for leaf, one in self.whole.state.items()})
        count = self.whole.pipeline.num_outputs
        self.store.clear()
        return rest, [assembled(parts[i]) if i in parts else None for i in range(count)]

    def check(self) -> None:
        """Refuse a stream whose batches are lost.

        Raises:
            StepSignatureError: they are.
        """
        if self._is_broken:
            raise StepSignatureError(
                "the batches in flight are lost, because an error or an interrupt ended their dispatch, or they were drained"
                " before: start again with `stream(state, batches)`, from a state that `drain` returned"
            )

    def _results(self, results: Sequence[tuple[LeafKey, Any]], window: Window) -> list[Any]:
        """The results that are not carried, taken out of the store."""
        found = by_leaf({leaf: one.read(window) for leaf, one in results})
        for _, one in results:
            for register in one.registers:
                window[register] = None
        literals = self.whole.pipeline.literals
        count = self.whole.pipeline.num_outputs
        return [
            assembled(found[i]) if i in found else jnp.array(literals[i]) if i in literals else None
            for i in range(count)
        ]
