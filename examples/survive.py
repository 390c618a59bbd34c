"""Four processes by one command: kill any of them while it runs, and watch the training go on.

    python examples/survive.py            # starts `autopar keep -n 4` with this file as the command of each member
    kill -9 PID                           # any process that it names: a worker, or the member that started it

A worker that is killed is replaced; a member that is killed leaves three, and is taken back when it is there again. The loss goes on
as if nothing had happened, because the state comes from the memory of the other members (docs/fault-tolerance.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

MEMBERS, STEPS, EVERY = 4, int(os.environ.get("STEPS", "200")), 5
BATCH, WIDTH = 48, 256


def train() -> None:
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import autopar

    run = autopar.join()  # in place of jax.distributed.initialize

    def create_state(rng: jax.Array) -> tuple[dict[str, jax.Array], optax.OptState]:
        rngs = jax.random.split(rng)
        params = {
            "in": jax.random.normal(rngs[0], (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
            "out": jax.random.normal(rngs[1], (4 * WIDTH, WIDTH)) / WIDTH,
        }
        return params, optimizer.init(params)

    optimizer = optax.adam(1e-3)

    @autopar.parallelize
    def train_step(state, batch):
        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((jax.nn.relu(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2)

        params, moments = state
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), loss

    def batches(position: int) -> Iterator[dict[str, np.ndarray]]:
        """This process's rows of each batch, from a position on: the number of a batch is all that it depends on."""
        for number in range(position, STEPS):
            x = np.random.default_rng(number).normal(size=(BATCH, WIDTH)).astype(np.float32)[run.rows(BATCH)]
            yield {"x": x, "y": np.roll(x, 1, axis=1)}

    whole = jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")
    state = run.restore_or_init(train_step, create_state, jax.random.key(0), batch={"x": whole, "y": whole})
    me = f"worker {jax.process_index()} of {jax.process_count()}"
    print(f"{me}: pid {os.getpid()}, member {os.getppid()}; step {run.position} from {run.restored_from}", flush=True)
    for batch in run.batches(batches):
        state, loss = train_step(state, batch)
        if jax.process_index() == 0 and (run.position + 1) % EVERY == 0:
            print(f"step {run.position + 1}  loss {float(loss):.6f}  on {jax.process_count()} processes", flush=True)
        time.sleep(float(os.environ.get("PAUSE", "0.2")))


def main() -> int:
    """Start the keeper, which starts the members, which start the workers."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    with tempfile.TemporaryDirectory() as folder:
        keep = ["keep", "-n", str(MEMBERS), "--every", str(EVERY), "--state", folder, *sys.argv[1:]]
        command = [sys.executable, "-m", "autopar", *keep, "--", sys.executable, __file__, "--worker"]
        return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        train()
    else:
        sys.exit(main())
