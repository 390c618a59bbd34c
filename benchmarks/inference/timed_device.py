"""Stand in for a device that takes a fixed time per model step: the engine, the scheduler and the packing of inputs are real.

In: sizes, seconds per step. Out: `timed_engine`. The device works on one call after the other, as a real one does, and returns random
tokens, which are those that masks allow. What it takes to draw them is hidden in the time of the step.
"""

from __future__ import annotations

import random
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from autopar.inference import DecoderConfig, Engine, Options
from autopar.inference.schedule.requests import Iteration
from autopar.inference.serve.runner import PageMemory, Runner
from autopar.inference.serve.setup import served_of
from autopar.inference.step.sampling_params import NEUTRAL
from autopar.inference.step.step import Out

PAGE = 16


class TimedIteration(NamedTuple):
    """An iteration on the device, which is done at a time."""

    iteration: Iteration
    out: Out
    done_at: float

    def fetch(self, **_: Any) -> Out:
        """Wait for the device."""
        time.sleep(max(0.0, self.done_at - time.perf_counter()))
        return self.out


class TimedRunner(Runner):
    """A runner whose device takes `step_s` for each step of a call. It has no weights."""

    def __init__(self, served: Any, num_pages: int, step_s: float) -> None:
        self.served, self.layout = served, SimpleNamespace(num_pages=num_pages, programs={})
        self._num_slots = served.options.num_slots
        self._sampling = np.tile(NEUTRAL, (self._num_slots, 1))
        self._chance = np.random.default_rng(0)
        self._step_s, self._free_at = step_s, 0.0
        self.memory, self._masks, self._params = PageMemory(()), {}, ()

    @property
    def shardings(self) -> tuple[Any, ...]:
        """Those of no weights."""
        return ()

    def dispatch(self, iteration: Iteration, allowed: Any = None) -> Any:
        """Pack the inputs as for a real device, and say when it is done."""
        rows = [self._slot_rows(iteration)]
        shape = iteration.shape
        if shape.rows:
            rows.append(self._chunk_rows(iteration.chunks, shape))
        self._free_at = max(time.perf_counter(), self._free_at) + self._step_s * shape.steps
        return TimedIteration(iteration, self._out(shape, allowed), self._free_at)

    def forward(self, iteration: Iteration) -> Any:
        """Pack the inputs, and say when the logits are there."""
        packed = self._slot_rows(iteration)
        self._free_at = max(time.perf_counter(), self._free_at) + self._step_s
        return packed

    def sample(self, iteration: Iteration, packed: Any, allowed: Any) -> Any:
        """Sample once the logits and the masks are there."""
        self._free_at = max(time.perf_counter(), self._free_at)
        return TimedIteration(iteration, self._out(iteration.shape, allowed), self._free_at)

    def _out(self, shape: Any, allowed: Any) -> Out:
        num, width = self._num_slots + shape.rows, shape.steps if shape.width == 1 else shape.width
        tokens = self._chance.integers(3, 256, (num, width)).astype(np.int32)
        if allowed is not None:
            tokens[:, 0] = [self._allowed_token(row) for row in allowed]
        return Out(tokens, np.full(num, width, np.int32), np.zeros((num, width), np.float32), np.ones(num, bool))  # pyright: ignore[reportArgumentType]

    def _allowed_token(self, mask: np.ndarray) -> int:
        """A random token of a mask. Drawing a word of the mask first takes the host less time than drawing a token at once."""
        words = np.flatnonzero(mask)
        word = int(words[self._chance.integers(words.size)])
        tokens = [bit for bit in range(32) if mask[word] >> bit & 1]
        return 32 * word + tokens[self._chance.integers(len(tokens))]


def vocabulary_of(size: int) -> Any:
    """A byte-level tokenizer with the most frequent pieces of Python's standard library."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    options: dict[str, Any] = {"special_tokens": ["<end>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def timed_engine(num_slots: int, max_length: int, step_s: float, vocabulary: int = 1024, **options: Any) -> Engine:
    """An engine over a device that takes `step_s` for each step.

    Args:
        options: further ones of the scheduler.
    """
    config = DecoderConfig.of(
        {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": max(16384, max_length),
        }
    )
    sizes_of = {"embed": (vocabulary, 64), "norm": (64,)}  # those that are read before a program is planned
    weights = {module: {"weight": jax.ShapeDtypeStruct(size, jnp.float32)} for module, size in sizes_of.items()}
    shapes = {"params": weights}
    sizes: dict[str, Any] = {"num_slots": num_slots, "max_length": max_length, "chunks": ((8, 64), (2, 256))}
    served = served_of(config, shapes, Options(**sizes | options), PAGE)
    num_pages = num_slots * (max_length // PAGE + 2)
    return Engine(TimedRunner(served, num_pages, step_s), vocabulary_of(vocabulary), [0], num_pages=num_pages)


def random_prompt(length: int, seed: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    chance = random.Random(seed)
    return [chance.randrange(3, 256) for _ in range(length)]
