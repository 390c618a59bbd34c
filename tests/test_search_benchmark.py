"""The vector search benchmark: ratios at equal recall, gates, recall with ties, the page and its plot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("faiss")

from benchmarks import run
from benchmarks.vector_search import contenders, data, ivf, page
from benchmarks.vector_search.contenders import Gate


def test_recall_counts_ties() -> None:
    corpus = np.array([[0.0, 0], [0, 0], [3, 0], [9, 0]], np.float32)
    queries = np.array([[1.0, 0]], np.float32)
    searched = data.Searched(corpus, queries, np.array([[1.0, 1.0]], np.float32))
    assert data.recall(searched, np.array([[1, 0]])) == 1
    assert data.recall(searched, np.array([[0, 2]])) == 0.5
    assert data.recall(searched, np.array([[-1, 0]])) == 0.5


@pytest.mark.parametrize(("of", "bound", "met"), [("queries_per_s", 0.3, True), ("queries_per_s", 0.6, False)])
def test_gate_compares_at_equal_recall(of: str, bound: float, met: bool) -> None:
    rows: list[contenders.Row] = [
        {"method": method, "recall": recall, "queries_per_s": speed, "beside": "", "gate": "", "met": ""}
        for method, recall, speed in (
            ("a", 0.9, 80.0),
            ("a", 0.96, 50.0),
            ("a", 1.0, 1.0),
            ("b", 0.92, 200.0),
            ("b", 1.0, 100.0),
        )
    ]
    compared = contenders._beside(rows, Gate("a", "b", of, bound))
    assert [row["gate"] for row in compared] == ["", bound, "", "", ""]
    assert compared[1]["beside"] == pytest.approx(50 / 150)  # halfway between 0.92 and 1
    assert compared[1]["met"] is met


@pytest.mark.parametrize(("of", "best"), [("distances", 0.94), ("distances", 0.97), ("queries_per_s", 0.94)])
def test_gate_without_comparable_setting(of: str, best: float) -> None:
    """A gate without a setting of sufficient recall is not met, whatever the ratio; a reference of lower recall counts
    at its maximum.
    """
    rows: list[contenders.Row] = [
        {"method": method, "recall": recall, of: figure, "beside": "", "gate": "", "met": ""}
        for method, recall, figure in (("a", 0.9, 40.0), ("a", best, 50.0), ("b", 0.91, 70.0), ("b", 0.93, 100.0))
    ]
    compared = contenders._beside(rows, Gate("a", "b", of, 0.6))
    assert [(row["beside"], row["gate"], row["met"]) for row in compared[1:]] == [
        (0.5, 0.6, best > 0.95),
        ("", "", ""),
        ("", "", ""),
    ]
    assert not any(
        row["gate"] for row in contenders._beside([dict(row, gate="") for row in rows], Gate("a", "b", of, None))
    )


@pytest.mark.slow
def test_part_is_measured_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ivf, "PROBES", (2, 16))
    rows = ivf.measure("skewed", num_vectors=600, num_queries=20, rounds=1)
    assert [row["setting"] for row in rows] == [f"{probes} probes" for probes in ivf.PROBES] * 3
    assert all(0 < row["recall"] <= 1 and row["queries_per_s"] > 0 for row in rows)
    shared, theirs = rows[2:4], rows[4:]
    assert [row["recall"] for row in shared] == pytest.approx([row["recall"] for row in theirs], abs=1e-2)
    table = page.page_table(rows)
    assert table.count("\n") == len(rows) + 1
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    page.draw(rows, one)
    page.draw(rows, other)
    assert one.read_bytes() == other.read_bytes()
    assert "FAISS IVF-Flat" in one.read_text()
    exact = {"method": "autopar exact", "batch": 1, "recall": 1.0, "times_faiss": 2.0, "gate": 1.5, "met": True}
    summary = page.summary([*rows, exact])
    assert "| exact: batch 1 | autopar exact |  | 1 | 2 | 1.5 | yes |" in summary
    assert "**graph.** Measure graph search:" in summary


def test_all_parts_have_a_module_and_existing_sources() -> None:
    benchmark = run.BENCHMARKS["vector_search"]
    assert set(benchmark.programs) == set(benchmark.sources_of)
    for program in benchmark.programs:
        record = run._blank_record("vector_search", program)
        assert record["sources"]
        assert program.partition(": ")[2] in (*data.SETS, "batch 1000", "batch 1")
