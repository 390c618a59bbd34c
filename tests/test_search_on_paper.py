"""`autopar estimate search`: sizes by arithmetic, layouts by the planner, and every wrong argument."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from autopar import vector_search
from autopar.cli.main import main
from autopar.errors import SearchError
from autopar.pipeline.plan_files import load_plan
from autopar.vector_search.estimate.estimate import estimate_search
from autopar.vector_search.estimate.servers import Served, Servers, best_served, served
from autopar.vector_search.estimate.sizes import (
    PARTS,
    SearchSpec,
    index_bytes,
    least_devices,
    nodes_in_blocks,
    read_bytes,
    with_fewer_devices,
)
from autopar.vector_search.exact.index import ExactIndex

EXAMPLE = ("estimate", "search", "--corpus", "1.4e9x100:int8", "--hardware", "h200")


def case(**more: Any) -> SearchSpec:
    known = {"num_vectors": 1_400_000_000, "dim": 100, "dtype": "int8", "beam": 64, "num_probes": 32}
    return SearchSpec(**{**known, **more})


# -- sizes -----------------------------------------------------------------------------------


def test_sizes_of_the_spacev1b_example() -> None:
    """140 GB of vectors, 358 GB of lists; a node of 356 bytes in blocks of 4 KiB, on drives of 5 and of 10 GB/s."""
    parts = {part.name: part.num_bytes for part in PARTS["graph"](case())}
    assert parts["vectors, 100 x int8"] == 140_000_000_000
    assert parts["adjacency lists, 64 neighbours"] == 358_400_000_000
    blocks = nodes_in_blocks(case())
    assert (blocks.node_bytes, blocks.per_block, blocks.blocks_per_node) == (356, 11, 1)
    assert blocks.amplification == pytest.approx(4096 / 356)
    assert blocks.disk_bytes == math.ceil(1.4e9 / 11) * 4096
    assert [drive["blocks_per_s"] for drive in blocks.drives] == [5e9 / 4096, 10e9 / 4096]
    assert [drive["queries_per_s"] for drive in blocks.drives] == [5e9 / 4096 / 64, 10e9 / 4096 / 64]
    assert [drive["useful_bytes_per_s"] for drive in blocks.drives] == [5e9 * 356 / 4096, 10e9 * 356 / 4096]


def test_sizes_follow_the_spec() -> None:
    other = case(
        num_vectors=1000, dim=768, dtype="float32", degree=400, beam=10, metric="inner_product", block_bytes=512
    )
    assert index_bytes(other, "graph") == 1000 * (768 * 4 + 400 * 4)
    assert index_bytes(other, "exact") == 1000 * (768 * 4 + 1)
    blocks = nodes_in_blocks(other)
    assert (blocks.per_block, blocks.blocks_per_node) == (0, math.ceil(4672 / 512))
    assert blocks.disk_bytes == 1000 * blocks.blocks_per_node * 512
    assert case().code_bytes == 25  # the most of 32 that divide 100
    assert index_bytes(case(code_bytes=50), "ivfpq") - index_bytes(case(), "ivfpq") == 25 * 1_400_000_000
    assert read_bytes(case(beam=32), "graph") == read_bytes(case(), "graph") / 2
    assert read_bytes(case(), "exact") == index_bytes(case(), "exact")


@pytest.mark.parametrize("index", PARTS)
def test_rest_of_the_index_stays_on_disk(index: str) -> None:
    small = case(batch=10)
    room = index_bytes(small, index) / 4.5
    assert least_devices(index_bytes(small, index), room) == 5
    rows = with_fewer_devices(small, index, room)
    assert [row.num_devices for row in rows] == [1, 2, 4]
    for row in rows:
        assert row.memory_bytes + row.disk_bytes == index_bytes(small, index)
        assert row.disk_bytes > 0
        assert row.queries_per_s[1] == pytest.approx(2 * row.queries_per_s[0])
    assert [row.reads for row in rows] == sorted((row.reads for row in rows), reverse=True)
    assert with_fewer_devices(small, index, 5 * room) == ()


def test_reads_from_disk() -> None:
    """A graph with half of its nodes on disk reads half of a query's nodes there; an exact index reads all once a batch."""
    graph = case(beam=40)
    (half,) = with_fewer_devices(graph, "graph", index_bytes(graph, "graph") / 2)
    assert half.reads == pytest.approx(20)
    assert half.queries_per_s[0] == pytest.approx(5e9 / 4096 / 20)
    exact = case(batch=100)
    (half,) = with_fewer_devices(exact, "exact", index_bytes(exact, "exact") / 2)
    assert half.queries_per_s[0] == pytest.approx(100 * 5e9 / (index_bytes(exact, "exact") / 2))
    codes = case(rerank=50)
    (some,) = with_fewer_devices(codes, "ivfpq", index_bytes(codes, "ivfpq") - 70e9)
    assert some.reads == pytest.approx(25)  # half of the vectors, no codes


# -- layouts ---------------------------------------------------------------------------------


def ways(corpus: str, hardware: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[int, tuple[int, int]]:
    """The number of shards of the corpus and of the queries on 8 devices, by batch size."""
    options = ("--corpus", corpus, "--hardware", hardware, "--devices", "8", "--no-cache", "--json")
    assert main(("estimate", "search", *options, *more)) == 0
    estimate = json.loads(capsys.readouterr().out)
    return {row["batch"]: (row["corpus_ways"], row["queries_ways"]) for row in estimate["batches"]}


@pytest.mark.slow
def test_batch_and_hardware_flip_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    flips = ways("1000x64:float32", "h100-sxm", capsys, "--batch", "100000")
    assert flips[1][1] == 1  # a single query cannot be split
    assert flips[100_000] == (1, 8)
    assert ways("4e6x64:float32", "h100-sxm", capsys)[1000] == (8, 1)
    middle = {name: ways("50000x64:float32", name, capsys)[1000] for name in ("h100-sxm", "cpu-host")}
    assert middle == {"h100-sxm": (1, 8), "cpu-host": (8, 1)}


def test_corpus_and_queries_are_both_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    """Queries are sharded over hosts, the corpus within a host: candidates stay on their host."""
    options = ("--corpus", "1e6x128:float32", "--hardware", "h100-sxm", "--mesh", "4x8", "--no-cache", "--json")
    assert main(("estimate", "search", *options)) == 0
    rows = {row["batch"]: row for row in json.loads(capsys.readouterr().out)["batches"]}
    assert (rows[10_000]["corpus_ways"], rows[10_000]["queries_ways"]) == (8, 4)
    assert (rows[1]["corpus_ways"], rows[1]["queries_ways"]) == (32, 1)


def test_estimated_program_is_the_one_that_an_index_runs() -> None:
    """The estimated program equals the one that `build` plans, down to its fingerprint."""
    import numpy as np

    vectors = np.zeros((5000, 16), np.float32)
    index = vector_search.build(vectors, mesh="8", hardware="cpu-host", batch=64)
    assert isinstance(index, ExactIndex)
    there = index.planned(64, 10).plan
    spec = SearchSpec(num_vectors=5000, dim=16, dtype="float32", batch=64)
    estimate = estimate_search(spec, mesh="8", hardware="cpu-host")
    assert estimate.requested.plan is not None
    assert estimate.requested.plan.program == there.program
    assert estimate.requested.plan.inputs == there.inputs
    assert estimate.requested.sent_bytes <= estimate.requested.most_bytes + 10 * 4  # and the chosen positions


@pytest.mark.slow
def test_tables_of_the_spacev1b_example(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """8 H200s hold the index; one H200 holds none, and the tables show what stays on disk."""
    saved = tmp_path / "search.plan.json"
    assert main((*EXAMPLE, "--devices", "8", "--no-cache", "-o", str(saved))) == 0
    out = capsys.readouterr().out
    for text in ("140 GB", "358 GB", "8 shards", "11 per block of 4,096", "11.5", "1,220,000", "2,440,000"):
        assert text in out, text
    plan = load_plan(str(saved))
    assert plan.program.name == "exact_search"
    assert main((*EXAMPLE, "--devices", "1", "--no-cache", "--index", "exact")) == 0
    out = capsys.readouterr().out
    assert "Nothing fits: no plan on mesh 1 fits" in out
    assert "Fewer devices: the rest of the index on disk" in out
    assert "358 GB" not in out
    assert main((*EXAMPLE, "--devices", "1", "--no-cache", "-o", str(tmp_path / "none.json"))) == 2
    assert not (tmp_path / "none.json").exists()


def test_json_of_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*EXAMPLE, "--devices", "8", "--no-cache", "--json", "--batch", "1e4", "--ssd", "7GB")) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["format"] == "autopar-search-on-paper"
    assert estimate["search"]["batch"] == 10_000
    assert estimate["search"]["ssd_bytes_per_s"] == [7e9]
    for row in estimate["batches"]:
        # and the chosen positions
        assert 0 < row["sent_bytes_per_query"] <= row["most_candidate_bytes_per_query"] + 10 * 4
    requested = next(row for row in estimate["batches"] if row["batch"] == 10_000)
    assert requested["queries_per_s"] == pytest.approx(10_000 / requested["time_s"])
    assert estimate["plan"]["prediction"]["step_time_s"] == requested["time_s"]
    assert {one["name"]: one["num_bytes"] for one in estimate["indexes"]}["exact"] == 1_400_000_000 * 105


# -- invalid arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--corpus", "1.4e9x100"), "invalid --corpus '1.4e9x100': write NxD:DTYPE"),
        (("--corpus", "1.5x100:int8"), "invalid --corpus"),
        (("--corpus", "..x100:int8"), "invalid --corpus"),
        (("--corpus", "0x100:int8"), "invalid --corpus"),
        (("--corpus", "9x0:int8"), "invalid --corpus"),
        (("--corpus", "9x4:int9"), "`dtype` is 'int9': expected one of float32, bfloat16, float16, int8, uint8"),
        (("--corpus", "3e9x4:int8"), "3,000,000,000 vectors: one index holds at most"),
        (("--corpus", "9x1e6:int8"), "invalid --corpus"),
        (("--corpus", "9x99999999:int8"), "int32 scores are exact up to"),
        (("--corpus", "9x4:int8", "--metric", "l1"), "`metric` is 'l1'"),
        (("--corpus", "9x4:int8", "--index", "tree"), "`index` is 'tree': expected one of exact, ivf, graph, ivfpq"),
        (("--corpus", "9x100:int8", "--code-bytes", "32"), "`code_bytes` is 32"),
        (("--corpus", "9x4:int8", "--hardware", "h200=8"), "devices of one kind"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    hardware = () if "--hardware" in arguments else ("--hardware", "h200")
    assert main(("estimate", "search", "--devices", "8", *hardware, *arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


@pytest.mark.parametrize("argument", ["--k=0", "--batch=none", "--beam=1.5", "--ssd=fast", "--stages=2", "--degree=-1"])
def test_parser_rejects_an_invalid_option(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main((*EXAMPLE, "--devices", "8", argument))
    assert caught.value.code == 2
    assert argument.partition("=")[2] in capsys.readouterr().err


def test_unknown_hardware_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*EXAMPLE[:-1], "h300", "--devices", "8")) == 2
    assert "h300" in capsys.readouterr().err


def test_a_search_needs_a_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(("estimate", "search", "--devices", "8"))
    assert "required: --corpus" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": True}, {"batch": 0}, {"num_vectors": 0}, {"rerank": -1}])
def test_wrong_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(SearchError, match=next(iter(wrong))):
        case(**wrong)


# -- servers with drives ---------------------------------------------------------------------


def of(kind: str, number: int, **more: Any) -> Served:
    servers = Servers(**{"memory_bytes": 64e9, "memory_bytes_per_s": 200e9, **more})
    return next(one for one in served(case(), servers) if (one.kind, one.num_servers) == (kind, number))


def test_spacev1b_on_servers() -> None:
    lists, graph = of("ivfdisk", 1), of("graphdisk", 1)
    assert 20e9 < lists.memory_bytes < 30e9 and 35e9 < graph.memory_bytes < 50e9
    assert graph.disk_bytes == math.ceil(1.4e9 / 11) * 4096
    assert lists.disk_bytes == pytest.approx(1.4e9 * 2.2 * 104 * 1.02)
    assert lists.queries_per_s == pytest.approx([speed / 4096 / lists.pages for speed in (5e9, 10e9)])
    assert of("exact", 1).why_not == of("graph", 1).why_not == "memory"
    assert of("ivfpq", 8).why_not == "" and of("ivfpq", 8).disk_bytes == 0
    # lists are read once, wherever they are; each server's graph is searched
    assert of("ivfdisk", 8).pages == lists.pages and of("ivfdisk", 8).queries_per_s[0] == 8 * lists.queries_per_s[0]
    assert of("graphdisk", 8).pages == 8 * graph.pages
    assert of("graphdisk", 8).queries_per_s == pytest.approx(graph.queries_per_s)


def test_choice_follows_memory_prices_and_updates() -> None:
    def chosen(number: int, **more: Any) -> str | None:
        servers = Servers(**{"memory_bytes": 64e9, "memory_bytes_per_s": 200e9, "numbers": (number,), **more})
        best = best_served(served(case(beam=48), servers), number)
        return best and best.kind

    assert chosen(1) == "graphdisk" and chosen(1, memory_bytes=30e9) == "ivfdisk"
    assert chosen(1, memory_bytes=1e9) is None
    assert chosen(1, updates_per_s=100) == chosen(16, updates_per_s=1) == "ivfdisk"
    assert chosen(16) == "graph"
    assert chosen(16, memory_usd=3, disk_usd=0.1) == "ivfdisk"
    assert chosen(16, memory_usd=0.1, disk_usd=100) == "exact"
    assert of("graph", 8, updates_per_s=5).why_not == "updates"


def test_efforts_follow_the_recall() -> None:
    low, middle, high = (case(recall=recall, beam=0, num_probes=0) for recall in (0.9, 0.95, 0.98))
    for name in ("num_probes", "beam", "disk_probes", "disk_beam"):
        assert getattr(low, name) < getattr(middle, name) < getattr(high, name), name
    given = case(beam=7, num_probes=5)
    assert (given.disk_beam, given.disk_probes, given.beam, given.num_probes) == (7, 5, 7, 5)
    assert read_bytes(low, "ivf") < read_bytes(high, "ivf") < index_bytes(high, "ivf")
    servers = Servers(memory_bytes=1e15, memory_bytes_per_s=200e9, numbers=(1,))
    by_name = {one.kind: one.why_not for one in served(case(recall=1), servers)}
    assert by_name.pop("exact") == "" and set(by_name.values()) == {"recall"}
    assert of("graphdisk", 1, queries_per_s=1e9).why_not == "rate"
    with pytest.raises(SearchError, match=r"`recall` is 1\.5"):
        case(recall=1.5)


def test_tables_and_json_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        *EXAMPLE,
        "--devices",
        "8",
        "--batch",
        "1",
        "--server-memory",
        "64GB",
        "--servers",
        "3",
        "--prices",
        "3,0.1",
    ]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["served"]
    assert {one["num_servers"] for one in found} == {3} and sum(one["is_chosen"] for one in found) == 1
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "On servers with memory and drives" in printed and "chosen" in printed and "no: memory" in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--servers", "2"), "the servers have no memory"),
        (("--server-memory", "1GB", "--prices", "3"), "invalid --prices '3'"),
        (("--server-memory", "1GB", "--prices", "3,-1"), "`disk_usd` is -1.0"),
        (("--server-memory", "1GB", "--updates", "-1"), "`updates_per_s` is -1.0"),
    ],
)
def test_wrong_servers(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--devices", "8", *arguments]) == 2
    assert text in capsys.readouterr().err
