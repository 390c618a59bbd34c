"""The programs that multi-process tests run in each process: `python process_programs.py NAME [ARGUMENTS]`.

A small regression trained by a plan, and each way in which this can fail. Results are printed as JSON, one value per
line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from several_processes import TOLD

import autopar
from autopar import errors
from autopar.runtime import jit as execute

WIDTH, BATCH, STEPS = 64, 16, 6
OPTIMIZER = optax.adam(1e-2)

State = dict[str, Any]
Batch = dict[str, Any]

BATCH_SHAPES: Batch = {
    "x": jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
    "y": jax.ShapeDtypeStruct((BATCH,), "float32"),  # so few that the plan keeps them whole
    "scale": jax.ShapeDtypeStruct((), "float32"),
}


def tell(value: Any) -> None:
    print(TOLD + json.dumps(value), flush=True)


def create_state(rng: jax.Array) -> State:
    keys = jax.random.split(rng, 2)
    params = {
        "in": jax.random.normal(keys[0], (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(keys[1], (4 * WIDTH, 1)) / WIDTH,
    }
    return {"params": params, "opt": OPTIMIZER.init(params)}


def step_of(rate: float = 1.0, activation: Callable[[jax.Array], jax.Array] = jax.nn.relu, key: str = "params") -> Any:
    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            hidden = activation(batch["x"] @ params["in"])
            return jnp.mean(((hidden @ params["out"])[:, 0] * batch["scale"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state[key])
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], jax.tree.map(lambda u: rate * u, updates))
        return {"params": params, "opt": opt}, loss

    return train_step


def batches(start: int = 0, stop: int = STEPS) -> Iterator[Batch]:
    """The whole batches of some steps."""
    for step in range(start, stop):
        rng = np.random.default_rng(step)
        x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.sin(x.sum(1)), "scale": np.float32(1.0)}


def share(batch: Batch) -> Batch:
    """What this process's own iterator would give."""
    size = BATCH // jax.process_count()
    start = jax.process_index() * size
    return {name: array if np.ndim(array) == 0 else array[start : start + size] for name, array in batch.items()}


def trained(step: autopar.ParallelStep, start: int = 0, stop: int = STEPS, state: Any = None) -> list[float]:
    """Losses of some steps, each process feeding its share."""
    if state is None:
        state = step.init(create_state, jax.random.key(0), batch=BATCH_SHAPES)
    losses = []
    for batch in batches(start, stop):
        state, loss = step(state, step.shard_batch(share(batch)))
        losses.append(float(loss))
    return losses


# -- programs --------------------------------------------------------------------------------


def train(mesh: str, *splits: str) -> None:
    """Each process feeds its share, however the plan splits the batch; then all the same, from the host.

    Args:
        splits: mesh axes for the examples, as in `model,data`.
    """
    losses: dict[str, list[float]] = {}
    moved: dict[str, bool] = {}
    for split in splits:
        step = autopar.parallelize(mesh=mesh, pin={"batch/x": jax.P(tuple(split.split(",")))})(step_of())
        losses[split] = trained(step)
        (planned,) = [prepared.arguments for prepared in step._dispatch.known.values()]
        (place,) = [place for place in planned._places["batch"] if place.tensor.path == "batch/x"]
        moved[split] = not place.stays
    step = autopar.parallelize(mesh=mesh)(step_of())
    state: Any = jax.tree.map(np.asarray, jax.jit(create_state)(jax.random.key(0)))
    losses["from the host"] = []
    for batch in batches():
        state, loss = step(state, batch)
        losses["from the host"].append(float(loss))
    plan = step.plan(jax.eval_shape(create_state, jax.random.key(0)), BATCH_SHAPES)
    processes = [device.process_index for device in execute.make_mesh(plan.mesh).devices.flat]
    tell({"losses": losses, "moved": moved, "plan": plan.to_json(), "processes": processes})


def refused(folder: str) -> None:
    """Every mistake in turn, each refused on all processes, so that the next can be made."""
    index = jax.process_index()
    args = (jax.eval_shape(create_state, jax.random.key(0)), BATCH_SHAPES)
    messages: dict[str, list[str]] = {}

    def wrong(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except errors.AutoparError as error:
            messages[name] = [type(error).__name__, str(error)]
        except Exception as error:
            messages[name] = [f"unexpected {type(error).__name__}", str(error)]

    def planned(step: Any, **options: Any) -> Callable[[], Any]:
        return lambda: autopar.parallelize(**options)(step).plan(*args)

    wrong("code", planned(step_of(activation=jax.nn.gelu if index else jax.nn.relu)))
    wrong("number", planned(step_of(rate=2.0 if index else 1.0)))
    wrong("option", planned(step_of(), mesh="4" if index else "2x2"))
    wrong("shape", lambda: autopar.parallelize()(step_of()).plan(args[0], larger(args[1]) if index else args[1]))
    wrong("untraceable", planned(step_of(key="no" if index else "params")))
    wrong("budget", planned(step_of(), memory_budget_bytes=10.0))

    plan = autopar.plan(step_of(), *args, mesh="4", hardware="cpu-host")
    changed = dataclasses.replace(plan, strategy="another") if index else plan
    changed.save(Path(folder) / f"{index}.json")
    wrong("plan", planned(step_of(), plan=Path(folder) / f"{index}.json"))

    step = autopar.parallelize(mesh="4")(step_of())
    wrong("no plan", lambda: step.shard_batch({}))
    wrong("seed", lambda: step.init(create_state, jax.random.key(index), batch=BATCH_SHAPES))
    state = step.init(create_state, jax.random.key(0), batch=BATCH_SHAPES)
    batch = next(batches())
    wrong("whole differs", lambda: step.shard_batch({**batch, "scale": np.float32(index)}))
    wrong("some shares", lambda: step.shard_batch(share(batch) if index else batch))
    wrong("uneven", lambda: step.shard_batch({**share(batch), "x": batch["x"][: 8 - index]}))
    wrong("dtype", lambda: step.shard_batch({**share(batch), "y": np.arange(8)}))
    wrong("no array", lambda: step.shard_batch({**share(batch), "y": object()}))
    wrong("other paths", lambda: step.shard_batch({"z": batch["x"]}))
    wrong("host batch", lambda: step(state, {**batch, "x": batch["x"] + index}))
    wrong("size", lambda: autopar.parallelize(mesh="2x8")(step_of())(state, batch))
    half = autopar.plan(step_of(), *args, mesh="2", hardware="cpu-host")
    half = dataclasses.replace(half, available_devices=4)
    wrong("idle process", lambda: autopar.parallelize(plan=half)(step_of())(state, batch))
    chosen = autopar.parallelize(cache=False)(step_of()).plan(*args)
    state, loss = step(state, step.shard_batch(share(batch)))  # after all that, it still runs
    tell({"messages": messages, "loss": float(loss), "num_devices": chosen.num_devices})


def larger(batch: Batch) -> Batch:
    return {
        name: jax.ShapeDtypeStruct((2 * s.shape[0], *s.shape[1:]) if s.shape else (), s.dtype)
        for name, s in batch.items()
    }


def killed(folder: str, at: str, who: str) -> None:
    """Saves every step; one process dies in the middle of it."""
    import orbax.checkpoint as ocp

    step = autopar.parallelize(mesh="4")(step_of())
    state = step.init(create_state, jax.random.key(0), batch=BATCH_SHAPES)
    saving = ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False))
    started = time.monotonic()
    try:
        with autopar.watch(step, timeout_s=8.0):
            for number, batch in enumerate(batches()):
                if number == int(at) and jax.process_index() == int(who):
                    os.kill(os.getpid(), signal.SIGKILL)
                state, loss = step(state, step.shard_batch(share(batch)))
                tell([number, float(loss)])
                saving.save(number, args=ocp.args.StandardSave(state))
                started = time.monotonic()
    finally:
        tell({"after_s": time.monotonic() - started})


def resumed(folder: str, mesh: Any) -> None:
    """The rest of the steps, from the last that was saved."""
    tell(rest_of(folder, mesh))


def rest_of(folder: str, mesh: Any) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    step = autopar.parallelize(mesh=mesh)(step_of())
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    state = step.init(create_state, jax.random.key(1), batch=BATCH_SHAPES)  # other numbers, to be replaced
    saving = ocp.CheckpointManager(folder)
    last = saving.latest_step()
    assert last is not None and jax.tree.structure(shapes) == jax.tree.structure(state)
    state = saving.restore(last, args=ocp.args.StandardRestore(state))
    return {"from": last + 1, "losses": trained(step, last + 1, STEPS, state)}


def frozen() -> None:
    """Process 0, in which the service runs, is stopped: nothing of it answers any more."""
    step = autopar.parallelize(mesh="4")(step_of())
    state = step.init(create_state, jax.random.key(0), batch=BATCH_SHAPES)
    state, loss = step(state, step.shard_batch(share(next(batches()))))
    with autopar.watch(step, timeout_s=10.0):
        for number, batch in enumerate(batches()):
            if number == 3 and jax.process_index() == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            state, loss = step(state, step.shard_batch(share(batch)))
            float(loss)


def to_watch(how: str) -> tuple[autopar.ParallelStep, Any, Callable[..., Iterator[Batch]]]:
    """A step, `whole` or in `stages`, a new state, and the whole batches of some steps."""
    if how == "stages":
        step = in_stages()
        return step, step.init(staged_state, jax.random.key(0), batch=next(staged_batches())), staged_batches
    step = autopar.parallelize(mesh="4")(step_of())
    return step, step.init(create_state, jax.random.key(0), batch=BATCH_SHAPES), batches


def hangs(how: str = "whole") -> None:
    """Process 1 does not come to its fourth step."""
    step, state, batches_of = to_watch(how)
    state, _ = step(state, step.shard_batch(share(next(batches_of()))))  # compiled
    with autopar.watch(step, timeout_s=12.0, step_timeout_s=5.0):
        for number, batch in enumerate(batches_of()):
            if number == 3 and jax.process_index() == 1:
                read_for_ever()
            state, loss = step(state, step.shard_batch(share(batch)))
            float(loss)


def dies(how: str, who: str) -> None:
    """A process is killed before its fourth step."""
    step, state, batches_of = to_watch(how)
    state, _ = step(state, step.shard_batch(share(next(batches_of()))))  # compiled
    with autopar.watch(step, timeout_s=8.0):
        for number, batch in enumerate(batches_of()):
            if number == 3 and jax.process_index() == int(who):
                os.kill(os.getpid(), signal.SIGKILL)
            state, loss = step(state, step.shard_batch(share(batch)))
            float(loss)


def read_for_ever() -> None:
    time.sleep(1e6)


def straggles(how: str = "whole", who: str = "1") -> None:
    """A process takes longer between its steps than the others; later it meets a mistake of its own."""
    step, state, batches_of = to_watch(how)
    slow = jax.process_index() == int(who)
    with autopar.watch(step, timeout_s=12.0) as watched:
        for batch in batches_of(stop=20):
            if slow:
                time.sleep(0.3)
            state, loss = step(state, step.shard_batch(share(batch)))
            float(loss)
        while len(watched.step_times()) < 2:
            time.sleep(0.2)
        times = [[one.member.index, one.factor, one.late_s, one.step_s] for one in watched.step_times()]
        tell({"times": times, "stragglers": [str(one) for one in watched.stragglers()]})
    with autopar.watch(step, timeout_s=12.0):
        for number, batch in enumerate(batches_of()):
            if number == 3 and slow:
                raise KeyError("no such file")
            state, loss = step(state, step.shard_batch(share(batch)))
            float(loss)


def pipelined(*cases: str) -> None:
    """A step in stages over the devices of all processes, beside the step as it was written.

    Args:
        cases: `STAGES MESH SCHEDULE [VIRTUAL]` each: submeshes, the mesh of each, and the stages on each.
    """
    from pipelines import pipelined as in_stages
    from test_pipeline_run import mlp_batch, mlp_state, mlp_step

    from autopar.pipeline.run.instructions import Call, Count, Move

    told: dict[str, Any] = {}
    for case in cases:
        num_stages, mesh, schedule, *virtual = case.split()
        run, pipeline = in_stages(
            mlp_step,
            (mlp_state(4), mlp_batch(0)),
            num_stages=int(num_stages),
            num_microbatches=4,
            schedule=schedule,
            virtual=int(*virtual or "1"),
            mesh=mesh,
        )
        state: Any = jax.tree.map(np.asarray, mlp_state(4))
        plain, step = mlp_state(4), jax.jit(mlp_step)
        losses, expected, off, mine = [], [], 0.0, 0
        for seed in range(3):
            state, loss = run(state, jax.tree.map(np.asarray, mlp_batch(seed)))
            plain, plain_loss = step(plain, mlp_batch(seed))
            losses.append(float(loss))
            expected.append(float(plain_loss))
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
            for shard in one.addressable_shards:
                mine += 1
                wanted = np.asarray(other)[shard.index]
                off = max(off, float(np.max(np.abs(np.asarray(shard.data) - wanted) / (1e-6 + 1e-5 * np.abs(wanted)))))
        told[case] = {"losses": losses, "expected": expected, "off": off, "shards": mine}
        steps = pipeline.instructions.steps
        counted = [one.moves for one in steps if isinstance(one, Count)]
        told[case] |= {
            "moves": sum(isinstance(one, Move) and len(one.crossing.legs) for one in steps),
            "counted": sum(one.num_legs for one in counted),
            "counting calls": sum(len(one.calls) for one in counted),
            "calls": sorted({one.stage for one in steps if isinstance(one, Call)}),
        }
    tell(told)


def mixer_in_stages(schedule: str = "1f1b") -> None:
    """A model in two stages, one in each process, and the leaves that this process has."""
    from test_stages_of_models import tiny

    _model_in_stages(tiny(), schedule)


def gpt_in_token_slices() -> None:
    """A language model in two stages, one in each process, and in slices of tokens."""
    from benchmarks.pipeline.models import MODELS

    _model_in_stages(MODELS["GPT-2"](), "terapipe(9, 6)")


def _model_in_stages(model: Any, schedule: str) -> None:
    from benchmarks.pipeline.models import STEPS, Case, trained, unsharded

    case = Case(2, 2, schedule, 2)
    there, expected = trained(model, unsharded(model.of.step, case))
    step, state, losses = autopar.parallelize(model.of.step, **case.options()), model.state(), []
    for seed in range(STEPS):
        state, loss = step(state, model.batch(seed))
        losses.append(float(loss))
    held, off = [], 0.0
    leaves, _ = jax.tree.flatten_with_path(state)
    for (path, one), other in zip(leaves, jax.tree.leaves(there), strict=True):
        for shard in one.addressable_shards:
            held.append(jax.tree_util.keystr(path))
            wanted = np.asarray(other)[shard.index]
            off = max(off, float(np.linalg.norm(np.asarray(shard.data) - wanted) / max(np.linalg.norm(wanted), 1e-4)))
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    tell({"losses": losses, "expected": expected, "off": off, "held": held, "all": names})


def out_of_order() -> None:
    """A step in three stages: the first and the last are in the first process, the one between them in the other."""
    from test_stages_out_of_order import mlp, planned

    step, reference = planned(mlp().step, (2, 4, 2)), jax.jit(mlp().step)
    state = step.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    plain = jax.jit(mlp().create_state)(jax.random.key(0))
    losses, expected = [], []
    for seed in range(3):
        batch = jax.tree.map(np.asarray, mlp().make_batch(seed))
        state, loss = step(state, batch)
        plain, plain_loss = reference(plain, batch)
        losses.append(float(loss))
        expected.append(float(plain_loss))
    devices = [list(stage.devices) for stage in step.latest_plan.stages]
    tell({"devices": devices, "losses": losses, "expected": expected})


def measured(*cases: str) -> None:
    """A step in stages, called and then measured.

    Args:
        cases: as of `pipelined`.
    """
    from pipelines import pipelined as in_stages
    from test_pipeline_run import mlp_batch, mlp_state, mlp_step

    from autopar.pipeline.run.measured import run_measured

    told: dict[str, Any] = {}
    for case in cases:
        num_stages, mesh, schedule = case.split()
        args: Any = jax.tree.map(np.asarray, (mlp_state(4), mlp_batch(0)))
        options: Any = {"num_microbatches": 4, "schedule": schedule, "mesh": mesh}
        run, pipeline = in_stages(mlp_step, args, num_stages=int(num_stages), **options)
        expected = jax.tree.leaves(run(*args))
        results, timeline = run_measured(pipeline, jax.tree.leaves(args))
        pairs = [
            (one.data, other.data)
            for a, b in zip(results, expected, strict=True)
            for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True)
        ]
        told[case] = {
            "same": bool(pairs) and all(np.array_equal(one, other) for one, other in pairs),
            "spans": [[span.submesh, span.task, [span.start_s, span.end_s]] for span in timeline.spans],
        }
    tell(told)


STAGED_WIDTH, STAGED_LAYERS = 32, 4


def staged_state(rng: jax.Array) -> State:
    """A state of stages with all that a checkpoint has to mind: counters, PRNG keys of each half, a weakly typed number."""
    shape = (STAGED_WIDTH, STAGED_WIDTH)
    kernels = [jax.random.normal(key, shape) / STAGED_WIDTH**0.5 for key in jax.random.split(rng, STAGED_LAYERS)]
    return {
        "params": kernels,
        "opt": OPTIMIZER.init(kernels),
        "rng": list(jax.random.split(rng)),
        "rate": jnp.asarray(0.5),
    }


def staged_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        x = batch["x"]
        for number, kernel in enumerate(params):
            kept = jax.random.bernoulli(
                jax.random.fold_in(state["rng"][2 * number // STAGED_LAYERS], number), 0.9, (STAGED_WIDTH,)
            )
            x = x + jnp.tanh(x @ kernel) * kept
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], jax.tree.map(lambda u: state["rate"] * u, updates))
    finite = [
        jnp.isfinite(grads[n].sum()).astype(int) for n in (0, STAGED_LAYERS - 1)
    ]  # so each key is made in its half
    rng = [jax.random.fold_in(key, one) for key, one in zip(state["rng"], finite, strict=True)]
    return {"params": params, "opt": opt, "rng": rng, "rate": state["rate"] * 0.99}, loss


def staged_batches(start: int = 0, stop: int = STEPS) -> Iterator[Batch]:
    for step in range(start, stop):
        x = np.random.default_rng(step).normal(size=(BATCH, STAGED_WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.roll(x, 1, axis=1)}


def in_stages(schedule: str = "1f1b") -> autopar.ParallelStep:
    options: Any = {"stages": 2, "num_microbatches": 2, "schedule": schedule, "hardware": "cpu-host", "cache": False}
    return autopar.parallelize(**options)(staged_step)


def digests(state: Any) -> dict[str, str]:
    """Of the leaves that this process has whole."""
    from autopar.runtime.distributed.local_batch import digest

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): digest(leaf) for path, leaf in leaves if leaf.is_fully_addressable}


def kept(folder: str, *what: str) -> None:
    """A state of a step in stages is saved, or restored, and the training goes on.

    Args:
        what: in order: `save`; `restore`, in stages; `whole`, restore as one program on all devices.
    """
    told: dict[str, Any] = {}
    for action in what:
        step = (
            autopar.parallelize(mesh=str(jax.device_count()), cache=False)(staged_step)
            if action == "whole"
            else in_stages()
        )
        key, batch = jax.random.key(0), next(staged_batches())
        with autopar.Checkpoints(folder, step) as checkpoints:
            if action == "save":
                state, losses = step.init(staged_state, key, batch=batch), []
                for one in staged_batches(0, 2):
                    state, loss = step(state, one)
                    losses.append(float(loss))
                checkpoints.save(2, state)
                told[action] = {"state": digests(state), "losses": losses}
            else:
                state = checkpoints.restore(staged_state, key, batch=batch)
                told[action] = {
                    "state": digests(state),
                    "rate": not state["rate"].addressable_shards or state["rate"].weak_type,
                }
        told[action]["rest"] = []
        for one in staged_batches(2, 4):
            state, loss = step(state, one)
            told[action]["rest"].append(float(loss))
    tell(told)


def replicas_kept(folder: str) -> None:
    """A step whose stages have a replica in each process: fed by shares, saved, restored, also with a stage in each."""
    step, one_way, key = in_stages("chimera"), in_stages(), jax.random.key(0)
    first = next(staged_batches())
    plain, state = jax.jit(staged_state)(key), step.init(staged_state, key, batch=first)
    told: dict[str, Any] = {"losses": [], "expected": [], "devices": []}
    for batch in staged_batches(0, 2):
        state, loss = step(state, step.shard_batch(share(batch)))
        plain, expected = jax.jit(staged_step)(plain, batch)
        told["losses"].append(float(loss))
        told["expected"].append(float(expected))
    told["devices"] = sorted({len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)})
    with autopar.Checkpoints(folder, step) as checkpoints:
        checkpoints.save(2, state)
        again = checkpoints.restore(staged_state, key, batch=first)
    other = autopar.Checkpoints(folder, one_way).restore(staged_state, key, batch=first)
    for batch in staged_batches(2, 4):
        found = []
        again, loss = step(again, batch)
        found.append(float(loss))
        other, loss = one_way(other, batch)
        found.append(float(loss))
        plain, expected = jax.jit(staged_step)(plain, batch)
        told["losses"] += found
        told["expected"] += [float(expected)] * 2
    tell(told)


def stacked_replicas(folder: str) -> None:
    """The same of a loop over layers, of which each process has both halves."""
    from test_replicas import create_layers, in_replicas, layers_batch, trained_layers

    step = autopar.parallelize(trained_layers, **in_replicas(stages=2, cache=False))
    key, batch = jax.random.key(0), jax.tree.map(np.asarray, layers_batch(0))
    plain, state = jax.jit(create_layers)(key), step.init(create_layers, key, batch=batch)
    losses, expected = [], []
    for seed in range(3):
        batch = jax.tree.map(np.asarray, layers_batch(seed))
        state, loss = step(state, batch)
        plain, plain_loss = jax.jit(trained_layers)(plain, batch)
        losses.append(float(loss))
        expected.append(float(plain_loss))
        if seed == 1:
            with autopar.Checkpoints(folder, step) as checkpoints:
                checkpoints.save(2, state)
                state = checkpoints.restore(create_layers, key, batch=batch)
    tell({"losses": losses, "expected": expected})


def shares_in_stages() -> None:
    """Each process feeds its share to a step in stages; then all the whole; and mistakes."""
    step, told = in_stages(), {}
    for how in ("shares", "whole"):
        state = step.init(staged_state, jax.random.key(0), batch=next(staged_batches()))
        told[how] = []
        for batch in staged_batches():
            laid = step.shard_batch(share(batch) if how == "shares" else batch)
            state, loss = step(state, laid)
            told[how].append(float(loss))
    batch, messages = next(staged_batches()), {}
    wrong = {
        "uneven": {**share(batch), "x": batch["x"][: 8 - jax.process_index()]},
        "other paths": {"z": batch["x"]},
        "dtype": {**share(batch), "y": np.arange(8)},
    }
    for name, given in wrong.items():
        try:
            in_stages_anew(step).shard_batch(given)
        except errors.BatchError as error:
            messages[name] = str(error)
    tell(told | {"messages": messages})


def in_stages_anew(step: autopar.ParallelStep) -> autopar.ParallelStep:
    """The same step, whose first batch has not come yet."""
    anew = autopar.parallelize(plan=step.latest_plan)(staged_step)
    anew.abstract_state(staged_state, jax.random.key(0), batch=next(staged_batches()))
    return anew


def fixed_in_stages(*cases: str) -> None:
    """A step whose stages have a given mesh and pinned parameters, and a second step planned `like` it.

    Args:
        cases: `STAGES MESH SCHEDULE` each.
    """
    from autopar.runtime.distributed.device_order import in_host_order

    def evaluate(state: State, batch: Batch) -> jax.Array:
        x = batch["x"]
        for kernel in state["params"]:
            x = x + jnp.tanh(x @ kernel)
        return jnp.mean((x - batch["y"]) ** 2)

    told: dict[str, Any] = {}
    for case in cases:
        stages, mesh, schedule = case.split()
        options: dict[str, Any] = {"stages": int(stages), "mesh": mesh, "schedule": schedule, "num_microbatches": 2}
        pin = {"state/params/*": jax.P(None, "data"), "state/params/1": jax.P("data")}
        step = autopar.parallelize(pin=pin, hardware="cpu-host", cache=False, **options)(staged_step)
        beside = autopar.parallelize(like=step, cache=False)(evaluate)
        state = step.init(staged_state, jax.random.key(0), batch=next(staged_batches()))
        plain = jax.jit(staged_state)(jax.random.key(0))
        specs = [str(kernel.sharding.spec) for kernel in state["params"]]
        order = in_host_order(jax.devices())
        devices = [sorted(map(order.index, kernel.sharding.device_set)) for kernel in state["params"]]
        losses, expected, mine = [], [], 0
        for batch in staged_batches(0, 3):
            losses.append(float(beside(state, batch)))
            expected.append(float(jax.jit(evaluate)(plain, batch)))
            state, loss = step(state, step.shard_batch(share(batch)))
            plain, plain_loss = jax.jit(staged_step)(plain, batch)
            losses.append(float(loss))
            expected.append(float(plain_loss))
        for one, other in zip(state["params"], plain["params"], strict=True):
            for shard in one.addressable_shards:
                mine += 1
                np.testing.assert_allclose(shard.data, np.asarray(other)[shard.index], rtol=1e-4, atol=1e-5)
        assert specs == [str(kernel.sharding.spec) for kernel in state["params"]]
        plan: Any = beside.latest_plan
        told[case] = {"losses": losses, "expected": expected, "specs": specs, "devices": devices, "shards": mine}
        told[case]["stages"] = [list(stage.devices) for stage in plan.stages]
    tell(told)


def branches(*numbers: str) -> None:
    """Branches side by side over the devices of all processes, beside the step as it was written.

    Args:
        numbers: of stages.
    """
    from test_branches_chosen import H100, batch_of, create, step

    told: dict[str, Any] = {}
    for number in numbers:
        options: dict[str, Any] = {"stages": number if number == "auto" else int(number), "num_microbatches": 1}
        branched = autopar.parallelize(hardware=H100, cache=False, **options)(step)
        state = branched.init(create, jax.random.key(0), x=batch_of(0))
        plain = jax.jit(create)(jax.random.key(0))
        losses, expected, mine = [], [], 0
        for seed in range(2):
            state, loss = branched(state, np.asarray(batch_of(seed)))
            plain, plain_loss = jax.jit(step)(plain, batch_of(seed))
            losses.append(float(loss))
            expected.append(float(plain_loss))
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
            for shard in one.addressable_shards:
                mine += 1
                np.testing.assert_allclose(shard.data, np.asarray(other)[shard.index], rtol=1e-4, atol=1e-6)
        plan: Any = branched.latest_plan
        told[number] = {"losses": losses, "expected": expected, "shards": mine, "plan": plan.strategy}
        told[number]["forks"] = len(plan.side_by_side())
        told[number]["stages"] = len(plan.stages)
    tell(told)


def gathered() -> None:
    """Shares of an array go to submeshes of one process, of two, of all, split by rows and otherwise."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from autopar.pipeline.run.batches import Gathering

    whole = np.arange(16 * 6, dtype=np.int32).reshape(16, 6)
    devices, count, told = np.array(jax.devices(), dtype=object), jax.process_count(), {}
    size = len(whole) // count
    mine = whole[jax.process_index() * size : (jax.process_index() + 1) * size]
    for start, stop in ((0, 2), (len(devices) - 2, len(devices)), (len(devices) - 4, len(devices)), (0, len(devices))):
        mesh = Mesh(devices[start:stop].reshape(2, -1), ("a", "b"))
        for spec in ((), ("a",), (("a", "b"),), (None, "a"), ("b", "a")):
            gather = Gathering(NamedSharding(mesh, PartitionSpec(*spec)))
            for add in (0, 1000):  # the second time it is known how
                array = gather(mine + add, whole.shape)
                same = [np.array_equal(one.data, (whole + add)[one.index]) for one in array.addressable_shards]
                told[f"{start} {stop} {spec} {add}"] = [all(same), len(same), array.shape == whole.shape]
    key = jax.random.split(jax.random.key(0), 4)
    words = gather(np.asarray(jax.random.key_data(key)), (4 * count, 2))
    told["words"] = [True, len(words.addressable_shards), words.shape == (4 * count, 2)]
    tell(told)


def main() -> None:
    name, *arguments = sys.argv[1:]
    count = int(os.environ["PROCESSES"])
    if count > 1:
        jax.distributed.initialize(os.environ["COORDINATOR"], count, int(os.environ["PROCESS"]))
        autopar.let_arrays_pass()
    globals()[name](*arguments)


if __name__ == "__main__":
    main()
