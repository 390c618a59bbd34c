"""Fine-tune Hugging Face's Flax BERT: the model as it comes, the encoder's first half frozen.

Needs `transformers==4.53.3`, the last with Flax models (extra `bench`). Nothing is downloaded: weights are random and
sequences made up. With `FlaxBertForSequenceClassification.from_pretrained(...)` the rest stays as it is.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight devices where there is no GPU
os.environ.setdefault("USE_TORCH", "0")

from typing import Any

import jax
import numpy as np
import optax
from flax import traverse_util
from flax.training.train_state import TrainState
from transformers import BertConfig, FlaxBertForSequenceClassification

import autopar

BATCH, SEQ, LAYERS = 16, 32, 2
CONFIG = BertConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    intermediate_size=512,
    num_labels=2,
)
MODEL = FlaxBertForSequenceClassification(CONFIG, input_shape=(1, SEQ), _do_init=False)


def is_trained(params: Any) -> Any:
    """Which parameters the optimizer is for: all but the embeddings and the first half of the layers."""
    frozen = {"embeddings", *(str(layer) for layer in range(LAYERS // 2))}
    return traverse_util.path_aware_map(lambda path, _: "frozen" if frozen & set(path) else "trained", params)


def create_state(key: jax.Array) -> TrainState:
    params = MODEL.init_weights(key, (1, SEQ))
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 100)))
    tx = optax.multi_transform({"trained": adamw, "frozen": optax.set_to_zero()}, is_trained)
    return TrainState.create(apply_fn=MODEL.__call__, params=params, tx=tx)


@autopar.parallelize
def train_step(state: TrainState, batch: dict[str, Any], key: jax.Array) -> tuple[TrainState, jax.Array]:
    dropout = jax.random.fold_in(key, state.step)

    def loss_fn(params: Any) -> jax.Array:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = state.apply_fn(**inputs, params=params, dropout_rng=dropout, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def sample_batch(seed: int) -> dict[str, np.ndarray]:
    """Sequences of random tokens, and whether the first of them is in the upper half of the vocabulary."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, CONFIG.vocab_size, (BATCH, SEQ), dtype=np.int32)
    mask = (np.arange(SEQ) < rng.integers(8, SEQ + 1, (BATCH, 1))).astype(np.int32)
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids[:, 0] >= CONFIG.vocab_size // 2).astype(np.int32)}


if __name__ == "__main__":
    key = jax.random.key(0)
    state = train_step.init(create_state, key, batch=sample_batch(0), key=key)
    print(train_step.plan(state, sample_batch(0), key).strategy)
    for number in range(10):
        state, loss = train_step(state, sample_batch(number), key)
        if number % 3 == 0:
            print(f"step {number}   loss {loss:.3f}")
