"""Programs that tests of workers in several processes run in each: `python worker_programs.py NAME [ARGUMENTS]`."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from process_programs import tell

import autopar
from autopar.errors import AutoparError

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
WORKERS, BATCHES = 2, 5


def new_state() -> Any:
    rng = np.random.default_rng(0)
    weights = {"a": rng.normal(size=(6, 4)).astype(np.float32), "b": np.ones(4, np.float32)}
    return {"weights": weights, "optimizer": OPTIMIZER.init(weights), "seed": np.zeros(2, np.uint32)}


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    kept = jax.random.bernoulli(jax.random.wrap_key_data(state["seed"]), 0.9, batch["x"].shape)

    def loss(weights: Any) -> Any:
        return jnp.mean((jnp.tanh((batch["x"] * kept) @ weights["a"]) @ weights["b"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["weights"])
    changes, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["weights"])
    weights = optax.apply_updates(state["weights"], changes)
    return {"weights": weights, "optimizer": optimizer, "seed": state["seed"] + 1}, value


def batches(worker: int | None) -> Iterator[Any]:
    """Whole batches, or the share of a worker."""
    for number in range(BATCHES):
        x = np.random.default_rng(number).normal(size=(8, 6)).astype(np.float32)
        batch = {"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}
        yield batch if worker is None else {name: array[worker::WORKERS] for name, array in batch.items()}


def digest(state: Any) -> list[str]:
    return [hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves(state)]


def trained(policy: str, outer: str) -> None:
    options = {"outer": optax.sgd(0.7, momentum=0.9)} if outer == "outer" else {}
    step = autopar.parallelize(train_step, consistency=policy, cache=False, **options)
    losses = [float(loss) for loss in step.stream(new_state(), batches(jax.process_index()))]
    state = step.drain()
    refused: list[str] = []
    for call in (lambda: step(state, next(batches(0))), step.report):
        try:
            refused.append(str(call()))
        except AutoparError as error:
            refused.append(str(error))
    weights = digest(state["weights"])
    tell({"losses": losses, "weights": weights, "state": digest(state), "refused": refused})


def broken(at: str) -> None:
    """The last worker's batches end with an error."""
    step = autopar.parallelize(train_step, consistency="bsp", cache=False)

    def shares() -> Iterator[Any]:
        for number, share in enumerate(batches(jax.process_index())):
            if number == int(at) and jax.process_index() == WORKERS - 1:
                os._exit(7)
            yield share

    try:
        for _ in step.stream(new_state(), shares()):
            pass
    except AutoparError as error:
        tell({"error": str(error)})
        os._exit(3)


def main() -> None:
    name, *arguments = sys.argv[1:]
    jax.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]))
    globals()[name](*arguments)


if __name__ == "__main__":
    main()
