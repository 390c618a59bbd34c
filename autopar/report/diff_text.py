"""Print the differences between two plans.

In: a `PlanDiff`. Out: tables on a console: the figures of both plans, then the tensors whose sharding differs. Tensors
whose paths differ only in a layer number share a row.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.sharding import TensorSharding
from autopar.pipeline.plan import AnyPlan, PipelinePlan, PipelinePrediction
from autopar.plans.plan import Plan
from autopar.report.breakdown import number_of_devices
from autopar.system.name_patterns import collapse
from autopar.system.text_tables import inset, short_source
from autopar.system.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from autopar.report.diff import PlanDiff

#: The most rows of tensors and of activations; the JSON has all.
MAX_ROWS = 24
#: The length above which a path is broken after a slash.
PATH_WIDTH = 30


# Every text is a `Text`, because rich would read markup in a user's paths.


def render_diff(found: PlanDiff, console: Console) -> None:
    """Print the differences to a console, with styles if it supports them."""
    name, other = found.before.program.name, found.after.program.name
    of = f"`{name}`" if name == other else f"`{name}` and `{other}`"
    console.print(Text(f"Two plans of {of}", "bold"), Text(), inset(_sides(found.before, found.after)), Text())
    console.print(Text("State: " + found.summary.removeprefix("mesh "), "bold"), Text())
    console.print(Group(*_state_section(found), *_data_section(found), *_activation_section(found), *_unlike(found)))


def _sides(before: AnyPlan, after: AnyPlan) -> Table:
    """The figures of both plans, in two columns."""
    table = _table("", "first", "second", "", right=[])
    plans = (before, after)
    table.add_row("devices", *(Text(f"{number_of_devices(plan)} {plan.hardware}") for plan in plans), "")
    table.add_row("mesh", *(Text(_mesh(plan)) for plan in plans), "")
    table.add_row("strategy", *(Text(plan.strategy) for plan in plans), "")
    counts = [plan.num_microbatches for plan in plans]
    if set(counts) != {1}:
        table.add_row("microbatches", *map(str, counts), "")
    remat = [sum(one.time_s for program in _programs(plan) for one in program.rematerialized) for plan in plans]
    if any(remat):
        table.add_row("rematerialization", *map(human_seconds, remat), "")
    for name, values in _seconds(before, after):
        table.add_row(Text(name), *map(human_seconds, values), _percent(*values))
    for name, sizes in _bytes(before, after):
        table.add_row(Text(name), *map(human_bytes, sizes), _percent(*sizes))
    return table


def _seconds(before: AnyPlan, after: AnyPlan) -> Iterator[tuple[str, tuple[float, float]]]:
    old, new = before.prediction, after.prediction
    yield "step time", (old.step_time_s, new.step_time_s)
    if isinstance(old, PipelinePrediction) or isinstance(new, PipelinePrediction):
        return
    yield "  compute", (old.compute_s, new.compute_s)
    for kind in sorted({*old.exposed_s, *new.exposed_s}):
        yield f"  {kind}", (old.exposed_s.get(kind, 0.0), new.exposed_s.get(kind, 0.0))


def _bytes(before: AnyPlan, after: AnyPlan) -> Iterator[tuple[str, tuple[float, float]]]:
    old, new = before.prediction, after.prediction
    yield "peak memory", (old.peak_bytes, new.peak_bytes)
    if isinstance(old, PipelinePrediction) or isinstance(new, PipelinePrediction):
        return
    for name in ("parameter", "optimizer", "data", "temporary", "output"):
        sizes = getattr(old, f"{name}_bytes"), getattr(new, f"{name}_bytes")
        if max(sizes) > 0.005 * max(old.peak_bytes, new.peak_bytes):
            yield f"  {name}", sizes


def _mesh(plan: AnyPlan) -> str:
    if isinstance(plan, PipelinePlan):
        return "\n".join(f"stage {n}: {stage.plan.mesh.describe()}" for n, stage in enumerate(plan.stages))
    return plan.mesh.describe()


def _programs(plan: AnyPlan) -> list[Plan]:
    return [stage.plan for stage in plan.stages] if isinstance(plan, PipelinePlan) else [plan]


def _percent(before: float, after: float) -> str:
    if not before or not math.isfinite(before) or not math.isfinite(after):
        return ""
    return f"{100 * (after / before - 1):+.0f} %" if round(100 * (after / before - 1)) else "same"


def _state_section(found: PlanDiff) -> list[RenderableType]:
    if not found.state:
        return []
    numbers = ["held", "to fetch", "to fetch, total"]
    rows = _merged(found.state)
    root = _common_root([path for path, _ in rows])
    table = _table(f"tensor, under {root}" if root else "tensor", "first -> second", *numbers, right=numbers)
    for path, group in rows[:MAX_ROWS]:
        first = group[0]
        table.add_row(
            _name(path[len(root) :], len(group)),
            Text(_from_to(first.before, first.after), "cyan"),
            human_bytes(sum(one.local_bytes for one in group)),
            human_bytes(sum(one.fetched_bytes for one in group)),
            human_bytes(sum(one.total_fetched_bytes for one in group)),
        )
    kept = found.num_state - len(found.state)
    lines = [_rest(len(rows))] if len(rows) > MAX_ROWS else []
    lines += [f"{kept} more tensors keep their sharding"] if kept else []
    legend = (
        "`held`: bytes of these tensors on a device in the second plan, which a restore reads. `to fetch`: the part of these"
        " bytes that the device does not have in the first plan, for the device with the largest part. Device n of one mesh"
        " is device n of the other."
    )
    under = [inset(Text("\n".join(lines), "dim"))] if lines else []
    return [inset(table), *under, Text(), Text(legend, "dim"), Text()]


def _data_section(found: PlanDiff) -> list[RenderableType]:
    if not found.data:
        return []
    table = _table("argument", "first -> second", right=[])
    for path, group in _merged(found.data):
        table.add_row(_name(path, len(group)), Text(_from_to(group[0].before, group[0].after), "cyan"))
    return [Text("Data and other arguments, fed at each step", "bold"), Text(), inset(table), Text()]


def _activation_section(found: PlanDiff) -> list[RenderableType]:
    if not found.activations:
        return []
    title = f"{len(found.activations)} of {found.num_activations} activations change sharding"
    table = _table("produced by", "first -> second", "where", right=[])
    rows = _merged(found.activations)
    for path, group in rows[:MAX_ROWS]:
        first = group[0]
        where = f"{first.phase} {first.primitive}\n{short_source(first.source)}".strip()
        table.add_row(
            _name(path or "the step", len(group)), Text(_from_to(first.before, first.after), "cyan"), Text(where, "dim")
        )
    rest = [inset(Text(_rest(len(rows)), "dim"))] if len(rows) > MAX_ROWS else []
    return [Text(title, "bold"), Text(), inset(table), *rest, Text()]


def _unlike(found: PlanDiff) -> list[RenderableType]:
    if not found.unlike:
        return []
    lines = list(found.unlike[:MAX_ROWS])
    lines += [_rest(len(found.unlike))] if len(found.unlike) > MAX_ROWS else []
    return [Text("Not in both plans", "bold"), inset(Text("\n".join(lines)))]


def _merged(changes: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """Merge changes whose paths differ only in numbers into one row."""
    families: dict[Any, list[Any]] = defaultdict(list)
    for change in changes:
        key = (change.shape, change.dtype, str(change.before), str(change.after), getattr(change, "primitive", ""))
        families[key, getattr(change, "phase", "")].append(change)
    return [
        (path, [family[position] for position in positions])
        for family in families.values()
        for path, positions in collapse([change.path for change in family])
    ]


def _common_root(paths: Sequence[str]) -> str:
    """The first folder if all paths share it: the step's argument."""
    roots = {path.split("/", 1)[0] for path in paths if "/" in path}
    return f"{roots.pop()}/" if len(roots) == 1 and all("/" in path for path in paths) else ""


def _name(path: str, count: int) -> Text:
    """A path, broken after slashes if long."""
    times = f"  x{count}" if count > 1 else ""
    if len(path) > PATH_WIDTH:
        path = "\n  ".join(line.replace("/ ", "/") for line in textwrap.wrap(path.replace("/", "/ "), PATH_WIDTH))
    return Text(path + times)


def _from_to(before: TensorSharding, after: TensorSharding) -> str:
    return f"{before} -> {after}"


def _rest(count: int) -> str:
    return f"and {count - MAX_ROWS} more rows; --json has all"


def _table(*headings: str, right: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table
