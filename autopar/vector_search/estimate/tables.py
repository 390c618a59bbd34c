"""Render a search estimate as tables and as JSON.

In: `SearchEstimate`. Out: tables on a console; JSON types.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.report.explain import explain_json
from autopar.system.text_tables import finite, inset, new_table, section, share_text
from autopar.system.units import human_bytes, human_number, human_seconds
from autopar.vector_search.estimate.estimate import PlannedBatch, SearchEstimate
from autopar.vector_search.estimate.servers import Served, best_served

_FITS = (
    "`min devices`: devices whose memory budget holds the index, by bytes only; `full memory`: with all of their memory."
    " `read/query`: bytes that a single query reads; `bound`: queries/s at the memory bandwidth. A batch of an exact search"
    " shares one read."
)
_BATCHES = (
    "Predicted by the cost model for the program of the exact index. `sent`: bytes that a device sends per query; k"
    " candidates of every device, value and position, are {most}."
)
_FEWER = (
    "The drives hold what does not fit in memory. exact: a batch of {batch:,} reads all of it once; ivf: a query reads"
    " {probes} lists; graph: the {beam} nodes that it expands; ivfpq: the {rerank} vectors to re-rank, and codes if these do"
    " not fit. Each read is a block, without a cache. The bandwidth is that of the drives of all devices."
)
_SERVED = (
    "Memory and drives are those of all servers. `pages`: 4 KiB pages that a query reads, without a cache: {probes} lists of an"
    " ivfdisk; a beam of {beam} nodes in a graphdisk of every server. In memory, the memory bandwidth bounds the queries."
    " `chosen`: the {how} that fits."
)


def render_search_estimate(estimate: SearchEstimate, console: Console) -> None:
    """Print the estimate as tables."""
    case, profile = estimate.case, estimate.profile
    devices = "device" if estimate.num_devices == 1 else "devices"
    console.print(
        Text(
            f"Search of {case.num_vectors:,} vectors, {case.dim} x {case.dtype}, {case.metric}, k = {case.k}, recall {case.recall:g}, on"
            f" {estimate.num_devices} {profile.name} {devices}, estimated",
            "bold",
        )
    )
    console.print(
        inset(
            Text(
                f"A device has {human_bytes(profile.hbm_bytes)} of memory at {human_bytes(profile.hbm_bytes_per_s)}/s; a plan"
                f" may fill {human_bytes(estimate.room_bytes)}."
            )
        ),
        "",
    )
    _print_indexes(estimate, console)
    _print_batches(estimate, console)
    _print_fewer(estimate, console)
    if any(one.name == "graph" for one in estimate.indexes):
        _print_blocks(estimate, console)
    if estimate.served:
        _print_served(estimate, console)


def _print_served(estimate: SearchEstimate, console: Console) -> None:
    case, has_cost = estimate.case, estimate.served[0].usd_per_month is not None
    speeds = [f"at {human_bytes(speed)}/s" for speed in case.ssd_bytes_per_s]
    numbers = ("servers", "memory", "on disk", "pages", *speeds, *(("USD/month",) if has_cost else ()))
    table = new_table("index", *numbers, "", right=numbers)
    for one in estimate.served:
        rates = one.queries_per_s if one.disk_bytes else one.queries_per_s * len(speeds)
        cells = [one.kind, str(one.num_servers), human_bytes(one.memory_bytes)]
        cells += [human_bytes(one.disk_bytes), f"{one.pages:.0f}"] if one.disk_bytes else ["-", "-"]
        cells += [f"{human_number(rate)}/s" for rate in rates]
        cells += [f"{one.usd_per_month:,.0f}"] if one.usd_per_month is not None else []
        cells.append("chosen" if one is _chosen(estimate, one) else f"no: {one.why_not}" if one.why_not else "")
        table.add_row(*map(Text, cells))
    legend = _SERVED.format(probes=case.disk_probes, beam=case.disk_beam, how="cheapest" if has_cost else "fastest")
    console.print(*section("On servers with memory and drives", table, legend), sep="\n")


def _print_indexes(estimate: SearchEstimate, console: Console) -> None:
    parts = new_table("index", "part", "per row", "total", right=("per row", "total"))
    numbers = ("total", "min devices", "full memory", f"each of {estimate.num_devices}", "read/query", "bound")
    fits = new_table("index", *numbers, right=numbers)
    bandwidth = estimate.num_devices * estimate.profile.hbm_bytes_per_s
    for one in estimate.indexes:
        for part in one.parts:
            row = (one.name if part is one.parts[0] else "", part.name)
            parts.add_row(*map(Text, (*row, human_bytes(part.row_bytes), human_bytes(part.num_bytes))))
        each = one.num_bytes / estimate.num_devices
        share = share_text(each, estimate.room_bytes)
        fits.add_row(
            *map(
                Text,
                (
                    one.name,
                    human_bytes(one.num_bytes),
                    str(one.least_devices),
                    str(one.least_bare),
                    f"{human_bytes(each)} ({share})" if each <= estimate.room_bytes else f"no: {human_bytes(each)}",
                    human_bytes(one.read_bytes),
                    f"{human_number(bandwidth / one.read_bytes)}/s",
                ),
            )
        )
    console.print(*section("Size of each index", parts), sep="\n")
    console.print(*section("Devices that hold an index", fits, _FITS), sep="\n")


def _print_batches(estimate: SearchEstimate, console: Console) -> None:
    numbers = ("time", "queries/s", "peak", "sent")
    table = new_table("batch", "corpus", "queries", "mesh", *numbers, right=("batch", *numbers))
    for one in estimate.batches:
        mark = " *" if one.batch == estimate.case.batch else ""
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
    legend = _BATCHES.format(most=human_bytes(estimate.requested.most_bytes))
    console.print(*section("Planned exact search", table, f"{legend} *: the requested batch."), sep="\n")
    if estimate.requested.plan is None:
        console.print(inset(Text(f"Nothing fits: {estimate.requested.refused}")), "")


def _print_fewer(estimate: SearchEstimate, console: Console) -> None:
    case = estimate.case
    speeds = [f"at {human_bytes(speed)}/s" for speed in case.ssd_bytes_per_s]
    numbers = ("devices", "in memory", "on disk", "reads", *speeds)
    table = new_table("index", *numbers, right=numbers)
    for index in estimate.indexes:
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
        legend = _FEWER.format(batch=case.batch, beam=case.beam, rerank=case.rerank, probes=case.num_probes)
        console.print(*section("Fewer devices: the rest of the index on disk", table, legend), sep="\n")


def _print_blocks(estimate: SearchEstimate, console: Console) -> None:
    case, blocks = estimate.case, estimate.blocks
    table = new_table("drives", "blocks/s", "useful", "queries/s", right=("drives", "blocks/s", "useful", "queries/s"))
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
    holds = f"{blocks.per_block} per block" if blocks.per_block else f"{blocks.blocks_per_node} blocks each"
    legend = (
        f"A node is {case.vector_bytes:,} + {case.degree} x {case.list_bytes // case.degree} = {blocks.node_bytes:,} bytes,"
        f" {holds} of {blocks.block_bytes:,}, {human_bytes(blocks.disk_bytes)} in total. The read amplification is"
        f" {blocks.amplification:.1f}. A query expands {case.beam} nodes. `useful`: bytes of the expanded nodes."
    )
    console.print(*section("Graph nodes in disk blocks", table, legend), sep="\n")


def _split(ways: int) -> str:
    return "replicated" if ways == 1 else f"{ways} shards"


def search_estimate_json(estimate: SearchEstimate) -> dict[str, Any]:
    """The estimate as JSON types: seconds and bytes, and the plan of the requested batch as `explain` gives it."""
    return finite(
        {
            "format": "autopar-search-on-paper",
            "version": 1,
            "search": asdict(estimate.case),
            "hardware": estimate.profile.name,
            "num_devices": estimate.num_devices,
            "room_bytes": estimate.room_bytes,
            "indexes": [
                asdict(one) | {"parts": [asdict(part) | {"num_bytes": part.num_bytes} for part in one.parts]}
                for one in estimate.indexes
            ],
            "batches": [_batch_json(one) for one in estimate.batches],
            "nodes_in_blocks": asdict(estimate.blocks),
            "served": [asdict(one) | {"is_chosen": one is _chosen(estimate, one)} for one in estimate.served],
            "plan": None if estimate.requested.plan is None else explain_json(estimate.requested.plan),
        }
    )


def _chosen(estimate: SearchEstimate, one: Served) -> Served | None:
    return best_served(estimate.served, one.num_servers)


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
