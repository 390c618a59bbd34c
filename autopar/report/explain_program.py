"""Explain a plan of one program in text and tables, from the `Plan` alone.

In: a plan, fresh or from a file. Out: `explain_program(plan)`, an `Explanation` that prints as plain text;
`render_program(plan, console)` for a terminal; `program_json(plan)` for other programs. Rows that differ only in a
layer number share a row: `h_{0..11}/attn/kernel`, x12.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from autopar.plans.plan import Plan
from autopar.report.breakdown import (
    SIMULATED_TEXT,
    MemoryUse,
    StepTime,
    efficiency_text,
    memory_use,
    number_of_devices,
    replicated_text,
    simulated_text,
    step_time,
    tie_text,
)
from autopar.report.considered import considered_json, considered_section
from autopar.report.module_tree import ModuleTree, module_tree
from autopar.report.rows import (
    CollectiveRow,
    Span,
    StateRow,
    TensorRow,
    largest_first,
    merge_collectives,
    merge_state,
    merge_tensors,
    of_activation,
    of_input,
)
from autopar.report.step_perfetto import write_step
from autopar.system.name_patterns import collapse
from autopar.system.text_tables import (
    bars,
    facts_table,
    finite,
    inset,
    new_table,
    notes_section,
    plain_text,
    section,
    share_text,
    short_source,
)
from autopar.system.units import human_bytes, human_seconds

#: The length above which a path is broken after a slash.
PATH_WIDTH = 30
#: The most rows of an unbounded table; the JSON has all.
MAX_ROWS = 16
#: The number of rematerialized modules that are named; the JSON has all.
MAX_NAMED = 4
_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_LEGEND = (
    "How to read it: P('data', None) shards dim 0 of a tensor over the mesh axis `data` and leaves dim 1 whole;"
    " P() keeps a copy on every device. `cost` is the time of one tensor's sharding in a step: its own kernel and the"
    " collectives next to it. `runner-up` is the next best sharding of this tensor, with all others fixed, and the time"
    " that it would add to the step. A `-` marks a tensor too small for a decision. Identical layers share a row:"
    " `h_{0..11}/kernel` x12."
)


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """An explanation of a plan as values, which every report reads. It prints as plain text of `TEXT_WIDTH` columns."""

    plan: Plan
    parameters: tuple[TensorRow, ...]
    optimizer: tuple[StateRow, ...]
    data: tuple[TensorRow, ...]
    activations: tuple[TensorRow, ...]
    collectives: tuple[CollectiveRow, ...]
    time: StepTime
    memory: MemoryUse
    modules: ModuleTree

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of a device as a trace for Perfetto; the path ends in `.json`.

        Raises:
            PlotError: the file cannot be written, or the plan's file is too old to have a timeline.
        """
        write_step(path, self.plan)

    @property
    def summary(self) -> str:
        """The head of the report: strategy, certainty, step time and peak memory."""
        return plain_text(lambda console: render_program_summary(self.plan, console))

    def __str__(self) -> str:
        return plain_text(lambda console: _print(self, console))

    __repr__ = __str__


def explain_program(plan: Plan) -> Explanation:
    """Explain what a plan does and why: `print(autopar.explain(plan))`."""
    decisions = {decision.path: decision for decision in plan.decisions if decision.kind != "activation"}
    inputs = [(tensor, of_input(plan, tensor, decisions.get(tensor.path))) for tensor in plan.inputs]
    activations = [of_activation(plan, decision) for decision in plan.decisions if decision.kind == "activation"]
    return Explanation(
        plan=plan,
        parameters=merge_tensors([row for tensor, row in inputs if tensor.role == "parameter"]),
        optimizer=merge_state(plan, [tensor for tensor in plan.inputs if tensor.role == "optimizer"]),
        data=merge_tensors([row for tensor, row in inputs if tensor.role == "data"]),
        activations=largest_first(merge_tensors(activations)),
        collectives=merge_collectives(plan.collectives),
        time=step_time(plan),
        memory=memory_use(plan),
        modules=module_tree(plan),
    )


def render_program(plan: Plan, console: Console) -> None:
    """Print the explanation to a console, with styles if it supports them."""
    _print(explain_program(plan), console)


def render_program_summary(plan: Plan, console: Console) -> None:
    """Print the summary: strategy, certainty, step time, memory."""
    console.print(Group(*_head(plan), *_totals(plan), *considered_section(plan.considered), *_closing(plan)))


def program_json(plan: Plan) -> dict[str, Any]:
    """The explanation as JSON types: every row, seconds and bytes as numbers, infinite ones as null."""
    explained = explain_program(plan)
    tables = ("parameters", "optimizer", "data", "activations", "collectives")
    rows = {name: getattr(explained, name) for name in tables}
    document = {
        "format": "autopar-explanation",
        "version": 2,
        "program": plan.program.name,
        "mesh": plan.mesh.size_of,
        "available_devices": plan.available_devices or plan.num_devices,
        "hardware": plan.hardware,
        "strategy": plan.strategy,
        "memory_budget_bytes": plan.memory_budget_bytes,
        "prediction": {**asdict(plan.prediction), "peak_bytes": plan.prediction.peak_bytes},
        "step_time": asdict(explained.time),
        "memory": asdict(explained.memory),
        "efficiency": asdict(plan.efficiency) if plan.efficiency else None,
        "outcome": asdict(plan.outcome),
        "microbatches": asdict(plan.microbatches) if plan.microbatches else None,
        "combine_threshold_bytes": plan.combine_threshold_bytes,
        "prefetched_gathers": plan.prefetched_gathers,
        "early_reductions": sum(len(one.values) for one in plan.early_reductions),
        "unfused_reductions": len(plan.unfused_reductions),
        "replicated": [asdict(one) for one in plan.replicated],
        "tie": {**asdict(plan.tie), "mesh": plan.tie.mesh.describe()} if plan.tie else None,
        **{name: [_row_json(row) for row in table] for name, table in rows.items()},
        "rejected": [{**asdict(other), "mesh": other.mesh.describe()} for other in plan.rejected],
        "considered": considered_json(plan.considered),
        "regions": [asdict(region) for region in plan.regions],
        "rematerialized": [
            {
                "path": one.path,
                "num_nodes": len(one.segment.nodes),
                "saved_bytes": one.saved_bytes,
                "time_s": one.time_s,
            }
            for one in plan.rematerialized
        ],
        "notes": plan.notes,
        "pins": plan.pins,
        "versions": plan.versions,
    }
    return finite(document)


def _row_json(row: TensorRow | StateRow | CollectiveRow) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "split"}


# Every text below is a `Text`, because rich would read markup in a user's paths and types.


def _print(explained: Explanation, console: Console) -> None:
    plan = explained.plan
    console.print(Group(*_head(plan), *_totals(plan), Text(_LEGEND, "dim"), Text()))
    for title, rows in (("Parameters", explained.parameters), ("Data and other arguments", explained.data)):
        console.print(Group(*_tensor_section(title, rows)))
    console.print(Group(*_state_section(explained.optimizer), *_activation_section(explained.activations)))
    console.print(Group(*_collective_section(explained.collectives), *_rejected_section(plan), *_closing(plan)))


def _head(plan: Plan) -> list[RenderableType]:
    outcome = plan.outcome
    replicated, tie = replicated_text(plan), tie_text(plan)
    if outcome.gap <= 1e-6:
        same = " with the same rematerialization" if plan.rematerialized else ""
        among = " among the strategies of the known sharding rules" if replicated else ""
        sure = f"proven optimal{among}: in the solver's model none{same} is faster by more than one part in a million"
    elif plan.tie is not None:
        sure = f"within {100 * outcome.gap:.2g} % of the optimum, in the solver's model"
    elif math.isfinite(outcome.gap):
        sure = f"within {100 * outcome.gap:.2g} % of the optimum; {outcome.status}"
    else:
        sure = f"not bounded; {outcome.status}"
    size = f"{outcome.num_nodes:,} decisions, {outcome.num_strategies:,} strategies"
    took = "" if outcome.solve_time_s is None else f", solved in {human_seconds(outcome.solve_time_s)}"
    facts = [
        ("Strategy", plan.strategy),
        *([("Replicated", replicated)] if replicated else []),
        ("Certainty", f"{sure} ({size}{took})"),
        *([("Tie", tie)] if tie else []),
        *_microbatches(plan),
        *(("Remat", text) for text in _rematerialized(plan)),
        *(("Combined", text) for text in _combined(plan)),
        *(("Overlap", text) for text in (*_prefetched(plan), *_early_reductions(plan))),
        *(("Fusion", text) for text in _unfused(plan)),
        *(("Pinned", f"{path} = {spec}") for path, spec in plan.pins.items()),
    ]
    devices = "device" if (plan.available_devices or plan.num_devices) == 1 else "devices"
    where = f"{number_of_devices(plan)} {plan.hardware} {devices}, mesh {plan.mesh.describe()}"
    return [Text(f"Plan of `{plan.program.name}` for {where}", "bold"), Text(), facts_table(facts), Text()]


def _microbatches(plan: Plan) -> list[tuple[str, str]]:
    """Gradient accumulation: its cost, and the memory it saves."""
    split = plan.microbatches
    if split is None:
        return []
    each = split.num_examples // split.count
    text = (
        f"gradient accumulation over {split.count} microbatches of {each} examples;"
        f" {split.num_accumulated} accumulators in {human_bytes(split.accumulated_bytes)} per device"
    )
    if split.own_statistics:
        text += "; each microbatch has its own batch statistics, which changes the step slightly"
    for other in split.tried:
        if not math.isfinite(other.step_time_s):
            text += f". With {other.count} nothing fits"
            continue
        saved = other.peak_bytes - plan.prediction.peak_bytes
        slower = plan.prediction.step_time_s / other.step_time_s - 1 if other.step_time_s else 0.0
        remat = " (with rematerialization)" if other.rematerializes else ""
        text += f". Against {other.count}{remat}: {human_bytes(abs(saved))} {'less' if saved >= 0 else 'more'} peak"
        text += f" memory, {100 * slower:+.1f} % step time"
    return [("Microbatches", text)]


def _rematerialized(plan: Plan) -> list[str]:
    """Rematerialized activations: the memory they save, and the time they take."""
    if not plan.rematerialized:
        return []
    saved, seconds = (sum(getattr(one, name) for one in plan.rematerialized) for name in ("saved_bytes", "time_s"))
    named = [pattern for pattern, _ in collapse([one.path for one in plan.rematerialized if one.path])]
    where = ", ".join(f"`{name}`" for name in named[:MAX_NAMED]) or "the step"
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    share = share_text(seconds, plan.prediction.step_time_s)
    effect = f"saves {human_bytes(saved)} per device for {human_seconds(seconds)} ({share} of the step)"
    return [f"{effect}: activations of {where}{more} are rematerialized in the backward pass"]


def _combined(plan: Plan) -> list[str]:
    """The combine threshold, if it is not XLA's default."""
    if plan.combine_threshold_bytes is None:
        return []
    return [f"XLA combines collectives of a kind up to {human_bytes(plan.combine_threshold_bytes)}, for better overlap"]


def _prefetched(plan: Plan) -> list[str]:
    """The number of all-gathers that run one iteration ahead."""
    if not plan.prefetched_gathers:
        return []
    gathers = "all-gather runs" if plan.prefetched_gathers == 1 else "all-gathers run"
    return [
        f"{plan.prefetched_gathers} {gathers} one iteration of a scan ahead: weights of the next layer are gathered during"
        " this one"
    ]


def _early_reductions(plan: Plan) -> list[str]:
    """The number of gradient reductions that barriers start early."""
    if not plan.early_reductions:
        return []
    count, barriers = (
        sum(len(one.values) for one in plan.early_reductions),
        len({one.node for one in plan.early_reductions}),
    )
    return [f"{count} gradient reductions start during the backward pass, by {barriers} barrier{'s' * (barriers > 1)}"]


def _unfused(plan: Plan) -> list[str]:
    """The number of reductions kept out of multi-output fusion."""
    if not plan.unfused_reductions:
        return []
    return [
        f"{len(plan.unfused_reductions)} reductions are kept out of multi-output fusion, which would slow the fused kernels"
    ]


def _totals(plan: Plan) -> list[RenderableType]:
    time, memory = step_time(plan), memory_use(plan)
    peak, budget = memory.peak_bytes, memory.budget_bytes
    of = (
        f"of {human_bytes(budget)} ({share_text(peak, budget)})" if budget else "(no budget given: the device's memory)"
    )
    # A loss and a few metrics are too small for a bar.
    parts = [(name, size) for name, size in memory.parts if name != "outputs" or size > 0.005 * peak]
    simulated, efficiency = simulated_text(plan), efficiency_text(plan)
    return [
        Text(f"Predicted step time: {human_seconds(time.step_time_s)}", "bold"),
        inset(bars(time.parts, time.step_time_s, human_seconds)),
        *([Text(f"{simulated} ({SIMULATED_TEXT})")] if simulated else []),
        *([Text(efficiency)] if efficiency else []),
        Text(),
        Text(f"Predicted peak memory per device: {human_bytes(peak)} {of}", "bold"),
        inset(bars(parts, peak, human_bytes)),
        Text(),
    ]


def _tensor_section(title: str, rows: Sequence[TensorRow]) -> list[RenderableType]:
    whole, local = sum(row.num_bytes for row in rows), sum(row.local_bytes for row in rows)
    count = sum(row.count for row in rows)
    size = f"{count} tensor{'s' * (count > 1)}, {human_bytes(whole)}, {human_bytes(local)} on each device"
    return _tensor_table(f"{title}: {size}", "tensor", rows) if rows else []


def _common_root(paths: Sequence[str]) -> str:
    """The folders that all paths share, with a slash; "" for a single path."""
    if len(paths) < 2:
        return ""
    shared = []
    for parts in zip(*(path.split("/")[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}/" for part in shared)


def _tensor_table(title: str, heading: str, rows: Sequence[TensorRow], left_out: str = "") -> list[RenderableType]:
    root = _common_root([row.path for row in rows])
    table = new_table(heading, "sharding", "cost", "runner-up, collectives caused", right=["cost"])
    for row in rows:
        table.add_row(
            _stacked(row.path[len(root) :], *_details(row)),
            Text(row.sharding + ("\npinned" if row.pinned else ""), "cyan"),
            Text(_span_text(row.cost_s)),
            Text("\n".join(filter(None, (_runner_up(row), *_caused(row))))),
        )
    return section(title + _under(root), table, left_out)


def _under(root: str) -> str:
    return f"; paths under {root}" if root else ""


def _stacked(first: str, *rest: str) -> Text:
    """A line, broken after slashes if it is long, and further lines, indented and dimmed."""
    if len(first) > PATH_WIDTH and " " not in first:
        spaced = textwrap.wrap(first.replace("/", "/ "), PATH_WIDTH + 4, subsequent_indent="  ")
        first = "\n".join(line.replace("/ ", "/") for line in spaced)
    return Text.assemble(first, *((f"\n  {line}", "dim") for line in rest if line))


def _details(row: TensorRow) -> tuple[str, ...]:
    times = f"  x{row.count}" if row.count > 1 else ""
    producer = (f"{row.phase} {row.primitive}", short_source(row.source)) if row.kind == "activation" else ()
    return _type_text(row.dtype, row.shape) + times, *producer


def _runner_up(row: TensorRow) -> str:
    if row.pinned or row.cost_s is None:
        return "" if row.pinned else "-"
    if row.runner_up_extra_s is None:
        return "no other choice"
    others = " or ".join(row.runner_up[:2]) + (" or others" if len(row.runner_up) > 2 else "")
    extra = _span_text(row.runner_up_extra_s)
    return f"{others}: the same" if row.runner_up_extra_s[1] == 0 else f"{others}: +{extra}"


def _caused(row: TensorRow) -> list[str]:
    return [f"{kind} over {', '.join(axes)}: {human_seconds(time_s)}" for kind, axes, time_s in row.collectives]


def _span_text(span: Span | None) -> str:
    if span is None:
        return "-"
    low, high = map(human_seconds, span)
    if span[1] <= 1.02 * span[0] or low == high:
        return low
    return f"{low.split()[0]}-{high}" if low.split()[1] == high.split()[1] else f"{low} - {high}"


def _state_section(rows: Sequence[StateRow]) -> list[RenderableType]:
    if not rows:
        return []
    root = _common_root([row.example for row in rows])
    numbers = ["tensors", "global", "per device"]
    table = new_table("sharding", *numbers, "the largest", right=numbers)
    for row in rows:
        sizes = human_bytes(row.num_bytes), human_bytes(row.local_bytes)
        table.add_row(Text(row.sharding, "cyan"), str(row.num_tensors), *sizes, Text(row.example[len(root) :]))
    return section(f"Optimizer state, by sharding{_under(root)}", table)


def _activation_section(rows: Sequence[TensorRow]) -> list[RenderableType]:
    if not rows:
        return []
    shown = rows[:MAX_ROWS]
    left_out = (
        f"and {len(rows) - len(shown)} rows of smaller activations; --json has all" if len(rows) > len(shown) else ""
    )
    return _tensor_table("Large activations, the largest first", "produced by", shown, left_out)


def _collective_section(rows: Sequence[CollectiveRow]) -> list[RenderableType]:
    if not rows:
        return [Text("Collectives: none", "bold"), Text()]
    numbers = ["count", "total time", "total data"]
    table = new_table("collective", *numbers, "cause", right=numbers)
    for row in rows[:MAX_ROWS]:
        where = (row.phase, short_source(row.source))
        path = row.path if row.path and row.path not in row.cause else ""
        table.add_row(
            _stacked(row.kind, f"over {', '.join(row.axes)}"),
            f"{row.count}{'*' if row.combinable else ' '}",
            human_seconds(row.time_s),
            human_bytes(row.num_bytes),
            _stacked(row.cause, path, ", ".join(filter(None, where))),
        )
    rest = rows[MAX_ROWS:]
    rest_s = human_seconds(sum(row.time_s for row in rest))
    more = f"and {len(rest)} more rows, {rest_s}; --json has all" if rest else ""
    star = "* XLA may combine these into fewer" if any(row.combinable for row in rows) else ""
    total = f"{sum(row.count for row in rows)} in a step, {human_seconds(sum(row.time_s for row in rows))}"
    left_out = "\n".join(filter(None, (more, star)))
    return section(f"Collectives: {total}; data per device", table, left_out)


def _rejected_section(plan: Plan) -> list[RenderableType]:
    if plan.considered or not plan.rejected:
        return considered_section(plan.considered)
    table = new_table("mesh", "predicted step", "peak memory", "strategy", right=["predicted step", "peak memory"])
    for other in sorted(plan.rejected, key=lambda other: other.step_time_s):
        slower = other.step_time_s / plan.prediction.step_time_s - 1 if plan.prediction.step_time_s else math.inf
        fits = math.isfinite(other.step_time_s)
        price = f"{human_seconds(other.step_time_s)}, {100 * slower:+.1f} %" if fits else "does not fit"
        peak = human_bytes(other.peak_bytes) if math.isfinite(other.peak_bytes) else "-"
        table.add_row(Text(other.mesh.describe()), price, peak, Text(other.strategy))
    return section("Other meshes, planned and rejected", table)


def _closing(plan: Plan) -> list[RenderableType]:
    return notes_section([*plan.notes, *_regions_note(plan)])


def _regions_note(plan: Plan) -> list[str]:
    """A note on all nodes that run as manual regions."""
    if not plan.regions:
        return []
    counts = Counter(region.primitive for region in plan.regions)
    named = ", ".join(f"`{name}`" + (f" x{count}" if count > 1 else "") for name, count in sorted(counts.items()))
    return [f"{named}: run under `jax.shard_map`, because XLA's partitioner would not shard them this way."]


def _type_text(dtype: str, shape: tuple[int, ...]) -> str:
    """A type such as `f32[768,3072]`, as in JAX's printouts."""
    match = re.fullmatch(r"([a-z]+)(\d.*)", dtype)
    short = _DTYPES.get(match[1], match[1]) + match[2] if match else dtype
    return f"{short}[{','.join(map(str, shape))}]"
