"""The programs that are measured, built from their libraries as they are.

Each is a train step and the shapes of its arguments, `state` and `batch`; no array is built. A batch
size is that of the whole job. `gpt2_small_target` is also a target of the command line:
`USE_TORCH=0 HF_HUB_OFFLINE=1 autopar plan benchmarks/models.py:gpt2_small_target --devices 8 --hardware h100-sxm`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
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
from transformers import (
    BartConfig,
    BertConfig,
    FlaxBartForConditionalGeneration,
    FlaxBertForPreTraining,
    FlaxGPT2LMHeadModel,
    FlaxLlamaForCausalLM,
    FlaxResNetForImageClassification,
    FlaxViTForImageClassification,
    GPT2Config,
    LlamaConfig,
    ResNetConfig,
    ViTConfig,
)

Step = Callable[..., Any]
Target = tuple[Step, tuple[Any, ...]]
Batch = dict[str, Any]
#: Parameters, the batch and, where the model drops out, a key for it, to a loss.
LossOf = Callable[[Any, Batch, jax.Array], jax.Array]
DEMO = Path(__file__).parents[1] / "examples" / "train_gpt.py"
BF16: Any = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True, slots=True)
class Model:
    """A program that is planned for several numbers of GPUs.

    Args:
        target: from the batch size of the whole job to a step and its arguments.
        batch_per_gpu: what one GPU gets where the batch alone is split.
        lengths: how many tokens an example becomes, where its own shape does not say.
        fitted: whether the cost model's constants may be fitted to it; the others are held out.
    """

    target: Callable[[int], Target]
    batch_per_gpu: int
    lengths: tuple[int, ...] = ()
    fitted: bool = True


def demo_gpt_target(batch: int = 8) -> Target:
    """The model of `make demo`: 4 layers, 64 tokens a sequence, f32, dropout, AdamW."""
    module = demo()
    shape = jax.ShapeDtypeStruct((batch, module.SEQ), jnp.int32)
    state = jax.eval_shape(module.create_state, jax.random.key(0))
    return module.train_step, (state, {"inputs": shape, "targets": shape})


def gpt2_small_target(batch: int = 64, seq: int = 1024) -> Target:
    """Hugging Face's GPT-2 small: 12 unrolled layers, bf16 compute, dropout, AdamW."""
    model: Any = FlaxGPT2LMHeadModel(GPT2Config(), _do_init=False, dtype=BF16)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        logits = model(batch["tokens"], params=params, dropout_rng=rng, train=True).logits
        return _next_token_loss(logits, batch["tokens"])

    return _train_step(loss_of), (_state(model), {"tokens": _tokens(batch, seq)})


def bert_base_target(batch: int = 128, seq: int = 512) -> Target:
    """Hugging Face's BERT base in pre-training: masked words, and the next sentence by the pooler; AdamW."""
    config = BertConfig(max_position_embeddings=seq)
    model: Any = FlaxBertForPreTraining(config, _do_init=False, dtype=BF16)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = model(batch["tokens"], batch["mask"], batch["segments"], params=params, dropout_rng=rng, train=True)
        words = _cross_entropy(out.prediction_logits, batch["labels"])
        masked = jnp.where(batch["labels"] > 0, words, 0).sum() / jnp.maximum((batch["labels"] > 0).sum(), 1)
        return masked + _cross_entropy(out.seq_relationship_logits, batch["next"]).mean()

    tokens = _tokens(batch, seq)
    shapes = {"tokens": tokens, "mask": tokens, "segments": tokens, "labels": tokens, "next": _tokens(batch)}
    return _train_step(loss_of), (_state(model), shapes)


def llama_1b_target(batch: int = 16, seq: int = 2048) -> Target:
    """Hugging Face's LLaMA with 0.94 billion parameters: 16 unrolled layers, bf16 compute, AdamW."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=seq,
    )
    model: Any = FlaxLlamaForCausalLM(config, _do_init=False, dtype=BF16)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        return _next_token_loss(model(batch["tokens"], params=params, train=True).logits, batch["tokens"])

    return _train_step(loss_of), (_state(model), {"tokens": _tokens(batch, seq)})


class BatchNormState(TrainState):
    """A `TrainState` that also carries running statistics."""

    batch_stats: Any


def resnet50_target(batch: int = 512, size: int = 224) -> Target:
    """Hugging Face's ResNet-50 on ImageNet's shapes: bf16 compute, running statistics, SGD with momentum."""
    model: Any = FlaxResNetForImageClassification(ResNetConfig(num_labels=1000), _do_init=False, dtype=BF16)
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)

    def create_state(rng: jax.Array) -> BatchNormState:
        variables = model.init_weights(rng, model.input_shape)
        return BatchNormState.create(
            apply_fn=model.__call__, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
        )

    def train_step(state: BatchNormState, batch: Batch) -> tuple[BatchNormState, jax.Array]:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, updates = model(batch["images"], params=variables, train=True)
            return _cross_entropy(out.logits, batch["labels"]).mean(), updates["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    state = jax.eval_shape(create_state, jax.random.key(0))
    return train_step, (state, _images(batch, size))


def vit_base_target(batch: int = 256, size: int = 224) -> Target:
    """Hugging Face's ViT base, patches of 16: bf16 compute, dropout, AdamW."""
    config = ViTConfig(image_size=size, num_labels=1000, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    model: Any = FlaxViTForImageClassification(config, _do_init=False, dtype=BF16)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = model(batch["images"], params=params, dropout_rng=rng, train=True)
        return _cross_entropy(out.logits, batch["labels"]).mean()

    return _train_step(loss_of), (_state(model), _images(batch, size))


def bart_base_target(batch: int = 64, seq: int = 512) -> Target:
    """Hugging Face's BART base: as many tokens in as out, bf16 compute, dropout, AdamW."""
    config = BartConfig(
        max_position_embeddings=seq,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    model: Any = FlaxBartForConditionalGeneration(config, _do_init=False, dtype=BF16)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = model(
            batch["tokens"],
            batch["mask"],
            decoder_input_ids=batch["shifted"],
            params=params,
            dropout_rng=rng,
            train=True,
        )
        return _cross_entropy(out.logits, batch["labels"]).mean()

    shapes = dict.fromkeys(("tokens", "mask", "shifted", "labels"), _tokens(batch, seq))
    return _train_step(loss_of), (_state(model), shapes)


#: In the order in which they are measured.
MODELS = {
    "gpt2_small": Model(gpt2_small_target, 8),
    "llama_1b": Model(llama_1b_target, 2),
    "bert_base": Model(bert_base_target, 16),
    "resnet50": Model(resnet50_target, 64),
    "demo_gpt": Model(demo_gpt_target, 1),
    "vit_base": Model(vit_base_target, 32, lengths=(196, 197), fitted=False),
    "bart_base": Model(bart_base_target, 8, fitted=False),
}


def demo() -> ModuleType:
    """The module of `make demo`, which is a script and not in a package."""
    spec = importlib.util.spec_from_file_location(DEMO.stem, DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what several of them share --------------------------------------------------------------


def _state(model: Any) -> TrainState:
    """The shapes of a Hugging Face model's parameters and of AdamW's state."""
    tx = optax.adamw(3e-4, weight_decay=0.01)

    def create_state(rng: jax.Array) -> TrainState:
        params = model.init_weights(rng, model.input_shape)
        return TrainState.create(apply_fn=model.__call__, params=params, tx=tx)

    return jax.eval_shape(create_state, jax.random.key(0))


def _train_step(loss_of: LossOf) -> Step:
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        dropout_rng = jax.random.fold_in(jax.random.key(0), state.step)
        loss, grads = jax.value_and_grad(lambda params: loss_of(params, batch, dropout_rng))(state.params)
        return state.apply_gradients(grads=grads), loss

    train_step.__qualname__ = train_step.__name__  # reports name it so
    return train_step


def _next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return _cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def _tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _images(batch: int, size: int) -> Batch:
    """Channels first, as these models take them, though they compute with channels last."""
    images = jax.ShapeDtypeStruct((batch, 3, size, size), jnp.bfloat16)
    return {"images": images, "labels": _tokens(batch)}
