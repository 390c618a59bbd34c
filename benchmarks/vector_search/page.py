"""Render the head of the results' page, its tables, and the plot of recall and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.page_parts import Row, cell, descriptions, plot

PICTURE = Path(__file__).parents[1] / "results" / "vector_search.svg"
#: Parts whose rows are points of a curve, in the order of drawing.
CURVES = ("ivf", "pq", "graph")
_MARKS = {"ivf": "o", "pq": "s", "graph": "^"}


def summary(rows: Sequence[Row]) -> str:
    """Each part's description, its gates with their results, and the plot."""
    parts = descriptions(Path(__file__).parent)
    gates = [row for row in rows if row["gate"] != ""]
    if gates:
        parts.append(_gates(gates))
    if any(row.get("part") in CURVES for row in rows):
        parts.append(f"![Recall and queries per second of every method, one picture for each data set]({PICTURE.name})")
    return "\n\n".join(parts)


def _gates(rows: Sequence[Row]) -> str:
    lines = [
        "| part | method | setting | recall | beside | gate | met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        part = f"{row['part']}: {row['data']}" if "part" in row else f"exact: batch {row['batch']}"
        ratio = row.get("beside", row.get("times_faiss"))
        cells = (part, row["method"], row.get("setting", ""), row["recall"], ratio, row["gate"], row["met"])
        lines.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join(lines)


def page_table(rows: Sequence[Row]) -> str:
    """All columns except those in the part's name."""
    columns = [column for column in rows[0] if column not in ("part", "data")]
    lines = [columns, ["---"] * len(columns), *([cell(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def publish(rows: Sequence[Row], about: str) -> None:
    """Draw the plot."""
    plot([row for row in rows if row.get("part") in CURVES and row["queries_per_s"] != ""], PICTURE, draw)


def draw(points: Sequence[Row], path: Path) -> None:
    """Recall on the x axis, queries per second on the y axis, a line per method; a panel per data set."""
    import matplotlib
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(row["data"] for row in points))
    methods = list(dict.fromkeys(row["method"] for row in points))
    # equal rows make an equal file
    with matplotlib.rc_context({"svg.hashsalt": "autopar", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(4.2 * len(sets), 4.4), layout="constrained")
        panels = figure.subplots(1, len(sets), squeeze=False)[0]
        for panel, name in zip(panels, sets, strict=True):
            for number, method in enumerate(methods):
                curve = sorted(
                    (row["recall"], row["queries_per_s"], row["part"])
                    for row in points
                    if (row["data"], row["method"]) == (name, method)
                )
                if not curve:
                    continue
                recalls, speeds, parts = zip(*curve, strict=True)
                own = method.startswith("autopar")
                panel.plot(
                    recalls,
                    speeds,
                    marker=_MARKS[parts[0]],
                    markersize=4,
                    color=f"C{number % 10}",
                    linewidth=2.0 if own else 1.0,
                    linestyle="-" if own else "--",
                    label=method,
                )
            count = next(row["vectors"] for row in points if row["data"] == name)
            panel.set(title=f"{name}, {count:,} vectors", xlabel="recall@10", yscale="log")
            panel.grid(visible=True, which="both", alpha=0.25)
        panels[0].set_ylabel("queries/s, in batches")
        handles = {
            text: line for panel in panels for line, text in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
