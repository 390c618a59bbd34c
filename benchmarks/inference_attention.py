"""Measure whole decode steps over KV pages against the same steps over a contiguous KV cache.

The model is a decoder with 4 layers, d 256, 8 query heads and 2 key-value heads, a vocabulary of 8,192, float32, random
weights; 16 slots, pages of 16 tokens in random order, at most 512 tokens. A step takes one token per slot, writes its
keys and values, attends, and picks the most likely next token; caches are donated. Each slot starts with 32, 224 or 400
tokens. The contenders take turns for a hundred steps of one token; the medians of the ratios within a turn count, and
the ratios of the minimum times are shown too. Gates: a paged step takes at most 1.25 times the contiguous step's time,
and with a pool four times as large, at most 1.10 times its own time. Logits are compared with those of the contiguous
cache, whose attention is that of `gather`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.inference import DecoderConfig
from autopar.inference.kernels.paged_attention import BACKENDS, attend_paged
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.model.attention import AttendContiguous, ContiguousCache
from autopar.inference.model.decoder import Decoder
from benchmarks.timing import take_turns

Row = dict[str, str | float | bool]

CONFIG = DecoderConfig.of(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
)
SLOTS, PAGE, LONGEST = 16, 16, 512
NUM_PAGES = SLOTS * LONGEST // PAGE
#: Initial tokens in each slot.
STARTS = {"few tokens": 32, "half": 224, "nearly all": 400}
ROUNDS, WARMUP = 100, 5
PAGED_LIMIT, POOL_LIMIT = 1.25, 1.10
CONTIGUOUS = "contiguous"


class AttendPages:
    """`Attend` over pages of each layer."""

    def __init__(self, backend: str, tables: jax.Array, positions: jax.Array) -> None:
        self.backend, self.tables, self.positions = backend, tables, positions

    def __call__(self, cache: Any, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
        pages = kv_pages.write(cache[layer], keys, values, self.tables, self.positions)
        attended = attend_paged(self.backend, queries, pages, self.tables, self.positions)
        return attended, (*cache[:layer], pages, *cache[layer + 1 :])


class Contender:
    """A cache, and the step that advances it by one token per call."""

    def __init__(self, params: Any, cache: Any, attend: Callable[[jax.Array], Any], start: int) -> None:
        model: Any = Decoder(CONFIG)

        @functools.partial(jax.jit, donate_argnums=1)
        def step(params: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
            logits, cache = model.apply(params, tokens, positions, attend(positions), cache)
            return logits, jnp.argmax(logits, -1).astype(jnp.int32), cache

        self.step, self.params, self.cache = step, params, cache
        self.tokens, self.position = jnp.ones((SLOTS, 1), jnp.int32), start
        self.logits: list[Any] = []

    def run(self) -> float:
        """Seconds from the call until its tokens are ready."""
        positions = jnp.full((SLOTS, 1), self.position, jnp.int32)
        begin = time.perf_counter()
        logits, tokens, self.cache = self.step(self.params, self.cache, self.tokens, positions)
        tokens.block_until_ready()
        seconds = time.perf_counter() - begin
        self.position += 1
        self.logits.append(np.asarray(logits))
        self.tokens = tokens
        return seconds


def measure(program: str) -> list[Row]:
    """A row for the contiguous cache, and for each CPU backend with a pool of one size and of four times that size."""
    start = STARTS[program]
    params = jax.jit(Decoder(CONFIG).init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    rng = np.random.default_rng(0)
    shape = (2, SLOTS, LONGEST, CONFIG.num_kv_heads, CONFIG.head_dim)
    cache = [rng.standard_normal(shape, np.float32) for _ in range(CONFIG.num_layers)]
    contenders = {CONTIGUOUS: Contender(params, _contiguous(cache), AttendContiguous, start)}
    backends = [name for name, backend in BACKENDS.items() if "cpu" in backend.platforms]
    for name in backends:
        for times in (1, 4):
            tables = rng.permutation(NUM_PAGES * times)[:NUM_PAGES].reshape(SLOTS, -1).astype(np.int32)
            attend = functools.partial(AttendPages, name, jnp.asarray(tables))
            contenders[f"{name}, pool x{times}"] = Contender(params, _paged(cache, tables, times), attend, start)
    seconds = take_turns({name: one.run for name, one in contenders.items()}, ROUNDS, WARMUP)
    rows: list[Row] = []
    for name in contenders:
        baseline = name.replace("x4", "x1") if name.endswith("x4") else CONTIGUOUS
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[baseline], strict=True))
        limit = POOL_LIMIT if baseline != CONTIGUOUS else PAGED_LIMIT
        pairs = zip(contenders[name].logits, contenders[CONTIGUOUS].logits, strict=True)
        rows.append(
            {
                "cache": name,
                "least_ms": 1e3 * min(seconds[name]),
                "median_ms": 1e3 * statistics.median(seconds[name]),
                "beside": baseline,
                "ratio": ratio,
                "ratio_of_least": min(seconds[name]) / min(seconds[baseline]),
                "limit": limit,
                "met": ratio <= limit,
                "logits_differ_by": max(float(np.abs(a - b).max()) for a, b in pairs),
            }
        )
    return rows


def _contiguous(cache: list[Any]) -> ContiguousCache:
    keys, values = (tuple(jnp.array(each[i]) for each in cache) for i in range(2))
    return ContiguousCache(keys, values)


def _paged(cache: list[Any], tables: Any, times: int) -> tuple[kv_pages.KVPages, ...]:
    """The same tokens in pages, in a pool with `times` as many pages."""

    def pool(rows: Any) -> jax.Array:
        pages = np.zeros((NUM_PAGES * times + 1, PAGE, *rows.shape[2:]), np.float32)
        pages[tables.reshape(-1)] = rows.reshape(-1, PAGE, *rows.shape[2:])
        return jnp.asarray(pages)

    return tuple(kv_pages.KVPages(pool(each[0]), pool(each[1])) for each in cache)
