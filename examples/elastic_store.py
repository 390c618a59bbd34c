"""A parameter server that survives, by one command: `python examples/elastic_store.py [POLICY]`, by default "bsp".

Two servers of two replicas each, three workers, six shares of every batch of scikit-learn's digits. While they train, a worker and the head
of a server are killed, and a new process is started for each. With "bsp" the weights are the same in every run, whoever dies.
`main` stands in for what starts processes on a cluster (docs/many-processes.md).
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time

NUM_SERVERS, NUM_REPLICAS, NUM_WORKERS, NUM_SHARES = 2, 2, 3, 6
NUM_CLOCKS, BATCH, WIDTH = 120, 192, 128


def serve(server: int, keeper: str, token: str, policy: str) -> None:
    import jax.numpy as jnp
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
    update = optax.chain(optax.scale(1 / NUM_SHARES), optax.adam(1e-2))  # pushes are added up
    store = autopar.VersionedStore(own, update=update, workers=NUM_SHARES, consistency=policy)
    autopar.serve_replica(store, keeper, token=token, server=server)  # until all shares are computed
    norm = sum(float(jnp.abs(array).sum()) for array in store.pull(worker=None).values.values())
    print(f"server {server}: version {store.report().versions[0]}, sum of the weights {norm:.6f}", flush=True)


def work(keeper: str, token: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from sklearn.datasets import load_digits

    import autopar

    data, labels = map(np.asarray, load_digits(return_X_y=True))
    images = data.astype(np.float32) / 16

    def logits(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ weights["in/kernel"] + weights["in/bias"]) @ weights["out/kernel"] + weights["out/bias"]

    @jax.jit
    def gradients(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        def loss(weights: dict[str, jax.Array]) -> jax.Array:
            return -jnp.mean(jax.nn.log_softmax(logits(weights, x))[jnp.arange(len(y)), y])

        return jax.grad(loss)(weights)

    with autopar.ElasticWorker(keeper, token=token) as worker:
        accuracy = 0.0
        for task in worker.tasks(NUM_CLOCKS):
            # the examples of a share follow from its clock and number, so that whoever computes it takes the same
            batch = np.random.default_rng(task.clock).permutation(len(images))[:BATCH]
            mine = batch[task.share :: task.num_shares]
            weights = dict(task.values)
            worker.push(task, gradients(weights, images[mine], labels[mine]))
            if task.clock == NUM_CLOCKS - 1:
                accuracy = float(jnp.mean(logits(weights, jnp.asarray(images)).argmax(1) == labels))
            time.sleep(0.03)  # a real model takes longer
    print(f"process {os.getpid()}: done" + (f", accuracy {accuracy:.3f}" if accuracy else ""), flush=True)


def main(policy: str) -> None:
    import autopar

    with autopar.StoreKeeper(servers=NUM_SERVERS, shares=NUM_SHARES) as keeper:

        def start(*arguments: object) -> subprocess.Popen[bytes]:
            command = [sys.executable, __file__, *map(str, arguments), keeper.address, keeper.token]
            return subprocess.Popen([*command, policy], env=os.environ | {"JAX_PLATFORMS": "cpu"})

        processes = [start("serve", server) for server in range(NUM_SERVERS) for _ in range(NUM_REPLICAS)]
        processes += [start("work", "-") for _ in range(NUM_WORKERS)]
        for role in ("a worker", "the head of server 0"):
            while len(keeper.view.workers) < NUM_WORKERS or any(len(one) < NUM_REPLICAS for one in keeper.view.chains):
                time.sleep(0.1)
            time.sleep(random.uniform(0.3, 1.0))
            name = keeper.view.head(0) if "server" in role else random.choice(keeper.view.workers)
            print(f"killing {role}: {name}", flush=True)
            os.kill(int(re.split("[ -]", name)[-2]), signal.SIGKILL)
            processes.append(start("serve", 0) if "server" in role else start("work", "-"))
            while name in keeper.view.workers or name in keeper.view.chains[0]:
                time.sleep(0.05)
        keeper.wait()
        for process in processes:
            process.wait()
        for at_s, event in keeper.events:
            print(f"{at_s - keeper.events[0][0]:6.1f} s: {event}")


if __name__ == "__main__":
    if len(sys.argv) <= 2:
        main(*sys.argv[1:] or ["bsp"])
    elif sys.argv[1] == "serve":
        serve(int(sys.argv[2]), *sys.argv[3:6])
    else:
        work(*sys.argv[3:5])
