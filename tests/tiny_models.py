"""Write small models with random weights in Hugging Face's format, with a byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from autopar.inference import Engine, Options, write_checkpoint
from autopar.inference.model.safetensors import read_header

LENGTH = 128
VOCABULARY = 300
BAD = 299  # the token whose embedding is NaN where `has_nan`
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 128,
    "max_position_embeddings": LENGTH,
}
OPTIONS = Options(num_slots=4, max_length=LENGTH, chunks=((2, 16), (1, 48)), steps=4)


def write_model(path: Path, *, has_nan: bool = False, **fields: Any) -> Path:
    """Write a model.

    Args:
        path: the folder.
        has_nan: whether the token `BAD` makes all later logits NaN. It is not generated greedily, but may be drawn.
        fields: fields of the configuration that replace those of `CONFIG`.
    """
    write_checkpoint(path, CONFIG | fields)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(path / "tokenizer.json"))
    for name, value in (("model.embed_tokens.weight", np.nan), ("lm_head.weight", 0)) if has_nan else ():
        tensor = read_header(path / "model.safetensors")[name]
        array = np.memmap(tensor.file, np.float32, "r+", tensor.begin, tensor.shape)
        array[BAD] = value
        array.flush()
    return path


def opened(folder: Path, num_devices: int = 1, **options: Any) -> Engine:
    """Open an engine on the first `num_devices` devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("model",))
    defaults: dict[str, Any] = {"mesh": mesh, "options": OPTIONS, "num_pages": 48, "attention": "gather"}
    return Engine.open(folder, **defaults | options)


def is_idle(engine: Engine) -> bool:
    """Whether no request runs and no page is held; also checks the pool."""
    engine.pool.check()
    stats = engine.stats
    return (stats.num_waiting, stats.num_running, stats.held_pages) == (0, 0, 0)
