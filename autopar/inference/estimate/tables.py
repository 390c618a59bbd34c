"""Render the predicted figures of serving as console tables and as JSON.

In: `InferenceOnPaper`. Out: tables on a console; JSON types.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.inference.estimate.estimate import InferenceOnPaper, Replicas
from autopar.inference.estimate.figures import ReplicaFigures
from autopar.inference.estimate.layout_text import describe_layout
from autopar.inference.schedule.requests import Shape
from autopar.plans.plan import Plan
from autopar.report.explain import explain_json
from autopar.system.text_tables import bars, finite, inset, new_table, section, share_text
from autopar.system.units import human_bytes, human_number, human_seconds

_REPLICAS = (
    "A replica is an engine with {batch} slots on its own devices. `TPOT`: the time of a decode step of all slots."
    " `loaded`: the average time between two tokens of a sequence while requests always wait, prefill chunks included."
    " `TTFT`: the time to the first token of a prompt of {prompt:,} tokens that gets a slot at once. `tokens/s`: generated"
    " by all replicas while requests always wait. *: {objective}."
)
_MEMORY = (
    "Bytes per device, of which a plan may use {room}. The cache has {pages:,} pages of {size} tokens: {tokens:,} tokens, or"
    " {longest} sequences of {max_length:,} at once."
)
_PARTS = (
    "`weights and cache read`: one read at memory bandwidth. `arithmetic`: matmuls with the weights, which overlap the read."
    " `collectives`: exposed communication. `the rest`: kernel launches, reads and writes of intermediates, and the copy of"
    " each sequence's pages to contiguous arrays. The largest part is: {limit}. With {steps} decode steps per call, a token"
    " takes {many}."
)


def render_inference(estimate: InferenceOnPaper, console: Console) -> None:
    """Print the tables on a console."""
    case, profile = estimate.case, estimate.profile
    config = case.config
    devices = "device" if estimate.num_devices == 1 else "devices"
    console.print(
        Text(
            f"Inference of a {config.family} model with {_weights_text(estimate)} in {case.dtype} on"
            f" {estimate.num_devices} {profile.name} {devices}, predicted",
            "bold",
        )
    )
    console.print(
        inset(
            Text(
                f"Prompts of {case.prompt:,} tokens, outputs of {case.output:,}, sequences of at most {case.max_length:,}."
                f" {config.num_layers} layers, {config.num_kv_heads} KV heads of {config.head_dim}."
            )
        ),
        "",
    )
    _print_replicas(estimate, console)
    assert estimate.chosen.figures is not None
    assert estimate.chosen.layout is not None
    _print_layout(estimate, estimate.chosen.layout.programs[Shape()].plan, estimate.chosen.figures, console)
    _print_memory(estimate, estimate.chosen.figures, console)
    _print_parts(estimate, estimate.chosen.figures, console)


def _weights_text(estimate: InferenceOnPaper) -> str:
    elements = num_weights(estimate)
    return f"{elements / 1e9:.3g} billion weights" if elements >= 1e9 else f"{elements / 1e6:.3g} million weights"


def num_weights(estimate: InferenceOnPaper) -> int:
    """The number of weights of the model. Those of 4 bits share a byte."""
    layout = estimate.chosen.layout
    assert layout is not None
    inputs = layout.programs[Shape()].plan.inputs
    weights = [tensor for tensor in inputs if tensor.path.startswith("params/")]
    return sum(
        math.prod(tensor.shape) * (2 if tensor.dtype == "uint8" else 1)
        for tensor in weights
        if not tensor.path.endswith(("/scale", "/zero"))
    )


def _print_replicas(estimate: InferenceOnPaper, console: Console) -> None:
    numbers = ("replicas", "TPOT", "loaded", "TTFT", "tokens/s", "peak")
    table = new_table("replicas", "of", *numbers[1:], "", right=numbers)
    for one in estimate.options:
        mark = " *" if one is estimate.chosen else ""
        left = (f"{one.num}{mark}", one.mesh.describe())
        if one.figures is None:
            table.add_row(*map(Text, (*left, *["-"] * 5, "does not fit")))
            continue
        figures = one.figures
        seconds = (figures.tpot_s, figures.tpot_loaded_s, figures.ttft_s)
        cells = (*map(human_seconds, seconds), human_number(one.tokens_per_s), human_bytes(figures.peak_bytes))
        table.add_row(*map(Text, (*left, *cells, estimate.verdicts.get(one.num, ""))))
    by = "the shortest TPOT" if estimate.case.objective == "latency" else "most tokens/s"
    legend = _REPLICAS.format(
        batch=estimate.case.batch, prompt=estimate.case.prompt, objective=f"{by}{_bounds(estimate)}"
    )
    console.print(*section("Replicas", table, legend), sep="\n")
    if estimate.missed:
        console.print(inset(Text(estimate.missed[0].upper() + estimate.missed[1:] + ".")), "")
    for one in estimate.options:
        if one.refused:
            console.print(inset(Text(f"{one.num} on {one.mesh.num_devices}: {one.refused}")), "")


def _bounds(estimate: InferenceOnPaper) -> str:
    bounds = {"TTFT": estimate.case.ttft_s, "TPOT": estimate.case.tpot_s}
    given = [f"{name} of at most {human_seconds(bound)}" for name, bound in bounds.items() if math.isfinite(bound)]
    return f" with a {' and a '.join(given)}" if given else ""


def _print_layout(estimate: InferenceOnPaper, decode: Plan, figures: ReplicaFigures, console: Console) -> None:
    table = new_table("tensor", "sharding")
    for row in describe_layout(decode):
        table.add_row(*map(Text, row))
    layers = ", ".join(f"{_times(count)} {kind}" for kind, count in figures.per_layer.items()) or "nothing"
    others = ", ".join(f"{count} {kind}" for kind, count in figures.outside.items()) or "nothing"
    legend = f"Collectives of a decode step: {layers} per layer; {others} outside the layers."
    devices = estimate.chosen.mesh.num_devices
    title = f"Shardings of a replica on {devices} device{'s' * (devices > 1)}"
    console.print(*section(title, table, legend), sep="\n")


def _print_memory(estimate: InferenceOnPaper, figures: ReplicaFigures, console: Console) -> None:
    free = max(0.0, estimate.room_bytes - figures.peak_bytes)
    rows = [
        ("weights", figures.weight_bytes),
        ("cache", figures.cache_bytes),
        ("temporaries", figures.temporary_bytes),
        ("free", free),
    ]
    table = new_table("memory", "bytes", "share", right=("bytes", "share"))
    for name, size in rows:
        table.add_row(*map(Text, (name, human_bytes(size), share_text(size, estimate.room_bytes))))
    legend = _MEMORY.format(
        room=human_bytes(estimate.room_bytes),
        pages=figures.num_pages,
        size=estimate.case.page_size,
        tokens=figures.num_tokens,
        longest=figures.num_longest,
        max_length=estimate.case.max_length,
    )
    console.print(*section("Memory", table, legend), sep="\n")


def _print_parts(estimate: InferenceOnPaper, figures: ReplicaFigures, console: Console) -> None:
    parts = figures.parts
    rows = [
        ("weights and cache read", parts.memory_s),
        ("arithmetic", parts.arithmetic_s),
        ("collectives", parts.collectives_s),
        ("the rest", parts.rest_s),
    ]
    legend = _PARTS.format(
        limit=parts.limit, steps=estimate.case.served.options.steps, many=human_seconds(figures.tpot_many_s)
    )
    table = bars(rows, figures.tpot_s, human_seconds)
    console.print(*section(f"Time of a decode step: {human_seconds(figures.tpot_s)}", table, legend), sep="\n")


def _times(count: float) -> str:
    """
    >>> _times(2.0), _times(1.5)
    ('2', '1.5')
    """
    return f"{count:.3g}"


def inference_json(estimate: InferenceOnPaper) -> dict[str, Any]:
    """The figures as JSON types, in seconds and bytes, with the plan of a decode iteration as `explain` gives it."""
    case, chosen = asdict(estimate.case), estimate.chosen
    assert chosen.layout is not None
    decode = chosen.layout.programs[Shape()].plan
    return finite(
        {
            "format": "autopar-inference-on-paper",
            "version": 1,
            "inference": case,
            "num_weights": num_weights(estimate),
            "hardware": estimate.profile.name,
            "num_devices": estimate.num_devices,
            "room_bytes": estimate.room_bytes,
            "chosen": chosen.num,
            "missed": estimate.missed or None,
            "replicas": [_replicas_json(estimate, one) for one in estimate.options],
            "layout": dict(describe_layout(decode)),
            "plan": explain_json(decode),
        }
    )


def _replicas_json(estimate: InferenceOnPaper, one: Replicas) -> dict[str, Any]:
    figures = asdict(one.figures) | {"limit": one.figures.parts.limit} if one.figures else None
    return {
        "num": one.num,
        "mesh": one.mesh.describe(),
        "tokens_per_s": one.tokens_per_s,
        "refused": one.refused or None,
        "verdict": estimate.verdicts.get(one.num),
        "figures": figures,
    }
