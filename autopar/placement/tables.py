"""Render an estimate of serving many models as console tables and as JSON, and read placements back.

In: `ServingEstimate`. Out: tables on a console; JSON types.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from autopar.errors import PlacementError
from autopar.placement.change import Running, first_devices
from autopar.placement.cost_of_change import ChangeCost
from autopar.placement.estimate_serving import ServingEstimate
from autopar.placement.expected import Demand
from autopar.placement.layouts import Layout
from autopar.placement.placements import Group, ModelSpec, Placement, by_name, least_bytes
from autopar.system.text_tables import finite, new_table, section
from autopar.system.units import human_bytes, human_seconds

_FORMAT = "autopar-placement"
_GROUPS = (
    "A group runs all its models on all its devices. `busy`: the share of the time for which its slowest stage computes."
    " `memory`: of one device, with the weights and a cache for one sequence of each model; the caches get the rest of {room}."
)
_MODELS = (
    "`within bounds`: the share of requests that meet the model's bounds. `TTFT` and `latency`: to the first and the last token,"
    " median and 99th percentile of the requests that were served."
)
_NEIGHBOURS = "The best placement found on each number of devices. `used`: devices of groups that run a model."


def render_serving(estimate: ServingEstimate, console: Console) -> None:
    """Print the tables on a console."""
    found, trace = estimate.found, estimate.trace
    console.print(Text(headline(estimate), "bold"), "", sep="\n")
    groups = new_table("devices", "layout", "models", "busy", "memory", right=("busy", "memory"))
    specs = by_name(estimate.models)
    for number, group in enumerate(found.placement.groups):
        busy = f"{100 * found.outcome.busy[number]:.0f} %"
        cells = (devices_text(found.firsts[number], group.layout), group.layout.describe(), ", ".join(group.models))
        groups.add_row(*map(Text, (*cells, busy, human_bytes(least_bytes(group, specs)))))
    console.print(*section("Groups", groups, _GROUPS.format(room=human_bytes(estimate.budget_bytes))), sep="\n")
    numbers = ("requests", "per s", "within bounds", "TTFT", "99 %", "latency", "99 %")
    models = new_table("model", *numbers, "bounds", right=numbers)
    for row in _model_rows(estimate):
        models.add_row(*map(Text, row))
    console.print(*section("Models", models, _MODELS), sep="\n")
    table = new_table("devices", "within bounds", "used", "", right=("devices", "within bounds", "used"))
    for num, each in _neighbours(estimate):
        mark = "*" if num == estimate.num_devices else ""
        if each is None:
            table.add_row(*map(Text, (str(num), "-", "-", "does not fit")))
        else:
            share = f"{100 * each.outcome.goodput:.1f} %"
            table.add_row(*map(Text, (str(num), share, str(each.placement.num_devices), mark)))
    if estimate.fewer is not None or estimate.more is not None:
        console.print(*section("One device more or less", table, _NEIGHBOURS), sep="\n")
    for note in notes(estimate):
        console.print(Text(f"  {note}"))
    if estimate.change is not None:
        console.print(Text(f"  {change_text(estimate.change)}"))
    loaded = f"{human_bytes(found.load_bytes)} of weights are loaded"
    console.print(
        Text(f"  {loaded}. {found.num_placements:,} placements were compared on {trace.num_requests:,} requests.")
    )


def notes(estimate: ServingEstimate) -> list[str]:
    """Why no placement can serve some requests."""
    specs, trace, found = by_name(estimate.models), estimate.trace, list[str]()
    needs = Demand(specs, trace).needs
    for name, spec in specs.items():
        own = trace.model == (trace.models.index(name) if name in trace.models else -1)
        longest = max((times.options.max_length for times in spec.times.values()), default=0)
        too_long = int((trace.prompt_tokens[own] + trace.output_tokens[own] > longest).sum())
        if too_long:
            found.append(f"{name}: {too_long} of {int(own.sum())} requests have more than {longest:,} tokens.")
        elif own.any() and not any(needs[name, layout].on_time for layout in spec.times):
            found.append(f"{name}: no layout meets the bounds, even for a request that is alone.")
    return found


def change_text(change: ChangeCost) -> str:
    """The cost and the gain of a change in one sentence."""
    before = f"What runs now has {100 * change.goodput_before:.1f} % of requests within bounds"
    if not change.seconds and not change.lost:
        return f"{before}."
    costs = f"the change takes {human_seconds(change.seconds)} and at most {change.lost:.0f} requests"
    if math.isinf(change.pays_after_s):
        return f"{before}; {costs}, and brings none."
    return f"{before}; {costs}, and has paid after {human_seconds(change.pays_after_s)}."


def headline(estimate: ServingEstimate) -> str:
    """The result in one sentence."""
    found = estimate.found
    return (
        f"{len(estimate.models)} model{'s' * (len(estimate.models) > 1)} on {estimate.num_devices} {estimate.profile.name}"
        f" device{'s' * (estimate.num_devices > 1)}: {100 * found.outcome.goodput:.1f} % of requests within their bounds on"
        f" {found.placement.num_devices} of them, predicted"
    )


def devices_text(first: int, layout: Layout) -> str:
    """
    >>> devices_text(4, Layout(2)), devices_text(3, Layout())
    ('4-5', '3')
    """
    last = first + layout.num_devices - 1
    return str(first) if last == first else f"{first}-{last}"


def _model_rows(estimate: ServingEstimate) -> list[tuple[str, ...]]:
    outcome, trace, rows = estimate.found.outcome, estimate.trace, list[tuple[str, ...]]()
    attainment, rates = outcome.attainment(), trace.rates_per_s()
    for model in estimate.models:
        if model.name not in rates:
            rows.append((model.name, "0", "0", *["-"] * 5, _bounds(model)))
            continue
        own = trace.model == trace.models.index(model.name)
        share = attainment[model.name]
        cells = [str(int(own.sum())), f"{rates[model.name]:.3g}", "-" if math.isnan(share) else f"{100 * share:.1f} %"]
        for seconds in (outcome.ttft_s[own], outcome.latency_s[own]):
            served = seconds[~np.isnan(seconds)]
            cells += [human_seconds(float(np.percentile(served, p))) if served.size else "-" for p in (50, 99)]
        rows.append((model.name, *cells, _bounds(model)))
    return rows


def _bounds(model: ModelSpec) -> str:
    named = {"latency": model.slo.latency_s, "TTFT": model.slo.ttft_s, "TPOT": model.slo.tpot_s}
    return ", ".join(f"{name} {human_seconds(bound)}" for name, bound in named.items() if math.isfinite(bound))


def _neighbours(estimate: ServingEstimate) -> list[tuple[int, Any]]:
    num = estimate.num_devices
    found = [(num - 1, estimate.fewer), (num, estimate.found), (num + 1, estimate.more)]
    return [(number, each) for number, each in found if number > 0]


def serving_json(estimate: ServingEstimate) -> dict[str, Any]:
    """The estimate as JSON types, in seconds and bytes."""
    found, outcome = estimate.found, estimate.found.outcome
    return finite(
        {
            **placement_json(found.placement, found.firsts),
            "hardware": estimate.profile.name,
            "num_devices": estimate.num_devices,
            "goodput": outcome.goodput,
            "attainment": outcome.attainment(),
            "busy": list(outcome.busy),
            "load_bytes": found.load_bytes,
            "change": None if estimate.change is None else _change_json(estimate.change),
            "notes": notes(estimate),
            "num_placements": found.num_placements,
            "neighbours": {
                str(num): None
                if each is None
                else {"goodput": each.outcome.goodput, "used": each.placement.num_devices}
                for num, each in _neighbours(estimate)
            },
        }
    )


def _change_json(change: ChangeCost) -> dict[str, Any]:
    return {
        "goodput_before": change.goodput_before,
        "seconds": change.seconds,
        "lost_requests": change.lost,
        "gain_per_s": change.gain_per_s,
        "pays_after_s": change.pays_after_s,
    }


def placement_json(placement: Placement, firsts: Mapping[int, int]) -> dict[str, Any]:
    """A placement as JSON types: for each group its devices, layout and models."""
    groups = [
        {"first_device": firsts[number], **group.layout._asdict(), "models": list(group.models)}
        for number, group in enumerate(placement.groups)
    ]
    return {"format": _FORMAT, "version": 1, "groups": groups}


def read_placement(path: str | os.PathLike[str]) -> Running:
    """Read a placement that `autopar estimate serving -o` wrote.

    Raises:
        PlacementError: the file cannot be read or is no placement.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["version"] != 1:
            raise ValueError(f"the format is {content['format']!r}, version {content['version']!r}")
        groups = content["groups"]
        running = Running(Placement(tuple(map(_group, groups))), dict(enumerate(map(_first, groups))))
    except OSError as error:
        raise PlacementError(f"the placement {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise PlacementError(f"{path} is no placement ({error}): write one by `autopar estimate serving -o`") from None
    if first_devices(running.placement.groups, running.firsts) is None:
        raise PlacementError(f"{path} is no placement: two of its groups have a device in common")
    return running


def _first(content: dict[str, Any]) -> int:
    first, size = content["first_device"], content["tensor"] * content["pipeline"]
    if not isinstance(first, int) or first < 0 or first % size:
        raise ValueError(f"the first device of a group of {size} is {first!r}")
    return first


def _group(content: dict[str, Any]) -> Group:
    layout, models = Layout(content["tensor"], content["pipeline"]), content["models"]
    if not all(isinstance(each, int) and each > 0 for each in layout) or not all(isinstance(n, str) for n in models):
        raise ValueError(f"a group is {content}")
    return Group(layout, tuple(sorted(models)))
