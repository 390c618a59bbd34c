"""What the plans of an engine's programs say of serving: seconds, bytes, sequences, collectives.

In: a `Layout` of plans, the workload, the hardware. Out: `ReplicaFigures`. Seconds are the plans' predictions; nothing is
planned here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost.hardware_profile import HardwareProfile
from autopar.inference.schedule.requests import Shape
from autopar.inference.schedule.steady_state import num_chunks, steady_state
from autopar.inference.serve.layout import Layout, PlanOnly, Served
from autopar.plans.plan import Plan

_LAYER = re.compile(r"\blayers_(\d+)(?=/|\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts:
    """Where the seconds of a decode iteration go, on one device.

    Args:
        memory_s: to read the weights, and the pages of all slots at their longest, once.
        arithmetic_s: products with the weights; beside the reading.
        collectives_s: that nothing hides.
        rest_s: of the kernels' time, what is left: each starts, reads and writes intermediates, and writes pages out
            in a row to read them again.
    """

    memory_s: float
    arithmetic_s: float
    collectives_s: float
    rest_s: float

    @property
    def limit(self) -> str:
        """What takes longest."""
        parts = {
            "memory bandwidth": self.memory_s,
            "arithmetic": self.arithmetic_s,
            "collectives": self.collectives_s,
            "starts of kernels, and intermediates": self.rest_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFigures:
    """One engine on its own devices. Bytes are of one device.

    Args:
        tpot_s: of an iteration in which each slot generates a token; tpot_many_s: for one token of those generated in
            one call. tpot_loaded_s: between two tokens where requests always wait, prompts computed beside included.
        ttft_s: of a prompt that finds a slot at once, computed in the longest chunks beside all other slots.
        tokens_per_s: generated, where requests always wait. mixed: of its iterations, the part with chunks.
        num_running: sequences at once: the slots, or fewer where the cache has no room for as many.
        weight_bytes, cache_bytes, temporary_bytes: the last of the program that needs most.
        num_tokens: that the cache holds. num_longest: sequences of `max_length` that fit at once.
        per_layer: collectives of a decode iteration in a layer, by kind, where all layers have the same; else an average.
        outside: those in no layer, by kind.
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
    """All that is told of one replica.

    Args:
        prompt, output: tokens of each sequence.
    """
    options = served.options
    plans = {key: made.plan for key, made in layout.programs.items()}
    decode, many = plans[Shape()], plans[Shape(steps=options.steps)]
    rows, length = max(options.chunks, key=lambda chunk: chunk[1])
    plain_s, mixed_s = (plans[key].prediction.step_time_s for key in (Shape(), Shape(rows=rows, length=length)))
    pages_each = -(-(prompt + output) // served.page_size)
    num_running = min(options.num_slots, layout.num_pages // pages_each)
    steady = steady_state(options, prompt, output, num_running)
    per_layer, outside = _collectives(decode, served.model.config.num_layers)
    return ReplicaFigures(
        tpot_s=plain_s,
        tpot_many_s=many.prediction.step_time_s / options.steps,
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
        num_longest=layout.num_pages // served.pages_of_sequence,
        parts=_parts(served, layout, decode, profile),
        per_layer=per_layer,
        outside=outside,
    )


def bytes_of(plan: Plan, prefix: str) -> float:
    """Of the inputs whose path begins so, on one device."""
    return sum(tensor.num_bytes for tensor in plan.inputs if tensor.path.startswith(prefix))


def _parts(served: Served, layout: Layout[PlanOnly], decode: Plan, profile: HardwareProfile) -> DecodeParts:
    looked_up = [] if served.model.config.tied else ["/embed/"]  # of these a row for each token is read
    looked_up += ["/embed_positions/"]
    products = [
        tensor
        for tensor in decode.inputs
        if tensor.path.startswith("params/") and not any(name in tensor.path for name in looked_up)
    ]
    slots = served.options.num_slots
    pages = slots * served.pages_of_sequence * layout.page_bytes
    memory = (sum(tensor.num_bytes for tensor in products) + pages) / profile.hbm_bytes_per_s
    arithmetic = 0.0
    for tensor in products:
        if len(tensor.shape) > 1:
            elements = tensor.sharding.local_size(tensor.shape, decode.mesh)
            arithmetic += 2.0 * slots * elements / profile.matrix_rate(tensor.dtype)
    predicted = decode.prediction
    return DecodeParts(
        memory_s=memory,
        arithmetic_s=arithmetic,
        collectives_s=sum(predicted.exposed_s.values()),
        rest_s=max(0.0, predicted.compute_s - max(memory, arithmetic)),
    )


def _collectives(plan: Plan, num_layers: int) -> tuple[dict[str, float], dict[str, int]]:
    """Of a step, by kind: of a layer, and of what is in none."""
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for use in plan.collectives:
        (inside if _LAYER.search(use.path) else outside)[use.kind] += use.num_times
    return {kind: count / num_layers for kind, count in sorted(inside.items())}, dict(sorted(outside.items()))
