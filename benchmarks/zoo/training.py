"""A model's train step with its arguments: all that a measurement or a test needs from a model.

In: functions for its variables and its loss, and the fields of its batch. Out: `Training`. Arrays are built only on
request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

Step = Callable[..., Any]
#: A step and the shapes of its arguments, as `autopar.plan` takes them.
Target = tuple[Step, tuple[Any, ...]]
Batch = dict[str, Any]
#: From parameters, the batch and a dropout key, which the model may ignore, to a loss.
LossOf = Callable[[Any, Batch, jax.Array], jax.Array]
#: From all variables and the batch to a loss and the new running statistics.
LossWithStatistics = Callable[[Any, Batch], tuple[jax.Array, Any]]
BF16: Any = jnp.dtype(jnp.bfloat16)
F32: Any = jnp.dtype(jnp.float32)


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a batch.

    Args:
        below: exclusive upper bound of integers.
    """

    shape: tuple[int, ...]
    dtype: Any = jnp.int32
    below: int = 2

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def values(self, rng: np.random.Generator) -> np.ndarray:
        """Uniform integers, or normal numbers."""
        if jnp.issubdtype(self.dtype, jnp.integer):
            return rng.integers(0, self.below, self.shape, dtype=np.int32).astype(self.dtype)
        return rng.standard_normal(self.shape, dtype=np.float32).astype(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """A train step `(state, batch) -> (state, loss)`.

    Args:
        create_state: function from a key to the step's first argument; run it under `jax.jit` or `jax.eval_shape`.
        batch: fields of the second argument.
    """

    step: Step
    create_state: Callable[[jax.Array], Any]
    batch: Mapping[str, Field]

    @property
    def target(self) -> Target:
        """The step, and its arguments as shapes."""
        batch = {name: field.struct for name, field in self.batch.items()}
        return self.step, (jax.eval_shape(self.create_state, jax.random.key(0)), batch)

    def make_batch(self, seed: int) -> Batch:
        """A batch of random values."""
        rng = np.random.default_rng(seed)
        return {name: field.values(rng) for name, field in self.batch.items()}


def adamw() -> optax.GradientTransformation:
    """The default optimizer."""
    return optax.adamw(3e-4, weight_decay=0.01)


def training(init: Callable[[jax.Array], Any], loss_of: LossOf, batch: Mapping[str, Field]) -> Training:
    """A step with AdamW.

    Args:
        init: function from a key to the parameters.
    """
    tx = adamw()

    def create_state(rng: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=_unused, params=init(rng), tx=tx)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        dropout_rng = jax.random.fold_in(jax.random.key(0), state.step)
        loss, grads = jax.value_and_grad(lambda params: loss_of(params, batch, dropout_rng))(state.params)
        return state.apply_gradients(grads=grads), loss

    return Training(_named(train_step), create_state, batch)


class StatisticsState(TrainState):
    """A `TrainState` that also carries running statistics."""

    batch_stats: Any


def training_with_statistics(
    init: Callable[[jax.Array], Any],
    loss_of: LossWithStatistics,
    batch: Mapping[str, Field],
    tx: optax.GradientTransformation,
) -> Training:
    """A step of a model with the variables `params` and `batch_stats`.

    Args:
        init: function from a key to both.
    """

    def create_state(rng: jax.Array) -> StatisticsState:
        made = init(rng)
        return StatisticsState.create(apply_fn=_unused, params=made["params"], tx=tx, batch_stats=made["batch_stats"])

    def train_step(state: StatisticsState, batch: Batch) -> tuple[StatisticsState, jax.Array]:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            return loss_of({"params": params, "batch_stats": state.batch_stats}, batch)

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return Training(_named(train_step), create_state, batch)


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of every token but the first."""
    return cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy in f32, one for each label."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def _named(step: Step) -> Step:
    step.__qualname__ = step.__name__  # the name in reports
    return step


def _unused(*_: Any) -> None:
    """Placeholder for a `TrainState`'s `apply_fn`, which no step here calls."""
