"""Measure the engine's decode step over KV pages against the same step over a contiguous KV cache.

The model is a decoder of 4 layers, d 256, 8 query heads and 2 key-value heads, vocabulary 8,192, float32, random
weights; 16 slots, pages of 16 tokens in random order, at most 512 tokens. A step takes one token per slot, writes its
keys and values, attends by the back end that the engine chose at its start, and samples; caches are donated. The
contenders take turns for a hundred steps of one token, starting with 32, 224 and 400 tokens in each slot. The medians
of the ratios within a turn count.
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

from autopar.inference import Engine, Options
from autopar.inference.model.attention import AttendContiguous, ContiguousCache
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Shape
from autopar.inference.serve.runner import Runner
from autopar.inference.step.sampling import sample
from autopar.inference.step.sampling_params import params_of as sampling_params_of
from benchmarks.inference.models import SMALL, config_of, params_of
from benchmarks.inference.rows import Row, row
from benchmarks.timing import take_turns

SLOTS, PAGE, LONGEST = 16, 16, 512
NUM_PAGES = SLOTS * LONGEST // PAGE
#: Initial tokens in each slot.
STARTS = (32, 224, 400)
ROUNDS, WARMUP = 100, 5
POOLS = (1, 4)


class Contender:
    """A cache, and the step that advances it by one token per call.

    Args:
        step: function from a cache and the position of the new tokens to the cache and the next tokens.
    """

    def __init__(self, step: Callable[[Any, int], tuple[Any, jax.Array]], cache: Any, start: int) -> None:
        self.step, self.cache, self.position = step, cache, start
        self.tokens: list[Any] = []

    def run(self) -> float:
        """Seconds from the call until its tokens are ready."""
        begin = time.perf_counter()
        self.cache, tokens = self.step(self.cache, self.position)
        tokens.block_until_ready()
        seconds = time.perf_counter() - begin
        self.position += 1
        self.tokens.append(np.asarray(tokens))
        return seconds


def measure() -> list[Row]:
    """Ratios for each start, and the pool's memory as the compiler reports it."""
    config = config_of(SMALL)
    params = params_of(config)
    options = Options(num_slots=SLOTS, max_length=LONGEST, chunks=((1, 64),), steps=1)
    runners = {
        times: Engine.of(
            config, params, options=options, num_pages=NUM_PAGES * times, cache=False, mesh=_one_device()
        ).runner
        for times in POOLS
    }
    contiguous = contiguous_step(config, params)
    rows: list[Row] = []
    for start in STARTS:
        contenders = {f"x{times}": _paged(runner, params, start) for times, runner in runners.items()}
        contenders["contiguous"] = Contender(contiguous, _empty_cache(config), start)
        seconds = take_turns({name: one.run for name, one in contenders.items()}, ROUNDS, WARMUP)
        ratios = {(a, b): _ratio(seconds[a], seconds[b]) for a, b in (("x1", "contiguous"), ("x4", "x1"))}
        expected = contenders["contiguous"].tokens
        differing = sum(int((a != b).sum()) for a, b in zip(contenders["x1"].tokens, expected, strict=True))
        rows += [
            row(f"paged step, {start} tokens", 1e3 * statistics.median(seconds["x1"]), "ms"),
            row(f"paged / contiguous, {start} tokens", ratios["x1", "contiguous"], at_most=1.25),
            row(f"pool of {POOLS[1]} times the pages / paged, {start} tokens", ratios["x4", "x1"], at_most=1.10),
            row(f"tokens that differ, of {SLOTS * len(expected):,}, from {start} on", differing, at_most=0),
        ]
    small, large = (_memory(runners[times]) for times in POOLS)
    more = (NUM_PAGES * (POOLS[1] - 1)) * runners[1].layout.page_bytes
    rows.append(
        row(
            "bytes renewed in place that the larger pool adds, of those it has more",
            (large[0] - small[0]) / more,
            at_least=1,
        )
    )
    rows.append(row("temporary bytes, larger pool / smaller", large[1] / small[1], at_most=1.10))
    return rows


def _one_device() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))


def _ratio(seconds: list[float], baseline: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, baseline, strict=True))


def _memory(runner: Runner) -> tuple[int, int]:
    """From the compiled decode program: bytes of results that alias an argument, and bytes of temporaries."""
    program = runner.layout.programs[Shape()]
    memory = program.run.memory_analysis()
    assert memory is not None
    return memory.alias_size_in_bytes, memory.temp_size_in_bytes


def _paged(runner: Runner, params: Any, start: int) -> Contender:
    """The engine's program, with each slot's pages at random places of the pool."""
    served, num_pages = runner.served, runner.layout.num_pages
    packed, rows = served.rows(SLOTS, 1, num_pages)
    tables = np.random.default_rng(0).permutation(num_pages)[:NUM_PAGES].reshape(SLOTS, -1)
    rows.tables[:] = tables
    rows.num_tokens[:] = 1
    rows.slots[:] = np.arange(SLOTS)
    rows.tokens[:] = -1  # each slot's latest token
    program, allowed = runner.layout.programs[Shape()].run, runner.served.all_allowed(Shape())

    def step(resident: Any, position: int) -> tuple[Any, jax.Array]:
        rows.start[:] = position
        resident, out = program(params, resident, allowed, packed)
        return resident, out.tokens[:, 0]

    return Contender(
        step, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), served.resident(num_pages)), start
    )


def contiguous_step(config: Any, params: Any) -> Callable[[Any, int], tuple[Any, jax.Array]]:
    """The same model and sampling over contiguous arrays of full length, one row per slot."""
    model: Any = Decoder(config)
    sampling = sampling_params_of([None] * SLOTS)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params: Any, resident: Any, start: jax.Array, sampling: Any) -> Any:
        cache, last = resident
        positions = start[:, None]
        logits, cache = model.apply(params, last[:, None], positions, AttendContiguous(positions), cache)
        found = sample(logits[:, 0], sampling, start + 1)
        return (cache, found.tokens), found

    def call(resident: Any, position: int) -> tuple[Any, jax.Array]:
        resident, found = step(params, resident, np.full(SLOTS, position, np.int32), sampling)
        return resident, found.tokens

    return call


def _empty_cache(config: Any) -> Any:
    return ContiguousCache.empty(config, SLOTS, LONGEST), jnp.zeros(SLOTS, jnp.int32)
