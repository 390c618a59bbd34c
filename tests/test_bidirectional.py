"""Chimera and DualPipe: legal orders, each microbatch in one direction, the published bubble, an independent makespan."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.bidirectional import CHIMERA, DUALPIPE
from autopar.pipeline.schedule.in_flight import in_flight, peak_held
from autopar.pipeline.schedule.kind import PipelineShape
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Schedule, Task

CASES = [(CHIMERA, p, m) for p in (2, 4, 6, 8, 16) for m in (2, 3, 4, 5, 6, 8, 9, 16, 17, 64)]
CASES += [(DUALPIPE, p, m) for p in (2, 4, 6, 8, 16) for m in (2 * p, 2 * p + 2, 64)]


def longest_path(schedule: Schedule, seconds: dict[str, int]) -> int:
    """The end of the step by relaxation, without the simulator: dependencies are written out here again."""
    tasks = set(schedule.tasks)
    before: dict[Task, list[Task]] = {task: [] for task in tasks}
    for order in schedule.orders:
        for first, second in itertools.pairwise(order):
            before[second].append(first)
    for task in tasks:
        stage, m, phase = task
        back = "input" if Task(stage, m, "input") in tasks else "backward"
        if phase == "forward":
            before[task] += [Task(stage - 1, m, "forward")] * (stage > 0)
        elif phase in ("backward", "input"):
            before[task] += [Task(stage, m, "forward")] + [Task(stage + 1, m, back)] * (stage + 1 < schedule.num_stages)
        elif phase == "weight":
            before[task].append(Task(stage, m, "input"))
        else:
            before[task] += [one for one in tasks if one.stage == stage and one.phase in ("backward", "weight")]
    ends = dict.fromkeys(tasks, 0)
    changed = True
    while changed:
        changed = False
        for task in tasks:
            end = seconds[task.phase] + max((ends[one] for one in before[task]), default=0)
            changed |= end != ends[task]
            ends[task] = end
    return max(ends.values())


@pytest.mark.parametrize(("kind", "p", "m"), CASES, ids=lambda one: getattr(one, "name", str(one)))
def test_each_task_runs_once_and_a_microbatch_keeps_its_direction(kind, p, m):
    schedule = build(kind, p, m)
    work = [task for task in schedule.tasks if task.phase != "update"]
    phases = ("forward", "backward") if kind is CHIMERA else ("forward", "input", "weight")
    assert Counter(work) == Counter(Task(s, n, phase) for s in range(p) for n in range(m) for phase in phases)
    on = schedule.submesh_of()
    for task in work:
        assert on[task] in (task.stage, p - 1 - task.stage)
        is_down = on[Task(0, task.microbatch, "forward")] == 0
        assert on[task] == (task.stage if is_down else p - 1 - task.stage)
    updates = Counter((task.stage, on[task]) for task in schedule.tasks if task.phase == "update")
    assert updates == Counter((s, one) for s in range(p) for one in (s, p - 1 - s))


@pytest.mark.parametrize("phases", [(1, 1, 1), (1, 2, 1), (3, 2, 5)])
@pytest.mark.parametrize(
    ("kind", "p", "m"), [one for one in CASES if one[1] * one[2] <= 64], ids=lambda one: getattr(one, "name", str(one))
)
def test_makespan_equals_the_longest_path(kind, p, m, phases):
    forward, input_part, weight = phases
    seconds = {"forward": forward, "input": input_part, "weight": weight, "backward": input_part + weight, "update": 0}
    schedule = build(kind, p, m)
    assert simulate(schedule, lambda task: seconds[task.phase]).makespan_s == longest_path(schedule, seconds)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_chimeras_bubble_is_the_published_one(p, units):
    m = units * p
    schedule = build(CHIMERA, p, m)
    end = simulate(schedule, lambda task: 0 if task.phase == "update" else 1).makespan_s
    assert Fraction(int(end) - 2 * m, int(end)) == Fraction(p - 2, 2 * m + p - 2)


@pytest.mark.parametrize(("p", "m"), [(p, m) for kind, p, m in CASES if kind is CHIMERA])
def test_chimera_holds_what_its_entry_states(p, m):
    schedule = build(CHIMERA, p, m)
    assert CHIMERA.in_flight is not None
    assert tuple(peak_held(schedule, lambda stage: 1)) == CHIMERA.in_flight(PipelineShape(p, m))
    assert all(set(own) == {on, p - 1 - on} for on, own in enumerate(in_flight(schedule)))


@pytest.mark.parametrize(
    ("kind", "p", "m", "virtual", "text"),
    [
        (CHIMERA, 3, 4, 1, "even number of them; got 3"),
        (CHIMERA, 4, 1, 1, "at least 2 microbatches, not 1"),
        (CHIMERA, 4, 4, 2, "leave virtual=1, not 2"),
        (DUALPIPE, 5, 10, 1, "even number of them; got 5"),
        (DUALPIPE, 4, 6, 1, "at least 8 on 4 submeshes; got 6"),
        (DUALPIPE, 4, 9, 1, "at least 8 on 4 submeshes; got 9"),
    ],
)
def test_shapes_without_an_order_are_refused(kind, p, m, virtual, text):
    with pytest.raises(ScheduleError, match=text):
        build(kind, p, m, virtual=virtual)
