"""A parameter server in processes, by one command: `python examples/parameter_server.py [POLICY]`, by default "ssp(3)".

Two servers have a part of the weights each, three workers train on a third of scikit-learn's digits each. In each clock one
worker, drawn by chance, is slow. Everything in `serve` and `train` is what processes on a cluster run, started there by
Slurm, Kubernetes, … (docs/many-processes.md); `main` stands in for these. Process 0, the first server, also has JAX's
coordination service. Compare "bsp", "ssp(3)" and "async".
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

NUM_SERVERS, NUM_WORKERS = 2, 3
NUM_CLOCKS, BATCH, WIDTH = 150, 64, 128


def serve(server: int, policy: str) -> None:
    import numpy as np
    import optax

    import autopar

    rng = np.random.default_rng(0)
    weights = {
        "in/kernel": rng.normal(size=(64, WIDTH)).astype(np.float32) / 8,
        "in/bias": np.zeros(WIDTH, np.float32),
        "out/kernel": rng.normal(size=(WIDTH, 10)).astype(np.float32) / WIDTH**0.5,
        "out/bias": np.zeros(10, np.float32),
    }
    own = {key: weights[key] for key in sorted(weights)[server::NUM_SERVERS]}
    store = autopar.VersionedStore(own, update=optax.sgd(0.1), workers=NUM_WORKERS, consistency=policy)
    store.serve(server=server)  # until all workers have left
    report = store.report()
    waited_s = sum(report.waits_s) / NUM_WORKERS
    print(
        f"server {server} of {', '.join(own)}: version {report.versions[0]}, each worker waited {waited_s:.1f} s;"
        f" staleness {dict(sorted(sum(report.staleness, start=type(report.staleness[0])()).items()))}",
        flush=True,
    )


def train(index: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from sklearn.datasets import load_digits

    import autopar

    data, labels = map(np.asarray, load_digits(return_X_y=True))
    images = data.astype(np.float32) / 16
    mine = np.arange(index, len(images), NUM_WORKERS)

    def logits(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ weights["in/kernel"] + weights["in/bias"]) @ weights["out/kernel"] + weights["out/bias"]

    @jax.jit
    def gradients(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        def loss(weights: dict[str, jax.Array]) -> jax.Array:
            return -jnp.mean(jax.nn.log_softmax(logits(weights, x))[jnp.arange(BATCH), y])

        return jax.grad(loss)(weights)

    rng, slow = np.random.default_rng(index), np.random.default_rng(7).integers(0, NUM_WORKERS, size=NUM_CLOCKS)
    started_s = time.monotonic()
    with autopar.StoreClient(index, servers=NUM_SERVERS) as worker:
        for clock in range(NUM_CLOCKS):
            chosen = rng.choice(mine, BATCH)
            weights = worker.pull().values
            time.sleep(0.1 if slow[clock] == index else 0.02)  # stands for a model that takes as long
            worker.push(None, gradients(weights, images[chosen], labels[chosen]))
            worker.clock()
        seconds = time.monotonic() - started_s
        final = worker.pull(at_least_clock=NUM_CLOCKS).values  # when all have finished
    accuracy = float(np.mean(np.argmax(logits(final, jnp.asarray(images)), axis=1) == labels))
    print(f"worker {index}: {NUM_CLOCKS} clocks in {seconds:.1f} s, accuracy {accuracy:.3f}", flush=True)


def run(coordinator: str, process: int, policy: str) -> None:
    import jax

    jax.distributed.initialize(coordinator, NUM_SERVERS + NUM_WORKERS, process)
    if process < NUM_SERVERS:
        serve(process, policy)
    else:
        train(process - NUM_SERVERS)


def main(policy: str) -> int:
    """Start all processes; where one fails, its exit code is ours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--process", coordinator, policy]
    processes = [subprocess.Popen([*command, str(i)], env=env) for i in range(NUM_SERVERS + NUM_WORKERS)]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        run(sys.argv[2], int(sys.argv[4]), sys.argv[3])
    else:
        sys.exit(main(*sys.argv[1:] or ["ssp(3)"]))
