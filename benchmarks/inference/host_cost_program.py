"""Measure the CPU time of the engine's thread over a device that takes none, and print it as JSON.

    python host_cost_program.py SLOTS CONTEXT OUTPUT STEPS SHARED

Run by `host_cost`, in this tree and in that of an earlier commit, whose modules have other names. All slots start with a
prompt of CONTEXT random tokens, of which the first SHARED are the same, and generate OUTPUT random tokens each, as text.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import importlib
import json
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models

VOCABULARY, PAGE = 1024, 16
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16384,
}


def imported(*names: str) -> Any:
    """The first of these modules that exists."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(names)


inference = imported("autopar.inference")
runner = imported("autopar.inference.serve.runner", "autopar.inference.runner")
step = imported("autopar.inference.step.step", "autopar.inference.step")
setup = imported("autopar.inference.serve.setup", "autopar.inference.opening")


class TimelessRunner(runner.Runner):
    """A runner whose device returns random tokens at once. It has no weights."""

    shardings = ()

    def __init__(self, served: Any, num_pages: int) -> None:
        self.served, self.layout = served, SimpleNamespace(num_pages=num_pages, programs={})
        self._num_slots, self._params = served.options.num_slots, ()
        try:
            self._sampling = np.tile(imported("autopar.inference.step.sampling_params").NEUTRAL, (self._num_slots, 1))
        except ModuleNotFoundError:
            sampling = imported("autopar.inference.step.sampling", "autopar.inference.sampling")
            self._sampling = sampling.params_of([None] * self._num_slots)
        self._chance = np.random.default_rng(0)

    def _copy(self, copies: Any) -> None:
        pass

    def _run(self, key: Any, *rows: Any, allowed: Any = None) -> Any:
        num, width = self._num_slots + key.rows, key.steps if key.width == 1 else key.width
        fields = {
            "tokens": self._chance.integers(3, 1000, (num, width)).astype(np.int32),
            "num": np.full(num, width, np.int32),
            "logprobs": np.zeros((num, width), np.float32),
            "is_sound": np.ones(num, bool),
            "is_cut": np.zeros(num, bool),
            "best_tokens": np.zeros((num, width, 64), np.int32),
            "best_logprobs": np.zeros((num, width, 64), np.float32),
        }
        return step.Out(**{name: value for name, value in fields.items() if name in step.Out._fields})


def tokenizer() -> Tokenizer:
    """A tokenizer of words."""
    vocabulary = {chr(33 + i): i for i in range(94)} | {f"Ġw{i}": 94 + i for i in range(VOCABULARY - 94)}
    made: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    made.decoder = decoders.ByteLevel()
    return made


def measure(slots: int, context: int, output: int, steps: int, shared: int) -> dict[str, float]:
    """CPU seconds of the thread: per prefill call, per decode call and per token, and to read the text per token."""
    options = inference.Options(num_slots=slots, max_length=context + output + 16, chunks=((8, 512),), steps=steps)
    sizes_of = {"embed": (VOCABULARY, 64), "norm": (64,)}  # those that are read before a program is planned
    weights = {module: {"weight": jax.ShapeDtypeStruct(size, jnp.float32)} for module, size in sizes_of.items()}
    shapes = {"params": weights}
    served = setup.served_of(inference.DecoderConfig.of(CONFIG), shapes, options, PAGE)
    num_pages = slots * ((context + output) // PAGE + 3)
    engine = inference.Engine(TimelessRunner(served, num_pages), tokenizer(), num_pages=num_pages)
    chance = random.Random(0)
    stem = [chance.randrange(1000) for _ in range(shared)]
    generations = [
        engine.submit(
            [*stem, *(chance.randrange(1000) for _ in range(context - shared))],
            max_tokens=output,
            sampling=inference.SamplingOptions(temperature=1.0, seed=seed),
        )
        for seed in range(slots)
    ]
    started, prefills = time.thread_time(), 0
    while engine.stats.num_prompt_tokens + engine.stats.num_cached_tokens < slots * context:
        engine.step()
        prefills += 1
    prefilled, calls, before = time.thread_time() - started, 0, sum(len(each.tokens) for each in generations)
    started = time.thread_time()
    while engine.step():
        calls += 1
    stepped = time.thread_time()
    tokens = sum(len(each.tokens) for each in generations) - before
    assert all(each.text for each in generations)
    read = time.thread_time()
    return {
        "prefill_s": prefilled / prefills,
        "call_s": (stepped - started) / calls,
        "token_s": (stepped - started) / tokens,
        "read_s": (read - stepped) / tokens,
    }


if __name__ == "__main__":
    json.dump(measure(*map(int, sys.argv[1:])), sys.stdout)
