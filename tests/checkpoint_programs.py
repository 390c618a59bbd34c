"""The steps and states that checkpoint tests save and restore, in this process and in others.

In: a number of devices, or a mesh of them. Out: steps of one program planned for these devices, and states that a
single number determines.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import programs
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar

#: Divided by 4, 6 and 8.
SIZE = 48


def mlp() -> programs.Program:
    return programs.mlp(batch=SIZE, width=SIZE, num_layers=3, optimizer="adamw")


def pinned(how: str) -> dict[str, Any]:
    """Plans that differ: rows, columns or blocks of the kernels, so that every restore has something to do."""
    axes = tuple(how.split("x"))
    kernel = {"rows": P("data"), "columns": P(None, "data"), "blocks": P("data", "model")}[axes[0]]
    return {"state/params/*/kernel": kernel, "state/opt_state/*/kernel": kernel}


def step_on(program: programs.Program, num_devices: int, how: str, **options: Any) -> autopar.ParallelStep:
    """The program's step on so many of the devices here."""
    devices = np.array(jax.devices()[:num_devices])
    mesh = Mesh(devices.reshape(2, -1), ("data", "model")) if how == "blocks" else Mesh(devices, ("data",))
    return autopar.parallelize(program.step, mesh=mesh, hardware="cpu-host", pin=pinned(how), **options)


def abstract_batch(program: programs.Program) -> Any:
    return program.abstract_args()[-1]


def values_of(state: Any, number: int) -> list[np.ndarray]:
    """What follows from a number, for each leaf of a state."""
    return [
        (np.arange(leaf.size, dtype=np.float64).reshape(leaf.shape) + 1000 * number + position).astype(leaf.dtype)
        for position, leaf in enumerate(jax.tree.leaves(state))
    ]


def filled(state: Any, number: int) -> Any:
    """A state like another, with these values."""
    leaves, structure = jax.tree.flatten(state)
    values = values_of(state, number)
    return jax.tree.unflatten(
        structure, [jax.device_put(one, leaf.sharding) for one, leaf in zip(values, leaves, strict=True)]
    )


# -- a state of every kind of leaf -----------------------------------------------------------


class Averages(NamedTuple):
    slow: Any
    nothing: None


@flax.struct.dataclass
class Mixed:
    """A dataclass with what states are made of: a static field, None, keys, numbers, halves, an empty array."""

    params: dict[str, Any]
    averages: Averages
    key: jax.Array
    keys: jax.Array
    count: int
    scale: float
    done: bool
    name: str = flax.struct.field(pytree_node=False, default="mixed")
    history: tuple[Any, ...] = field(default=())


def mixed_state(rng: jax.Array) -> Mixed:
    weights = jax.random.normal(rng, (16, 24), jnp.bfloat16)
    return Mixed(
        params={"w": weights, "mlp/~/linear.0": {"b": jnp.arange(24, dtype=jnp.float16)}, "2": {0: jnp.ones(8)}},
        averages=Averages(slow=[weights.astype(jnp.float32), jnp.zeros((0, 3))], nothing=None),
        key=jax.random.key(7),
        keys=jax.random.split(jax.random.key(8, impl="rbg"), 4),
        count=3,
        scale=0.5,
        done=True,
        history=(None, jnp.array([1, 2], jnp.int8), {}),
    )


def mixed_step(state: Mixed, x: jax.Array) -> tuple[Mixed, jax.Array]:
    key, use = jax.random.split(state.key)
    y = x @ (state.params["w"].astype(jnp.float32) + jax.random.normal(use, (16, 24)))
    params = state.params | {"w": state.params["w"] * 2}
    return replace(state, params=params, key=key, count=state.count + 1), jnp.mean(y) * state.scale


def bits(state: Any) -> list[tuple[str, Any, bytes]]:
    """Every leaf with its type, as bytes."""

    def plain(leaf: Any) -> Any:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [
        (str(getattr(leaf, "dtype", type(leaf))), plain(leaf).shape, plain(leaf).tobytes())
        for leaf in jax.tree.leaves(state)
    ]
