"""Let workers compute gradients and the server update the state: a step cut where gradient accumulation cuts it.

In: a traced step, the workers' devices, a policy. Out: `GradientWork`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from autopar.api.workers.combine import SHARES, combined
from autopar.api.workers.division import Division
from autopar.api.workers.planned_part import PlannedPart
from autopar.api.workers.traced_step import TracedStep
from autopar.api.workers.work import Note, Share, as_array, bytes_of, share_of
from autopar.errors import MicrobatchError
from autopar.transforms.microbatch.worker_programs import Input, Term, cut_for_workers
from autopar.versions.consistency.policy import Policy, next_clock
from autopar.versions.snapshot import Snapshot
from autopar.versions.store import VersionedStore
from autopar.versions.terms import Taken, TermsUpdate


class GradientWork:
    """Gradients on workers, the update on the server, which is on the devices of worker 0.

    Args:
        own_statistics: as in `cut_for_workers`.
    """

    def __init__(self, step: TracedStep, division: Division, policy: Policy, *, own_statistics: bool) -> None:
        self._policy = policy
        self.step, self.devices, self._num_workers = step, division.devices, division.num_workers
        self._own = division.own
        self._cut = cut_for_workers(
            step.program, division.num_workers, own_statistics=own_statistics, wide=policy.period > 1
        )
        _check_terms(self._cut.terms, policy)
        if self._own is not None and self._cut.whole is not None:
            raise MicrobatchError(
                "the step reads a value of the whole batch before its gradients, such as a number of marked examples, and no process"
                " has the whole batch: divide by it after the sums, or use one process"
            )
        self._worker = PlannedPart.of(self._cut.worker.program, division.options)
        self._update = PlannedPart.of(self._cut.update.program, division.options)
        self._whole = None
        if self._cut.whole is not None:
            self._whole = PlannedPart.of(self._cut.whole.program, division.options)
        self.plans = {"worker": self._worker.plan, "update": self._update.plan}
        self.keys = tuple(f"term {n}" for n in range(len(self._cut.terms)))
        self.pushed_bytes = bytes_of([*self._worker.output_shapes, np.int32()])
        self.pulls = [self._path(one) for one in self._cut.worker.inputs if one.source == "state"]
        values = self._worker.program.trace
        state = (n for n, one in enumerate(self._cut.worker.inputs) if one.source == "state")
        self.pulled_bytes = bytes_of(values.avals[values.inputs[n]] for n in state)

    def deal(self, leaves: Sequence[Any]) -> list[Share]:
        """As `Work.deal`."""
        if self._own is not None:
            return [self._own_share(leaves)]
        whole: Sequence[Any] = ()
        if self._whole is not None and self._cut.whole is not None:
            whole = self._whole.on(self.devices[0])([leaves[one.index] for one in self._cut.whole.inputs])
        return [
            [self._dealt(one, leaves, whole, worker) for one in self._cut.worker.inputs if one.source != "state"]
            for worker in range(self._num_workers)
        ]

    def session(
        self, leaves: Mapping[str, Any], note: Note, dispatching: AbstractContextManager[Any]
    ) -> GradientSession:
        """As `Work.session`."""
        return GradientSession(self, self.new_store(leaves, note), dispatching)

    def session_of(self, store: Any, leaves: Mapping[str, Any], note: Note) -> GradientSession:
        """As `Work.session_of`."""
        return GradientSession(self, store, nullcontext())

    def new_store(self, leaves: Mapping[str, Any], note: Note, *, keeps_results: bool = False) -> VersionedStore:
        """As `Work.new_store`."""
        server = self._update.on(self.devices[0])
        places = {self.step.paths[i]: server.out_shardings[o] for i, o in self.step.pairs}
        placed = jax.device_put(dict(leaves), {path: places[path] for path in leaves})
        if keeps_results:
            for n in self._results():
                shape = self._update.output_shapes[n]
                placed[result_key(n)] = jax.device_put(np.zeros(shape.shape, shape.dtype), server.out_shardings[n])
        update = TermsUpdate(self._takes(), self.updating(note))
        return VersionedStore(placed, update=update, workers=self._num_workers, consistency=self._policy)

    def results_in(self, pulled: Callable[[list[str]], Mapping[str, Any]]) -> list[Any] | None:
        """As `Work.results_in`."""
        numbers = self._results()
        values = pulled([result_key(n) for n in numbers])
        outputs: list[Any] = [None] * len(self._update.output_shapes)
        for n in numbers:
            outputs[n] = values[result_key(n)]
        return outputs

    def run(self, worker: int, weights: Mapping[str, jax.Array], share: Share) -> dict[str, Any]:
        """A worker's terms, by key."""
        given = iter(share)
        inputs = [weights[self._path(one)] if one.source == "state" else next(given) for one in self._cut.worker.inputs]
        return dict(zip(self.keys, self._worker.on(self.devices[worker])(inputs), strict=True))

    @property
    def terms(self) -> tuple[Term, ...]:
        """What each worker hands to the update, by `keys`."""
        return self._cut.terms

    def placed(self, weights: Mapping[str, Any], worker: int = 0) -> dict[str, Any]:
        """The weights that a worker reads, where it reads them, so that several runs do not move them again."""
        places = self._worker.on(self.devices[worker]).in_shardings
        inputs = zip(self._cut.worker.inputs, places, strict=True)
        return {
            self._path(one): jax.device_put(weights[self._path(one)], place)
            for one, place in inputs
            if one.source == "state"
        }

    # -- helpers -----------------------------------------------------------------------------

    def _path(self, one: Input) -> str:
        return self.step.paths[one.index]

    def _results(self) -> list[int]:
        """The outputs that are no state."""
        carried = {output for _, output in self.step.pairs}
        return [n for n in range(len(self._update.output_shapes)) if n not in carried]

    def _own_share(self, leaves: Sequence[Any]) -> Share:
        """The inputs from the share that this process was given."""
        inputs = (one for one in self._cut.worker.inputs if one.source != "state")
        return [np.uint32(self._own or 0) if one.source == "number" else leaves[one.index] for one in inputs]

    def _dealt(self, one: Input, leaves: Sequence[Any], whole: Sequence[Any], worker: int) -> Any:
        if one.source == "number":
            return np.uint32(worker)
        leaf = whole[one.index] if one.source == "whole" else leaves[one.index]
        return leaf if one.cut is None else share_of(one.cut, as_array(leaf), worker)

    def _takes(self) -> dict[str, Taken]:
        server, sources = self._update.on(self.devices[0]), self._cut.update.inputs
        place_of = {
            one.index: sharding
            for one, sharding in zip(sources, server.in_shardings, strict=True)
            if one.source == "term"
        }
        everywhere = jax.sharding.NamedSharding(server.in_shardings[0].mesh, jax.sharding.PartitionSpec())
        takes: dict[str, Taken] = {}
        for n, (term, made) in enumerate(zip(self._cut.terms, self._worker.output_shapes, strict=True)):
            place = everywhere if term.kind == "rows" else place_of[n]
            may_wait = term.kind == "sum" and bool(term.shape)
            takes[self.keys[n]] = Taken(made.shape, made.dtype, place, may_wait)
        return takes | {SHARES: Taken((), np.dtype("int32"), everywhere, may_wait=False)}

    def updating(self, note: Note) -> Any:
        """The function `(weights, None, pushed terms) -> (new weights, None)`; `note` takes what the step returns besides."""
        server, sources = self._update.on(self.devices[0]), self._cut.update.inputs
        adding = jax.jit(functools.partial(combined, self._cut.terms, self.keys, self._num_workers))
        output_of = {self.step.paths[i]: o for i, o in self.step.pairs}
        carried = set(output_of.values())
        output_of |= {result_key(n): n for n in self._results()}

        def update(
            weights: dict[str, jax.Array], state: None, pushed: Sequence[Mapping[str, jax.Array]]
        ) -> tuple[dict[str, jax.Array], None]:
            pushed = [one for one in pushed if SHARES in one]
            if not pushed:  # what a policy had held back when its worker left
                return weights, None
            values = adding(pushed)
            inputs = [values[one.index] if one.source == "term" else weights[self._path(one)] for one in sources]
            outputs = server(inputs)
            note([None if n in carried else output for n, output in enumerate(outputs)])
            return {path: outputs[output_of[path]] for path in weights}, None

        return update


def result_key(output: int) -> str:
    """The key of what an update returned apart from the state, in a store that keeps it."""
    return f"result {output}"


class GradientSession:
    """As `Session`. The store counts the iterations of a period, and holds what was pushed in it."""

    def __init__(self, work: GradientWork, store: Any, dispatching: AbstractContextManager[Any]) -> None:
        self.work, self.store, self.dispatching = work, store, dispatching
        self._pulled: dict[int, Mapping[str, jax.Array]] = {}
        self._count = [0] * store.num_workers
        self._clocks = [0] * store.num_workers
        if isinstance(store, VersionedStore):
            self._look_up()

    def iteration(self, worker: int) -> int:
        """As `Session.iteration`."""
        period = self.store.policy.period
        return self._clocks[worker] * period + self._count[worker] % period

    def begin(self, worker: int) -> None:
        """As `Session.begin`."""
        pulled = self.store.pull(self.work.pulls, worker=worker)
        self._pulled[worker], self._clocks[worker] = pulled.values, pulled.clock

    def compute(self, worker: int, share: Share, *, wait: bool) -> None:
        """As `Session.compute`."""
        with self.dispatching:
            made = self.work.run(worker, self._pulled.pop(worker), share)
        if wait:
            jax.block_until_ready(made)
        with self.dispatching:
            self.store.push([*made, SHARES], {**made, SHARES: np.int32(1)}, worker=worker)

    def finish(self, worker: int) -> None:
        """As `Session.finish`."""
        self._count[worker] += 1
        with self.dispatching:
            self._clocks[worker] = self.store.clock(worker=worker)

    def end_round(self) -> None:
        """As `Session.end_round`; updates note results."""

    def flush(self, worker: int) -> None:
        """As `Session.flush`."""
        self.store.flush()

    def leave(self, worker: int) -> None:
        """As `Session.leave`."""
        with self.dispatching:
            self.store.leave(worker)

    def state(self) -> dict[str, Any]:
        """As `Session.state`."""
        pulled = self.store.pull(worker=None).values
        return {path: pulled[path] for path in (self.work.step.paths[i] for i, _ in self.work.step.pairs)}

    def snapshot(self) -> Snapshot:
        """As `Session.snapshot`."""
        return self.store.snapshot()

    def load(self, snapshot: Snapshot) -> None:
        """As `Session.load`."""
        self.store.load(snapshot)
        self._look_up()

    def _look_up(self) -> None:
        """Take counts and clocks from the store."""
        report = self.store.report()
        self._count, self._clocks = list(report.iterations), [clock or 0 for clock in report.clocks]


def _check_terms(terms: Sequence[Term], policy: Policy) -> None:
    """Refuse terms that a policy cannot combine.

    Raises:
        MicrobatchError: it adds up iterations, or applies updates of single workers, and a term needs all workers' of one batch.
    """
    takes_all = policy.slack == 0 and not policy.catches_up and policy.turn is next_clock
    for term in terms:
        if term.kind == "rows" and not (takes_all and policy.period == 1):
            raise MicrobatchError(
                f"the step returns a value for each example ({term.where}), and an update of {policy.name!r} may have the examples of"
                ' some workers only: leave it out of the results, or use "bsp"'
            )
        if policy.period > 1 and term.kind != "sum":
            raise MicrobatchError(
                f"{policy.name!r} adds up what a worker pushes in {policy.period} iterations, and the update reads"
                f" {term.where}, which is no sum over the examples: give an optimizer for the server (`outer=`), so that workers"
                " run the whole step"
            )
