"""What a test of asynchronous pipelines runs in one process or in several (`several_processes`)."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import jax
import numpy as np
import optax
from several_processes import TOLD
from test_async_pipeline import batches_of, layered_step, weights_of

import autopar


def streams(*rules: str) -> None:
    """Two streams, the second from the first one's state; tells losses and the bytes of the weights that are here."""
    told: dict[str, Any] = {}
    for rule in rules:
        optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 20))
        step = autopar.parallelize(
            layered_step(optimizer), stages=2, num_microbatches=2, consistency=rule, num_devices=2, cache=False
        )
        weights = weights_of(2)  # one on each stage, however it is planned
        state: Any = jax.tree.map(np.asarray, (weights, optimizer.init(weights)))
        losses = []
        for _ in range(2):
            losses += [float(loss) for loss in step.stream(state, batches_of(9, 8))]
            state = step.drain()
        here = {n: w.addressable_shards[0].data for n, w in enumerate(state[0]) if w.addressable_shards}
        told[rule] = {"losses": losses, "here": {n: np.asarray(one).tobytes().hex() for n, one in here.items()}}
    print(TOLD + json.dumps(told), flush=True)


def saved_streams(folder: str, killed_at: str) -> None:
    """A stream that is saved after every third batch, and resumed if there is a checkpoint; killed after a number of batches."""
    consistency, optimizer = "pipemare(12, 0.3)", optax.adam(1e-2)
    step = autopar.parallelize(
        layered_step(optimizer), stages=2, num_microbatches=2, consistency=consistency, num_devices=2, cache=False
    )
    batches = batches_of(12, 8)
    state: Any = (weights_of(4), optimizer.init(weights_of(4)))
    losses: list[float] = []
    with autopar.StoreCheckpoints(folder) as checkpoints:
        first = 0
        if checkpoints.latest is not None:
            state, first = checkpoints.restore(step, state, batches[0])
        for number, loss in enumerate(step.stream(state, batches[first:]), first + 1):
            losses.append(float(loss))
            if number % 3 == 0:
                checkpoints.save(number, step, wait=True)
            if number == int(killed_at):
                os.kill(os.getpid(), signal.SIGKILL)
    ended = [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(step.drain())]
    print(TOLD + json.dumps({"first": first, "losses": losses, "state": ended}), flush=True)


def main() -> None:
    name, *arguments = sys.argv[1:]
    count = int(os.environ.get("PROCESSES", "1"))
    if count > 1:
        jax.distributed.initialize(os.environ["COORDINATOR"], count, int(os.environ["PROCESS"]))
        autopar.let_arrays_pass()
    globals()[name](*arguments)


if __name__ == "__main__":
    main()
