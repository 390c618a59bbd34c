"""Define the served models, with random weights, and the requests to them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.inference import DecoderConfig
from autopar.inference.model.decoder import Decoder

#: 4 layers, d 256, 8 query heads and 2 key-value heads, vocabulary 8,192. Read-only, as are the others.
SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
)
#: The size of GPT-2 small.
GPT2_SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    }
)
#: Two layers with the sizes of LLaMA 3.1 8B.
LLAMA_8B: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
)


def config_of(fields: Mapping[str, Any], **others: Any) -> DecoderConfig:
    """The config of one of these models, with some fields replaced."""
    return DecoderConfig.of({**fields, **others})


def params_of(config: DecoderConfig) -> Any:
    """Random float32 weights in memory."""
    return jax.jit(Decoder(config).init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))


def output_lengths(num: int, seed: int, mean: float = 60, least: int = 4, most: int = 240) -> list[int]:
    """Geometrically distributed lengths around a mean, clipped."""
    return np.random.default_rng(seed).geometric(1 / mean, num).clip(least, most).tolist()


def random_prompts(lengths: list[int], vocabulary: int, seed: int) -> list[list[int]]:
    """A random prompt of each length; prompts share tokens only by chance."""
    rng = np.random.default_rng([seed, 1])
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]
