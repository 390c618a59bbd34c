"""Compute serving figures from the plans of an engine's programs: TTFT, TPOT, throughput, memory, collectives.

In: a `Layout` of plans, the workload, the hardware. Out: `ReplicaFigures`. The times are predictions of the plans.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from autopar.hardware.profile import HardwareProfile
from autopar.inference.schedule.requests import Shape
from autopar.inference.schedule.steady_state import num_chunks, steady_state
from autopar.inference.serve.layout import Layout, PlanOnly, Served
from autopar.plans.plan import Plan

_LAYER = re.compile(r"\blayers_(\d+)(?=/|\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts:
    """The parts of a decode iteration's time on one device.

    Args:
        memory_s: the time to read the weights, and the pages of all slots at full length, once.
        arithmetic_s: the time of the matmuls with the weights, which overlaps with the reads.
        collectives_s: the exposed time of collectives.
        rest_s: the remaining time of kernels: launches, reads and writes of intermediates, and the copy of pages to
            contiguous arrays.
    """

    memory_s: float
    arithmetic_s: float
    collectives_s: float
    rest_s: float

    @property
    def limit(self) -> str:
        """The name of the largest part."""
        parts = {
            "memory bandwidth": self.memory_s,
            "arithmetic": self.arithmetic_s,
            "collectives": self.collectives_s,
            "kernel launches and intermediates": self.rest_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFigures:
    """The predicted figures of one replica. Bytes are per device.

    Args:
        tpot_s: the time of an iteration in which every slot decodes one token.
        tpot_many_s: the time per token if one call has several decode steps.
        tpot_loaded_s: the average time between two tokens of a sequence in the steady state, prefill chunks included.
        ttft_s: the time to the first token of a prompt that gets a slot at once, with prefill in the longest chunks.
        tokens_per_s: the tokens generated per second in the steady state.
        mixed: the share of iterations with prefill chunks in the steady state.
        num_running: the sequences that run at once: the number of slots, or fewer if the cache has too few pages.
        weight_bytes, cache_bytes: the bytes of weights and of cache.
        temporary_bytes: temporaries and outputs of the program that needs the most.
        peak_bytes: the peak memory of the program that needs the most.
        num_pages, num_tokens: the capacity of the cache in pages and in tokens.
        num_longest: the number of sequences of `max_length` tokens that fit in the cache.
        per_layer: the collectives of a decode iteration per layer, by kind; the average if layers differ.
        outside: the collectives outside of layers, by kind.
    """

    tpot_s: float
    tpot_many_s: float
    tpot_loaded_s: float
    ttft_s: float
    tokens_per_s: float
    mixed: float
    num_running: int
    weight_bytes: float
    cache_bytes: float
    temporary_bytes: float
    peak_bytes: float
    num_pages: int
    num_tokens: int
    num_longest: int
    parts: DecodeParts
    per_layer: Mapping[str, float]
    outside: Mapping[str, int]


def figures_of(
    served: Served, layout: Layout[PlanOnly], prompt: int, output: int, profile: HardwareProfile
) -> ReplicaFigures:
    """Compute the figures of one replica.

    Args:
        prompt, output: the tokens of each prompt and of its output.
    """
    options = served.options
    plans = {key: program.plan for key, program in layout.programs.items()}
    decode, multi_step = plans[Shape()], plans[Shape(steps=options.steps)]
    rows, length = max(options.chunks, key=lambda chunk: chunk[1])
    plain_s, mixed_s = (plans[key].prediction.step_time_s for key in (Shape(), Shape(rows=rows, length=length)))
    pages_each = min(-(-(prompt + output) // served.page_size), served.pages_held)
    num_running = min(options.num_slots, layout.num_pages // pages_each)
    steady = steady_state(options, prompt, output, num_running)
    per_layer, outside = _collectives(decode, served.model.config.num_layers)
    return ReplicaFigures(
        tpot_s=plain_s,
        tpot_many_s=multi_step.prediction.step_time_s / options.steps,
        tpot_loaded_s=steady.iteration_s(plain_s, mixed_s),
        ttft_s=num_chunks(options, prompt) * mixed_s,
        tokens_per_s=steady.tokens_per_s(output, plain_s, mixed_s),
        mixed=steady.mixed,
        num_running=num_running,
        weight_bytes=bytes_of(decode, "params/"),
        cache_bytes=bytes_of(decode, "resident/pages/"),
        temporary_bytes=max(plan.prediction.temporary_bytes + plan.prediction.output_bytes for plan in plans.values()),
        peak_bytes=layout.peak_bytes,
        num_pages=layout.num_pages,
        num_tokens=layout.num_pages * served.page_size,
        num_longest=layout.num_pages // served.pages_held,
        parts=_parts(served, layout, decode, profile),
        per_layer=per_layer,
        outside=outside,
    )


def bytes_of(plan: Plan, prefix: str) -> float:
    """The bytes on one device of the inputs whose path begins with a prefix."""
    return sum(tensor.num_bytes for tensor in plan.inputs if tensor.path.startswith(prefix))


def _parts(served: Served, layout: Layout[PlanOnly], decode: Plan, profile: HardwareProfile) -> DecodeParts:
    lookups = [] if served.model.config.tied else ["/embed/"]  # only one row per token is read of these
    lookups += ["/embed_positions/"]
    weights = [
        tensor
        for tensor in decode.inputs
        if tensor.path.startswith("params/") and not any(name in tensor.path for name in lookups)
    ]
    slots = served.options.num_slots
    pages = slots * served.pages_held * layout.page_bytes
    memory = (sum(tensor.num_bytes for tensor in weights) + pages) / profile.memory_bytes_per_s
    arithmetic, how = 0.0, served.model.config.quantization
    for tensor in weights:
        if tensor.path.endswith("/weight") and len(tensor.shape) > 1:
            packed = how.per_byte if how is not None and tensor.dtype == "uint8" else 1  # 4 bits are packed in bytes
            elements = packed * tensor.sharding.local_size(tensor.shape, decode.mesh)
            arithmetic += 2.0 * slots * elements / profile.matrix_rate(str(jnp.dtype(served.dtype)))
    predicted = decode.prediction
    return DecodeParts(
        memory_s=memory,
        arithmetic_s=arithmetic,
        collectives_s=sum(predicted.exposed_s.values()),
        rest_s=max(0.0, predicted.compute_s - max(memory, arithmetic)),
    )


def _collectives(plan: Plan, num_layers: int) -> tuple[dict[str, float], dict[str, int]]:
    """The collectives of a step by kind: the average per layer, and those outside of layers."""
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for use in plan.collectives:
        (inside if _LAYER.search(use.path) else outside)[use.kind] += use.num_times
    return {kind: count / num_layers for kind, count in sorted(inside.items())}, dict(sorted(outside.items()))
