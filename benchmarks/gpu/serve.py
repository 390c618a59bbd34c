"""Measure the inference engine on one GPU: decode, prefill, attention by back end, and host time.

In: the name of a part. Out: a record with rows. Weights are random bfloat16 with LLaMA 3.1 8B's sizes, and a quarter of
its layers. A decode step reads all weights and the batch's keys and values once: its bytes per second are compared with
the rate at which this device copies memory, measured in the same process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autopar.inference import DecoderConfig, Engine, Options
from autopar.inference.kernels.paged_attention import BACKENDS, attend_paged
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.model.decoder import Decoder
from benchmarks.gpu.quick_keys import quick_key
from benchmarks.gpu.setting import Record, Setting
from benchmarks.timing import median_s

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
_TINY = _LLAMA | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
#: A model with one narrow layer: the time of its step is host time.
_NEXT_TO_NOTHING = _TINY | {"num_hidden_layers": 1}
_PAGE = 16
_STEPS, _WARM_UP = 30, 5
#: Number of timed calls of a single kernel.
_CALLS = 20


def decode(setting: Setting) -> Record:
    """Tokens per second, and bytes per second compared with the copy rate, by batch and context length."""
    config = DecoderConfig.of(_TINY if setting.is_tiny else _LLAMA)
    params = _params(config)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    token_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    cases = [(2, 32)] if setting.is_tiny else [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (32, 4096), (8, 15000)]
    copy_rate = copy_bytes_per_s(setting)
    rows: list[Record] = []
    record: Record = {"weight_bytes": weights, "copy_bytes_per_s": copy_rate, "rows": rows}
    engines: dict[tuple[int, int], Engine] = {}
    for batch, context in cases:
        longest = context + _PAGE * -(-(_WARM_UP + 2 * _STEPS) // _PAGE)
        if (batch, longest) not in engines:
            engines.clear()  # free its pages before new ones are allocated
            engines[batch, longest] = _engine(config, params, batch, longest, chunk=min(context, 1024))
        step_s = _decode_step(engines[batch, longest], config, batch, context)
        # The embedding is looked up, so it is not read as a whole.
        read = weights - 2 * config.vocab_size * config.hidden_size + batch * context * token_bytes
        rows.append(
            {
                "batch": batch,
                "context": context,
                "step_s": step_s,
                "tokens_per_s": batch / step_s,
                "bytes_per_s": read / step_s,
                "of_copy_rate": read / step_s / copy_rate,
            }
        )
        setting.keep(record)
    return record


def host(setting: Setting) -> Record:
    """Seconds of a decode step with almost no arithmetic, by batch: the host time, which a large model's step hides."""
    config = DecoderConfig.of(_NEXT_TO_NOTHING)
    params = _params(config)
    rows: list[Record] = []
    for batch in (1, 2) if setting.is_tiny else (1, 8, 32, 128):
        engine = _engine(config, params, batch, 128, chunk=16)
        rows.append({"batch": batch, "step_s": _decode_step(engine, config, batch, 16)})
    return {"rows": rows}


def prefill(setting: Setting) -> Record:
    """Prompt tokens per second, and FLOP/s of the weights' matmuls, by prompt length and chunk length."""
    config = DecoderConfig.of(_TINY if setting.is_tiny else _LLAMA)
    params = _params(config)
    in_matmuls = sum(leaf.size for leaf in jax.tree.leaves(params)) - config.vocab_size * config.hidden_size
    rows: list[Record] = []
    for length, chunk in ((32, 16),) if setting.is_tiny else ((512, 512), (2048, 2048), (8192, 2048), (8192, 8192)):
        engine = _engine(config, params, 1, length + _PAGE, chunk=chunk)
        times: list[float] = []
        for seed in range(6):
            began = time.perf_counter()
            engine.submit(_prompt(config, length, seed), max_tokens=1).result()
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[1:])
        flops = 2.0 * in_matmuls * length
        rows.append(
            {
                "prompt": length,
                "chunk": chunk,
                "seconds": seconds,
                "tokens_per_s": length / seconds,
                "flops_per_s": flops / seconds,
            }
        )
        setting.keep({"rows": rows})
        del engine
    return {"rows": rows}


def attention(setting: Setting) -> Record:
    """Seconds of attention over one layer's pages, by back end, batch and context; and bytes per second of keys and
    values."""
    config = DecoderConfig.of(_TINY if setting.is_tiny else _LLAMA)
    platform = jax.local_devices()[0].platform
    names = [name for name, one in BACKENDS.items() if platform in one.platforms]
    rows: list[Record] = []
    for batch, context in ((2, 32),) if setting.is_tiny else ((1, 1024), (32, 1024), (128, 1024), (32, 8192)):
        arrays = _pages(config, batch, context)
        if rows:
            setting.keep({"rows": rows})
        for name in names:
            row: Record = {"backend": name, "batch": batch, "context": context}
            if (reason := BACKENDS[name].refused(_PAGE, config.head_dim)) is not None:
                rows.append(row | {"refused": reason})
                continue
            try:
                seconds = median_s(partial(_attended(name), *arrays), _CALLS)
            except Exception as error:  # record a kernel that this card or this JAX refuses
                rows.append(row | {"error": f"{type(error).__name__}: {error}"[:300]})
                continue
            read = 2 * 2 * batch * context * config.num_kv_heads * config.head_dim
            rows.append(row | {"seconds": seconds, "bytes_per_s": read / seconds})
    return {"rows": rows}


def copy_bytes_per_s(setting: Setting) -> float:
    """Bytes read and written per second by a memory copy."""
    array = jnp.ones((1 << (16 if setting.is_tiny else 29),), jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return 2 * array.nbytes / median_s(partial(add, array), _CALLS)


def _attended(backend: str) -> Callable[..., Any]:
    return jax.jit(partial(attend_paged, backend))


def _pages(config: DecoderConfig, batch: int, context: int) -> tuple[Any, ...]:
    """Queries of one token, pages in random order, tables and positions."""
    per_row = context // _PAGE
    key = quick_key(0)
    shape = (batch * per_row + 1, _PAGE, config.num_kv_heads, config.head_dim)
    pages = KVPages(*(jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(key)))
    queries = jax.random.normal(key, (batch, 1, config.num_heads, config.head_dim), jnp.bfloat16)
    tables = np.random.default_rng(0).permutation(batch * per_row).reshape(batch, per_row).astype(np.int32)
    return queries, pages, jnp.asarray(tables), jnp.full((batch, 1), context - 1, jnp.int32)


def _params(config: DecoderConfig) -> Any:
    """Random bfloat16 weights, made leaf by leaf, so that they are never all in float32."""
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnames=("shape",))
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(quick_key(0), len(leaves))
    return jax.tree.unflatten(structure, [draw(key, shape=leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


def _engine(config: DecoderConfig, params: Any, slots: int, longest: int, chunk: int) -> Engine:
    longest = _PAGE * -(-longest // _PAGE)
    options = Options(num_slots=slots, max_length=longest, chunks=((1, chunk),), steps=1)
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("model",))
    return Engine.of(
        config,
        params,
        options=options,
        mesh=mesh,
        num_pages=slots * longest // _PAGE,
        page_size=_PAGE,
        shares_prefixes=False,
        cache=False,
    )


def _decode_step(engine: Engine, config: DecoderConfig, batch: int, context: int) -> float:
    """Median seconds of an iteration in which every slot generates a token."""
    running = [engine.submit(_prompt(config, context, seed), max_tokens=_WARM_UP + 2 * _STEPS) for seed in range(batch)]
    while not all(generation.tokens for generation in running):
        engine.step()
    times: list[float] = []
    for number in range(_WARM_UP + _STEPS):
        began = time.perf_counter()
        if not engine.step():
            break
        if number >= _WARM_UP:
            times.append(time.perf_counter() - began)
    for generation in running:
        generation.abort()
    engine.run()
    return statistics.median(times)


def _prompt(config: DecoderConfig, length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()
