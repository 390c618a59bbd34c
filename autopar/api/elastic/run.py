"""Train as one of the members of a job that `autopar keep` keeps alive.

In: the user's step, state and batches. Out: the same training, whatever members fail, leave and return: the state comes from the
memory of peers, and the batches from the position that belongs to it.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.api.checkpoint.checkpoints import Checkpoints
from autopar.api.elastic.agent_channel import AgentChannel, agent_address
from autopar.api.elastic.background_copies import BackgroundCopies
from autopar.api.elastic.carried_state import CarriedState
from autopar.api.elastic.dealt_step import DealtStep
from autopar.api.elastic.device_probe import DeviceProbe
from autopar.api.elastic.own_rows import rows_of
from autopar.api.elastic.shards import PeerCopies
from autopar.api.parallel_step import ParallelStep
from autopar.errors import ProcessError, StepSignatureError
from autopar.jax_interop.own_programs import keep_own_programs
from autopar.jax_interop.processes import backends_are_initialized
from autopar.membership.blame import is_effect
from autopar.membership.deal import Deal
from autopar.membership.records import Place
from autopar.membership.wire import split
from autopar.plans.plan import Plan
from autopar.runtime.distributed.exchange import among_processes
from autopar.transforms.program import Program

_RETRY_S = 0.02
#: Seconds for which worker 0 of a rehearsal, which runs JAX's service, outlives the others.
_LAST_S = 2.0
#: Seconds before the error of a collective is shown.
_EFFECT_S = 5.0


class ElasticRun:
    """One worker of a run. Made by `join`.

    Attributes:
        position: the steps done: the number of the batch that comes next.
        place: this worker's place; None where no agent has started the process.
        restored_from: "peers", "checkpoint" or "init".
    """

    def __init__(self, place: Place | None, channel: AgentChannel | None) -> None:
        self.place, self._channel = place, channel
        self.position, self.restored_from = 0, ""
        self._step: ParallelStep[Any] | None = None
        self._state: CarriedState | None = None
        self._returned: Any = None
        self._probe = DeviceProbe()
        self._deal = Deal(place.microbatches, place.rank) if place is not None and place.microbatches else None
        self._dealt: DealtStep | None = None
        is_trained = place is not None and channel is not None and not place.rehearsal
        self._copies = BackgroundCopies(place, channel.token) if is_trained and place and channel else None

    @property
    def is_rehearsal(self) -> bool:
        """Whether this process only compiles ahead: it ends inside the first call of the step."""
        return self.place is not None and self.place.rehearsal

    @property
    def copied_bytes(self) -> int:
        """Bytes that this worker has sent to the memory of peers, its own host's included."""
        return 0 if self._copies is None else self._copies.num_bytes

    def rows(self, batch_size: int) -> slice | np.ndarray:
        """The rows of a global batch that this process gives to the step: an equal part, or all where they do not divide. Where
        microbatches are dealt, the rows of this process's, which are not side by side: an array of their numbers.

        Raises:
            BatchError: the number of microbatches does not divide the batch.
        """
        if self._deal is not None:
            return rows_of(self._deal, batch_size)
        count, index = jax.process_count(), jax.process_index()
        if batch_size % count:
            return slice(0, batch_size)
        return slice(index * batch_size // count, (index + 1) * batch_size // count)

    def restore_or_init(
        self,
        step: ParallelStep[Any],
        create_state: Any,
        *create_args: Any,
        checkpoints: Checkpoints | None = None,
        **step_args: Any,
    ) -> Any:
        """The newest state: from the memory of peers, else the last checkpoint, else a new one by `step.init`. Sets `position`.

        Args:
            checkpoints: of this step, numbered by steps done.
            create_state, create_args, step_args: see `ParallelStep.init`.

        Raises:
            ProcessError: the copies have been lost meanwhile; the job starts again from older ones.
            CheckpointError: the copies are of another program.
            StepSignatureError: the step does not return its whole state; or microbatches are dealt, and it is a pipeline.
        """
        if self._deal is not None:
            if step.runs_pipelines:
                raise StepSignatureError(
                    f"`{step.name}` runs in several pipelines (`pipelines`), which divide the microbatches: leave --microbatches out of"
                    " `autopar keep`"
                )
            step.run_by = functools.partial(self._dealt_step, step.options)
        restore = None if self.place is None else self.place.restore
        saved = None if checkpoints is None or self.is_rehearsal else _agreed(checkpoints)
        if restore is not None and (saved is None or saved <= restore.step):
            state = self._from_peers(step, step.abstract_state(create_state, *create_args, **step_args))
        elif checkpoints is not None and saved is not None:
            state = checkpoints.restore(create_state, *create_args, at=saved, **step_args)
            self.position, self.restored_from = saved, "checkpoint"
        elif not self.is_rehearsal:
            state = step.init(create_state, *create_args, **step_args)
            self.restored_from = "init"
        else:
            state = None
        if self._channel is not None:
            carried = CarriedState(step, step.abstract_state(create_state, *create_args, **step_args))
            state = carried.zeros() if state is None else state
            self._state = carried
            step.observer = self._observe
            self._channel.at(self.position)
        if self._deal is not None and self._dealt is None:
            raise StepSignatureError(
                f"`{step.name}` is planned as a pipeline, whose microbatches go through all stages: leave --microbatches out of"
                " `autopar keep`, or give `stages=1`"
            )
        self._step = step
        return state

    def batches(self, source: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
        """Batches for the step, from `position` on, laid out by its plan. The body of the loop calls the step once.

        Args:
            source: returns the batches from a position on: this process's `rows` of each, or whole ones.

        Raises:
            ProcessError: there is no state yet, or the loop did not call the step.
        """
        if self._step is None:
            raise ProcessError("`batches` follows `restore_or_init`, which says from which position on")
        for batch in source(self.position):
            self._returned = None
            yield self._step.shard_batch(batch)
            if self._channel is not None and self._returned is None:
                raise ProcessError(
                    f"the loop over `batches` did not call `{self._step.name}`: each batch is one step of the state, so call it once"
                )
            self.position += 1
            self._border()
        self._finish("finished")

    # -- helpers -----------------------------------------------------------------------------

    def _dealt_step(
        self, options: Mapping[str, Any], plan: Plan, program: Program, mesh: Mesh, may_take: bool
    ) -> DealtStep:
        assert self._deal is not None
        self._dealt = DealtStep(plan, program, mesh, self._deal, options, may_take=may_take)
        return self._dealt

    def _seconds(self) -> float:
        """Seconds that this worker's devices need for the same work as those of others; 0 if that is not known."""
        if self._dealt is not None:
            return self._dealt.seconds
        return 0.0 if self.place is None or self.place.count < 3 else self._probe.seconds(self._returned)

    def _from_peers(self, step: ParallelStep[Any], target: Any) -> Any:
        assert self.place is not None and self.place.restore is not None and self._channel is not None
        copies = PeerCopies(self.place.restore, self._channel.token)
        copies.read_index()
        try:
            state = CarriedState(step, target).made(copies.array)
        finally:
            copies.close()
        self.position, self.restored_from = self.place.restore.step, "peers"
        return state

    def _observe(self, returned: Any) -> None:
        """See what a call of the step returned."""
        self._returned = returned
        if self.is_rehearsal:
            jax.block_until_ready(returned)
            assert self.place is not None
            exchange = among_processes()
            if exchange is not None:  # stages of a pipeline need each other until the last result is there
                exchange.judged("ending a rehearsal", None, lambda given: None)
            time.sleep(0 if self.place.rank else _LAST_S)
            _flush()
            os._exit(0)

    def _border(self) -> None:
        """Between two steps: send a copy if one is due, and end if the members change."""
        channel, place, copies, state = self._channel, self.place, self._copies, self._state
        if channel is None or place is None or copies is None or state is None:
            return
        ends = channel.at(self.position, self._seconds()) == self.position
        if ends or self.position % place.every == 0:
            copies.take(self.position, state.arrays(self._returned))
        if ends:
            copies.wait()
            self._finish("yielded")
            atexit.register(_leave_at_once)
            raise SystemExit(0)

    def _finish(self, how: Any) -> None:
        if self._copies is not None:
            self._copies.wait()
        if self._channel is not None:
            self._channel.end(how)


def join() -> ElasticRun:
    """Take part in a job that `autopar keep` keeps alive, in place of `jax.distributed.initialize`.

    Under `autopar keep` it waits until this process has a place, which may be after another one has failed, so import everything before
    it, and use JAX's devices only after it. Without `autopar keep` it returns at once, and the run restores from checkpoints only.

    Raises:
        ProcessError: the script has used JAX's devices already.
        SystemExit: the agent that started this process has ended.
    """
    address = agent_address()
    if not address:
        return ElasticRun(None, None)
    if backends_are_initialized():
        raise ProcessError(
            "`autopar.join()` comes before anything that uses JAX's devices, such as making an array or `jax.devices()`: until this"
            " process has its place, the devices belong to another one, and JAX does not know its peers"
        )
    try:
        channel = AgentChannel(address)
    except OSError as error:
        sys.exit(f"autopar: the agent that started this process, at {address}, does not answer: {error}")
    place = channel.place()
    _report_errors(channel)
    # The next generation finds every program in the cache, also those that compile in less than a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if place.count > 1:
        if place.rank:
            _wait_for(place.coordinator, place.timeout_s)
        jax.distributed.initialize(
            place.coordinator, place.count, place.rank, cluster_detection_method="deactivate", local_device_ids=None
        )
    keep_own_programs()
    return ElasticRun(place, channel)


def _leave_at_once() -> None:
    """End without the interpreter's finalization, which takes seconds where much is imported: the next generation waits."""
    jax.distributed.shutdown()
    _flush()
    os._exit(0)


def _wait_for(address: str, timeout_s: float) -> None:
    """Wait until worker 0 listens: JAX's client waits a second before it tries again."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        try:
            socket.create_connection(split(address), timeout=timeout_s).close()
            return
        except OSError:
            time.sleep(_RETRY_S)


def _agreed(checkpoints: Checkpoints) -> int | None:
    """The newest checkpoint that process 0 sees: the same on every process."""
    exchange = among_processes()
    if exchange is None:
        return checkpoints.latest
    return exchange.made_once("the choice of a checkpoint", lambda: checkpoints.latest)


def _report_errors(channel: AgentChannel) -> None:
    """Report an error that ends this process, and end it without waiting for the other workers."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lines = str(error).splitlines()
        at = traceback.extract_tb(trace)[-1:]
        where = f" at {Path(at[0].filename).name}:{at[0].lineno}" if at else ""
        why = f"failed{where}: {kind.__name__}: {lines[0] if lines else ''}"
        channel.fail(why)
        if is_effect(why):
            time.sleep(_EFFECT_S)  # its agent ends it before, if another worker was the cause
        before(kind, error, trace)
        _flush()
        os._exit(1)

    sys.excepthook = report


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
