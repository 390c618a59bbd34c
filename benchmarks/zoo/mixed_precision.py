"""Textbook mixed precision: fp16 parameters and gradients, fp32 master copy and Adam moments.

That is 2 + 2 + 4 + 4 + 4 = 16 bytes for each parameter (Micikevicius et al., 2018; Rajbhandari et al., ZeRO, 2020). In:
a function that makes a model's variables, and its loss. Out: `Training`, whose state has all of these but the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.training import Batch, Field, LossOf, Training, adamw

#: Keeps small gradients from underflowing in fp16.
LOSS_SCALE = 1024.0


class MixedState(NamedTuple):
    """A step's state: fp16 parameters, which it reads; their fp32 master copy and moments, which it updates."""

    step: Any
    params: Any
    master: Any
    moments: Any


def mixed_precision(init: Callable[[jax.Array], Any], loss_of: LossOf, batch: Mapping[str, Field]) -> Training:
    """A step with AdamW on the master copy.

    Args:
        init: function from a key to the parameters, in fp32.
    """
    tx = adamw()

    def create_state(rng: jax.Array) -> MixedState:
        master = init(rng)
        return MixedState(jnp.zeros((), jnp.int32), _half(master), master, tx.init(master))

    def train_step(state: MixedState, batch: Batch) -> tuple[MixedState, jax.Array]:
        rng = jax.random.fold_in(jax.random.key(0), state.step)
        scaled, grads = jax.value_and_grad(lambda params: LOSS_SCALE * loss_of(params, batch, rng))(state.params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / LOSS_SCALE, grads)
        updates, moments = tx.update(grads, state.moments, state.master)
        master = optax.apply_updates(state.master, updates)
        return MixedState(state.step + 1, _half(master), master, moments), scaled / LOSS_SCALE

    train_step.__qualname__ = train_step.__name__  # the name in reports
    return Training(train_step, create_state, batch)


def _half(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)
