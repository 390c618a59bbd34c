"""Measure the engine on 64 requests against `transformers`' own generate in torch, on the same CPU.

The model has the size of GPT-2 small. Prompts have 8 to 128 tokens; outputs are geometrically distributed around 60
tokens, clipped to 4 to 240; greedy, float32, random weights in one checkpoint that both read. Both have 16 slots: the
engine fills a slot as soon as it is free; torch takes batches of 16 in order of arrival, padded on the left, each as
long as its longest request. torch runs in a process of its own. The two take turns, each with all cores while the other
waits; each round has new prompts of the same lengths. The medians of the ratios within a round count.
`AUTOPAR_TORCH_PYTHON` is a Python with torch and transformers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from autopar.inference import Engine, Options, write_checkpoint
from benchmarks.inference.models import GPT2_SMALL, output_lengths, random_prompts
from benchmarks.inference.rows import Row, row

SLOTS, LONGEST, REQUESTS, ROUNDS = 16, 384, 64, 3
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 128


class Served(NamedTuple):
    """One contender's round; `steps` counts steps of the model, including prefill."""

    seconds: float
    steps: int
    tokens: list[list[int]]


def measure() -> list[Row]:
    """Medians over the rounds."""
    python = os.environ.get("AUTOPAR_TORCH_PYTHON")
    if not python:
        raise SystemExit("AUTOPAR_TORCH_PYTHON names no Python with torch and transformers")
    lengths = np.random.default_rng(0).integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1, REQUESTS).tolist()
    wanted = output_lengths(REQUESTS, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_checkpoint(model, GPT2_SMALL)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
        options = Options(num_slots=SLOTS, max_length=LONGEST)
        engine = Engine.open(model, options=options, mesh=mesh, num_pages=SLOTS * LONGEST // 16)
        with Torch(python, model) as torch:
            rounds = [_round(engine, torch, lengths, wanted, number) for number in range(ROUNDS + 1)][1:]
            about = torch.about
    return _rows(rounds, sum(wanted), about)


def _round(engine: Engine, torch: Torch, lengths: list[int], wanted: list[int], number: int) -> tuple[Served, Served]:
    """One round of both contenders in alternating order; the first round is short, as a warm-up."""
    prompts, wanted = random_prompts(lengths, GPT2_SMALL["vocab_size"], number), list(wanted)
    if number == 0:
        prompts, wanted = prompts[:SLOTS], [4] * SLOTS
    sides = [lambda: served(engine, prompts, wanted), lambda: torch.served(prompts, wanted, SLOTS)]
    results = [side() for side in (sides if number % 2 else sides[::-1])]
    ours, theirs = results if number % 2 else results[::-1]
    return ours, theirs


def served(engine: Engine, prompts: list[list[int]], wanted: list[int]) -> Served:
    """Serve a round with the engine."""
    before, begin = engine.stats.num_steps, time.perf_counter()
    generations = [engine.submit(prompt, max_tokens=num) for prompt, num in zip(prompts, wanted, strict=True)]
    engine.run()
    seconds = time.perf_counter() - begin
    return Served(seconds, engine.stats.num_steps - before, [generation.tokens for generation in generations])


class Torch:
    """`transformers` in a process of its own, which waits between rounds."""

    def __init__(self, python: str, model: Path) -> None:
        kept = {key: value for key, value in os.environ.items() if key not in ("USE_TORCH", "PYTHONPATH", "PYTHONHOME")}
        # -P keeps the script's folder off the import path, because this file has the package's name.
        command = [python, "-P", str(Path(__file__).with_name("torch_generate.py")), str(model)]
        env = {**kept, "HF_HUB_OFFLINE": "1", "USE_FLAX": "0", "TRANSFORMERS_VERBOSITY": "error"}
        self._child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = str(self._read()["about"])

    def __enter__(self) -> Torch:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)

    def served(self, prompts: list[list[int]], wanted: list[int], slots: int) -> Served:
        """Serve a round with torch."""
        assert self._child.stdin is not None
        print(
            json.dumps({"prompts": prompts, "max_tokens": wanted, "slots": slots}), file=self._child.stdin, flush=True
        )
        return Served(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"torch ended with {self._child.wait()}")
        return json.loads(line)


def _rows(rounds: list[tuple[Served, Served]], num_tokens: int, about: str) -> list[Row]:
    """Seconds and steps of both, and their ratios."""

    def ratio(of: Any) -> float:
        return statistics.median(of(theirs) / of(ours) for ours, theirs in rounds)

    rows: list[Row] = []
    for number, name in enumerate(("autopar, float32", about)):
        seconds = statistics.median(both[number].seconds for both in rounds)
        steps = statistics.median(both[number].steps for both in rounds)
        rows += [
            row(f"requests/s, {name}", REQUESTS / seconds),
            row(f"tokens/s, {name}", num_tokens / seconds),
            row(f"steps, {name}", steps),
            row(f"seconds of a step, {name}", seconds / steps, "s"),
        ]
    pairs = [pair for ours, theirs in rounds for pair in zip(ours.tokens, theirs.tokens, strict=True)]
    return [
        row("requests/s, autopar / torch", ratio(lambda side: side.seconds), at_least=2),
        row("steps, torch / autopar", ratio(lambda side: side.steps)),
        row("seconds of a step, torch / autopar", ratio(lambda side: side.seconds / side.steps)),
        row(f"requests whose tokens differ, of {len(pairs)}", sum(ours != theirs for ours, theirs in pairs)),
        *rows,
    ]
