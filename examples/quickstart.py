"""The example in the README: a pure function, a plan that can be read, a sharded step."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight devices where there is no GPU

import jax
import jax.numpy as jnp

import autopar


def create_params(rng: jax.Array) -> dict[str, jax.Array]:
    return {"w1": jax.random.normal(rng, (512, 2048)) / 32, "w2": jax.random.normal(rng, (2048, 512)) / 32}


@autopar.parallelize
def train_step(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jax.nn.relu(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


batch = {"x": jnp.ones((64, 512)), "y": jnp.zeros((64, 512))}
params = train_step.init(create_params, jax.random.key(0), batch=batch)
print(autopar.explain(train_step.plan(params, batch)))
for _ in range(3):
    params, loss = train_step(params, batch)
    print(f"loss {loss:.4f}")
