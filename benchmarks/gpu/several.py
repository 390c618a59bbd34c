"""Measure a train step on all GPUs of a host: autopar's plan against data parallelism, FSDP and tensor parallelism.

In: a model's name. Out: a record with a row for each sharding. All run in one process, one after the other. The planned
step runs again at the end: the difference of its two times is the measurement's noise.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

import autopar
from autopar.ir.mesh import MeshShape
from autopar.runtime.jit import make_mesh
from benchmarks.baselines import pinned
from benchmarks.baselines.jitted import jitted, shardings_of
from benchmarks.baselines.pinned import Pins
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.prepared import SEVERAL, saved
from benchmarks.gpu.quick_keys import quick_key
from benchmarks.gpu.setting import Record, Setting
from benchmarks.gpu.train import first_loss, host_copy, timed
from benchmarks.timing import TimedLoop
from benchmarks.zoo.training import Training

_SHARE = 0.05


def several(name: str, setting: Setting) -> Record:
    """Measure one model of `ON_SEVERAL`, on the largest number of GPUs here that has a plan."""
    num = max(one for one in SEVERAL if one <= setting.num_devices)
    training = MODELS[name][setting.scale](num)
    plan, _, card = saved(setting.plans, setting.profile, name, num)
    devices = jax.local_devices()[:num]
    step = autopar.parallelize(training.step, plan=plan, mesh=make_mesh(plan.mesh, devices), cache=False)
    batch = training.make_batch(0)
    state = step.init(training.create_state, quick_key(0), batch=batch)
    initial = host_copy(state)
    rows: list[Record] = []
    record: Record = {
        "num_gpus": num,
        "plan_of": card,
        "strategy": plan.strategy,
        "predicted_s": plan.prediction.step_time_s,
        "rows": rows,
    }
    rows.append({"way": "autopar"} | _measured(step, state, step.shard_batch(batch), setting))
    del state
    for words, recipe, sizes in _by_hand(num):
        shape = MeshShape(("data", "model"), sizes)
        try:
            pins = recipe(training.target[1], shape)
            rows.append({"way": words} | _of_hand(training, pins, make_mesh(shape, devices), initial, setting))
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # it does not fit, or does not divide
            rows.append({"way": words, "error": str(error)[:300]})
        setting.keep(record)
    state = step.init(training.create_state, quick_key(0), batch=batch)
    rows.append({"way": "autopar, again"} | _measured(step, state, step.shard_batch(batch), setting))
    return record


def _measured(step: Any, state: Any, batch: Any, setting: Setting) -> Record:
    loop = TimedLoop(step, state, batch)
    return {"first_loss": first_loss(loop)} | timed(loop, _SHARE * setting.seconds)


def _by_hand(num: int) -> list[tuple[str, Any, tuple[int, int]]]:
    """Name, recipe and mesh of each hand-written sharding; tensor parallelism on two GPUs and on all."""
    split = [("tensor parallelism", pinned.tensor_parallel, (num // model, model)) for model in sorted({2, num})]
    return [
        ("data parallelism", pinned.data_parallel, (num, 1)),
        ("FSDP", pinned.fsdp, (1, num)),
        *((f"{words} over {shape[1]}", recipe, shape) for words, recipe, shape in split),
    ]


def _of_hand(training: Training, pins: Pins, mesh: Mesh, initial: Any, setting: Setting) -> Record:
    """The step by `jax.jit` with hand-written shardings."""
    args = training.target[1]
    state, batch = jax.device_put((initial, training.make_batch(0)), shardings_of(args, pins, mesh))
    return _measured(jitted(training.step, args, pins, mesh), state, batch, setting)
