"""Work shared with copies of this process: all of it is done, even if copies fail, and no copy remains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import BudgetError
from autopar.planner import fork_pool as side_by_side
from autopar.planner import mesh_search
from autopar.planner.fork_pool import SharedMinimum, Workers, workers
from tests import programs

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="copies are made on Linux alone")

PARENT = os.getpid()


@pytest.fixture(autouse=True)
def three_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(side_by_side.PROCESSES, "3")
    made: list[int] = []
    fork = os.fork

    def noted() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(os, "fork", noted)
    yield
    for copy in made:
        with pytest.raises(ProcessLookupError):  # none stayed behind
            os.kill(copy, 0)


def in_a_copy() -> bool:
    return os.getpid() != PARENT


def spread(
    team: Workers[int, Any], answer: Callable[[int], Any], requests: Sequence[int]
) -> dict[int, tuple[int, Any]]:
    for request in team.spread(requests):
        team.note(request, answer(request))
    return team.answers


def each_by_worker(
    team: Workers[int, Any],
    answer: Callable[[int], Any],
    requests: Mapping[int, Sequence[int]],
    may_take: Callable[[int], bool] = lambda _: False,
) -> dict[int, tuple[int, Any]]:
    for request in team.each_by_worker(requests, may_take):
        team.note(request, answer(request))
    return team.answers


def test_all_is_answered_and_by_several() -> None:
    def answer(request: int) -> tuple[int, int]:
        time.sleep(0.05)
        return os.getpid(), request**2

    with workers(answer, 8, patience_s=60) as team:
        assert len(team) == 3
        answers = spread(team, answer, range(30))
        own = each_by_worker(team, answer, {2: [5], 0: [1, 2]})
    assert {request: found for request, (_, (_, found)) in answers.items()} == {n: n * n for n in range(30)}
    assert len({pid for _, (pid, _) in answers.values()}) == 3
    assert {request: worker for request, (worker, _) in own.items()} == {5: 2, 1: 0, 2: 0}


def test_who_has_nothing_to_do_takes_what_may_be_taken(tmp_path: Path) -> None:
    taken = tmp_path / "taken"

    def answer(request: int) -> int:
        until = time.monotonic() + 60
        while request == 1 and not taken.exists() and time.monotonic() < until:  # the other has begun
            time.sleep(0.01)
        if request == 3:
            taken.touch()
        return request

    with workers(answer, 2, patience_s=60) as team:
        found = each_by_worker(team, answer, {0: [1, 2, 3, 4]}, lambda request: request in (2, 3))
    worker_of = {request: worker for request, (worker, _) in found.items()}
    assert (worker_of[1], worker_of[3], worker_of[4]) == (0, 1, 0)
    assert worker_of[2] in (0, 1), "whichever is done first"


def test_there_are_no_more_workers_than_work_or_than_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(abs, 2, patience_s=60) as team:
        assert len(team) == 2
    monkeypatch.setenv(side_by_side.PROCESSES, "1")
    with workers(abs, 8, patience_s=60) as team:
        assert len(team) == 1


def dies(_: int) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(_: int) -> Any:
    raise ValueError


def answers_what_cannot_be_sent(_: int) -> Any:
    return lambda: None


def hangs(_: int) -> Any:
    time.sleep(3600)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("misfortune", [dies, raises, answers_what_cannot_be_sent, hangs])
def test_what_a_copy_does_not_answer_is_done_here(misfortune: Any) -> None:
    def answer(request: int) -> int:
        time.sleep(0.01)
        return misfortune(request) if in_a_copy() else request + 1

    with workers(answer, 3, patience_s=2) as team:
        answers = spread(team, answer, range(6))
        again = each_by_worker(team, answer, {1: [7]})
    assert {request: found for request, (_, found) in answers.items()} == {n: n + 1 for n in range(6)}
    assert again == {7: (0, 8)}


def test_what_fails_here_is_raised() -> None:
    with pytest.raises(ValueError), workers(raises, 3, patience_s=60) as team:
        spread(team, raises, range(6))


def test_copies_end_with_an_interrupt() -> None:
    def answer(_: int) -> int:
        if in_a_copy():
            time.sleep(3600)
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), workers(answer, 3, patience_s=3600) as team:
        spread(team, answer, range(6))
    assert time.monotonic() - started < 60


def test_all_see_the_least() -> None:
    least = SharedMinimum()

    def answer(request: int) -> float:
        if in_a_copy():
            least.lower(request)
        return least.value

    with workers(answer, 2, patience_s=60) as team:
        each_by_worker(team, answer, {1: [5]})
        each_by_worker(team, answer, {1: [7]})
        assert least.value == 5


PROGRAM = programs.mlp(batch=32, width=256, num_layers=4, optimizer="adam")


def planned(**options: Any) -> autopar.Plan:
    return autopar.plan(PROGRAM.step, *PROGRAM.abstract_args(), num_devices=32, hardware="h100-sxm", **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"memory_budget_bytes": 1.6e6}])
def test_plans_are_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    alone = planned(**options)
    monkeypatch.setattr(mesh_search, "_WORTH_FORKS", 0)
    together = planned(progress=lambda stage, _: told.append(stage), **options)
    assert replace(together, rejected=()) == replace(alone, rejected=())  # what the others are spared differs
    assert together.in_tree == alone.in_tree
    assert told[-1] == "done"


@pytest.mark.slow
def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error, with the same ways out, whoever found that out."""
    with pytest.raises(BudgetError) as alone:
        planned(memory_budget_bytes=1e4)
    monkeypatch.setattr(mesh_search, "_WORTH_FORKS", 0)
    with pytest.raises(BudgetError) as together:
        planned(memory_budget_bytes=1e4)
    assert str(together.value) == str(alone.value)
