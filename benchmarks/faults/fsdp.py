"""Programs that `autopar keep` keeps alive: FSDP of a small network, a pipeline of another one, and the same by hand from checkpoints.

python fsdp.py kept LOG STEPS        under `autopar keep`
python fsdp.py kept_in_stages LOG STEPS
python fsdp.py by_hand LOG START STOP FOLDER      in COUNT processes, from a checkpoint to the next
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH, WIDTH = int(os.environ.get("BATCH", "48")), int(os.environ.get("WIDTH", "96"))


def model() -> tuple[Any, Any, Any]:
    """The step, planned as FSDP; the function that makes the state; shapes of a batch."""
    import jax
    from jax.sharding import PartitionSpec as P

    import autopar

    train_step, create_state = as_written()
    mesh = f"data={jax.device_count()}"
    pins = {f"state/{part}/*": P("data") for part in ("params", "moments/0/mu", "moments/0/nu")}
    step = autopar.parallelize(train_step, mesh=mesh, pin=pins)
    whole = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    return step, create_state, {"x": whole, "y": whole}


def as_written() -> tuple[Any, Any]:
    """The step for one device, and the function that makes the state."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(1e-3)

    def create_state(rng: jax.Array) -> Any:
        rngs = jax.random.split(rng)
        params = {
            "in": jax.random.normal(rngs[0], (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
            "out": jax.random.normal(rngs[1], (4 * WIDTH, WIDTH)) / WIDTH,
        }
        return {"params": params, "moments": optimizer.init(params), "rng": jax.random.key(7)}

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        rng, dropped = jax.random.split(state["rng"])

        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            hidden = jax.nn.relu(batch["x"] @ params["in"])
            hidden *= jax.random.bernoulli(dropped, 0.9, hidden.shape)
            return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, moments = optimizer.update(grads, state["moments"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments, "rng": rng}, loss

    return train_step, create_state


#: The layers of the pipeline, of which 4 and 3 stages have unequal numbers; and the memory of a device, which one alone does not hold.
LAYERS, MEMORY_BYTES = 6, 1.0e6


def in_stages(count: int) -> tuple[Any, Any, Any]:
    """The same for a pipeline with a stage in each process, of scanned layers, so that stages hold unequal parts of one stack."""
    import jax

    import autopar

    train_step, create_state = layers_as_written()
    step = autopar.parallelize(train_step, stages=count, num_microbatches=4)
    whole = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    return step, create_state, {"x": whole, "y": whole}


def layers_as_written() -> tuple[Any, Any]:
    """The step of the pipeline for one device, and the function that makes the state."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(1e-3)

    def create_state(rng: jax.Array) -> Any:
        layers = jax.random.normal(rng, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
        params = {"layers": layers, "last": jnp.ones((WIDTH,))}
        return {"params": params, "moments": optimizer.init(params)}

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            hidden, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["layers"])
            return jnp.mean((hidden * params["last"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, moments = optimizer.update(grads, state["moments"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return train_step, create_state


def batches(start: int, stop: int, rows: Any) -> Iterator[Any]:
    import numpy as np

    for number in range(start, stop):
        x = np.random.default_rng(number).normal(size=(BATCH, WIDTH)).astype(np.float32)[rows]
        yield {"x": x, "y": np.roll(x, 1, axis=1)}


def tell(log: str, **what: Any) -> None:
    """Append a line to the log: several processes may write it."""
    with Path(log).open("a") as file:
        file.write(json.dumps({"at_s": time.time(), "pid": os.getpid(), "agent": os.getppid(), **what}) + "\n")


def save_templates(folder: Path, num_members: int) -> dict[int, str]:
    """Plan the pipeline for each number of members, and save the plans. Returns what stages each member of each has."""
    import jax

    import autopar

    step, create_state = layers_as_written()
    state = jax.eval_shape(create_state, jax.random.key(0))
    whole = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    options = {"devices_per_node": 1, "hardware": "cpu-host", "memory_budget_bytes": MEMORY_BYTES}
    made = autopar.plan_templates(
        step, state, {"x": whole, "y": whole}, num_nodes=num_members, survive=0, num_microbatches=4, **options
    )
    for size, one in made.templates.items():
        plan: Any = one.plan
        plan.save(folder / f"{size}.json")
    return {size: str(one.stages) for size, one in made.templates.items()}


def kept_by_template(log: str, steps: str, pause_s: str, folder: str) -> None:
    import autopar

    def made(count: int) -> tuple[Any, Any, Any]:
        train_step, create_state = layers_as_written()
        step = autopar.parallelize(train_step, plan=Path(folder) / f"{count}.json")
        return step, create_state, in_stages(1)[2]

    kept(log, steps, pause_s, made)


def kept_in_stages(log: str, steps: str, pause_s: str = "0.05") -> None:
    kept(log, steps, pause_s, in_stages)


def kept(
    log: str, steps: str, pause_s: str = "0.05", made: Callable[[int], tuple[Any, Any, Any]] = lambda _: model()
) -> None:
    import jax
    import optax  # noqa: F401  before the place, as all imports

    import autopar

    tell(log, event="imported")
    run = autopar.join()
    step, create_state, shapes = made(1 if run.place is None else run.place.count)
    state = run.restore_or_init(step, create_state, jax.random.key(0), batch=shapes)
    count, rank = jax.process_count(), jax.process_index()
    if not run.is_rehearsal:
        tell(
            log,
            event="start",
            step=run.position,
            count=count,
            rank=rank,
            source=run.restored_from,
            strategy=_strategy(step),
        )
    for batch in run.batches(lambda start: batches(start, int(steps), run.rows(BATCH))):
        at_s = time.time()
        state, loss = step(state, batch)
        if rank == min(device.process_index for device in loss.sharding.device_set):
            value = float(loss.addressable_data(0))
            tell(log, event="step", step=run.position + 1, count=count, loss=value, began_s=at_s, **_deal(run))
        time.sleep(float(pause_s))
    shards = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    tell(log, event="end", step=run.position, rank=rank, bytes=run.copied_bytes, state_bytes=shards)


def _strategy(step: Any) -> str:
    return step.latest_plan.strategy


def _deal(run: Any) -> dict[str, Any]:
    """The microbatches of each member, where they are dealt."""
    return {"microbatches": run.place.microbatches} if run.place is not None and run.place.microbatches else {}


def by_hand(log: str, start: str, stop: str, folder: str) -> None:
    import jax

    import autopar

    count, rank = int(os.environ["PROCESSES"]), int(os.environ["PROCESS"])
    if count > 1:
        jax.distributed.initialize(os.environ["COORDINATOR"], count, rank)
    step, create_state, shapes = model()
    rows = slice(rank * BATCH // count, (rank + 1) * BATCH // count)
    with autopar.Checkpoints(folder, step) as checkpoints:
        state = checkpoints.restore_or_init(create_state, jax.random.key(0), batch=shapes)
        assert (checkpoints.latest or 0) == int(start)
        for number, batch in enumerate(batches(int(start), int(stop), rows), int(start) + 1):
            state, loss = step(state, step.shard_batch(batch))
            if rank == 0:
                tell(log, event="step", step=number, count=count, loss=float(loss))
        checkpoints.save(int(stop), state, wait=True)
    if rank == 0:
        print("told: 0", flush=True)


if __name__ == "__main__":
    programs = {
        "kept": kept,
        "kept_in_stages": kept_in_stages,
        "kept_by_template": kept_by_template,
        "by_hand": by_hand,
    }
    programs[sys.argv[1]](*sys.argv[2:])
