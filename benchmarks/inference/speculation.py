"""Measure speculative decoding: tokens per verified step by acceptance rate, and steps saved by n-grams and a draft.

Acceptance: 100,000 draws of the engine's `verify`, from logits that give each proposal the same probability, compared
with `(1 - a^(n + 1)) / (1 - a)`. Steps: 16 requests for 128 tokens each, to decoders of 4 layers, d 256, random
weights, with four proposals at every step, against decoding without proposals. For n-grams, a model of 256 tokens
attends to the last token alone, so that its text soon repeats. The draft model is the model itself: it is always right
but costs as much as the model, so its seconds do not represent a real draft's. The generated tokens must be the same
with and without proposals.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.inference import Engine, Options, write_checkpoint
from autopar.inference.step.sampling_params import SamplingOptions
from autopar.inference.step.sampling_params import params_of as sampling_params_of
from autopar.inference.step.verify_draft import verify
from benchmarks.inference.models import SMALL, config_of, params_of, random_prompts
from benchmarks.inference.rows import Row, row

#: Probability that a proposal is accepted, and number of proposals.
ACCEPTANCES = ((0.6, 4), (0.8, 4), (0.9, 7))
DRAWS, VOCABULARY = 100_000, 8
SLOTS, LONGEST, PROMPT, TOKENS = 16, 512, 48, 128
_SERVING: Mapping[str, Any] = MappingProxyType(
    {
        "options": Options(num_slots=SLOTS, max_length=LONGEST, chunks=((4, 64),), steps=1, num_proposals=4),
        "num_pages": SLOTS * LONGEST // 16,
        "cache": False,
    }
)


def measure() -> list[Row]:
    """Rows of acceptance, then of steps."""
    rows: list[Row] = []
    for acceptance, num in ACCEPTANCES:
        expected = (1 - acceptance ** (num + 1)) / (1 - acceptance)
        found = tokens_per_step(acceptance, num, DRAWS)
        case = f"acceptance {acceptance}, {num} proposals"
        rows.append(row(f"tokens of a verified step, {case}", found))
        rows.append(row(f"off the formula, {case}", 100 * abs(found / expected - 1), "%", at_most=2))
    return rows + _by_n_grams() + _by_itself()


def tokens_per_step(acceptance: float, num_proposals: int, draws: int) -> float:
    """Mean tokens per step over draws, each with its own seed."""
    proposed = jnp.zeros((draws, num_proposals), jnp.int32)
    others = np.full(VOCABULARY - 1, (1 - acceptance) / (VOCABULARY - 1), np.float32)
    logits = jnp.broadcast_to(jnp.log(jnp.array([acceptance, *others])), (draws, num_proposals + 1, VOCABULARY))
    sampling = sampling_params_of([SamplingOptions(1.0)] * draws)._replace(seed=np.arange(draws, dtype=np.uint32))
    counts = jnp.full(draws, num_proposals), sampling, jnp.zeros(draws, jnp.int32)
    return float(jax.jit(verify)(logits, proposed, *counts).num_accepted.mean()) + 1


def _by_n_grams() -> list[Row]:
    """Steps saved by n-grams, for a model with periodic text: its next token depends on the last one alone."""
    config = config_of(SMALL, vocab_size=256)
    params = params_of(config)
    for layer in range(config.num_layers):
        out = params["params"][f"layers_{layer}"]["out"]
        out["weight"] = jnp.zeros_like(out["weight"])
    opened = Engine.of(config, params, propose="n-gram", **_SERVING, mesh=_one_device())
    return _rows("n-grams", opened, random_prompts([PROMPT] * SLOTS, config.vocab_size, 0))


def _by_itself() -> list[Row]:
    """Steps saved by a draft that is the model itself."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_checkpoint(model, SMALL)
        opened = Engine.open(model, propose=model, **_SERVING, mesh=_one_device())
        prompts = random_prompts([PROMPT] * SLOTS, SMALL["vocab_size"], 0)
        return _rows("a draft equal to the model", opened, prompts)


def _one_device() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))


def _rows(name: str, opened: Engine, prompts: list[list[int]]) -> list[Row]:
    """Rows with proposals at every step, and without."""
    (steps, seconds, tokens), (plain_steps, plain_seconds, plain) = (
        _served(Engine(opened.runner, shares_prefixes=False, proposer=proposer), prompts)
        for proposer in (opened.proposer, None)
    )
    differing = sum(a != b for a, b in zip(tokens, plain, strict=True))
    return [
        row(f"steps, {name}", steps),
        row(f"steps without {name}", plain_steps),
        row(f"steps without / with {name}", plain_steps / steps),
        row(f"seconds without / with {name}", plain_seconds / seconds),
        row(f"requests whose tokens differ, {name}, of {len(prompts)}", differing, at_most=0),
    ]


def _served(engine: Engine, prompts: list[list[int]]) -> tuple[int, float, list[list[int]]]:
    """Steps of the model, seconds, and the generated tokens."""
    begin = time.perf_counter()
    generations = engine.generate(prompts, max_tokens=TOKENS)
    seconds = time.perf_counter() - begin
    return engine.stats.num_steps, seconds, [generation.tokens for generation in generations]
