"""Test the benchmark of the engine: step counts, gates, the page; no times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.inference import page, parts, scheduling, speculation
from benchmarks.inference.rows import row


def test_gates_are_upper_or_lower_bounds() -> None:
    assert row("ratio", 1.25, at_most=1.25) == {
        "what": "ratio",
        "value": 1.25,
        "unit": "",
        "gate": "<= 1.25",
        "met": True,
    }
    assert row("ratio", 1.9, at_least=2)["met"] is False
    assert row("time", 3.0, "ms")["gate"] == row("time", 3.0, "ms")["met"] == ""


def test_steps_equal_those_counted_by_hand() -> None:
    """Static batches take 9 and 5 steps. Continuous batching takes fewer, but at least those of the longest request. One
    request takes a step for its chunk, and one for each later token."""
    assert scheduling.static_steps([9, 2, 5, 1], 2) == 14
    found = scheduling.simulated([9, 2, 5, 1], slots=2, prompt=4)
    assert 9 <= found.steps < 14
    assert 0 < found.utilisation <= 1
    alone = scheduling.simulated([16], slots=1, prompt=4)
    assert alone.steps == 16


def test_tokens_per_verified_step_follow_the_formula() -> None:
    assert speculation.tokens_per_step(0.8, 4, draws=20_000) == pytest.approx((1 - 0.8**5) / (1 - 0.8), rel=0.02)


def test_every_part_exists_and_is_reported() -> None:
    rows = [{"part": "scheduling", **row("ratio", 2.5, at_least=2)}, {"part": "scheduling", **row("steps", 14)}]
    text = page.summary(rows)
    assert "| scheduling | ratio | 2.5 |  | >= 2 | yes |" in text and "128 requests" in text and "| steps |" not in text
    assert page.page_table(rows).splitlines()[-1] == "| steps | 14 |  |  |  |"
    here = Path(parts.__file__).parent
    benchmark = run.BENCHMARKS["inference"]
    for part in benchmark.programs:
        assert all((here.parent / source).is_file() for source in benchmark.sources_of[part]), part
    assert benchmark.xla_flags_of.keys() <= set(benchmark.programs)
