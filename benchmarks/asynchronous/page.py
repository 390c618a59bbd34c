"""Render the results: tables without the points of curves, and the plot of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.page_parts import Row, cell, plot

PICTURE = Path(__file__).parents[1] / "results" / "versions.svg"


def summary(rows: Sequence[Row]) -> str:
    """The plot."""
    if not any("update" in row for row in rows):
        return ""
    return f"![Loss under every asynchronous rule, and over the synchronous loss]({PICTURE.name})"


def page_table(rows: Sequence[Row]) -> str:
    """All rows that are no points of a curve."""
    shown = [row for row in rows if "update" not in row]
    lines = [[*shown[0]], ["---"] * len(shown[0]), *([cell(value) for value in row.values()] for row in shown)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(rows: Sequence[Row], about: str) -> None:
    """Draw the plot."""
    plot([row for row in rows if "update" in row], PICTURE, draw)


def draw(points: Sequence[Row], path: Path) -> None:
    """Panels one under another, which a telephone shows too: the loss in most stages, then the loss over the synchronous one in each
    number of stages."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = sorted({(row["stages"], row["microbatches per update"]) for row in points})
    rules = list(dict.fromkeys(row["rule"] for row in points))
    base = {row["update"]: row["loss"] for row in points if row["rule"] == rules[0]}
    # equal rows make an equal file
    with matplotlib.rc_context({"svg.hashsalt": "autopar", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(4.8, 2.5 * (1 + len(settings)) + 0.6), layout="constrained")
        top, *others = figure.subplots(1 + len(settings), 1)
        for panel, setting in ((top, settings[-1]), *zip(others, settings, strict=True)):
            for number, rule in enumerate(rules):
                of = settings[0] if rule == rules[0] else setting
                own = [
                    row for row in points if (row["rule"], row["stages"], row["microbatches per update"]) == (rule, *of)
                ]
                values = [row["loss"] / (1 if panel is top else base[row["update"]]) for row in own]
                style = "--" if rule == rules[0] else "-"
                color = "black" if rule == rules[0] else f"C{number - 1}"
                panel.plot(
                    [row["update"] for row in own], values, color=color, linestyle=style, linewidth=1.2, label=rule
                )
            stages, per_update = setting
            per = "1 microbatch" if per_update == 1 else f"{per_update} microbatches"
            panel.set(title=f"{stages} stages, {per} per update", xlabel="updates")
            panel.title.set_fontsize(9)
            panel.set(ylabel="loss" if panel is top else "over synchronous")
            panel.grid(visible=True, alpha=0.25)
        # All rules run in the first setting.
        handles, labels = others[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
