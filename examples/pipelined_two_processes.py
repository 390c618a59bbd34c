"""A step in two stages, one in each of two processes: `python examples/pipelined_two_processes.py` starts both.

Each process plays a host with four CPU devices. The step is written for one device; the planner cuts it, and each process
runs its stage. Everything in `train` is what a process on a cluster runs, started there by Slurm, Kubernetes, mpirun, …
(docs/many-processes.md); `main` stands in for these.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

NUM_PROCESSES, DEVICES_EACH = 2, 4
BATCH, WIDTH, NUM_LAYERS, NUM_STEPS = 64, 256, 8, 10


def train(coordinator: str, process: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autopar

    jax.distributed.initialize(coordinator, NUM_PROCESSES, process)

    @autopar.parallelize(stages=2, num_microbatches=4, schedule="1f1b")
    def train_step(params: list[jax.Array], batch: dict[str, jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        def loss_fn(params: list[jax.Array]) -> jax.Array:
            x = batch["x"]
            for kernel in params:
                x = x + jnp.tanh(x @ kernel)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return [p - 0.3 * g for p, g in zip(params, grads, strict=True)], loss

    def create_params(rng: jax.Array) -> list[jax.Array]:
        return [jax.random.normal(one, (WIDTH, WIDTH)) / WIDTH for one in jax.random.split(rng, NUM_LAYERS)]

    def examples(seed: int) -> dict[str, np.ndarray]:
        """This process's share of a batch, as its own reader would give it."""
        x = np.random.default_rng([seed, process]).normal(size=(BATCH // NUM_PROCESSES, WIDTH)).astype(np.float32)
        return {"x": x, "y": np.roll(x, 1, axis=1)}

    shape = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    params = train_step.init(create_params, jax.random.key(0), batch={"x": shape, "y": shape})
    losses = []
    for step in range(NUM_STEPS):
        params, loss = train_step(params, train_step.shard_batch(examples(step)))  # each stage gets what it reads
        losses.append(float(loss))  # every process can read it
    mine = [n for n, kernel in enumerate(params) if kernel.addressable_shards]
    print(f"process {process}: layers {mine[0]} to {mine[-1]}, loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    if process == 0:
        print(train_step.plans[-1].strategy)
    assert losses[-1] < losses[0]


def main() -> int:
    """Start all processes; where one fails, its exit code is ours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={DEVICES_EACH}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, coordinator]
    processes = [subprocess.Popen([*command, str(i)], env=env) for i in range(NUM_PROCESSES)]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
