"""A search on paper, for people and for programs.

In: `SearchOnPaper`. Out: tables on a console; JSON types.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.report.explain import explain_json
from autopar.system.text_tables import finite, inset, new_table, section, share_text
from autopar.system.units import human_bytes, human_number, human_seconds
from autopar.vector_search.estimate.estimate import PlannedBatch, SearchOnPaper

_FITS = (
    "`least`: devices whose memory holds the index, by its bytes alone; `bare`: if all of a device's memory could be"
    " filled. `one query reads`: what a query by itself has to look at in memory; `at most`: queries/s if that alone took"
    " time, which a batch of an exact search shares."
)
_BATCHES = (
    "Predicted by the cost model for the exact search's own program. `sent`: bytes that a device sends for one query;"
    " k candidates of every device, a value and a position each, are {most}."
)
_FEWER = (
    "What does not fit in memory is read from the drives: of an exact index all of it, once for each batch of {batch:,};"
    " of a graph the nodes that a walk of {beam} looks at, of ivfpq the {rerank} vectors to score again (and codes, where"
    " these do not fit), each as a block, and none kept. The drives are those of all devices together."
)


def render_on_paper(told: SearchOnPaper, console: Console) -> None:
    """Print it."""
    case, profile = told.case, told.profile
    devices = "device" if told.num_devices == 1 else "devices"
    console.print(
        Text(
            f"Search of {case.num_vectors:,} vectors, {case.dim} x {case.dtype}, {case.metric}, k = {case.k}, on"
            f" {told.num_devices} {profile.name} {devices}, on paper",
            "bold",
        )
    )
    console.print(
        inset(
            Text(
                f"A plan may fill {human_bytes(told.room_bytes)} of a device; it has {human_bytes(profile.hbm_bytes)}, and"
                f" reads {human_bytes(profile.hbm_bytes_per_s)}/s of it."
            )
        ),
        "",
    )
    _print_indexes(told, console)
    _print_batches(told, console)
    _print_fewer(told, console)
    if any(one.name == "graph" for one in told.indexes):
        _print_blocks(told, console)


def _print_indexes(told: SearchOnPaper, console: Console) -> None:
    parts = new_table("index", "part", "each", "in all", right=("each", "in all"))
    numbers = ("in all", "least", "bare", f"on {told.num_devices}, each", "one query reads", "at most")
    fits = new_table("index", *numbers, right=numbers)
    bandwidth = told.num_devices * told.profile.hbm_bytes_per_s
    for one in told.indexes:
        for part in one.parts:
            row = (one.name if part is one.parts[0] else "", part.name)
            parts.add_row(*map(Text, (*row, human_bytes(part.row_bytes), human_bytes(part.num_bytes))))
        each = one.num_bytes / told.num_devices
        share = share_text(each, told.room_bytes)
        fits.add_row(
            *map(
                Text,
                (
                    one.name,
                    human_bytes(one.num_bytes),
                    str(one.least_devices),
                    str(one.least_bare),
                    f"{human_bytes(each)} ({share})" if each <= told.room_bytes else f"no: {human_bytes(each)}",
                    human_bytes(one.read_bytes),
                    f"{human_number(bandwidth / one.read_bytes)}/s",
                ),
            )
        )
    console.print(*section("What an index holds", parts), sep="\n")
    console.print(*section("What fits", fits, _FITS), sep="\n")


def _print_batches(told: SearchOnPaper, console: Console) -> None:
    numbers = ("time", "queries/s", "peak", "sent")
    table = new_table("batch", "corpus", "queries", "mesh", *numbers, right=("batch", *numbers))
    for one in told.batches:
        mark = " *" if one.batch == told.case.batch else ""
        if one.plan is None:
            table.add_row(f"{one.batch:,}{mark}", *["nothing fits", *["-"] * 6])
            continue
        expected = one.plan.prediction
        table.add_row(
            *map(
                Text,
                (
                    f"{one.batch:,}{mark}",
                    _split(one.corpus_ways),
                    _split(one.queries_ways),
                    str(one.plan.mesh),
                    human_seconds(expected.step_time_s),
                    human_number(one.queries_per_s),
                    human_bytes(expected.peak_bytes),
                    human_bytes(one.sent_bytes),
                ),
            )
        )
    legend = _BATCHES.format(most=human_bytes(told.asked.most_bytes))
    console.print(*section("Exact search, as planned", table, f"{legend} *: the batch asked for."), sep="\n")
    if told.asked.plan is None:
        console.print(inset(Text(f"Nothing fits: {told.asked.refused}")), "")


def _print_fewer(told: SearchOnPaper, console: Console) -> None:
    case = told.case
    speeds = [f"at {human_bytes(speed)}/s" for speed in case.ssd_bytes_per_s]
    numbers = ("devices", "in memory", "on disk", "reads", *speeds)
    table = new_table("index", *numbers, right=numbers)
    for index in told.indexes:
        for one in index.fewer:
            reads = (
                f"{human_bytes(one.reads * case.block_bytes)}" if one.index == "exact" else f"{one.reads:.1f} blocks"
            )
            table.add_row(
                *map(
                    Text,
                    (
                        one.index,
                        str(one.num_devices),
                        human_bytes(one.memory_bytes),
                        human_bytes(one.disk_bytes),
                        reads,
                        *(f"{human_number(speed)}/s" for speed in one.queries_per_s),
                    ),
                )
            )
    if table.row_count:
        legend = _FEWER.format(batch=case.batch, beam=case.beam, rerank=case.rerank)
        console.print(*section("With fewer devices: what stays on disk", table, legend), sep="\n")


def _print_blocks(told: SearchOnPaper, console: Console) -> None:
    case, blocks = told.case, told.blocks
    table = new_table(
        "drives", "blocks/s", "of nodes", "queries/s", right=("drives", "blocks/s", "of nodes", "queries/s")
    )
    for drive in blocks.drives:
        table.add_row(
            *map(
                Text,
                (
                    f"{human_bytes(drive['bytes_per_s'])}/s",
                    human_number(drive["blocks_per_s"]),
                    f"{human_bytes(drive['useful_bytes_per_s'])}/s",
                    human_number(drive["queries_per_s"]),
                ),
            )
        )
    holds = f"{blocks.per_block} to a block" if blocks.per_block else f"{blocks.blocks_per_node} blocks each"
    legend = (
        f"A node is {case.vector_bytes:,} + {case.degree} x {case.list_bytes // case.degree} = {blocks.node_bytes:,} bytes,"
        f" {holds} of {blocks.block_bytes:,}, {human_bytes(blocks.disk_bytes)} in all. To look at one reads"
        f" {blocks.amplification:.1f} times its bytes. A query looks at {case.beam}."
    )
    console.print(*section("A graph's nodes in blocks, all on disk", table, legend), sep="\n")


def _split(ways: int) -> str:
    return "whole" if ways == 1 else f"{ways} parts"


def on_paper_json(told: SearchOnPaper) -> dict[str, Any]:
    """As JSON types: raw seconds and bytes, and the plan of the batch asked for as `explain` gives it."""
    return finite(
        {
            "format": "autopar-search-on-paper",
            "version": 1,
            "search": asdict(told.case),
            "hardware": told.profile.name,
            "num_devices": told.num_devices,
            "room_bytes": told.room_bytes,
            "indexes": [
                asdict(one) | {"parts": [asdict(part) | {"num_bytes": part.num_bytes} for part in one.parts]}
                for one in told.indexes
            ],
            "batches": [_batch_json(one) for one in told.batches],
            "nodes_in_blocks": asdict(told.blocks),
            "plan": None if told.asked.plan is None else explain_json(told.asked.plan),
        }
    )


def _batch_json(one: PlannedBatch) -> dict[str, Any]:
    made = one.plan
    return {
        "batch": one.batch,
        "refused": one.refused or None,
        "mesh": made.mesh.describe() if made else None,
        "corpus_ways": one.corpus_ways or None,
        "queries_ways": one.queries_ways or None,
        "shardings": {t.path: [list(axes) for axes in t.sharding.dims] for t in made.inputs} if made else None,
        "time_s": made.prediction.step_time_s if made else None,
        "queries_per_s": one.queries_per_s if made else None,
        "peak_bytes": made.prediction.peak_bytes if made else None,
        "sent_bytes_per_query": one.sent_bytes if made else None,
        "most_candidate_bytes_per_query": one.most_bytes,
    }
