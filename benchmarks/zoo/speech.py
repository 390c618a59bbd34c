"""Hugging Face's Flax models of speech. In: their configs and sizes. Out: `Training`."""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.zoo.language import initialiser  # sets what transformers reads at import
from benchmarks.zoo.training import F32, Batch, Field, Training, cross_entropy, training

# isort: split
from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig


def whisper(config: WhisperConfig, batch: int, seq: int, dtype: Any = F32) -> Training:
    """From mel spectra through two convolutions and an encoder to `seq` tokens."""
    model: Any = FlaxWhisperForConditionalGeneration(config, _do_init=False, dtype=dtype)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = model(batch["spectra"], batch["shifted"], params=params, dropout_rng=rng, train=True)
        return cross_entropy(out.logits, batch["labels"]).mean()

    tokens = Field((batch, seq), below=config.vocab_size)
    spectra = Field((batch, config.num_mel_bins, 2 * config.max_source_positions), F32)
    return training(initialiser(model), loss_of, {"spectra": spectra, "shifted": tokens, "labels": tokens})
