"""Compare eight devices with one: the generated tokens, and the collectives of a decode step.

Tokens: 16 requests to a decoder of 4 layers, d 256, 8 heads, float32, on eight virtual CPU devices and on one.
Collectives: those of the decode program compiled for eight virtual devices, for that decoder and for two layers with
the sizes of LLaMA 3.1 8B in bfloat16, planned for `h100-sxm` and compiled from shapes alone. Gates: at most two
all-reduces per layer; no gathered array is as large as the logits of all slots, or as the cache of one layer.
"""

from __future__ import annotations

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from autopar.inference import DecoderConfig, Engine, Options
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Shape
from autopar.inference.serve.layout import Served
from autopar.inference.serve.setup import planned_for
from autopar.xla_compiler import hlo_collectives as hlo
from benchmarks.inference.models import LLAMA_8B, SMALL, config_of, output_lengths, params_of, random_prompts
from benchmarks.inference.rows import Row, row

DEVICES, SLOTS, LONGEST, REQUESTS = 8, 16, 512, 16
_LAYER = re.compile(r"layers_(\d+)")


def measure() -> list[Row]:
    """Rows of tokens, then of collectives at both sizes."""
    config = config_of(SMALL, num_key_value_heads=DEVICES)
    one, several = (_engine(config, num) for num in (1, DEVICES))
    prompts = random_prompts([48] * REQUESTS, config.vocab_size, 0)
    wanted = output_lengths(REQUESTS, 0, mean=24, most=64)
    tokens = [
        [
            generation.result().tokens
            for generation in [engine.submit(p, max_tokens=n) for p, n in zip(prompts, wanted, strict=True)]
        ]
        for engine in (one, several)
    ]
    differing = sum(a != b for a, b in zip(*tokens, strict=True))
    return [
        row(f"requests whose tokens differ, of {REQUESTS}", differing, at_most=0),
        *_collectives("small", several.runner.layout.programs[Shape()].run, several.runner.served),
        *_large(),
    ]


def _mesh(num: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:num]), ("model",))


def _engine(config: DecoderConfig, num_devices: int) -> Engine:
    options = Options(num_slots=SLOTS, max_length=LONGEST, chunks=((4, 64),), steps=1)
    return Engine.of(
        config,
        params_of(config),
        options=options,
        mesh=_mesh(num_devices),
        num_pages=SLOTS * LONGEST // 16,
        cache=False,
    )


def _large() -> list[Row]:
    """Collectives of a large model's decode program, compiled without arrays."""
    config = config_of(LLAMA_8B)
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    options = Options(num_slots=SLOTS, max_length=4096, chunks=((1, 256),), steps=1)
    served = Served(Decoder(config), params, options, 16, jnp.bfloat16)
    place = {"mesh": _mesh(DEVICES), "hardware": "h100-sxm", "cache": False}
    layout = planned_for(served, place, num_pages=SLOTS * 4096 // 16)
    return _collectives("LLaMA 8B's size", layout.programs[Shape()].compiled().run, served)


def _collectives(name: str, compiled: jax.stages.Compiled, served: Served) -> list[Row]:
    """Collectives of a compiled decode program: all-reduces per layer, all others by kind, and the largest gathered
    array."""
    found = hlo.collectives(compiled.as_text() or "", ignore_up_to=0)
    config, slots = served.model.config, served.options.num_slots
    in_layers = Counter(match[1] for one in found if one.kind == "all-reduce" and (match := _LAYER.search(one.op_name)))
    counts = [in_layers[str(layer)] for layer in range(config.num_layers)]
    by_kind: dict[str, list[hlo.Collective]] = {}
    for one in found:
        where = "in layers" if _LAYER.search(one.op_name) else "outside"
        by_kind.setdefault(f"{one.kind}s {where}", []).append(one)
    gathered = max((one.num_elements for one in found if one.kind == "all-gather"), default=0)
    cache = math.prod(served.resident(1).pages[0].keys.shape[1:]) * slots * served.pages_of_sequence
    least = min(slots * config.vocab_size, cache)
    rows = [
        row(f"{name}: all-reduces of a layer, most", max(counts), at_most=2),
        row(f"{name}: all-reduces of a layer, least", min(counts)),
        row(f"{name}: elements gathered at once / of logits or a layer's cache", gathered / least, at_most=0.1),
    ]
    for kind, those in sorted(by_kind.items()):
        kilobytes = sum(one.num_bytes for one in those) / 1e3
        rows.append(row(f"{name}: {kind}, {len(those)}, together", kilobytes, "kB"))
    return rows
