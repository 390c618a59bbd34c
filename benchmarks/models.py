"""The programs that are measured, built from their libraries as they are.

`gpt2_small_target` is also a target of the command line:
`USE_TORCH=0 HF_HUB_OFFLINE=1 autopar plan benchmarks/models.py:gpt2_small_target --devices 8 --hardware h100-sxm`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# Before transformers is imported: no torch, and nothing from the network.
os.environ.setdefault("USE_TORCH", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from transformers import FlaxGPT2LMHeadModel, GPT2Config

Step = Callable[..., Any]
DEMO = Path(__file__).parents[1] / "examples" / "train_gpt.py"


def gpt2_small_target(batch: int = 64, seq: int = 1024) -> tuple[Step, tuple[Any, ...]]:
    """Hugging Face's GPT-2 small: 12 unrolled layers, bf16 compute, dropout, AdamW.

    Returns:
        The train step and the shapes of its arguments, `state` and `batch`; no array is built.
    """
    model = FlaxGPT2LMHeadModel(GPT2Config(), _do_init=False, dtype=jnp.dtype(jnp.bfloat16))
    tx = optax.adamw(3e-4, weight_decay=0.01)

    def create_state(rng: jax.Array) -> TrainState:
        params = model.init_weights(rng, model.input_shape)
        return TrainState.create(apply_fn=model.__call__, params=params, tx=tx)

    def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
        dropout_rng = jax.random.fold_in(jax.random.key(0), state.step)

        def loss_fn(params: Any) -> jax.Array:
            tokens = batch["tokens"]
            logits = state.apply_fn(tokens, params=params, dropout_rng=dropout_rng, train=True).logits
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype(jnp.float32), tokens[:, 1:])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = jax.eval_shape(create_state, jax.random.key(0))
    return train_step, (state, {"tokens": jax.ShapeDtypeStruct((batch, seq), jnp.int32)})


def demo() -> ModuleType:
    """The module of `make demo`, which is a script and not in a package."""
    spec = importlib.util.spec_from_file_location(DEMO.stem, DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
