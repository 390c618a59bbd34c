"""The measured twin of a timeline: every task once, on its submesh, after what it waits for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from pipelines import pipelined
from test_pipeline_memory import arguments, step

from autopar.pipeline.measured import run_measured
from autopar.pipeline.perfetto import perfetto_trace
from autopar.pipeline.timeline_text import timeline_text


@pytest.mark.parametrize(
    ("schedule", "num_stages", "virtual"), [("1f1b", 4, 1), ("zb-h1", 2, 1), ("interleaved", 2, 2)]
)
def test_every_task_is_there_in_order(schedule: str, num_stages: int, virtual: int) -> None:
    run, pipeline = pipelined(
        step, arguments(), num_stages=num_stages, num_microbatches=4, schedule=schedule, virtual=virtual
    )
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
    spans = {span.task: span for span in timeline.spans}
    for task, needs in own.needs.items():
        for need in needs:
            if task.phase != "update" and task in spans and need in spans:
                assert spans[need].end_s <= spans[task].start_s
    assert "submesh" in timeline_text(timeline) and perfetto_trace(timeline)["traceEvents"]


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
