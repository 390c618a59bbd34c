"""Lend the devices of an engine to a train step.

In: the engine's iterations, a step in microbatches, its state and batches. Out: `Training`, which has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autopar.api.microbatched_step import MicrobatchedStep
from autopar.errors import InferenceError
from autopar.inference.serve.iterations import Iterations
from autopar.inference.serve.lending import GUARD_FACTOR, Lending, Training
from autopar.inference.serve.shared_pages import SharedPages

_MEASURED = 3


def in_microbatches(
    step: MicrobatchedStep | Callable[..., Any], num_microbatches: int, options: Mapping[str, Any]
) -> MicrobatchedStep:
    """A step in microbatches, if it is none yet."""
    return step if isinstance(step, MicrobatchedStep) else MicrobatchedStep(step, num_microbatches, **options)


def lend(
    shared: SharedPages,
    own: Iterations,
    step: MicrobatchedStep,
    state: Any,
    batches: Iterable[Any],
    tpot_s: float | None,
) -> Training:
    """See `Engine.lend`."""

    def end() -> None:
        shared.lent = None

    with shared.lock:
        shared.check()
        if shared.lent is not None:
            raise InferenceError("the devices are lent already: `finish` or `stop` that training first")
        if own.runner.is_asleep:
            raise InferenceError("the engine sleeps: `wake_up` first, so that its iterations can be measured")
        if tpot_s is not None and not tpot_s > 0:
            raise InferenceError(f"tpot_s is {tpot_s}: give a positive number of seconds")
        training = Training(step, state, batches, shared.lock, end)
        pieces = training.piece_seconds(own.runner.clock)
        shared.guarded(own.process_all)
        if not own.seconds:
            measured = [shared.guarded(own.runner.seconds) for _ in range(_MEASURED)]
            own.seconds = {shape: sorted(each[shape] for each in measured)[_MEASURED // 2] for shape in measured[0]}
        iterations = own.seconds
        decode_s = min(
            seconds / shape.steps for shape, seconds in iterations.items() if shape.width == 1 and not shape.rows
        )
        lending = Lending(training, shared.members, tpot_s or GUARD_FACTOR * decode_s, own.runner.clock)
        for kind, seconds in pieces.items():
            lending.note_time(kind, seconds)
        for shape, seconds in iterations.items():
            lending.note_time(shape, seconds, own)
        shared.lent = lending
        return training
