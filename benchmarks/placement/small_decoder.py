"""The decoder that one CPU device serves in `real_engine` and `lend`."""

from __future__ import annotations

from typing import Any

from autopar.inference import Options

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}
OPTIONS = Options(num_slots=4, max_length=192, chunks=((1, 64),), steps=4)
