"""One process of the job of `stores`: a replica of a server, or a worker. `python -m benchmarks.faults.store_process ROLE JSON`.

The model is regression by a small network; the examples of a share of a batch are drawn from its clock and number.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

NUM_SERVERS, NUM_SHARES, FEATURES, HIDDEN, EXAMPLES = 2, 6, 16, 32, 32
_SHAPES = {"first": (FEATURES, HIDDEN), "bias": (HIDDEN,), "second": (HIDDEN, 1), "offset": (1,)}

Weights = Mapping[str, Any]


def store(server: int, policy: str, clocks: int) -> autopar.VersionedStore:
    """The store of one server: every second key. The learning rate falls to zero where the loss is compared."""
    rng = np.random.default_rng(0)
    weights = {key: (rng.normal(size=shape) / 4).astype(np.float32) for key, shape in _SHAPES.items()}
    own = {key: weights[key] for key in sorted(weights)[server::NUM_SERVERS]}
    rate = 3e-3 if policy == "bsp" else optax.cosine_decay_schedule(3e-3, num_updates(policy, clocks))
    return autopar.VersionedStore(own, update=optax.adam(rate), workers=NUM_SHARES, consistency=policy)


def num_updates(policy: str, clocks: int) -> int:
    """The versions after so many clocks."""
    return clocks if policy.startswith(("bsp", "backup")) else clocks * NUM_SHARES


def examples(clock: int, share: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of a share of a batch."""
    rng = np.random.default_rng([clock, share])
    x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return x, np.sin(x[:, :4].sum(1, keepdims=True)) + 0.3 * rng.normal(size=(EXAMPLES, 1)).astype(np.float32)


@jax.jit
def loss(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error."""
    return jnp.mean((jnp.tanh(x @ weights["first"] + weights["bias"]) @ weights["second"] + weights["offset"] - y) ** 2)


@functools.cache
def _gradients() -> Any:
    return jax.jit(jax.grad(loss))


def gradients(weights: Weights, clock: int, share: int) -> Any:
    """The gradients of a share of a batch."""
    return _gradients()(dict(weights), *examples(clock, share))


def serve(options: Mapping[str, Any]) -> None:
    """Serve until all is done, and write the weights."""
    own = store(options["server"], options["policy"], options["clocks"])
    autopar.serve_replica(own, options["keeper"], server=options["server"], token=options["token"], log=options["log"])
    arrays: dict[str, Any] = {key: np.asarray(one) for key, one in own.pull(worker=None).values.items()}
    np.savez(options["weights"], **arrays)


def work(options: Mapping[str, Any]) -> None:
    """Compute shares until all is done."""
    with autopar.ElasticWorker(options["keeper"], token=options["token"]) as worker:
        Path(options["started"]).touch()
        for task in worker.tasks(options["clocks"]):
            time.sleep(options["sleep_s"])
            worker.push(task, gradients(task.values, task.clock, task.share))


if __name__ == "__main__":
    {"serve": serve, "work": work}[sys.argv[1]](json.loads(sys.argv[2]))
