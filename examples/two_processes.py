"""Two processes by one command: `python examples/two_processes.py` starts both, each with four CPU devices.

Each process plays a host: it reads its own half of the examples. Everything in `train` is what a process on a cluster
runs, started there by Slurm, Kubernetes, mpirun, … (docs/many-processes.md); `main` stands in for these.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

NUM_PROCESSES, DEVICES_EACH = 2, 4
BATCH, WIDTH, NUM_STEPS = 64, 256, 20


def train(coordinator: str, process: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import autopar

    jax.distributed.initialize(coordinator, NUM_PROCESSES, process)

    def create_params(rng: jax.Array) -> dict[str, jax.Array]:
        rngs = jax.random.split(rng)
        return {
            "in": jax.random.normal(rngs[0], (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
            "out": jax.random.normal(rngs[1], (4 * WIDTH, WIDTH)) / WIDTH,
        }

    @autopar.parallelize
    def train_step(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((jax.nn.relu(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), loss

    def my_examples(seed: int) -> dict[str, np.ndarray]:
        """This process's own: here by another seed in each process; on a cluster, from its own files."""
        size = BATCH // jax.process_count()
        x = np.random.default_rng([seed, jax.process_index()]).normal(size=(size, WIDTH)).astype(np.float32)
        return {"x": x, "y": np.roll(x, 1, axis=1)}

    whole = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    params = train_step.init(create_params, jax.random.key(0), batch={"x": whole, "y": whole})
    losses = []
    with autopar.watch(train_step, timeout_s=30):
        for step in range(NUM_STEPS):
            params, loss = train_step(params, train_step.shard_batch(my_examples(step)))
            losses.append(float(loss))
    if jax.process_index() == 0:
        plan = train_step.plan(params, {"x": whole, "y": whole})
        print(f"{jax.process_count()} processes, {jax.device_count()} devices: {plan.strategy}; mesh {plan.mesh}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
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
