"""Programs of `test_side_by_side`, run in each of several processes."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax
from several_processes import TOLD

import autopar
from benchmarks.faults import fsdp


def trained() -> None:
    train_step, create_state = fsdp.layers_as_written()
    step = autopar.parallelize(train_step, pipelines=2, stages=2, num_microbatches=6)
    whole = jax.ShapeDtypeStruct((fsdp.BATCH, fsdp.WIDTH), "float32")
    state = step.init(create_state, jax.random.key(0), batch={"x": whole, "y": whole})
    count, rank = jax.process_count(), jax.process_index()
    start, stop = (0, count) if fsdp.BATCH % count else (rank, rank + 1)
    rows = slice(start * fsdp.BATCH // count, stop * fsdp.BATCH // count)
    losses = []
    for batch in fsdp.batches(0, 6, rows):
        state, loss = step(state, step.shard_batch(batch))
        losses.append(float(loss))
    plain, expected = jax.jit(train_step), []
    wanted = create_state(jax.random.key(0))
    for batch in fsdp.batches(0, 6, slice(0, fsdp.BATCH)):
        wanted, loss = plain(wanted, batch)
        expected.append(float(loss))
    assert step.pipelines is not None
    tell({"losses": losses, "expected": expected, "pipelines": step.pipelines.pipelines})


def kept(log: str, steps: str, pause_s: str) -> None:
    """Under `autopar keep`."""

    def made(count: int) -> Any:
        train_step, create_state = fsdp.layers_as_written()
        whole = jax.ShapeDtypeStruct((fsdp.BATCH, fsdp.WIDTH), "float32")
        step = autopar.parallelize(train_step, pipelines=2, stages=2, num_microbatches=6)
        return step, create_state, {"x": whole, "y": whole}

    fsdp.kept(log, steps, pause_s, made)


def tell(value: object) -> None:
    print(TOLD + json.dumps(value), flush=True)


if __name__ == "__main__":
    if "COORDINATOR" in os.environ:
        jax.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]))
    {"trained": trained, "kept": kept}[sys.argv[1]](*sys.argv[2:])
