"""Hugging Face's Flax models of images. In: their configs and sizes. Out: `Training`.

Input images have channels first, as these models require; the models compute with channels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.language import initialiser  # sets what transformers reads at import
from benchmarks.zoo.training import (
    F32,
    Batch,
    Field,
    Training,
    adamw,
    cross_entropy,
    training,
    training_with_statistics,
)

# isort: split
from transformers import (
    CLIPConfig,
    FlaxCLIPModel,
    FlaxResNetForImageClassification,
    FlaxViTForImageClassification,
    ResNetConfig,
    ViTConfig,
)


def vit(config: ViTConfig, batch: int, dtype: Any = F32) -> Training:
    """Patches by a convolution, a class token, dropout if the config has it."""
    model: Any = FlaxViTForImageClassification(config, _do_init=False, dtype=dtype)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = model(batch["images"], params=params, dropout_rng=rng, train=True)
        return cross_entropy(out.logits, batch["labels"]).mean()

    return training(initialiser(model), loss_of, _labelled(config, batch, config.image_size, dtype))


def resnet(
    config: ResNetConfig, batch: int, size: int, dtype: Any = F32, tx: optax.GradientTransformation | None = None
) -> Training:
    """Convolutions and batch norm with running statistics."""
    model: Any = FlaxResNetForImageClassification(config, _do_init=False, dtype=dtype)
    return classifier_with_statistics(model, batch, size, dtype, tx)


def classifier_with_statistics(
    model: Any, batch: int, size: int, dtype: Any = F32, tx: optax.GradientTransformation | None = None
) -> Training:
    """A model from images to labels that also returns its new running statistics."""

    def loss_of(variables: Any, batch: Batch) -> tuple[jax.Array, Any]:
        out, updates = model(batch["images"], params=variables, train=True)
        return cross_entropy(out.logits, batch["labels"]).mean(), updates["batch_stats"]

    fields = _labelled(model.config, batch, size, dtype)
    return training_with_statistics(initialiser(model), loss_of, fields, tx or adamw())


def clip(config: CLIPConfig, batch: int, seq: int, dtype: Any = F32) -> Training:
    """Images against their captions, contrasted within the batch in both directions."""
    model: Any = FlaxCLIPModel(config, _do_init=False, dtype=dtype)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = model(batch["tokens"], batch["images"], batch["mask"], params=params, dropout_rng=rng, train=True)
        pairs = jnp.arange(out.logits_per_image.shape[0])
        return (cross_entropy(out.logits_per_image, pairs) + cross_entropy(out.logits_per_text, pairs)).mean() / 2

    size, vocabulary = config.vision_config.image_size, config.text_config.vocab_size
    fields = {
        "tokens": Field((batch, seq), below=vocabulary),
        "mask": Field((batch, seq)),
        "images": Field((batch, 3, size, size), dtype),
    }
    return training(initialiser(model), loss_of, fields)


def _labelled(config: Any, batch: int, size: int, dtype: Any) -> Mapping[str, Field]:
    images = Field((batch, config.num_channels, size, size), dtype)
    return {"images": images, "labels": Field((batch,), below=config.num_labels)}
