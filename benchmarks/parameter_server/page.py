"""Render the results: tables of the loss at some times, and the plot of loss over simulated time and over updates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.page_parts import Row, cell, plot

PICTURE = Path(__file__).parents[1] / "results" / "parameter_server.svg"
#: Simulated seconds at which tables have the loss.
MARKS_S = (20.0, 50.0, 100.0, 200.0)
_UNITS = {"digits": "loss", "text": "loss per byte, nats"}


def summary(rows: Sequence[Row]) -> str:
    """The plot."""
    if not any("simulated_s" in row for row in rows):
        return ""
    return f"![Loss over simulated time and over updates under every policy]({PICTURE.name})"


def page_table(rows: Sequence[Row]) -> str:
    """A row for each policy and a column for each of `MARKS_S`; other parts have all columns."""
    if "simulated_s" not in rows[0]:
        lines = [
            [*rows[0]],
            ["---"] * len(rows[0]),
            *([cell(row.get(column, "")) for column in rows[0]] for row in rows),
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    head = ["policy", "rate", "updates in 200 s", *(f"loss at {mark:.0f} s" for mark in MARKS_S)]
    lines = [head, ["---"] * len(head)]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {row["simulated_s"]: row for row in rows if row["policy"] == policy}
        last = own[MARKS_S[-1]]
        lines.append([policy, *map(cell, (last["rate"], last["updates"], *(own[mark]["loss"] for mark in MARKS_S)))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(rows: Sequence[Row], about: str) -> None:
    """Draw the plot."""
    plot([row for row in rows if "simulated_s" in row], PICTURE, draw)


def draw(points: Sequence[Row], path: Path) -> None:
    """A row of panels per task: loss over simulated seconds, and over updates; a line per policy."""
    import matplotlib
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in points))
    policies = list(dict.fromkeys(row["policy"] for row in points))
    # equal rows make an equal file
    with matplotlib.rc_context({"svg.hashsalt": "autopar", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(8.4, 3.4 * len(tasks) + 0.6), layout="constrained")
        grid = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
        for panels, task in zip(grid, tasks, strict=True):
            for panel, column in zip(panels, ("simulated_s", "updates"), strict=True):
                for number, policy in enumerate(policies):
                    own = [row for row in points if (row["task"], row["policy"]) == (task, policy)]
                    style = ("-", "--", ":")[0 if number < 5 else 1 if number < 8 else 2]
                    panel.plot(
                        [row[column] for row in own],
                        [row["loss"] for row in own],
                        color=f"C{number % 10}",
                        linestyle=style,
                        linewidth=1.2,
                        label=policy,
                    )
                panel.set(
                    yscale="log", xlabel="simulated seconds" if column == "simulated_s" else "workers' updates applied"
                )
                for axis_of_ticks in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
                    axis_of_ticks("{x:g}")
                panel.grid(visible=True, which="both", alpha=0.25)
            panels[0].set(ylabel=_UNITS.get(task, "loss"), title=task)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
