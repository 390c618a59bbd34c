"""Measure the gaps between tokens of 15 requests while a long prompt is prefilled, against the gaps without it.

The model is a decoder of 4 layers, d 256, float32, at most 2,304 tokens, 16 slots. The prompt has 2,000 tokens; it is
prefilled in chunks of a fixed length while the other slots decode, or all at once. A window begins when the prompt is
submitted and ends with its first token; the baseline window has as many iterations just before. The 99th percentile of
all gaps of a window counts; of five pairs of windows, the median ratio. The engines take turns.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import jax
import numpy as np

from autopar.inference import Engine, Options
from autopar.inference.serve.generation import Generation
from benchmarks.inference.models import SMALL, config_of, params_of, random_prompts
from benchmarks.inference.rows import Row, row
from benchmarks.timing import take_turns

SLOTS, LONGEST, PROMPT = 16, 2304, 2000
#: Tokens per chunk. The last one prefills the prompt all at once.
CHUNKS = (32, 128, 2048)
#: The chunk length that has to meet the gate.
GATED = 32
ROUNDS, WARMUP = 5, 1
_LEAST_WINDOW = 16  # iterations


def measure() -> list[Row]:
    """For each chunk length, the ratio of gaps with and without the prompt, and the time to its first token."""
    config = config_of(SMALL, max_position_embeddings=LONGEST)
    params = params_of(config)
    windows = {chunk: _Windows(_opened(config, params, chunk), config.vocab_size) for chunk in CHUNKS}
    take_turns({str(chunk): one.run for chunk, one in windows.items()}, ROUNDS, WARMUP)
    rows: list[Row] = []
    for chunk, one in windows.items():
        pairs = one.pairs[WARMUP:]
        ratio, with_prompt, without, first = (statistics.median(each) for each in zip(*pairs, strict=True))
        how = f"chunks of {chunk}" if chunk < PROMPT else "without chunks"
        rows += [
            row(f"gap, {how}, prompt / none", ratio, at_most=2.0 if chunk == GATED else None),
            row(f"gap, {how}, prompt", 1e3 * with_prompt, "ms"),
            row(f"gap, {how}, none", 1e3 * without, "ms"),
            row(f"prompt's first token, {how}", 1e3 * first, "ms"),
        ]
    return rows


def _opened(config: Any, params: Any, chunk: int) -> Engine:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    options = Options(num_slots=SLOTS, max_length=LONGEST, chunks=((1, chunk),), steps=1)
    return Engine.of(
        config, params, options=options, num_pages=SLOTS * LONGEST // 16, cache=False, shares_prefixes=False, mesh=mesh
    )


class _Windows:
    """One engine; 15 of its slots always generate.

    Attributes:
        pairs: for each pair of windows, the ratio of their percentiles, both percentiles in seconds, and the seconds to
            the first token.
    """

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        self.engine, self.vocabulary = engine, vocabulary
        self.pairs: list[tuple[float, float, float, float]] = []
        self._seeds = itertools.count()

    def run(self) -> float:
        """Run a pair of windows; returns the seconds of both."""
        begin = time.perf_counter()
        short = random_prompts([64] * (SLOTS - 1), self.vocabulary, next(self._seeds))
        running = [self.engine.submit(prompt, max_tokens=LONGEST - 64) for prompt in short]
        while not all(generation.tokens for generation in running):
            self.engine.step()
        chunk = self.engine.runner.served.options.chunks[0][1]
        without = self._gaps(running, max(_LEAST_WINDOW, PROMPT // chunk))
        submitted = time.perf_counter()
        prompt = self.engine.submit(random_prompts([PROMPT], self.vocabulary, next(self._seeds))[0], max_tokens=1)
        with_prompt = self._gaps(running, until=prompt)
        first = time.perf_counter() - submitted
        for generation in running:
            generation.abort()
        self.engine.run()
        high, low = (float(np.percentile(gaps, 99)) for gaps in (with_prompt, without))
        self.pairs.append((high / low, high, low, first))
        return time.perf_counter() - begin

    def _gaps(self, running: list[Generation], num: int = 0, until: Generation | None = None) -> list[float]:
        """Seconds between tokens of each request, for `num` tokens or until another request ends."""
        gaps: list[float] = []
        num_tokens, last = [len(each.tokens) for each in running], [time.perf_counter()] * len(running)
        while until.ended is None if until is not None else len(gaps) < num * len(running):
            self.engine.step()
            now = time.perf_counter()
            for number, generation in enumerate(running):
                if len(generation.tokens) > num_tokens[number]:
                    gaps.append(now - last[number])
                    num_tokens[number], last[number] = len(generation.tokens), now
        return gaps
