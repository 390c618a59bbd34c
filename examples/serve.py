"""Train a small decoder on this machine's Python sources, and serve it: many requests at once, pages and hits shown live.

    python examples/serve.py
    python examples/serve.py --seconds 10 --requests 200
    python examples/serve.py --serve

`make demo-inference` runs the last of these, which goes on as an OpenAI-compatible server with a live page. The model is as small as two CPU cores can train in a minute: it has learnt what code
looks like, not what it means. What it shows is the engine: prompts that begin alike share their pages, prompts are
computed in chunks beside those that generate, every slot that becomes free is taken by the next request; then eight
chains are drawn over one prompt, and judged by whether they are Python; and a vector index over the standard library tells a
chain what to import.
"""

from __future__ import annotations

import os

# Before JAX is imported: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import argparse
import ast
import asyncio
import contextlib
import random
import re
import sysconfig
import time
import webbrowser
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import autopar
from autopar import vector_search
from autopar.inference import Chain, Decoder, DecoderConfig, Engine, Generation, Options, SamplingOptions, best_of

LENGTH = 256
BATCH, SEQ = 16, 64
CONFIG = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
OPTIONS = Options(num_slots=8, max_length=LENGTH, chunks=((4, 32), (1, 128)), steps=4)
#: What prompts begin with: those of a module share its pages.
MODULES = (
    "import os\nimport sys\nfrom pathlib import Path\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "import unittest\n\n\nclass TestCase(unittest.TestCase):\n    def setUp(self):\n        self.values = [1, 2, 3]\n",
    "",
)
PROMPTS = (
    "    def read(self",
    "    def test_",
    "def main(",
    "for name in ",
    "    return ",
    "if __name__ ==",
    "try:\n    import ",
)


def sources() -> str:
    """Some of Python's own, which is on every machine that runs this."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)[:3_000_000]


def tokenizer_of(text: str) -> Tokenizer:
    """1,024 pieces of text, which any text can be made of."""
    tokenizer: Any = Tokenizer(models.BPE())
    trainer: Any = trainers.BpeTrainer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainer(vocab_size=CONFIG["vocab_size"], initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def train(model: Decoder, tokens: np.ndarray, seconds: float) -> tuple[Any, float]:
    """Weights, and the loss of the last steps. `autopar.parallelize` lays the step over the devices."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_constant_schedule(1e-3, 1e-2, 30), b2=0.95)
    )

    @autopar.parallelize
    def step(state: Any, batch: jax.Array) -> Any:
        params, moments = state

        def loss_of(params: Any) -> jax.Array:
            logits: Any = model.apply(params, batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits[0], batch[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def create() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))
        return params, optimizer.init(params)

    chance = np.random.default_rng(0)

    def batches() -> Iterator[np.ndarray]:
        while True:
            starts = chance.integers(0, len(tokens) - SEQ - 1, BATCH)
            yield np.stack([tokens[start : start + SEQ + 1] for start in starts])

    state = step.init(create, batch=jax.ShapeDtypeStruct((BATCH, SEQ + 1), np.int32))
    losses: list[float] = []
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as bar:
        task, started = bar.add_task("training", total=seconds), time.perf_counter()
        for batch in batches():
            state, loss = step(state, batch)
            losses.append(float(loss))
            done = time.perf_counter() - started
            bar.update(task, completed=done, description=f"training, loss {np.mean(losses[-20:]):.2f}")
            if done > seconds and len(losses) > 20:
                return state[0], float(np.mean(losses[-20:]))
    raise AssertionError("batches never end")


def requests(num: int) -> Iterator[dict[str, Any]]:
    """Of all kinds: short and long, greedy and drawn."""
    chance = random.Random(0)
    for number in range(num):
        yield {
            "prompt": chance.choice(MODULES) + chance.choice(PROMPTS),
            "max_tokens": chance.choice([12, 24, 48, 96]),
            "sampling": SamplingOptions(chance.choice([0.0, 0.7, 1.0]), top_p=0.95, seed=number),
            "name": f"{number:03}",
        }


def drawn(engine: Engine, generations: list[Generation], since: float) -> Group:
    """The engine now."""
    stats = engine.stats
    total, width = engine.pool.num_pages, 72
    held = round(width * stats.held_pages / total)
    kept = round(width * stats.evictable_pages / total)
    pages = Text.assemble(
        "pages   ",
        ("█" * held, "green"),
        ("▓" * kept, "blue"),
        ("░" * (width - held - kept), "bright_black"),
        f"  {stats.held_pages} held, {stats.evictable_pages} kept for what begins alike, {stats.free_pages} free",
    )
    prompts = stats.num_prompt_tokens + stats.num_cached_tokens
    seconds = time.perf_counter() - since
    counts = Text(
        f"batch   {stats.num_running} of {OPTIONS.num_slots} slots, {stats.num_waiting} waiting;"
        f" {stats.num_iterations} iterations, {stats.num_compiled} programs\n"
        f"hits    {stats.num_cached_tokens:,} of {prompts:,} prompt tokens were in the cache\n"
        f"tokens  {stats.num_tokens:,} generated, {stats.num_tokens / max(seconds, 1e-9):,.0f} per second"
    )
    if not generations:
        return Group(pages, counts)
    table = Table(box=None, padding=(0, 1), expand=True)
    for title, style in (("request", "cyan"), ("tokens", "green"), ("text", "")):
        table.add_column(title, style=style, no_wrap=True, ratio=10 if title == "text" else 1)
    running = [each for each in generations if each.ended is None and each.tokens][: OPTIONS.num_slots]
    for each in running:
        text = each.text.replace("\n", "⏎")
        table.add_row(each.name, f"{len(each.tokens)}/{each.request.max_tokens}", Text(text[-90:]))
    return Group(pages, counts, table)


def is_python(prompt: str) -> Any:
    """A verifier: the part of a chain's lines that are Python, with its prompt before them."""

    def verify(chain: Chain) -> float:
        lines = (prompt + chain.text).splitlines()
        for num in range(len(lines), 0, -1):
            try:
                ast.parse("\n".join(lines[:num]))
            except (SyntaxError, ValueError):
                continue
            return num / len(lines)
        return 0.0

    return verify


def counted(text: str) -> np.ndarray:
    """Its words, hashed into 2,048 places."""
    places = [zlib.crc32(word.encode()) % 2048 for word in re.findall(r"[a-z]{3,}", text.lower())]
    return np.bincount(places, minlength=2048).astype(np.float32)


def module_finder() -> Any:
    """A tool: the module of the standard library whose description is nearest to a text, by a vector index."""
    described: dict[str, str] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        with contextlib.suppress(SyntaxError, ValueError):
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8", errors="ignore")))
            if about:
                described[path.stem] = f"{path.stem} " * 3 + about[:500]
    counts = np.stack([counted(text) for text in described.values()])
    rarity = np.log(len(counts) / np.maximum(1, (counts > 0).sum(0)))
    index = vector_search.build(counts * rarity, metric="cosine", index="exact")
    names = list(described)

    def find(text: str) -> str:
        return names[int(index.search((counted(text) * rarity)[None], 1).ids[0, 0])]

    return find


def serve_over_http(engine: Engine, console: Console) -> None:
    """Serve the engine on this machine until Ctrl-C, and open the page."""
    from autopar.serving import Limits
    from autopar.serving.server import serve

    def show(address: str) -> None:
        body = '{"prompt": "def main(", "max_tokens": 40}'
        console.rule("an OpenAI-compatible server, until Ctrl-C", align="left")
        console.print(f"page: {address}/", highlight=False)
        console.print(f"curl {address}/v1/completions -H 'content-type: application/json' -d '{body}'", highlight=False)
        webbrowser.open(f"{address}/")

    limits = Limits(hosts=frozenset(["127.0.0.1", "localhost"]))
    asyncio.run(
        serve([("demo", Path(__file__).parent)], lambda _: engine, limits, host="127.0.0.1", port=0, on_ready=show)
    )


def main() -> None:
    """Train, serve, show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="of training (default: 45)")
    parser.add_argument("--requests", type=int, default=60, help="how many (default: 60)")
    parser.add_argument("--serve", action="store_true", help="then serve the model over HTTP, and open the page")
    asked = parser.parse_args()
    console = Console()

    text = sources()
    tokenizer = tokenizer_of(text)
    tokens = np.array(tokenizer.encode(text[:1_000_000]).ids, np.int32)
    config = DecoderConfig.of(CONFIG)
    params, loss = train(Decoder(config), tokens, asked.seconds)
    console.print(f"Trained on {len(tokens):,} tokens of Python sources for {asked.seconds:.0f} s: loss {loss:.2f}.")

    with console.status("planning and compiling its programs"):
        engine = Engine.of(config, params, tokenizer, options=OPTIONS, num_pages=96, cache=False)
    layout = engine.runner.layout
    console.print(
        f"Served on {jax.device_count()} devices: {len(layout.programs)} programs, {layout.num_pages} pages of"
        f" {engine.runner.served.page_size} tokens.\n"
    )

    started = time.perf_counter()
    generations = [engine.submit(**each) for each in requests(asked.requests)]
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while engine.step():
                live.update(drawn(engine, generations, started), refresh=True)
    except KeyboardInterrupt:
        for each in generations:
            each.abort()
        console.print("Interrupted: what was under way is dropped.")
    console.print(drawn(engine, [], started))
    done = [each for each in generations if each.ended in ("stop", "length")]
    for each in done[:3]:
        console.rule(f"request {each.name}, {len(each.tokens)} tokens", align="left")
        prompt = tokenizer.decode(each.request.prompt)
        console.print(Text.assemble((prompt[-160:], "bright_black"), each.text), highlight=False)

    prompt = MODULES[0] + "    def read(self):\n"
    answers = best_of(engine, prompt, 8, is_python(prompt), sampling=SamplingOptions(0.8, seed=1), max_tokens=60)
    console.rule("the best of eight chains, by how much of it is Python", align="left")
    console.print(Text.assemble((prompt, "bright_black"), answers.best.text), highlight=False)
    scores = ", ".join(f"{each.score:.2f}" for each in answers.chains if each.score is not None)
    console.print(f"\nscores: {scores}")

    question = '"""Compress the files of a folder with gzip."""\nimport sys'
    find = module_finder()
    tools = {"\n": lambda text: f"import {find(question + text)}\n"}
    answers = best_of(engine, question, 2, tools=tools, max_calls=1, max_tokens=40, sampling=SamplingOptions(0.5))
    console.rule("where a chain ends its first line, a vector index says what it needs", align="left")
    console.print(Text.assemble((question, "bright_black"), answers.best.text), highlight=False)
    engine.pool.check()
    console.print(f"{engine.stats.held_pages} pages are held: nothing is left of any request.")
    if asked.serve:
        serve_over_http(engine, console)


if __name__ == "__main__":
    main()
