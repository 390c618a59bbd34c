"""The cost of a runner-up for the whole step, explained by the difference between two plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import programs
import pytest
from jax.sharding import PartitionSpec as P
from test_plan_check import SLOW, make

import autopar
from autopar.cli.main import main
from autopar.comparison.why import why
from autopar.errors import PinError


def of_mlp(path: str, **options: Any) -> Any:
    program = programs.mlp(batch=512, width=64, num_layers=3)
    return why(path, program.step, *program.abstract_args(), mesh="2x4", hardware=SLOW, **options)


def test_a_parameter_costs_what_a_plan_with_it_pinned_costs() -> None:
    step, args = make()
    result = why("params/up", step, *args, mesh="2x4", hardware=SLOW)
    (one,) = result.decisions
    assert one.runner_up is not None
    pinned = autopar.plan(step, *args, mesh="2x4", hardware=SLOW, pin={"params/up": one.runner_up})
    assert result.forced is not None
    assert result.forced.prediction == pinned.prediction
    assert result.extra_s == pytest.approx(pinned.prediction.step_time_s - result.plan.prediction.step_time_s)
    assert f"params/up {one.sharding}" in result.summary
    assert f"forcing {one.runner_up}" in result.summary


def test_the_cause_is_the_difference_of_the_two_plans() -> None:
    result = of_mlp("state/params/Dense_1/kernel")
    assert result.forced is not None
    seconds = {kind: result.forced.prediction.exposed_s.get(kind, 0.0) for kind in result.plan.prediction.exposed_s}
    parts = result.forced.prediction.compute_s - result.plan.prediction.compute_s
    parts += sum(result.forced.prediction.exposed_s.values()) - sum(result.plan.prediction.exposed_s.values())
    assert parts == pytest.approx(result.extra_s, rel=1e-6, abs=1e-12)
    assert seconds.keys() == result.plan.prediction.exposed_s.keys()
    added = sum(one.num_bytes for one in result.more) - sum(one.num_bytes for one in result.fewer)
    totals = [
        sum(use.bytes_per_step for use in plan.collectives if not use.combinable)
        for plan in (result.plan, result.forced)
    ]
    if not any(use.combinable for plan in (result.plan, result.forced) for use in plan.collectives):
        assert added == pytest.approx(totals[1] - totals[0])


def test_only_the_output_of_a_module_is_forced() -> None:
    result = of_mlp("MLP/Dense_1")
    (one,) = result.decisions
    assert (one.kind, one.phase, one.primitive) == ("activation", "forward", "dot_general")
    assert result.forced is not None
    after = next(d for d in result.forced.decisions if d.value == one.value)
    assert after.sharding == one.runner_up
    assert result.extra_s >= -1e-9


def test_a_glob_forces_all_at_once() -> None:
    result = of_mlp("Dense_*/kernel")
    assert [one.path for one in result.decisions] == [f"state/params/Dense_{n}/kernel" for n in range(3)]
    assert result.forced is not None
    lies = {tensor.path: tensor.sharding for tensor in result.forced.inputs}
    assert all(lies[one.path] == one.runner_up for one in result.decisions)
    assert "state/params/Dense_{0..2}/kernel" in result.summary


def test_an_unknown_path_is_an_error_that_names_similar_paths() -> None:
    with pytest.raises(
        PinError, match=r"has the path 'state/params/Dense_9/kernel'\. Paths look like .*Dense_\d/kernel"
    ):
        of_mlp("state/params/Dense_9/kernel")


def test_a_pinned_tensor_has_no_runner_up() -> None:
    with pytest.raises(PinError, match=r"has a single possible sharding on mesh 2x4"):
        of_mlp("state/params/Dense_0/kernel", pin={"state/params/Dense_0/kernel": P()})


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("from test_plan_check import make\n")
    monkeypatch.chdir(tmp_path)
    planning = ["--mesh", "2x4", "--hardware", SLOW]
    assert main(["why", "params/up", "train.py:make", *planning]) == 0
    text = capsys.readouterr().out
    assert text.startswith("`train_step` on mesh 2x4 (slow-gpu): ")
    assert main(["why", "params/up", "train.py:make", "--json", *planning]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["summary"] in text
    assert result["forced"]["step_time_s"] - result["plan"]["step_time_s"] == pytest.approx(result["extra_s"])
    step, args = make()
    autopar.plan(step, *args, mesh="2x4", hardware="h100-sxm").save("p.json")
    assert main(["why", "params/up", "train.py:make", "--plan", "p.json"]) == 0
    assert "(h100-sxm)" in capsys.readouterr().out
    assert main(["why", "params/up", "train.py:make", "--plan", "p.json", "--mesh", "8"]) == 2
    assert "which fixes these options: drop --mesh, or leave out --plan" in capsys.readouterr().err
    assert main(["why", "params/upp", "train.py:make", *planning]) == 2
    assert "'params/up'" in capsys.readouterr().err
