"""A small model and workers in threads, for tests of versioned stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.versions.layout_choice import Place
from autopar.versions.store import VersionedStore

WIDTH, BATCH, WORKERS = 16, 8, 4


def weights() -> dict[str, jax.Array]:
    rngs = jax.random.split(jax.random.key(0))
    return {
        "in/kernel": jax.random.normal(rngs[0], (WIDTH, 2 * WIDTH)) / 4,
        "in/bias": jnp.zeros(2 * WIDTH),
        "out/kernel": jax.random.normal(rngs[1], (2 * WIDTH, 1)) / 4,
    }


@jax.jit
def gradients(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(x @ params["in/kernel"] + params["in/bias"])
        return jnp.mean((hidden @ params["out/kernel"] - jnp.sin(x.sum(1, keepdims=True))) ** 2)

    return jax.grad(loss)(params)


def batch(worker: int, clock: int) -> np.ndarray:
    return np.random.default_rng([worker, clock]).normal(size=(BATCH, WIDTH)).astype(np.float32)


def run_workers(work: Callable[[int], None], count: int = WORKERS) -> None:
    """Run a function for each worker in a thread of its own; raise the first error."""
    raised: list[BaseException] = []

    def guarded(worker: int) -> None:
        try:
            work(worker)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    if raised:
        raise raised[0]


def train(store: VersionedStore, num_clocks: int, devices: Sequence[Place] | None = None) -> None:
    def work(index: int) -> None:
        with store.worker(index, to=None if devices is None else devices[index]) as worker:
            for clock in range(num_clocks):
                params = worker.pull().values
                worker.push(None, gradients(params, batch(index, clock)))
                worker.clock()

    run_workers(work)


def zeros(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)
