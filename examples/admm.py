"""Logistic regression by ADMM on a parameter server: `python examples/admm.py`.

Even and odd digits of scikit-learn, with an L1 penalty. Four workers have a quarter of the examples each. A worker pulls
the consensus z, solves its own problem by Newton's method, and pushes x + u; the server's update is not a gradient step, but
z = soft_threshold(mean of x + u) (Boyd et al. 2011, section 8). The policy is BSP: z waits for all workers.
"""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import autopar

NUM_WORKERS, NUM_CLOCKS = 4, 60
PENALTY, RHO = 2.0, 4.0


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Images with a constant for the bias, and +1 for an odd digit, -1 for an even one."""
    data, labels = map(np.asarray, load_digits(return_X_y=True))
    images = data.astype(np.float32) / 16
    return np.concatenate([images, np.ones_like(images[:, :1])], 1), np.where(labels % 2, 1, -1).astype(np.float32)


def log_loss(weights: jax.typing.ArrayLike, x: np.ndarray, y: np.ndarray) -> jax.Array:
    return jnp.sum(jax.nn.softplus(-y * jnp.dot(x, weights)))


@jax.jit
def solved(x: np.ndarray, y: np.ndarray, center: jax.Array, start: jax.Array) -> jax.Array:
    """The weights that minimize a worker's loss plus rho/2 |weights - center|^2: eight steps of Newton's method."""

    def local(weights: jax.Array) -> jax.Array:
        return log_loss(weights, x, y) + RHO / 2 * jnp.sum((weights - center) ** 2)

    def step(weights: jax.Array, _: None) -> tuple[jax.Array, None]:
        return weights - jnp.linalg.solve(jax.hessian(local)(weights), jax.grad(local)(weights)), None

    return jax.lax.scan(step, start, length=8)[0]


@jax.jit
def consensus(weights: dict[str, jax.Array], total: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The server's update, from the sum of the workers' x + u. The bias, the last weight, has no penalty."""
    mean = total["z"] / NUM_WORKERS
    shrunk = jnp.sign(mean) * jnp.maximum(jnp.abs(mean) - PENALTY / (RHO * NUM_WORKERS), 0)
    return {"z": shrunk.at[-1].set(mean[-1])}


def main() -> None:
    x, y = examples()
    store = autopar.VersionedStore(
        {"z": np.zeros(x.shape[1], np.float32)}, update=consensus, workers=NUM_WORKERS, consistency="bsp"
    )

    def work(index: int) -> None:
        mine = slice(index, None, NUM_WORKERS)
        weights = multiplier = jnp.zeros(x.shape[1])
        with store.worker(index) as worker:
            z = worker.pull("z").values["z"]
            for _ in range(NUM_CLOCKS):
                weights = solved(x[mine], y[mine], z - multiplier, weights)
                worker.push("z", weights + multiplier)
                worker.clock()
                z = worker.pull("z").values["z"]
                multiplier = multiplier + weights - z

    threads = [threading.Thread(target=work, args=(index,)) for index in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    z = np.asarray(store.pull("z", worker=None).values["z"])
    objective = float(log_loss(z, x, y)) + PENALTY * float(np.abs(z[:-1]).sum())
    accuracy = float(np.mean(np.sign(x @ z) == y))
    report = store.report()
    print(f"{report.versions[0]} clocks of {NUM_WORKERS} workers: objective {objective:.2f}, accuracy {accuracy:.3f}")
    print(f"{np.count_nonzero(z[:-1])} of {len(z) - 1} pixels used")
    exchanged = sum(one.pushed_bytes + one.pulled_bytes for one in report.traffic.values())
    print(f"{exchanged} bytes between workers and server")


if __name__ == "__main__":
    main()
