"""The measured timeline of a pipeline: every task once, on its submesh, after its dependences; and its report."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import pipelined
from several_processes import run as run_processes
from test_pipeline_memory import arguments, step
from test_stages import mlp, plan, staged

import autopar
from autopar.errors import PlotError, StepSignatureError
from autopar.pipeline.draw.perfetto import perfetto_trace
from autopar.pipeline.draw.predicted_vs_measured import compare_stages, differences
from autopar.pipeline.draw.svg import timeline_svg
from autopar.pipeline.draw.text import timeline_text
from autopar.pipeline.run.measured import run_measured
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Schedule, Task
from autopar.pipeline.schedule.timeline import PipelineTimeline, Span


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "num_stages", "virtual"), [("1f1b", 4, 1), ("zb-h1", 2, 1), ("interleaved", 2, 2)]
)
def test_every_task_is_there_in_order(schedule: str, num_stages: int, virtual: int) -> None:
    run, pipeline = pipelined(
        step, arguments(), num_stages=num_stages, num_microbatches=4, schedule=schedule, virtual=virtual
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Some donated buffers were not usable")
        expected = jax.tree.leaves(run(*arguments()))
    results, timeline = run_measured(pipeline, jax.tree.leaves(arguments()))
    for one, other in zip(results, expected, strict=True):
        assert jnp.array_equal(one, other)
    own = pipeline.schedule
    assert timeline.num_submeshes == num_stages and timeline.title == f"{own.name}, measured"
    for submesh, order in enumerate(own.orders):
        ran = [span.task for span in timeline.on(submesh)]
        runs = [task for task in order if task.phase in pipeline.pieces[task.stage].pieces.each]
        assert [task for task in ran if task.phase != "update"] == runs  # no stage waits for the first's input parts
        assert {task for task in ran if task.phase == "update"} <= {task for task in order if task.phase == "update"}
    check_order(timeline, own)
    assert "submesh" in timeline_text(timeline) and perfetto_trace(timeline)["traceEvents"]


def check_order(timeline: PipelineTimeline, schedule: Schedule) -> None:
    """No task but an update, which is run in pieces, begins before all that it waits for has ended."""
    spans = {span.task: span for span in timeline.spans}
    for task, needs in schedule.needs.items():
        for need in needs:
            if task.phase != "update" and task in spans and need in spans:
                assert spans[need].end_s <= spans[task].start_s


def test_an_error_of_one_submesh_ends_the_step() -> None:
    run, pipeline = pipelined(step, arguments(), num_stages=4, num_microbatches=4)
    run(*arguments())

    def broken(*args: jax.Array) -> list[jax.Array]:
        raise RuntimeError("out of order")

    call = next(one for one in pipeline.instructions.steps if getattr(one, "stage", None) == 2)
    assert hasattr(call, "program")
    call.program.jitted = broken  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="out of order"):
        run_measured(pipeline, jax.tree.leaves(arguments()))


# -- of a step that a user has decorated -----------------------------------------------------


def trained(measured: bool) -> tuple[Any, Any]:
    """The state of a step that has run six times, the last time perhaps measured; and the step."""
    one = staged()
    state = one.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    for seed in range(5):
        state, _ = one(state, mlp().make_batch(seed))
    state, _ = (one.measured if measured else one)(state, mlp().make_batch(5))
    return state, one


@pytest.mark.slow
def test_a_measured_step_computes_what_a_call_does() -> None:
    called, _ = trained(measured=False)
    measured, one = trained(measured=True)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(measured), jax.tree.leaves(called))
    told = one.report()
    timeline, schedule = told.measured, plan().tasks()
    assert timeline is not None
    assert sorted(span.task for span in timeline.spans) == sorted(schedule.tasks)
    for submesh, order in enumerate(schedule.orders):
        assert [span.task for span in timeline.on(submesh)] == list(order)
    check_order(timeline, schedule)
    one.measured(measured, mlp().make_batch(6))
    assert one.report().num_steps == told.num_steps  # it does not count among those that are timed


def test_a_report_has_both_timelines(tmp_path: Path) -> None:
    told = trained(measured=True)[1].report()
    text = str(told)
    assert "1f1b, simulated" in text and "1f1b, measured" in text and "instead of" in text
    assert max(map(len, text.splitlines())) <= 100
    told.draw(tmp_path / "twin.svg")
    root = ElementTree.parse(tmp_path / "twin.svg").getroot()
    titles = [text.text or "" for text in root.iter() if text.get("class") == "title"]
    assert [title.split(":")[0] for title in titles] == ["1f1b, simulated", "1f1b, measured"]
    told.draw(tmp_path / "twin.json")
    events = json.loads((tmp_path / "twin.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["1f1b, simulated", "1f1b, measured"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * len(plan().tasks().tasks)
    document = json.loads(json.dumps(told.to_json()))
    assert len(document["simulated"]) == len(document["measured"]) == len(plan().tasks().tasks)
    with pytest.raises(PlotError, match="cannot write"):
        told.draw(tmp_path / "nowhere" / "twin.svg")


def test_an_explanation_draws_itself(tmp_path: Path) -> None:
    autopar.explain(plan()).draw(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text(encoding="utf-8") == timeline_svg(plan().timeline())


def test_what_has_no_timeline_says_so() -> None:
    one = autopar.parallelize(plan=plan())(mlp().step)
    state = one.init(mlp().create_state, jax.random.key(0), batch=mlp().make_batch(0))
    with pytest.raises(StepSignatureError, match="compiled at its first call"):
        one.measured(state, mlp().make_batch(0))
    whole = autopar.parallelize(mesh="8", hardware="cpu-host")(lambda x: x + 1.0)
    x = jnp.ones((8,))
    for _ in range(5):
        x = whole(x)
    with pytest.raises(StepSignatureError, match="is one program"):
        whole.measured(x)
    with pytest.raises(PlotError, match="is one program"):
        whole.report().draw("nothing.svg")
    assert whole.report().to_json()["measured"] is None


# -- where they differ -----------------------------------------------------------------------

SECONDS = {"forward": 1e-3, "backward": 2e-3, "update": 1e-3}


def timelines(slower: dict[int, float]) -> tuple[PipelineTimeline, PipelineTimeline]:
    """A schedule simulated, and again with the backward passes of some stages so many times as long."""
    schedule = build("1f1b", 3, 4)
    simulated = simulate(schedule, lambda task: SECONDS[task.phase])

    def seconds(task: Task) -> float:
        return SECONDS[task.phase] * (slower.get(task.stage, 1.0) if task.phase == "backward" else 1.0)

    return simulated, replace(simulate(schedule, seconds), title="1f1b, measured")


def test_the_stage_that_is_slowest_is_named() -> None:
    simulated, measured = timelines({1: 2.5, 2: 1.2})
    assert [one.factor for one in compare_stages(simulated, measured)] == pytest.approx([1.0, 25 / 13, 14.6 / 13])
    step, stage = differences(simulated, measured)
    slower = 100 * (measured.makespan_s / simulated.makespan_s - 1)
    assert f"instead of 19.0 ms ({slower:+.0f} %)" in step and "instead of 32 %" in step
    assert "stage 1 is slowest against its prediction: its tasks take 25.0 ms instead of 13.0 ms" in stage
    assert "most of all backward, 2.5 times as long" in stage and "of stage 0, 1 times as long" in stage


def test_equally_slow_stages_are_not_named() -> None:
    _, stage = differences(*timelines(dict.fromkeys(range(3), 1.5)))
    assert "no stage stands out" in stage


def test_tasks_that_were_not_run_are_not_compared() -> None:
    simulated, measured = timelines({})
    some = replace(measured, spans=tuple(span for span in measured.spans if span.task.stage != 1))
    assert [one.stage for one in compare_stages(simulated, some)] == [0, 2]
    pieces = (Span(0, Task(0, 0, "update"), 30e-3, 30.5e-3), Span(0, Task(0, 0, "update"), 31e-3, 32e-3))
    (one,) = compare_stages(simulated, replace(measured, spans=pieces))
    assert (one.predicted_s, one.measured_s) == pytest.approx((1e-3, 1.5e-3))
    assert len(differences(simulated, replace(measured, spans=()))) == 1


@pytest.mark.parametrize(("factor", "stretched"), [(3.0, False), (20.0, True)])
def test_a_timeline_that_is_far_shorter_is_drawn_wider(factor: float, stretched: bool) -> None:
    simulated, _ = timelines({})
    measured = replace(simulate(build("1f1b", 3, 4), lambda task: factor * SECONDS[task.phase]), title="measured")
    for drawn in (timeline_text(simulated, measured).plain, timeline_svg(simulated, measured)):
        assert ("time axis stretched 20 times" in drawn) == stretched
    root = ElementTree.fromstring(timeline_svg(simulated, measured))
    rows = [float(one.get("width", "")) for one in root.iter() if one.get("class") == "bubble"]
    assert rows[0] == pytest.approx(rows[-1] if stretched else rows[-1] / factor, abs=0.01)
    lines = [line for line in timeline_text(simulated, measured).plain.splitlines() if line.startswith("submesh 0")]
    assert all(line.count("F") == 4 for line in lines)


@pytest.mark.slow
def test_processes_put_their_spans_together() -> None:
    """Two stages in each of two processes, and one stage over both."""
    cases = ["4 1 1f1b", "2 2 zb-h1"]
    ended = run_processes("measured", *cases, processes=2, devices=2)
    assert [one.code for one in ended] == [0, 0], ended[-1].errors[-3000:]
    first, second = (one.last for one in ended)
    for case in cases:
        assert first[case]["spans"] == second[case]["spans"], "all have the spans of all"
        assert first[case]["same"] and second[case]["same"]
        num_stages, _, name = case.split()
        schedule = build(name, int(num_stages), 4)
        spans = [Span(submesh, Task(*task), *seconds) for submesh, task, seconds in first[case]["spans"]]
        timeline = PipelineTimeline(name, int(num_stages), tuple(spans))
        for submesh, order in enumerate(schedule.orders):
            ran = [span.task for span in timeline.on(submesh) if span.task.phase != "update"]
            runs = [task for task in order if task.phase != "update" and (task.phase, task.stage) != ("input", 0)]
            assert ran == runs
        check_order(timeline, schedule)
