"""Training under `autopar keep` goes on as a run that is started by hand from checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from several_processes import run

from benchmarks.faults import kept_job
from benchmarks.faults.fsdp import layers_as_written, save_templates
from benchmarks.faults.kept_job import KeptJob, losses, segments
from benchmarks.faults.survival import worst_difference

PROGRAM = Path(kept_job.__file__).parent / "fsdp.py"


@pytest.mark.slow
def test_losses_are_those_of_a_run_by_hand_with_the_same_devices(tmp_path: Path) -> None:
    """FSDP on four processes: one member is lost, later another, and one returns."""
    log = str(tmp_path / "log")
    options = ["--timeout", "5", "--every", "7", "--ahead", "0", "--return-after", "1000"]
    with KeptJob(tmp_path, [str(PROGRAM), "kept", log, "1000000", "0.1"], *options) as job:
        job.at(20)
        os.kill(job.worker(1)["agent"], signal.SIGKILL)
        job.wait(lambda: any(one["count"] == 3 for one in job.events("step")))
        job.at(50)
        os.kill(job.worker(2)["agent"], signal.SIGKILL)
        job.wait(lambda: any(one["count"] == 2 for one in job.events("step")))
        job.join_another()
        job.wait(lambda: job.events("step")[-1]["count"] == 3)
        job.at(job.events("step")[-1]["step"] + 10)
        job.keeper.send_signal(signal.SIGTERM)  # ends at a step border
        assert job.ended() == 0, job.text()
        history = losses(job.events("step"))
        assert all("FSDP" in one["strategy"] for one in job.events("start")), job.events("start")
    assert sorted(history) == list(range(1, max(history) + 1))
    parts = segments(history)
    assert [count for count, _, _ in parts] == [4, 3, 2, 3]
    by_hand = tmp_path / "by_hand"
    for count, start, stop in parts:
        arguments = [str(by_hand), str(start), str(stop), str(tmp_path / "checkpoints")]
        ended = run("by_hand", *arguments, processes=count, devices=1, programs=PROGRAM)
        assert [one.code for one in ended] == [0] * count, ended[0].errors[-3000:]
    job.log = by_hand
    expected = losses(job.events("step"))
    worst = max(abs(history[step][1] / expected[step][1] - 1) for step in history)
    print(f"largest relative difference {worst:.2g}, parts {parts}")
    assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [("kept", []), ("kept", ["--microbatches", "6"]), ("kept_in_stages", []), ("kept_side_by_side", [])],
)
def test_nothing_is_compiled_for_fewer_members_if_it_was_compiled_ahead(
    tmp_path: Path, kind: str, more: list[str]
) -> None:
    """Also by processes that have stages or microbatches of their own: the last one tells of a pipeline."""
    program = str(Path(__file__).parent / "counted_compiles.py")
    options = ["--timeout", "10", "--ahead", "1", "--return-after", "1000", *more]
    with KeptJob(tmp_path, [program, kind, str(tmp_path / "log"), "1000000", "0.1"], *options, members=3) as job:
        job.wait(lambda: "the program for 2 members is compiled ahead" in job.text(), 300)
        os.kill(job.worker(1)["agent"], signal.SIGKILL)
        job.wait(lambda: any(one["count"] == 2 for one in job.events("step")))
        compiled = {one["count"]: one["compiled"] for one in reversed(job.events("step"))}
    print(f"compilations up to the first step, by the number of members: {compiled}")
    assert compiled[2] == 0


@pytest.mark.slow
def test_a_pipeline_goes_on_with_the_stages_of_the_members_that_remain(tmp_path: Path) -> None:
    """Six scanned layers in stages of four processes, then of three and two: unequal parts of one stack; and again of three."""
    log = str(tmp_path / "log")
    options = ["--timeout", "5", "--every", "7", "--ahead", "0", "--return-after", "1000"]
    with KeptJob(tmp_path, [str(PROGRAM), "kept_in_stages", log, "1000000", "0.1"], *options) as job:
        job.at(20)
        assert [one["strategy"] for one in job.events("start")] and "4 stages" in job.events("start")[0]["strategy"]
        os.kill(job.worker(2)["agent"], signal.SIGKILL)
        job.wait(lambda: any(one["count"] == 3 for one in job.events("step")))
        job.at(job.events("step")[-1]["step"] + 20)
        os.kill(job.worker(0)["agent"], signal.SIGKILL)
        job.wait(lambda: any(one["count"] == 2 for one in job.events("step")))
        job.join_another()
        job.wait(lambda: job.events("step")[-1]["count"] == 3)
        job.at(job.events("step")[-1]["step"] + 10)
        job.keeper.send_signal(signal.SIGTERM)
        assert job.ended() == 0, job.text()
        history = losses(job.events("step"))
    assert sorted(history) == list(range(1, max(history) + 1))
    assert [count for count, _, _ in segments(history)] == [4, 3, 2, 3]
    assert worst_difference(history, layers_as_written()) < 1e-5


@pytest.mark.slow
def test_pipelines_run_by_the_templates_of_the_members_that_remain(tmp_path: Path) -> None:
    """Templates are planned ahead of the job, one for each number of members that holds the model."""
    stages = save_templates(tmp_path, 4)
    print(stages)
    fewest = min(stages)
    assert 1 < fewest < 4, "one member does not hold the model"
    log = str(tmp_path / "log")
    options = ["--timeout", "5", "--every", "7", "--ahead", "0", "--least", str(fewest), "--return-after", "1000"]
    command = [str(PROGRAM), "kept_by_template", log, "1000000", "0.1", str(tmp_path)]
    with KeptJob(tmp_path, command, *options) as job:
        job.at(20)
        for count in range(3, fewest - 1, -1):
            os.kill(job.worker(1)["agent"], signal.SIGKILL)
            job.wait(lambda count=count: any(one["count"] == count for one in job.events("step")))
            job.at(job.events("step")[-1]["step"] + 20)
        job.keeper.send_signal(signal.SIGTERM)
        assert job.ended() == 0, job.text()
        history = losses(job.events("step"))
    assert sorted(history) == list(range(1, max(history) + 1))
    assert [count for count, _, _ in segments(history)] == [*range(4, fewest - 1, -1)]
    assert worst_difference(history, layers_as_written()) < 1e-5
