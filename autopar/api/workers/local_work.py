"""Let workers run the whole step on weights of their own, and the server average how these changed: local SGD, DiLoCo.

In: a traced step, the workers' devices, a policy, the server's optimizer. Out: `LocalWork`. The mean of (weights pulled - weights after
the period's iterations) is the gradient of the outer optimizer, so `optax.sgd(1.0)` averages weights (Stich 2019, McMahan et al. 2017), and
`optax.sgd(0.7, momentum=0.9, nesterov=True)` is DiLoCo's (Douillard et al. 2023). Weights are the parameters: floating-point arrays of the state that the forward or backward pass reads.
The rest, as the moments of an optimizer, stays with its worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api.workers.combine import SHARES, combined
from autopar.api.workers.division import Division
from autopar.api.workers.planned_part import PlannedPart
from autopar.api.workers.traced_step import TracedStep
from autopar.api.workers.work import Note, Share, as_array, bytes_of, is_lockstep, share_of
from autopar.errors import MicrobatchError, OptionError, StoreError
from autopar.planner.plan_assembly import input_roles
from autopar.transforms.microbatch.batch_dims import Place, leading_dim
from autopar.transforms.microbatch.slices import Cut
from autopar.transforms.microbatch.worker_programs import Term
from autopar.versions.consistency.policy import Policy
from autopar.versions.server_update import Transformation, update_of
from autopar.versions.snapshot import Name, Snapshot, as_like, raw
from autopar.versions.store import VersionedStore
from autopar.versions.terms import Taken, TermsUpdate


class LocalWork:
    """The whole step on each worker.

    Args:
        outer: an optax transformation.
    """

    def __init__(self, step: TracedStep, local: Any, division: Division, policy: Policy, outer: Any) -> None:
        self.step, self.devices, self.num_workers, self._outer = step, division.devices, division.num_workers, outer
        self.policy, self._own = policy, division.own
        graph = step.program.as_written.graph
        size, inputs = leading_dim(graph)
        self._cuts = dict.fromkeys(inputs, Cut(Place(0), size, division.num_workers))
        self._state = {position for position, _ in step.pairs}
        self._step = PlannedPart.of(local, division.options)
        self.plans = {"worker": self._step.plan}
        trace = step.program.as_written.trace
        roles, values = input_roles(graph), [trace.avals[v] for v in trace.inputs]
        self.weights = {
            step.paths[i]: i
            for i in sorted(self._state)
            if roles[i] == "parameter" and jnp.issubdtype(values[i].dtype, jnp.inexact)
        }
        if not self.weights:
            raise MicrobatchError(
                "with `outer`, the server averages weights, and neither the forward nor the backward pass reads a floating-point array of the state"
            )
        self._check_results()
        self.pulled_bytes = bytes_of(values[i] for i in self.weights.values())
        self.pushed_bytes = self.pulled_bytes + np.int32().nbytes

    def deal(self, leaves: Sequence[Any]) -> list[Share]:
        """As `Work.deal`."""
        if self._own is not None:
            return [[leaf for i, leaf in enumerate(leaves) if i not in self._state]]
        return [
            [
                share_of(self._cuts[i], as_array(leaf), worker) if i in self._cuts else leaf
                for i, leaf in enumerate(leaves)
                if i not in self._state
            ]
            for worker in range(self.num_workers)
        ]

    def session(self, leaves: Mapping[str, Any], note: Note, dispatching: AbstractContextManager[Any]) -> LocalSession:
        """As `Work.session`."""
        return LocalSession(self, self.new_store(leaves, note), leaves, note, dispatching)

    def session_of(self, store: Any, leaves: Mapping[str, Any], note: Note) -> LocalSession:
        """As `Work.session_of`."""
        return LocalSession(self, store, leaves, note, nullcontext())

    def results_in(self, pulled: Callable[[list[str]], Mapping[str, Any]]) -> list[Any] | None:
        """As `Work.results_in`: each worker has its own."""
        return None

    def new_store(self, leaves: Mapping[str, Any], note: Note, *, keeps_results: bool = False) -> VersionedStore:
        """As `Work.new_store`."""
        shardings = self._step.on(self.devices[0]).in_shardings
        placed = {path: jax.device_put(leaves[path], shardings[i]) for path, i in self.weights.items()}
        update = update_of(self._outer, placed)
        assert isinstance(update, Transformation), "`check_outer` has seen it"
        keys = {path: change_of(path) for path in placed}
        terms = [Term("sum", str(array.dtype), array.shape, None, path) for path, array in placed.items()]
        adding = jax.jit(functools.partial(combined, terms, list(keys.values()), 1))

        def average(weights: Any, state: Any, pushed: Sequence[Mapping[str, jax.Array]]) -> tuple[Any, Any]:
            pushed = [one for one in pushed if SHARES in one]
            if not pushed:  # what a policy had held back when its worker left
                return weights, state
            total = dict(zip(placed, adding(pushed), strict=True))
            return update.run(total, state, weights)

        takes = {keys[path]: Taken(array.shape, array.dtype, array.sharding) for path, array in placed.items()}
        everywhere = jax.sharding.NamedSharding(shardings[0].mesh, jax.sharding.PartitionSpec())
        takes[SHARES] = Taken((), np.dtype("int32"), everywhere, may_wait=False)
        return VersionedStore(
            placed,
            update=TermsUpdate(takes, average, update.init),
            workers=self.num_workers,
            consistency=_with_own_period(self.policy),
        )

    @property
    def own_worker(self) -> int | None:
        """The worker of this process, where there are several."""
        return self._own

    def run(self, worker: int, state: Mapping[int, Any], share: Share) -> tuple[jax.Array, ...]:
        """The step on one worker: its flat outputs."""
        given = iter(share)
        inputs = [state[i] if i in self._state else next(given) for i in range(len(self.step.paths))]
        return self._step.on(self.devices[worker])(inputs)

    def own(self, worker: int, leaves: Mapping[str, Any]) -> dict[int, jax.Array]:
        """A part of the state on a worker's devices, by position.

        Args:
            leaves: by path.
        """
        shardings, paths = self._step.on(self.devices[worker]).in_shardings, self.step.paths
        return {i: jax.device_put(leaves[paths[i]], shardings[i]) for i in sorted(self._state) if paths[i] in leaves}

    def _check_results(self) -> None:
        carried = {output for _, output in self.step.pairs}
        for n, shape in enumerate(self._step.output_shapes):
            if n not in carried and is_lockstep(self.policy) and not jnp.issubdtype(shape.dtype, jnp.inexact):
                path = self.step.program.as_written.trace.output_paths[n]
                raise MicrobatchError(
                    f"the step returns `{path}` as {shape.dtype}: with `outer`, results of the workers are averaged. Return it as a"
                    " floating-point number"
                )


def change_of(path: str) -> str:
    """The key of how weights changed."""
    return f"change of {path}"


def check_outer(outer: Any) -> None:
    """Refuse what is no optimizer.

    Raises:
        OptionError: it is none.
    """
    if not (hasattr(outer, "init") and hasattr(outer, "update")):
        raise OptionError(
            f"`outer` is a {type(outer).__name__}: give the server's optimizer, an optax transformation; `optax.sgd(1.0)` averages"
            " weights, as local SGD does"
        )


def _with_own_period(policy: Policy) -> Policy:
    """The policy for a store whose workers count the iterations of a period themselves."""
    return replace(policy, period=1)


@jax.jit
def _changes(before: Sequence[jax.Array], after: Sequence[jax.Array]) -> list[jax.Array]:
    return [old - new for old, new in zip(before, after, strict=True)]


@jax.jit
def _means(results: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    return [functools.reduce(jnp.add, values) / len(values) for values in zip(*results, strict=True)]


class LocalSession:
    """As `Session`."""

    def __init__(
        self,
        work: LocalWork,
        store: Any,
        leaves: Mapping[str, Any],
        note: Note,
        dispatching: AbstractContextManager[Any],
    ) -> None:
        self.work, self.store, self.note, self.dispatching = work, store, note, dispatching
        here = range(work.num_workers) if work.own_worker is None else (work.own_worker,)
        self.states = {worker: work.own(worker, leaves) for worker in here}
        self.counts = [0] * work.num_workers
        self._before: list[list[jax.Array]] = [[] for _ in range(work.num_workers)]
        self._clocks = [0] * work.num_workers
        if isinstance(store, VersionedStore):
            self._clocks = [clock or 0 for clock in store.report().clocks]
        self._round: list[list[Any]] = []

    def iteration(self, worker: int) -> int:
        """As `Session.iteration`."""
        period = self.work.policy.period
        return self._clocks[worker] * period + self.counts[worker] % period

    def begin(self, worker: int) -> None:
        """As `Session.begin`."""
        if self.counts[worker] % self.work.policy.period == 0:
            pulled = self.store.pull(worker=worker)
            with self.dispatching:
                self._load(worker, pulled.values)
            self._clocks[worker] = pulled.clock

    def _load(self, worker: int, values: Mapping[str, jax.Array]) -> None:
        self.states[worker] |= self.work.own(worker, values)
        self._before[worker] = [self.states[worker][i] for i in self.work.weights.values()]

    def compute(self, worker: int, share: Share, *, wait: bool) -> None:
        """As `Session.compute`."""
        with self.dispatching:
            outputs = list(self.work.run(worker, self.states[worker], share))
        if wait:
            jax.block_until_ready(outputs)
        for i, output in self.work.step.pairs:
            self.states[worker][i] = outputs[output]
            outputs[output] = None  # type: ignore[call-overload]
        if wait:
            self.note(outputs)
        else:
            self._round.append(outputs)

    def finish(self, worker: int) -> None:
        """As `Session.finish`."""
        self.counts[worker] += 1
        if self.counts[worker] % self.work.policy.period == 0:
            self._push(worker)

    def end_round(self) -> None:
        """As `Session.end_round`: the mean of the workers' results."""
        made, self._round = self._round, []
        if made:
            at = [n for n, output in enumerate(made[0]) if output is not None]
            place = made[0][at[0]].sharding if at else None
            means = _means([[jax.device_put(one[n], place) for n in at] for one in made]) if at else []
            self.note([dict(zip(at, means, strict=True)).get(n) for n in range(len(made[0]))])

    def flush(self, worker: int) -> None:
        """As `Session.flush`."""
        self._push_rest(worker)
        self.store.flush()

    def _push_rest(self, worker: int) -> None:
        """Push what an unfinished period has changed; the next iteration begins a period."""
        period = self.work.policy.period
        if self.counts[worker] % period:
            self._push(worker)
            self.counts[worker] += period - self.counts[worker] % period

    def leave(self, worker: int) -> None:
        """As `Session.leave`."""
        self._push_rest(worker)
        with self.dispatching:
            self.store.leave(worker)

    def state(self) -> dict[str, Any]:
        """As `Session.state`: the server's weights, and the rest of worker 0."""
        paths = self.work.step.paths
        first = min(self.states)  # of its own process, where there are several
        return {paths[i]: array for i, array in self.states[first].items()} | self.store.pull(worker=None).values

    def snapshot(self) -> Snapshot:
        """As `Session.snapshot`."""
        paths, of_store = self.work.step.paths, self.store.snapshot()
        arrays: dict[Name, Any] = {("store", *name): array for name, array in of_store.arrays.items()}
        for worker, (state, before) in ((n, (state, self._before[n])) for n, state in self.states.items()):
            arrays |= {("local", worker, paths[i]): raw(array) for i, array in state.items()}
            arrays |= {("start", worker, n): array for n, array in enumerate(before)}
        return Snapshot(arrays, {"store": dict(of_store.about), "counts": list(self.counts)})

    def load(self, snapshot: Snapshot) -> None:
        """As `Session.load`."""
        local, start, paths = snapshot.within("local"), snapshot.within("start"), self.work.step.paths
        try:
            counts = [int(count) for count in snapshot.about["counts"]]
            states = {
                worker: {i: as_like(local[worker, paths[i]], like, repr(paths[i])) for i, like in state.items()}
                for worker, state in self.states.items()
            }
            before = [
                [as_like(start[worker, n], state[i], path) for n, (path, i) in enumerate(self.work.weights.items())]
                if (worker, 0) in start
                else []
                for worker, state in self.states.items()
            ]
            of_store = Snapshot(snapshot.within("store"), snapshot.about["store"])
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"the snapshot of the workers is of another step, or damaged: {error}") from error
        self.store.load(of_store)
        self.counts, self.states, self._before = counts, states, before
        self._clocks = [clock or 0 for clock in self.store.report().clocks]

    def _push(self, worker: int) -> None:
        with self.dispatching:
            after = [self.states[worker][i] for i in self.work.weights.values()]
            changes = _changes(self._before[worker], after)
            update = {change_of(path): one for path, one in zip(self.work.weights, changes, strict=True)}
            self.store.push([*update, SHARES], {**update, SHARES: np.int32(1)}, worker=worker)
            self._clocks[worker] = self.store.clock(worker=worker)
