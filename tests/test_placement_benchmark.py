"""Test the benchmark of placements: its settings, its enumeration, its page; no times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopar.inference.schedule.requests import Shape
from autopar.placement import Group, Layout, ModelSpec, Placement, Slo, StepTimes, Trace
from benchmarks import run
from benchmarks.inference.rows import row
from benchmarks.placement import md1, overhead, page, parts, settings
from benchmarks.placement.every_placement import every_placement


def times(layout: Layout, stage_s: float) -> StepTimes:
    stages = dict.fromkeys(settings.OPTIONS.shapes, (stage_s,) * layout.pipeline)
    return StepTimes(layout=layout, options=settings.OPTIONS, stage_s=stages, weight_bytes=8.0 / layout.num_devices)


def test_the_formula_is_that_of_md1_queues() -> None:
    assert md1.mean_wait_s(2, 0.4, 0.4) == pytest.approx(1.2)
    assert md1.mean_wait_s(4, 0.4, 0.2) == pytest.approx(0.8)


def test_the_recursion_waits_for_the_request_before() -> None:
    columns = (np.array([0, 1, 0, 0], np.int32), np.ones(4, np.int32), np.ones(4, np.int32))
    trace = Trace(("a", "b"), np.array([0.0, 0.1, 0.3, 5.0]), *columns, duration_s=9.0)
    assert md1.lindley_s(trace, ["a"], 0.4) == pytest.approx(0.4 + 0.1 / 3)
    assert md1.lindley_s(trace, ["a", "b"], 0.2) == pytest.approx(0.4 + (0.0 + 0.1 + 0.1 + 0.0) / 4)


def test_a_layout_with_an_overhead_takes_that_much_more_of_its_devices() -> None:
    alone = times(Layout(), 0.1)
    for layout in (Layout(4), Layout(1, 4), Layout(2, 2)):
        slow = overhead.slowed(times(layout, 0.5), alone, 0.5)
        (stage_s, *_) = slow.seconds(Shape(rows=1, length=2048))
        assert stage_s * layout.num_devices == pytest.approx(0.15)
        assert slow.work_s(2000, 1) * layout.num_devices == pytest.approx(0.15)


def test_every_placement_is_enumerated_once() -> None:
    """One device holds one model, two hold two: 2 + 3 with one group, 3 with two groups of one device, and none."""
    layouts = (Layout(), Layout(2))
    of_layouts = {layout: times(layout, 0.1) for layout in layouts}
    models = {name: ModelSpec(name=name, slo=Slo(latency_s=1.0), times=of_layouts) for name in "ab"}
    found = list(every_placement(models, layouts, 2, 9.0))
    assert len(found) == len(set(found)) == 9
    assert Placement((Group(Layout(2), ("a", "b")),)) in found
    assert Placement((Group(Layout(), ("a",)), Group(Layout(), ("a",)))) in found


def test_every_part_exists_and_is_reported() -> None:
    rows = [{"part": "md1", **row("ratio", 1.5, "%", at_most=2)}, {"part": "scale", **row("goodput", 0.9)}]
    assert "1 of 1 gates are met" in page.summary(rows)
    assert page.page_table(rows).splitlines()[-1] == "| scale | goodput | 0.9 |  |  |  |"
    here = Path(parts.__file__).parent
    benchmark = run.BENCHMARKS["placement"]
    for part in benchmark.programs:
        assert all((here.parent / source).is_file() for source in benchmark.sources_of[part]), part
        assert (here / f"{part.partition(':')[0].replace(' ', '_')}.py").is_file()
    assert len(settings.CVS) * len(settings.BOUNDS) == 20
