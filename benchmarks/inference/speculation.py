"""Proposals: tokens of a verified step by synthetic acceptance, and steps saved with guesses from the text and from a draft.

Acceptance: 100,000 draws of the engine's `verify`, from logits that give each proposal the same probability, against
`(1 - a^(n + 1)) / (1 - a)`. Steps: 16 requests for 96 tokens each from a decoder of 4 layers, d 256, random weights, after a
phrase six times over; proposals are made at every step. What is generated has to be the same with and without. A draft that
is the model itself is guessed right always but costs as much as the model, so its seconds say nothing of a real one's.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.inference import Engine, Options, write_checkpoint
from autopar.inference.proposals import Proposer
from autopar.inference.sampling import SamplingParams
from autopar.inference.speculation import verify
from benchmarks.inference.models import SMALL, random_prompts
from benchmarks.inference.rows import Row, row

#: Probability that a proposal is accepted, and how many there are.
ACCEPTANCES = ((0.6, 4), (0.8, 4), (0.9, 7))
DRAWS, VOCABULARY = 100_000, 8
SLOTS, LONGEST, PROPOSALS, TOKENS = 16, 512, 4, 96
PHRASE, TIMES = 16, 6


def measure() -> list[Row]:
    """Rows of acceptance, then of steps."""
    rows: list[Row] = []
    for acceptance, num in ACCEPTANCES:
        expected = (1 - acceptance ** (num + 1)) / (1 - acceptance)
        found = tokens_per_step(acceptance, num, DRAWS)
        case = f"acceptance {acceptance}, {num} proposals"
        rows.append(row(f"tokens of a verified step, {case}", found))
        rows.append(row(f"off the formula, {case}", 100 * abs(found / expected - 1), "%", at_most=2))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "model", SMALL)
        return rows + _steps(Path(folder) / "model")


def tokens_per_step(acceptance: float, num_proposals: int, draws: int) -> float:
    """Mean over draws, each with a seed of its own."""
    proposed = jnp.zeros((draws, num_proposals), jnp.int32)
    others = np.full(VOCABULARY - 1, (1 - acceptance) / (VOCABULARY - 1), np.float32)
    logits = jnp.broadcast_to(jnp.log(jnp.array([acceptance, *others])), (draws, num_proposals + 1, VOCABULARY))
    sampling = SamplingParams(
        jnp.ones(draws), jnp.zeros(draws, jnp.int32), jnp.ones(draws), jnp.arange(draws, dtype=jnp.uint32)
    )
    counts = jnp.full(draws, num_proposals), sampling, jnp.zeros(draws, jnp.int32)
    return float(jax.jit(verify)(logits, proposed, *counts).num_accepted.mean()) + 1


def _steps(folder: Path) -> list[Row]:
    options = Options(num_slots=SLOTS, max_length=LONGEST, chunks=((4, 64),), steps=1, num_proposals=PROPOSALS)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    prompts = [each * TIMES for each in random_prompts([PHRASE] * SLOTS, SMALL["vocab_size"], 0)]
    made: dict[str, Proposer | None] = {"without": None}
    for name, propose in (("n-grams", "n-gram"), ("a draft equal to the model", folder)):
        opened = Engine.open(
            folder, options=options, mesh=mesh, propose=propose, num_pages=SLOTS * LONGEST // 16, cache=False
        )
        made[name] = opened.proposer
    rows: list[Row] = []
    plain: Any = None
    for name, proposer in made.items():
        steps, seconds, tokens = _served(Engine(opened.runner, shares_prefixes=False, proposer=proposer), prompts)
        rows.append(row(f"steps, {name}", steps))
        rows.append(row(f"seconds, {name}", seconds, "s"))
        if plain is None:
            plain = steps, tokens
            continue
        differing = sum(a != b for a, b in zip(tokens, plain[1], strict=True))
        rows.append(row(f"steps without / with {name}", plain[0] / steps))
        rows.append(row(f"requests whose tokens differ, {name}", differing, at_most=0))
    return rows


def _served(engine: Engine, prompts: list[list[int]]) -> tuple[int, float, list[list[int]]]:
    """Steps of the model, seconds, and what was generated."""
    begin = time.perf_counter()
    generations = engine.generate(prompts, max_tokens=TOKENS)
    seconds = time.perf_counter() - begin
    return engine.stats.num_steps, seconds, [generation.tokens for generation in generations]
