"""Measure what quantized weights cost in perplexity: a decoder trained on the sources of Python's standard library.

A LLaMA of bytes (4 layers, d 192, a vocabulary of 256) is trained on nine of ten files, and written as a checkpoint in float32. It is
read in bfloat16, and quantized on load; the perplexity is that of the first bytes of every tenth file. Weight bytes are those of
all parameters on the device, with scales, embedding and norms.
"""

from __future__ import annotations

import math
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from autopar.inference import Checkpoint, Decoder, DecoderConfig, write_checkpoint
from benchmarks.inference.rows import Row, row

FIELDS = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
STEPS, BATCH, LENGTH = 300, 16, 128
#: Sequences of 256 bytes whose perplexity is measured.
HELD_OUT = 64
KINDS = ("int8", "int8-g64", "int4", "int4-g32")


def measure() -> list[Row]:
    """Rows of perplexities and of weight bytes."""
    train, held_out = corpus()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        config = DecoderConfig.of(FIELDS)
        write_checkpoint(folder, FIELDS, params=trained(Decoder(config), train))
        loss, num_bytes = evaluated(folder, None, held_out)
        rows = [row("perplexity of held-out bytes, bfloat16", math.exp(loss))]
        rows.append(row("weights in bfloat16", num_bytes / 1e6, "MB"))
        for name in KINDS:
            other, other_bytes = evaluated(folder, name, held_out)
            change = 100 * (math.exp(other - loss) - 1)
            rows.append(
                row(f"perplexity more than in bfloat16, {name}", change, "%", at_most=0.5 if name == "int8" else None)
            )
            most = {"int8": 0.52, "int4": 0.28}.get(name)
            rows.append(row(f"weight bytes / bfloat16, {name}", other_bytes / num_bytes, at_most=most))
    return rows


def corpus() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The bytes to train on; and sequences of every tenth file, `[HELD_OUT, 257]`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train = b"\n".join(file.read_bytes() for number, file in enumerate(files) if number % 10)
    rest = b"\n".join(file.read_bytes()[:20_000] for number, file in enumerate(files) if number % 10 == 0)
    length = FIELDS["max_position_embeddings"] + 1
    num = len(rest) // length
    chosen = np.frombuffer(rest[: num * length], np.uint8).reshape(num, length)[:: max(1, num // HELD_OUT)][:HELD_OUT]
    return np.frombuffer(train, np.uint8).astype(np.int32), chosen.astype(np.int32)


def trained(model: Decoder, tokens: NDArray[np.int32]) -> Any:
    """The weights after `STEPS` steps of AdamW."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 6e-3, 30, STEPS), b2=0.95)
    )

    @jax.jit
    def step(params: Any, moments: Any, batch: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: loss_of(model, params, batch))(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    moments, chance = optimizer.init(params), np.random.default_rng(0)
    for _ in range(STEPS):
        starts = chance.integers(0, len(tokens) - LENGTH - 1, BATCH)
        params, moments, _ = step(params, moments, np.stack([tokens[at : at + LENGTH + 1] for at in starts]))
    return params


def loss_of(model: Decoder, params: Any, tokens: jax.Array) -> jax.Array:
    """The mean negative log-likelihood of all tokens but the first of each sequence."""
    logits: Any = model.apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits[0], tokens[:, 1:]).mean()


def evaluated(folder: Path, quantize: str | None, tokens: NDArray[np.int32]) -> tuple[float, int]:
    """The loss of held-out tokens, and the bytes of the weights."""
    checkpoint = Checkpoint.open(folder, quantize)
    params = checkpoint.load(dtype=jnp.bfloat16)
    loss = jax.jit(lambda params, tokens: loss_of(checkpoint.model, params, tokens))
    parts = [float(loss(params, part)) for part in np.split(tokens, 8)]
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return float(np.mean(parts)), num_bytes
