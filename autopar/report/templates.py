"""Report on pipelines that survive failures: which node runs which stage before and after, and what is copied.

In: `PipelineTemplates`. Out: `TemplatesExplanation`, which prints as text; JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.pipeline.templates.cover import Change, Nodes
from autopar.pipeline.templates.templates import PipelineTemplates
from autopar.system.text_tables import facts_table, inset, new_table, plain_text
from autopar.system.units import human_bytes, human_seconds

#: Nodes in one row of the picture, and the most copies and paths of one copy that are shown; the JSON has all.
_NODES_IN_ROW, _MOST_COPIES, _MOST_PATHS = 16, 12, 2


@dataclass(frozen=True, slots=True, repr=False)
class TemplatesExplanation:
    """Pipelines over nodes, and after a failure what changed. It prints as plain text."""

    templates: PipelineTemplates

    def __str__(self) -> str:
        return plain_text(lambda console: render_templates(self.templates, console))

    __repr__ = __str__


def render_templates(plan: PipelineTemplates, console: Console) -> None:
    """Print pipelines over nodes to a console."""
    setting, sizes = plan.setting, sorted(plan.templates)
    nodes = f"{plan.num_nodes} nodes of {setting.devices_per_node} x {setting.hardware}"
    left = f", after the failure of {_nodes(plan.failed)}" if plan.failed else ""
    console.print(
        Text.assemble(("Pipelines of ", "bold"), (setting.program, "bold"), f" over {nodes}{left}\n", style="")
    )
    own = " + ".join(str(len(one)) for one in plan.pipelines)
    facts = [
        ("Survives", _survives(plan)),
        ("Templates", f"{sizes[0]} to {sizes[-1]} nodes; {setting.fewest} hold the model"),
        ("Pipelines", f"{own} nodes; the batch of {setting.num_microbatches} microbatches is divided over them"),
        (
            "Step time",
            f"{human_seconds(plan.step_time_s)} predicted: {human_seconds(max(plan.pipeline_s))} of the slowest pipeline,"
            f" {human_seconds(plan.sync_s)} {_sync(plan)}",
        ),
    ]
    console.print(facts_table(facts))
    console.print(inset(_pipelines(plan)))
    console.print(Text("\nStages of the pipelines on each node: A0 is stage 0 of pipeline A; x failed", "bold"))
    for table in _pictures(plan):
        console.print(inset(table))
    if plan.before is not None:
        _render_changes(plan, console)


def _sync(plan: PipelineTemplates) -> str:
    return "to send parameters and gradients" if plan.setting.shares_state else "to add up gradients over pipelines"


def _survives(plan: PipelineTemplates) -> str:
    if plan.setting.shares_state:
        return "what `autopar keep` copies: the state is divided over all nodes once"
    requested, most = plan.setting.requested, plan.survives
    text = "no failure" if not most else "the failure of any node" if most == 1 else f"the failure of any {most} nodes"
    if plan.failed or most >= requested:
        return text
    return (
        f"{text}, not {requested}: that takes {requested + 1} pipelines, {(requested + 1) * plan.setting.fewest} nodes"
    )


def _pipelines(plan: PipelineTemplates) -> Table:
    table = new_table(
        "pipeline", "nodes", "stages", "microbatches", "seconds", right=("stages", "microbatches", "seconds")
    )
    each = zip(plan.numbers, plan.pipelines, plan.microbatches, plan.pipeline_s, strict=True)
    for n, nodes, count, seconds in each:
        stages = {stage for one in plan.templates[len(nodes)].stages for stage in one}
        table.add_row(_letter(n), ", ".join(map(str, nodes)), str(len(stages)), str(count), human_seconds(seconds))
    return table


def _pictures(plan: PipelineTemplates) -> list[Table]:
    """For each node, the stages that it runs, before and after the failure."""
    rows = {"after" if plan.failed else "runs": _on_nodes(plan)}
    if plan.before is not None:
        rows = {"before": _on_nodes(plan.before), **rows}
    nodes = sorted({node for row in rows.values() for node in row})
    found: list[Table] = []
    for first in range(0, len(nodes), _NODES_IN_ROW):
        some = nodes[first : first + _NODES_IN_ROW]
        table = new_table("node", *map(str, some))
        for name, row in rows.items():
            table.add_row(name, *(row.get(node, "x") for node in some))
        found.append(table)
    return found


def _on_nodes(plan: PipelineTemplates) -> dict[int, str]:
    found: dict[int, str] = {}
    for n, nodes in zip(plan.numbers, plan.pipelines, strict=True):
        for node, stages in zip(nodes, plan.templates[len(nodes)].stages, strict=True):
            several = f"{stages[0]}" if len(stages) == 1 else f"{stages[0]}-{stages[-1]}" if stages else "-"
            found[node] = f"{_letter(n)}{several}"
    return found


def _render_changes(plan: PipelineTemplates, console: Console) -> None:
    assert plan.before is not None
    before = dict(zip(plan.before.numbers, plan.before.pipelines, strict=True))
    lines = [_change(change, before) for change in plan.changes]
    total = f"\nCopied: {human_bytes(plan.copied_bytes)} in {human_seconds(plan.copy_s)}, predicted"
    console.print(Text(f"\nWhat changed ({_nodes(plan.failed[len(plan.before.failed) :])} failed)", "bold"))
    for line in lines:
        console.print(inset(Text(line)))
    console.print(Text(total, "bold"))
    if not plan.copies:
        return
    table = new_table("to node", "from node", "bytes", "arrays, or parts of them", right=("bytes",))
    for one in sorted(plan.copies, key=lambda one: -one.num_bytes)[:_MOST_COPIES]:
        more = len(one.paths) - _MOST_PATHS
        paths = ", ".join(one.paths[:_MOST_PATHS]) + (f" and {more} more" if more > 0 else "")
        source = "a checkpoint" if one.source is None else str(one.source)
        table.add_row(str(one.target), source, human_bytes(one.num_bytes), paths)
    console.print(inset(table))
    if len(plan.copies) > _MOST_COPIES:
        console.print(inset(Text(f"and {len(plan.copies) - _MOST_COPIES} smaller ones")))


def _change(change: Change, before: Mapping[int, Nodes]) -> str:
    own = _letter(change.pipeline)
    if change.kind == "lost":
        return f"{own} lost all its {len(before[change.pipeline])} nodes"
    if change.kind == "shrink":
        return f"{own} goes on with the nodes that it has left"
    other = _letter(change.other or 0)
    return (
        f"{own} borrows node {change.node} from {other}" if change.kind == "borrow" else f"{own} is merged into {other}"
    )


def _letter(number: int) -> str:
    """A, B, ..., Z, AA, AB, ...

    >>> _letter(0), _letter(25), _letter(26)
    ('A', 'Z', 'AA')
    """
    before, last = divmod(number, 26)
    return (_letter(before - 1) if before else "") + chr(ord("A") + last)


def _nodes(nodes: tuple[int, ...]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"


def templates_json(plan: PipelineTemplates) -> dict[str, Any]:
    """Pipelines and copies as JSON types: plain seconds and bytes."""
    return {
        "format": "autopar-pipeline-templates",
        "version": 1,
        **asdict(plan.setting),
        "sizes": sorted(plan.templates),
        "survives": plan.survives,
        "step_time_s": plan.step_time_s,
        "pipelines": [
            {
                "number": number,
                "nodes": list(nodes),
                "stages": [list(one) for one in plan.templates[len(nodes)].stages],
                "microbatches": count,
                "seconds": seconds,
            }
            for number, nodes, count, seconds in zip(
                plan.numbers, plan.pipelines, plan.microbatches, plan.pipeline_s, strict=True
            )
        ],
        "failed": list(plan.failed),
        "changes": [asdict(one) for one in plan.changes],
        "copies": [asdict(one) for one in plan.copies],
        "copied_bytes": plan.copied_bytes,
        "copy_s": plan.copy_s,
        "before": None if plan.before is None else templates_json(plan.before),
    }
