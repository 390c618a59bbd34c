"""Measure a train step on one GPU: time, kernels and memory, against its plan's predictions and XLA's estimate.

In: a model's name. Out: a record. The step runs by a prepared plan; plain `jax.jit` of the same step follows in the
same process as the baseline.
"""

from __future__ import annotations

import time
from typing import Any

import jax

import autopar
from autopar.runtime.jit import make_mesh
from benchmarks.gpu.kernels import kernel_times
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.prepared import saved
from benchmarks.gpu.setting import Record, Setting
from benchmarks.timing import TimedLoop
from benchmarks.zoo.training import Training

#: The limit of timed steps, then the numbers of steps before that (warm-up) and after that (profiled).
_MOST_STEPS, _WARM_UP, _PROFILED = 30, 3, 3
#: Share of a piece's seconds for timing the planned step, and again for timing plain `jit`.
_TIMED_SHARE = 0.1


def train(name: str, setting: Setting) -> Record:
    """Measure one of `MODELS`."""
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
    state = step.init(training.create_state, jax.random.key(0), batch=batch)
    state, loss = jax.block_until_ready(step(state, batch))
    record["first_start_s"] = time.perf_counter() - began
    record["first_loss"] = float(loss)
    loop = TimedLoop(step, state, batch)
    del state
    record |= timed(loop, _TIMED_SHARE * setting.seconds)
    report = step.report()
    record |= {
        "measured_s": record["median_s"],
        "peak_bytes": report.peak_bytes,
        "peak_bytes_from": report.memory_from,
        "model_flops": report.model_flops,
        "utilisation": report.utilisation,
        "profile": kernel_times(loop.run, _PROFILED),
    }
    loop.state = None  # free the memory for plain `jit`
    return record | {"jit": _plain(training, batch, devices[0], setting)}


def _plain(training: Training, batch: Any, device: Any, setting: Setting) -> Record:
    """The same step by `jax.jit` alone."""
    with jax.default_device(device):
        try:
            state = jax.jit(training.create_state)(jax.random.key(0))
            loop = TimedLoop(jax.jit(training.step, donate_argnums=0), state, batch)
            del state
            return {"first_loss": first_loss(loop)} | timed(loop, _TIMED_SHARE * setting.seconds)
        except jax.errors.JaxRuntimeError as error:  # it does not fit without the plan's rematerialization
            return {"error": str(error)[:300]}


def first_loss(loop: TimedLoop) -> float:
    """The loss of the first step, which compiles."""
    loop.state, loss = loop.step(loop.state, loop.batch)
    return float(loss)


def timed(loop: TimedLoop, seconds: float) -> Record:
    """Time steps one by one for this many seconds, then as many again without waiting between them, as a training loop
    does."""
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
