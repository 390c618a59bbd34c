"""Measure a train step on one GPU: time, kernels and memory, against its plan's predictions and XLA's estimate.

In: a model's name. Out: a record, and the compiled program with its kernels in a file. The step runs by a prepared
plan; plain `jax.jit` of the same step follows in the same process as the baseline, if there is time. Each part is kept
as soon as it is measured.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

import autopar
from autopar.runtime.jit import make_mesh
from benchmarks.gpu import programs
from benchmarks.gpu.kernels import in_order, profiled, summed
from benchmarks.gpu.models import BY_HAND, MODELS
from benchmarks.gpu.prepared import saved
from benchmarks.gpu.quick_keys import quick_key
from benchmarks.gpu.setting import OutOfTimeError, Record, Setting
from benchmarks.timing import TimedLoop
from benchmarks.zoo.training import Training

#: The limit of timed steps, then the numbers of steps before that (warm-up) and after that (profiled).
_MOST_STEPS, _WARM_UP, _PROFILED = 30, 3, 3
#: Share of a piece's seconds for timing the planned step, and again for timing plain `jit`.
_TIMED_SHARE = 0.1


def train(name: str, setting: Setting) -> Record:
    """Measure one of `MODELS`.

    Raises:
        OutOfTimeError: too little time is left for plain `jit`.
    """
    training = MODELS[name][setting.scale](1)
    plan, xla, card = saved(setting.plans, setting.profile, name, 1)
    predicted = plan.prediction
    record: Record = {
        "plan_of": card,
        "strategy": plan.strategy,
        "recomputed": len(plan.rematerialized),
        "predicted_s": predicted.step_time_s,
        "predicted_peak_bytes": predicted.peak_bytes,
        "xla": xla,
    }
    devices = jax.local_devices()[:1]
    step = autopar.parallelize(training.step, plan=plan, mesh=make_mesh(plan.mesh, devices), cache=False)
    batch = jax.device_put(training.make_batch(0), devices[0])
    began = time.perf_counter()
    state = jax.block_until_ready(step.init(training.create_state, quick_key(0), batch=batch))
    first_start_s = time.perf_counter() - began
    initial = host_copy(state)
    began = time.perf_counter()
    state, loss = jax.block_until_ready(step(state, batch))
    record["first_start_s"] = first_start_s + time.perf_counter() - began
    record["first_loss"] = float(loss)
    loop = TimedLoop(step, state, batch)
    del state
    timed_s = _TIMED_SHARE * setting.seconds
    record |= timed(loop, timed_s)
    setting.keep(record)
    report = step.report()
    record |= {
        "peak_bytes": report.peak_bytes,
        "peak_bytes_from": report.memory_from,
        "model_flops": report.model_flops,
        "utilisation": report.utilisation,
    }
    events = profiled(loop.run, _PROFILED)
    record["profile"] = summed(events, _PROFILED)
    setting.keep(record)
    if kernels := in_order(events, _PROFILED):
        programs.save(programs.Program(setting.host, name, _hlo(step), kernels), setting.results)
    loop.state = None  # free the memory for plain `jit`
    if setting.left_s < record["first_start_s"] + 2 * timed_s:
        raise OutOfTimeError(f"no plain `jit`: {setting.left_s:.0f} s are left")
    by_hand = training if setting.is_tiny or name not in BY_HAND else BY_HAND[name](1)
    return record | {"jit": plain_jit(by_hand, initial, batch, timed_s)}


def _hlo(step: Any) -> str:
    """The text of the planned step's compiled program."""
    last = step._dispatch.last
    return last.run.compiled(last.compiled_for).as_text()


def plain_jit(training: Training, initial: Any, batch: Any, seconds: float) -> Record:
    """The same step by `jax.jit` alone.

    Args:
        initial: the state, in host memory. It is placed like the batch, as the step's results are, so that the step
            compiles once.
        batch: on the device.
    """
    try:
        state = jax.device_put(initial, next(iter(batch.values())).sharding)
        loop = TimedLoop(jax.jit(training.step, donate_argnums=0), state, batch)
        del state
        return {"first_loss": first_loss(loop)} | timed(loop, seconds)
    except jax.errors.JaxRuntimeError as error:  # it does not fit without the plan's rematerialization
        return {"error": str(error)[:300]}


def host_copy(state: Any) -> Any:
    """The arrays in host memory, for another measurement with the same initial state."""
    found = jax.device_get(state)
    # On a CPU the arrays would share the memory of those that a step donates.
    return jax.tree.map(np.array, found) if jax.default_backend() == "cpu" else found


def first_loss(loop: TimedLoop) -> float:
    """The loss of the first step, which compiles."""
    loop.state, loss = loop.step(loop.state, loop.batch)
    return float(loss)


def timed(loop: TimedLoop, seconds: float) -> Record:
    """Time steps one by one for this many seconds, then as many again in a row.

    Returns:
        `in_a_row_s`, seconds per step in a row, as in a training loop: the host dispatches a step while the one before
            runs; `median_s` and `least_s`, seconds of a step from its call until its results are ready, which include
            the host's time to dispatch it; `num_steps`, the number of each.
    """
    for _ in range(_WARM_UP):
        loop.run()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < _MOST_STEPS and time.perf_counter() - began < seconds):
        times.append(loop.run())
    began = time.perf_counter()
    for _ in times:
        loop.state, _ = loop.step(loop.state, loop.batch)
    jax.block_until_ready(loop.state)
    ordered = sorted(times)
    return {
        "num_steps": len(times),
        "median_s": ordered[len(ordered) // 2],
        "least_s": ordered[0],
        "in_a_row_s": (time.perf_counter() - began) / len(times),
    }
