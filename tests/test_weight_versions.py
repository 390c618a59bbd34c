"""Which version of the weights each task of an asynchronous pipeline reads, and which versions stages keep."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import pytest

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.in_flight import most_in_flight
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import SCHEDULES, build, find
from autopar.pipeline.schedule.tasks import Schedule, Task
from autopar.pipeline.schedule.versions import (
    SYNCHRONOUS,
    Read,
    VersionRule,
    alive_during,
    delays_of,
    log_of,
    most_kept,
    versions_read,
)

UPDATES = 200
#: For one microbatch per update (double buffer: for any number m of at least p), p stages, stage s and microbatch k: what
#: a forward pass reads after filling, the versions kept, and the delay. A backward pass reads the same, or with the
#: latest weights k.
TABLE: dict[str, tuple[Callable[[int, int, int, int], int], Callable[[int, int], int], Callable[[int, int], int]]] = {
    "pipedream": (lambda p, s, k, m: k - (p - 1 - s), lambda p, s: p - s, lambda p, s: p - 1 - s),
    "vertical": (lambda p, s, k, m: k - (p - 1), lambda p, s: p, lambda p, s: p - 1),
    "2bw": (lambda p, s, k, m: k // m - 1, lambda p, s: 2, lambda p, s: 1),
    "ampnet": (lambda p, s, k, m: k - (p - 1 - s), lambda p, s: 1, lambda p, s: p - 1 - s),
    "pipemare": (lambda p, s, k, m: k - (p - 1 - s), lambda p, s: 1, lambda p, s: p - 1 - s),
}


def reads_of(name: str, schedule: Schedule, per_update: int) -> dict[Task, int]:
    return versions_read(schedule, find(name).reads, per_update)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize("p", range(2, 9))
def test_reads_copies_and_delays_are_those_of_the_papers(name: str, p: int) -> None:
    forward, kept, delay = TABLE[name]
    for m in (p, 2 * p) if name == "2bw" else (1,):
        schedule = build(name, p, m, num_updates=UPDATES)
        reads = reads_of(name, schedule, m)
        expected = []
        for s, k in itertools.product(range(p), range(m * UPDATES)):
            version = max(0, forward(p, s, k, m))
            expected.append(Read(s, k, version, k if kept(p, s) == 1 and name != "2bw" else version))
        assert list(log_of(reads)) == expected
        assert most_kept(schedule, reads) == tuple(kept(p, s) for s in range(p))
        filled = {t: n for t, n in delays_of(reads, m).items() if t.microbatch >= m * p}
        assert filled
        assert all(n == delay(p, task.stage) for task, n in filled.items())
        assert most_in_flight(schedule) == tuple(p - s for s in range(p))


def enumerated(p: int, m: int, name: str, updates: int) -> Iterator[Read]:
    """Stages that act by turns on what they see: a stage with p - s microbatches in flight, or without another one to
    start, waits for a backward pass, else it starts a forward pass. Weights are lists of versions that are looked up, not
    counted."""
    sent: list[list[int]] = [list(range(m * updates)), *([] for _ in range(p - 1))]
    back: list[list[int]] = [[] for _ in range(p)]
    weights = [["initial"] for _ in range(p)]
    stash: list[dict[int, str]] = [{} for _ in range(p)]
    started = [0] * p
    entered: dict[int, str] = {}
    gradients: list[list[int]] = [[] for _ in range(p)]
    logged: list[tuple[int, int, str, str]] = []

    def chosen(s: int, k: int) -> str:
        if name == "vertical":
            entered.setdefault(k, weights[0][-1])
            return entered[k]
        if name == "2bw":
            return "initial" if k < 2 * m else f"after batch {k // m - 2}"
        return weights[s][-1]

    while len(logged) < p * m * updates:
        for s in range(p):
            if back[s] and (len(stash[s]) == p - s or started[s] == m * updates):
                k = back[s].pop(0)
                ahead = stash[s].pop(k)
                logged.append((s, k, ahead, ahead if name in ("pipedream", "vertical", "2bw") else weights[s][-1]))
                gradients[s].append(k)
                if s:
                    back[s - 1].append(k)
                if len(gradients[s]) == m:
                    assert len({one // m for one in gradients[s]}) == 1
                    weights[s].append(f"after batch {k // m}")
                    gradients[s] = []
            elif sent[s] and len(stash[s]) < p - s:
                k = sent[s].pop(0)
                started[s] += 1
                stash[s][k] = chosen(s, k)
                (sent[s + 1] if s < p - 1 else back[s]).append(k)
    number = {"initial": 0, **{f"after batch {n}": n + 1 for n in range(updates)}}
    for s, k, ahead, behind in sorted(logged):
        assert {ahead, behind} <= set(weights[s])
        yield Read(s, k, number[ahead], number[behind])


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_the_log_is_that_of_stages_that_act_by_turns(name: str, m: int) -> None:
    for p in (2, 3, 5, 8):
        if name == "2bw" and m < p:
            continue
        schedule = build(name, p, m, num_updates=30)
        assert list(log_of(reads_of(name, schedule, m))) == list(enumerated(p, m, name, 30))


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.backward == "whole"])
def test_synchronous_schedules_read_the_version_of_their_step(name: str) -> None:
    kind = SCHEDULES[name]
    assert kind.reads is SYNCHRONOUS
    assert not kind.is_asynchronous
    schedule = build(name, 4, 8, virtual=kind.virtuals[0])
    reads = versions_read(schedule, kind.reads, 8 * kind.parts)
    assert set(reads.values()) == {0}
    assert set(most_kept(schedule, reads)) == {1}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_versions_alive_are_those_that_are_still_read(name: str) -> None:
    """By the definition, task by task, instead of one pass over the order."""
    for p, m in ((3, 3), (4, 5)):
        schedule = build(name, p, m, num_updates=9)
        reads = reads_of(name, schedule, m)
        alive = alive_during(schedule, reads)
        for order in schedule.orders:
            for n, task in enumerate(order):
                applied = sum(one.phase == "update" for one in order[:n])
                still_read = {reads[one] for one in order[n:]} & set(range(applied + 1))
                assert set(alive[task]) == still_read | {applied}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_no_submesh_idles_after_filling(name: str) -> None:
    for p in (2, 4, 7):
        timeline = simulate(
            build(name, p, p, num_updates=12), lambda task: {"forward": 1, "backward": 2}.get(task.phase, 0)
        )
        assert timeline.idle_s == (3 * (p - 1),) * p


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_fewer_batches_have_the_same_order_without_the_others(name: str) -> None:
    """So a stream may end anywhere, and versions and lifetimes of what is left are as if it went on."""
    for p, m in ((4, 4), (3, 5)):
        long = build(name, p, m, num_updates=9)
        for count in range(1, 9):
            short = build(name, p, m, num_updates=count)
            for all_tasks, tasks in zip(long.orders, short.orders, strict=True):
                assert tasks == tuple(task for task in all_tasks if task.microbatch < m * count)
            reads = reads_of(name, long, m)
            assert reads_of(name, short, m) == {task: reads[task] for task in short.tasks}


def test_an_update_waits_for_its_own_batch_only() -> None:
    schedule = build("pipedream", 2, 2, num_updates=3)
    assert schedule.needs[Task(0, 2, "update")] == (Task(0, 2, "backward"), Task(0, 3, "backward"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: build("2bw", 4, 3),
            "schedule '2bw' keeps two versions only with at least as many microbatches per update as stages, 4, not 3: raise"
            " `num_microbatches`, or take 'pipedream'",
        ),
        (
            lambda: build("1f1b", 4, 8, num_updates=2),
            "schedule '1f1b' orders one step at a time: leave num_updates=1, or take an asynchronous schedule",
        ),
        (
            lambda: versions_read(
                build("pipedream", 2, 1, num_updates=3), VersionRule("the next", lambda at: at.batch + 1), 1
            ),
            "schedule 'pipedream' cannot run: the forward of microbatch 0 on stage 0 reads version 1 of the weights, but its"
            " stage has applied 0 updates by then. Let tasks read versions that exist",
        ),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_stages_are_cut_by_no_more_versions_than_they_keep(name: str) -> None:
    for p, m in itertools.product((2, 3, 5, 8), (1, 2, 3, 5, 8)):
        if name == "2bw" and m < p:
            continue
        schedule = build(name, p, m, num_updates=2 * p // m + 4)
        always, for_each = find(name).reads.least_further(m)
        kept = most_kept(schedule, reads_of(name, schedule, m))
        assert all(always + for_each * (p - 1 - s) <= kept[s] - 1 for s in range(p))
        if m == 1 and name != "vertical":
            assert all(always + for_each * (p - 1 - s) == kept[s] - 1 for s in range(p))
