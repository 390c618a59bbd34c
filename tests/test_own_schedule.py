"""A schedule of one's own, as `docs/add-a-schedule.md` describes it: by the decorator, a saved plan, and the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_docs import DOCS, blocks

import autopar
from autopar.cli.main import main
from autopar.errors import PlanFileError, ScheduleError
from autopar.extend.schedules import PipelineShape, ScheduleKind
from autopar.pipeline.plan import OwnSchedule, PipelinePlan
from autopar.pipeline.schedule.table import SCHEDULES, build
from autopar.pipeline.schedule.task_text import tasks_of, text_of

FIXED: dict[str, Any] = {"stages": 4, "num_microbatches": 8, "hardware": "cpu-host"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page."""
    for name in ("groups.py", "train.py"):
        text = "\n\n".join(block.text for block in blocks(DOCS / "add-a-schedule.md") if block.title == name)
        assert text
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("groups", "train"):
        sys.modules.pop(name, None)


def made() -> tuple[Callable[..., Any], tuple[Any, ...], ScheduleKind]:
    import groups  # type: ignore[import-not-found]
    import train  # type: ignore[import-not-found]

    step, arguments = train.make()
    return step, arguments, groups.GROUPS


def same_numbers(found: Any, step: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*arguments)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_it_runs_from_the_decorator_and_from_its_file(folder: Path) -> None:
    step, arguments, kind = made()
    first = autopar.parallelize(step, schedule=kind, **FIXED)
    same_numbers(first(*arguments), step, arguments)
    plan = first.plans[-1]
    assert isinstance(plan, PipelinePlan) and plan.schedule == "groups" and plan.own_schedule is not None
    built = build(kind, 4, 8)
    assert plan.tasks().orders == built.orders and plan.prediction.step_time_s > 0
    plan.save("groups.plan.json")
    (folder / "groups.py").unlink()
    loaded = autopar.load_plan("groups.plan.json")
    assert loaded == plan
    same_numbers(autopar.parallelize(step, plan=loaded)(*arguments), step, arguments)


def test_it_runs_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--devices", "8", "--hardware", "cpu-host", "--stages", "4", "--num-microbatches", "8"]
    assert main(["plan", "train.py:make", *how, "--schedule", "groups.py:GROUPS", "-o", "a.plan.json"]) == 0
    assert main(["explain", "a.plan.json"]) == 0
    assert "groups: GPipe, a few microbatches at a time." in capsys.readouterr().out
    for name, message in (
        ("groups.py:GROUP", "groups.py has no ScheduleKind 'GROUP'; it has GROUPS"),
        ("group.py:GROUPS", "there is no file 'group.py'"),
        ("groups.py:", "cannot read the schedule 'groups.py:'"),
    ):
        assert main(["plan", "train.py:make", *how, "--schedule", name]) != 0
        assert message in capsys.readouterr().err


def test_what_is_no_entry_is_refused(folder: Path) -> None:
    step, arguments, kind = made()
    taken = ScheduleKind(name="zb-v", description="Mine.", orders=kind.orders)
    few = ScheduleKind(
        name="few", description="Forgets some.", orders=lambda shape: kind.orders(PipelineShape(shape.num_submeshes, 3))
    )
    forward = ScheduleKind(
        name="half",
        description="Forward only.",
        orders=SCHEDULES["inference"].orders,
        backward="none",
    )
    for wrong, message in (
        (taken, "the name 'zb-v' belongs to a schedule of the package"),
        (few, "orders the tasks of 3 microbatches, but 8 were asked for"),
        (forward, "runs forward passes only"),
        (7, "`schedule` is 7"),
    ):
        with pytest.raises(ScheduleError, match=message):
            autopar.plan(step, *arguments, schedule=wrong, **FIXED)


def test_damaged_tasks_in_a_file_are_refused(folder: Path) -> None:
    step, arguments, kind = made()
    body = autopar.plan(step, *arguments, schedule=kind, **FIXED).to_json()

    def refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
        damaged = json.loads(json.dumps(body))
        change(damaged)
        with pytest.raises(PlanFileError, match=message):
            PipelinePlan.from_json(damaged)

    orders = body["own_schedule"]["orders"]
    refused(lambda b: b["own_schedule"].update(orders=orders[:-1]), "own_schedule.*is not legal")
    refused(lambda b: b["own_schedule"].update(orders=[orders[0] + " X1.1", *orders[1:]]), "'X1.1' is no task")
    refused(
        lambda b: b["own_schedule"].update(orders=[orders[1], orders[0], *orders[2:]]), "submeshes on which 'groups'"
    )
    refused(
        lambda b: b["own_schedule"].update(orders=[*orders[:-1], orders[-1].replace("F3.0 ", "", 1)]), "needs forward"
    )
    refused(lambda b: b.update(num_microbatches=4), "8 microbatches, but the plan")
    refused(lambda b: b.pop("own_schedule"), "'groups', which is none of")


def test_tasks_as_text() -> None:
    for name, virtual in (("1f1b", 1), ("zb-v", 2), ("interleaved", 3)):
        for order in build(name, 3, 6, virtual=virtual).orders:
            assert tasks_of(text_of(order)) == order
    assert tasks_of("") == ()
    for wrong in ("F1", "F1.2.3", "f1.2", "F-1.2", "F1.٣", "F1.9999999999"):
        with pytest.raises(ScheduleError, match="is no task"):
            tasks_of(wrong)


def test_an_order_by_planned_times_is_saved_as_it_is() -> None:
    kind = SCHEDULES["zb-v"]
    printed = build(kind, 2, 4, virtual=2)
    assert OwnSchedule.of(printed, kind) is None
    first, second, *rest = printed.orders[0]
    assert (first.microbatch, second.microbatch) == (0, 1)
    other = replace(printed, orders=((second, first, *rest), printed.orders[1]))
    own = OwnSchedule.of(other, kind)
    assert own is not None and own.description.endswith("The order follows planned times.")
    edges = [(0, 1), (1, 2), (2, 3)]
    assert own.schedule("zb-v", edges).orders == other.orders
    fewer = own.of_first(3).schedule("zb-v", edges)
    assert fewer.num_microbatches == 3 and len(fewer.tasks) == len(printed.tasks) - 4 * 3
