"""Every schedule of the table, and custom schedules: order, figures, errors, pictures.

Durations are whole numbers, so that equality is exact.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.pipeline.draw.palette import label
from autopar.pipeline.draw.perfetto import perfetto_trace
from autopar.pipeline.draw.svg import timeline_svg
from autopar.pipeline.draw.text import timeline_text
from autopar.pipeline.partition.planned_order import in_planned_order
from autopar.pipeline.partition.step_time import staged_peaks, task_seconds
from autopar.pipeline.schedule.in_flight import in_flight, most_in_flight, peak_held
from autopar.pipeline.schedule.kind import EvenPipeline, PipelineShape, ScheduleKind, down_and_up
from autopar.pipeline.schedule.objective import StageCost
from autopar.pipeline.schedule.sequential import GPIPE
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import SCHEDULES, build, find, unmet
from autopar.pipeline.schedule.task_text import text_of
from autopar.pipeline.schedule.tasks import Edges, Needs, Orders, Schedule, Task, chain, synchronous_needs
from autopar.pipeline.schedule.timeline import PipelineTimeline, Span
from autopar.pipeline.schedule.verifier import check
from benchmarks.pipeline.critical_path import longest_path
from benchmarks.pipeline.theory import seconds_of
from scripts import pytorch_orders

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"

Build = Callable[[PipelineShape], Schedule]
EVERY = pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES)
#: Forward pass, input part and weight part of a stage.
DURATIONS = ((1, 1, 1), (2, 3, 1), (3, 2, 2), (5, 1, 1), (1, 4, 1), (1, 2, 3), (2, 1, 1), (3, 2, 1), (4, 3, 1))


def shapes(kind: ScheduleKind) -> list[PipelineShape]:
    """Small ones for which a schedule is defined."""
    every = [PipelineShape(p, m, v) for p in range(1, 6) for m in range(1, 11) for v in range(1, 4)]
    return [shape for shape in every if unmet(kind, shape) is None]


def built(kind: ScheduleKind, shape: PipelineShape, edges: Edges | None = None) -> Schedule:
    return build(kind, shape.num_submeshes, shape.num_microbatches, virtual=shape.virtual, edges=edges)


def even_timeline(schedule: Schedule, even: EvenPipeline) -> PipelineTimeline:
    return simulate(schedule, lambda task: seconds_of(even, task))


# -- the contract ------------------------------------------------------------------------------


@EVERY
def test_an_entry_is_complete(kind: ScheduleKind) -> None:
    assert SCHEDULES[kind.name] is kind
    assert find(kind.name) is kind
    assert kind.description.endswith(".")
    assert kind.bubble, "the published formula in words"
    assert kind.bubble_s, "the published formula as code"
    assert kind.in_flight, "how many microbatches are held"
    assert shapes(kind), "some shape it is defined for"


@EVERY
def test_tasks_run_once_and_in_a_legal_order(kind: ScheduleKind) -> None:
    for shape in shapes(kind):
        schedule = built(kind, shape)
        assert schedule.num_submeshes == shape.num_submeshes
        assert schedule.num_stages == shape.num_submeshes * shape.virtual
        assert schedule.num_microbatches == shape.num_microbatches
        phases = {"none": ("forward",), "whole": ("forward", "backward"), "split": ("forward", "input", "weight")}
        stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
        expected = [Task(s, m, phase) for s in stages for m in microbatches for phase in phases[kind.backward]]
        first = [
            min(m for m in microbatches if on == schedule.place_of[s, m]) for s in stages for on in schedule.replicas[s]
        ]
        updated = [s for s in stages for _ in schedule.replicas[s] if kind.backward != "none"]
        expected += [Task(s, m, "update") for s, m in zip(updated, first, strict=False)]
        assert Counter(schedule.tasks) == Counter(expected)
        timeline = even_timeline(schedule, EvenPipeline(shape, 2, 3, 1))
        assert_legal(timeline, schedule.num_stages)
        assert_in_sequence(schedule)


def assert_legal(timeline: PipelineTimeline, num_stages: int) -> None:
    """What a synchronous step over a chain of stages asks for, whatever the schedule says that it waits for."""
    span_of = {span.task: span for span in timeline.spans}
    back = "input" if any(task.phase == "input" for task in span_of) else "backward"
    ended = {task: span.end_s for task, span in span_of.items()}
    for task, span in span_of.items():
        stage, microbatch = task.stage, task.microbatch
        if task.phase == "forward" and stage:
            assert span.start_s >= ended[Task(stage - 1, microbatch, "forward")]
        if task.phase == back:
            assert span.start_s >= ended[Task(stage, microbatch, "forward")]
            if stage < num_stages - 1:
                assert span.start_s >= ended[Task(stage + 1, microbatch, back)]
        if task.phase == "weight":
            assert span.start_s >= ended[Task(stage, microbatch, "input")]
        if task.phase == "update":
            own = [one for one in span_of.values() if one.task.stage == stage and one.task.phase != "update"]
            assert all(one.end_s <= span.start_s for one in own)
    for submesh in range(timeline.num_submeshes):
        assert all(one.end_s <= other.start_s for one, other in pairwise(timeline.on(submesh)))


def assert_in_sequence(schedule: Schedule) -> None:
    """A stage takes the microbatches of each phase in their order."""
    for order in schedule.orders:
        found = defaultdict[tuple[int, str], list[int]](list)
        for task in order:
            found[task.stage, task.phase].append(task.microbatch)
        assert all(numbers == sorted(numbers) for numbers in found.values())


@EVERY
def test_idle_time_is_as_published(kind: ScheduleKind) -> None:
    compared = 0
    for shape in shapes(kind):
        schedule = built(kind, shape)
        for durations in DURATIONS:
            even = EvenPipeline(shape, *durations)
            timeline = even_timeline(schedule, even)
            assert kind.bubble_s
            if kind.holds(even):
                assert timeline.idle_s == (kind.bubble_s(even),) * shape.num_submeshes, (shape, durations)
                compared += 1
            assert longest_path(schedule, lambda task, even=even: seconds_of(even, task))[0] == timeline.makespan_s
    assert compared >= 20


@EVERY
def test_most_in_flight_is_as_published(kind: ScheduleKind) -> None:
    for shape in shapes(kind):
        assert kind.in_flight
        assert peak_held(built(kind, shape), lambda stage: 1) == kind.in_flight(shape), shape


@EVERY
def test_an_update_delays_no_other_submesh(kind: ScheduleKind) -> None:
    """So the idle time of a step with updates is that without."""
    shape = shapes(kind)[-1]
    schedule, even = built(kind, shape), EvenPipeline(shape, 2, 3, 1)
    with_update = simulate(schedule, lambda task: 7 if task.phase == "update" else seconds_of(even, task))
    assert with_update.idle_s == even_timeline(schedule, even).idle_s


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_makespan_is_the_longest_path(data: st.DataObject) -> None:
    """Of any schedule, under any durations and transfers; and the path is one: it adds up to its length."""
    kind = data.draw(st.sampled_from(list(SCHEDULES.values())))
    schedule = built(kind, data.draw(st.sampled_from(shapes(kind))))
    draw = data.draw(st.randoms(use_true_random=False))
    seconds = {task: draw.randrange(20) for task in schedule.tasks}
    submesh_of = schedule.submesh_of()
    delays = {
        (need, task): draw.randrange(10)
        for task in schedule.tasks
        for need in schedule.needs[task]
        if submesh_of[need] != submesh_of[task]
    }

    def transfer_s(source: Task, target: Task) -> int:
        return delays[source, target]  # asked for nothing else

    timeline = simulate(schedule, seconds.__getitem__, transfer_s)
    length, path = longest_path(schedule, seconds.__getitem__, transfer_s)
    assert (
        timeline.makespan_s
        == length
        == sum(seconds[task] for task in path) + sum(delays.get(pair, 0) for pair in pairwise(path))
    )
    order_of = {span.task: span for span in timeline.spans}
    assert all(order_of[one].end_s <= order_of[other].start_s for one, other in pairwise(path))
    for span in timeline.spans:  # nothing starts before what it waits for has arrived
        needs = schedule.needs[span.task]
        assert all(order_of[n].end_s + delays.get((n, span.task), 0) <= span.start_s for n in needs)


# -- figures -----------------------------------------------------------------------------------


def test_fractions_of_one_after_another_and_of_inference() -> None:
    for p in range(1, 6):
        for m in range(1, 9):
            for name, expected in (("none", Fraction(p - 1, p)), ("inference", Fraction(p - 1, p - 1 + m))):
                timeline = simulate(build(name, p, m), lambda task: 0 if task.phase == "update" else 1)
                assert Fraction(int(sum(timeline.idle_s)), int(p * timeline.makespan_s)) == expected


def test_unit_slots_of_zero_bubble() -> None:
    """JaxPP's grid: with parts of equal length the step has exactly 3m + p - 1 of them."""
    for p in range(1, 9):
        for m in range(p, 20):
            timeline = simulate(build("zb-h1", p, m), lambda task: task.phase != "update")
            assert timeline.makespan_s == 3 * m + p - 1


@pytest.mark.parametrize(
    ("name", "shape", "submesh", "expected"),
    [
        ("1f1b", (4, 6, 1), 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5 U"),
        ("gpipe", (4, 3, 1), 2, "F0 F1 F2 B0 B1 B2 U"),
        ("none", (4, 3, 1), 2, "F0 B0 F1 B1 F2 B2 U"),
        # Megatron-LM's rule: forward and backward by turns after 2(p - 1 - i) + (v - 1)p forward passes.
        ("interleaved", (2, 4, 2), 0, "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a Ua Ub"),
        ("interleaved", (2, 4, 2), 1, "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a Ua Ub"),
        # As 1f1b, but submesh i puts off i weight parts.
        ("zb-h1", (4, 6, 1), 0, "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5 U"),
        ("zb-h1", (4, 6, 1), 3, "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5 U"),
    ],
)
def test_orders_worked_out_by_hand(name: str, shape: tuple[int, int, int], submesh: int, expected: str) -> None:
    p, m, v = shape
    schedule = build(name, p, m, virtual=v)
    stages = schedule.stages_on(submesh)
    assert " ".join(label(task, stages) for task in schedule.orders[submesh]) == expected


def test_orders_obey_pairwise_rules() -> None:
    """Shardy states 1F1B and ZB-H1 as pairs that come one before the other on stage s of p; all of them hold here."""
    for p in range(1, 6):
        for m in range(1, 10):
            for name, back in (("1f1b", "backward"), ("zb-h1", "input")):
                for s, order in enumerate(build(name, p, m).orders):
                    at = {(task.phase, task.microbatch): i for i, task in enumerate(order)}
                    pairs = [((back, i), ("forward", i + p - s)) for i in range(m)]
                    pairs += [(("forward", i + p - s - 1), (back, i)) for i in range(m)]
                    if back == "input":
                        pairs += [(("weight", i), ("forward", i + p)) for i in range(m)]
                        pairs += [(("input", i + s), ("weight", i)) for i in range(m)]
                        pairs += [(("weight", i), ("input", i + s + 1)) for i in range(m)]
                    assert all(at[one] < at[other] for one, other in pairs if one in at and other in at)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("interleaved", "81aa6d67614d3488", marks=pytest.mark.slow),
        pytest.param("interleaved-zb", "3031763bc98d8f07", marks=pytest.mark.slow),
        ("zb-v", "3d9d19c99b6bd7af"),
        ("dualpipe-v", "c4b4146fea790545"),
    ],
)
def test_orders_equal_pytorchs(name: str, expected: str) -> None:
    """The digests are those that `scripts/pytorch_orders.py` prints with PyTorch 2.9.1."""
    orders = (build(name, p, m, virtual=v).orders for p, m, v in pytorch_orders.shapes(name))
    texts = (text_of(task for task in order if task.phase != "update") for each in orders for order in each)
    assert pytorch_orders.digest(texts) == expected


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
def test_interleaved_takes_any_number_of_microbatches(name: str) -> None:
    """Longer rounds idle no longer than the whole rounds of fewer submeshes, and every number is legal."""
    for p, m, v in itertools.product(range(1, 7), range(1, 14), (2, 3, 4)):
        schedule = build(name, p, m, virtual=v)
        assert Counter(task.phase for task in schedule.tasks)["forward"] == p * m * v
        assert most_in_flight(schedule) == SCHEDULES[name].in_flight(PipelineShape(p, m, v))  # type: ignore[misc]


def test_planned_orders_are_legal_and_within_memory() -> None:
    """In parts of unequal length, some order by planned times is faster, and none holds more than the budget."""
    draw, faster = random.Random(0), 0
    for name, virtual in (("zb-v", 2), ("zb-h1", 1), ("interleaved-zb", 2)):
        for p, m in ((2, 3), (4, 8), (3, 7)):
            printed = build(name, p, m, virtual=virtual)
            costs = [
                StageCost(
                    forward_s=draw.random(), backward_s=draw.random(), weight_s=draw.random(),
                    state_bytes=draw.random(), flight_bytes=draw.random(), working_bytes=draw.random(),
                )
                for _ in range(p * virtual)
            ]  # fmt: skip
            needed = staged_peaks(printed, costs)
            budgets = [draw.uniform(1.0, 1.5) * one for one in needed]
            found = list(in_planned_order(printed, chain(p * virtual), costs, (), budgets))
            assert found
            before = simulate(printed, task_seconds(costs)).makespan_s
            for one in found:
                check(one)
                assert Counter(one.tasks) == Counter(printed.tasks)
                assert all(a <= b * (1 + 1e-9) for a, b in zip(staged_peaks(one, costs), budgets, strict=True))
                faster += simulate(one, task_seconds(costs)).makespan_s < before
    assert faster > 5


def test_zero_bubble_holds_no_more_than_1f1b() -> None:
    for p in range(1, 7):
        for m in range(1, 12):
            most = [max(peak_held(build(name, p, m), lambda stage: 1)) for name in ("1f1b", "zb-h1")]
            assert most[0] == most[1]


def test_zero_bubble_with_long_weight_parts() -> None:
    """Where the weight part fits no gap, what remains idle is the longer of the other two, on the way in and out."""
    for p in range(1, 6):
        for durations in DURATIONS:
            shape = PipelineShape(p, 2 * p)
            forward, into, weight = durations
            timeline = even_timeline(build("zb-h1", p, 2 * p), EvenPipeline(shape, *durations))
            longest = max(forward, into, forward + into - weight)
            assert timeline.idle_s == ((p - 1) * longest,) * p


def test_what_is_held_by_stage_and_in_bytes() -> None:
    assert in_flight(build("1f1b", 3, 8)) == ({0: 3}, {1: 2}, {2: 1})
    assert in_flight(build("interleaved", 2, 4, virtual=2)) == ({0: 4, 2: 2}, {1: 3, 3: 1})
    assert peak_held(build("interleaved", 2, 4, virtual=2), lambda stage: 10**stage) == (203, 1020)
    assert peak_held(build("zb-h1", 3, 8), lambda stage: 4) == (12, 12, 12)
    # Once the input part is through, half is free: the last submesh puts off two weight parts.
    assert peak_held(build("zb-h1", 3, 8), lambda stage: 4, lambda stage: 2) == (12, 10, 8)


def test_a_measured_timeline_has_the_same_figures() -> None:
    """It starts when it starts, and what overlaps on one submesh counts once."""
    spans = (
        Span(0, Task(0, 0, "forward"), 100, 104),
        Span(0, Task(0, 1, "forward"), 102, 106),
        Span(1, Task(1, 0, "forward"), 105, 110),
    )
    timeline = PipelineTimeline("measured", 3, spans)
    assert timeline.makespan_s == 10
    assert timeline.busy_s == (6, 5, 0)
    assert timeline.idle_s == (4, 5, 10)
    assert timeline.bubble_fractions == (0.4, 0.5, 1.0)


def test_branches_run_at_once() -> None:
    """Two stages that read the first and feed the last: neither waits for the other."""
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    forked = simulate(build("inference", 4, 1, edges=edges), lambda task: 1)
    assert forked.makespan_s == 3
    assert simulate(build("inference", 4, 1), lambda task: 1).makespan_s == 4
    for name in ("none", "gpipe", "1f1b", "zb-h1"):
        assert simulate(build(name, 4, 6, edges=edges), lambda task: 1).makespan_s > 0


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("1f2b", 4, 8), "there is no schedule '1f2b'. Did you mean '1f1b'? The schedules are 'none', 'inference',"),
        (lambda: build("ZB-H2", 4, 8), "there is no schedule 'ZB-H2'. Did you mean 'zb-h1' or 'zb-v'?"),
        (lambda: build("?", 4, 8), "there is no schedule '?'. The schedules are"),
        (lambda: build("gpipe", 4, 0), "schedule 'gpipe' needs num_microbatches of at least 1; got 0"),
        (
            lambda: build("1f1b", 4, 8, virtual=2),
            "schedule '1f1b' puts one stage on each submesh, not 2: leave virtual=1, or take schedule='interleaved'",
        ),
        (
            lambda: build("interleaved", 4, 8),
            "schedule 'interleaved' needs at least two stages on each submesh, not one: set virtual=2 or more, or take"
            " schedule='1f1b'",
        ),
        (lambda: build("dualpipe-v", 4, 7, virtual=2), "at least two microbatches for each of its 4 submeshes, not 7"),
        (lambda: build("zb-v", 4, 8), "has two stages on each submesh, not 1"),
        (lambda: find(replace(GPIPE, backward="split")), "the name 'gpipe' belongs to a schedule of the package"),
        (lambda: find(cast(Any, 3)), "`schedule` is 3: give a name or a `ScheduleKind`"),
    ],
)  # fmt: skip
def test_errors_of_users_schedules(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        call()


def made(orders: list[list[Task]], edges: Edges = ((0, 1),)) -> Schedule:
    whole = tuple(map(tuple, orders))
    return Schedule("mine", whole, synchronous_needs(whole, edges))


F = lambda stage, microbatch: Task(stage, microbatch, "forward")  # noqa: E731
B = lambda stage, microbatch: Task(stage, microbatch, "backward")  # noqa: E731


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            made([[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]]),
            "schedule 'mine' deadlocks: on submesh 0, the backward of microbatch 0 on stage 0 waits for the backward"
            " of microbatch 0 on stage 1, which submesh 1 runs after the forward of microbatch 1 on stage 1; on submesh 1,"
            " the forward of microbatch 1 on stage 1 waits for the forward of microbatch 1 on stage 0, which submesh 0 runs"
            " after the backward of microbatch 0 on stage 0. A submesh runs its tasks in the given order: move tasks"
            " that others wait for to the front",
        ),
        (
            made([[B(0, 0), F(0, 0)]], ()),
            "schedule 'mine' deadlocks: on submesh 0, the backward of microbatch 0 on stage 0 waits for the forward of"
            " microbatch 0 on stage 0, which submesh 0 runs after the backward of microbatch 0 on stage 0.",
        ),
        (
            Schedule("mine", ((F(0, 0),), (F(1, 0),)), {F(1, 0): (F(2, 0),)}),
            "schedule 'mine' cannot run: the forward of microbatch 0 on stage 1, next on submesh 1, waits for the forward of"
            " microbatch 0 on stage 2, which no submesh runs.",
        ),
        (
            made([[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0), F(0, 0)]]),
            "schedule 'mine' runs the forward of microbatch 0 on stage 0 2 times, on submesh 0 and 1; each task runs once",
        ),
        (
            made([[F(0, 0), B(0, 0)], [F(1, 0)]]),
            "schedule 'mine' runs forward of microbatch 0 on stage 1, which needs forward and backward, or forward, input"
            " and weight: every stage runs every microbatch, whole",
        ),
        (
            made([[F(0, 0), F(0, 1)], [F(1, 0)]]),
            "schedule 'mine' runs nothing of microbatch 1 on stage 1, which needs forward: every stage runs every",
        ),
        (
            made([[F(0, 0), B(1, 0), B(0, 0)], [F(1, 0)]]),
            "schedule 'mine' runs microbatch 0 of stage 1 on submeshes 0 and 1; a backward pass must run",
        ),
    ],
)  # fmt: skip
def test_errors_of_illegal_schedules(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check(schedule)


# -- schedules that are not in the table -------------------------------------------------------
# Placement, what waits for what, and the number of stages are read off a schedule: these need no change of anything.


def in_order_of_readiness(tasks: list[list[Task]], needs: Needs, most_in_flight: int) -> Orders:
    """An order for each submesh, found step by step: of what is ready, the part of a backward pass that others wait for
    first, then forward while there is room, then weight parts."""
    rank = {"input": 0, "backward": 0, "forward": 1, "weight": 2, "update": 3}
    left, done = [sorted(on, key=lambda t: (rank[t.phase], t.microbatch, -t.stage)) for on in tasks], set[Task]()
    orders: list[list[Task]] = [[] for _ in tasks]
    while any(left):
        ended = []
        for submesh, on in enumerate(left):
            held = Counter(task.phase in ("backward", "weight") for task in orders[submesh] if task.phase != "input")
            room = held[False] - held[True] < most_in_flight
            ready = (t for t in on if (t.phase != "forward" or room) and all(need in done for need in needs[t]))
            task = next(ready, None)
            if task is not None:
                on.remove(task)
                orders[submesh].append(task)
                ended.append(task)
        assert ended, "nothing is ready"
        done.update(ended)
    return tuple(map(tuple, orders))


def _v_placed(shape: PipelineShape) -> Orders:
    """ZB-V's placement: two stages on each submesh, the program going up and down again, the backward pass split."""
    p = shape.num_submeshes
    tasks = [
        [
            Task(stage, microbatch, phase)
            for stage in (submesh, 2 * p - 1 - submesh)
            for microbatch in range(shape.num_microbatches)
            for phase in ("forward", "input", "weight")
        ]
        for submesh in range(p)
    ]
    needs = synchronous_needs(tuple(map(tuple, tasks)), chain(2 * p))
    return in_order_of_readiness(tasks, needs, most_in_flight=2 * p)


V_PLACED = ScheduleKind(
    name="v",
    description="The program goes up and down again.",
    orders=_v_placed,
    backward="split",
    placement=down_and_up,
    virtuals=(2,),
)


def test_v_placement() -> None:
    """Two stages side by side on the last submesh, first and last on the first; idle less than ZB-H1 by as much memory."""
    p, m = 4, 8
    schedule = build(V_PLACED, p, m, virtual=2)
    assert [schedule.stages_on(submesh) for submesh in range(p)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    timeline = simulate(schedule, lambda task: 0 if task.phase == "update" else 1)
    assert_legal(timeline, 2 * p)
    assert max(peak_held(schedule, lambda stage: 1)) <= 2 * p
    one_way = simulate(build("zb-h1", p, m), lambda task: 0 if task.phase == "update" else 2)  # stages twice as long
    assert timeline.bubble_fraction < one_way.bubble_fraction
    assert longest_path(schedule, lambda task: 0 if task.phase == "update" else 1)[0] == timeline.makespan_s


def _both_ways(shape: PipelineShape) -> Orders:
    """Chimera: half of the microbatches go down the submeshes, half go up; each stage stands on two."""
    p, m = shape.num_submeshes, shape.num_microbatches
    tasks = [
        [
            Task(stage, microbatch, phase)
            for stage, first in ((submesh, 0), (p - 1 - submesh, 1))
            for microbatch in range(first, m, 2)
            for phase in ("forward", "backward")
        ]
        for submesh in range(p)
    ]
    return in_order_of_readiness(tasks, synchronous_needs(tuple(map(tuple, tasks)), chain(p)), most_in_flight=p)


BOTH_WAYS = ScheduleKind(
    name="both ways",
    description="Half of the microbatches go the other way.",
    orders=_both_ways,
    placement=lambda shape: tuple((s, shape.num_submeshes - 1 - s) for s in range(shape.num_submeshes)),
)


def test_a_stage_on_two_submeshes() -> None:
    p = 4
    schedule = build(BOTH_WAYS, p, p)
    assert [schedule.stages_on(submesh) for submesh in range(p)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    updates = [task for task in schedule.tasks if task.phase == "update"]
    assert sorted(updates) == sorted(Task(stage, first, "update") for stage in range(p) for first in (0, 1))
    gradients = {Task(0, microbatch, "backward") for microbatch in range(p)}
    assert all(set(schedule.needs[Task(0, copy, "update")]) == gradients for copy in (0, 1))  # summed over both
    seconds = {"forward": 1, "backward": 2, "update": 0}
    timeline = simulate(schedule, lambda task: seconds[task.phase])
    assert_legal(timeline, p)
    one_way = simulate(build("1f1b", p, p), lambda task: seconds[task.phase])
    assert timeline.bubble_fraction < one_way.bubble_fraction
    assert max(peak_held(schedule, lambda stage: 1)) <= p


SLICES = 3


def _token_slices(shape: PipelineShape) -> Orders:
    """TeraPipe: a microbatch in slices along its tokens; a task's microbatch counts the slices of all of them. Backward
    goes from the last slice to the first, for attention has each token look at those before it."""
    forward = range(shape.num_microbatches * SLICES)
    backward = [m * SLICES + s for m in range(shape.num_microbatches) for s in reversed(range(SLICES))]
    return tuple(
        (*(F(stage, i) for i in forward), *(B(stage, i) for i in backward)) for stage in range(shape.num_submeshes)
    )


def _slice_needs(orders: Orders, edges: Edges) -> Needs:
    needs = synchronous_needs(orders, edges)
    for task in needs:
        other = task.microbatch + {"forward": -1, "backward": 1}.get(task.phase, 0)
        if task.phase in ("forward", "backward") and other >= 0 and other // SLICES == task.microbatch // SLICES:
            needs[task] = (*needs[task], Task(task.stage, other, task.phase))
    return needs


TOKEN_SLICES = ScheduleKind(
    name="slices", description="By slices of tokens.", orders=_token_slices, needs=_slice_needs, parts=SLICES
)


def test_token_slices() -> None:
    p, m = 4, 2
    schedule = build(TOKEN_SLICES, p, m)
    assert F(2, 4) in schedule.needs[F(2, 5)]
    assert F(2, 2) not in schedule.needs[F(2, 3)]  # another microbatch
    assert B(2, 5) in schedule.needs[B(2, 4)]
    timeline = simulate(schedule, lambda task: {"forward": 1, "backward": 2, "update": 0}[task.phase])
    assert timeline.idle_s == ((p - 1) * (1 + 2),) * p  # of a slice: a third of the microbatch's
    check(schedule)


def _never_drained(shape: PipelineShape) -> Orders:
    """PipeDream: an update after each backward pass, and no waiting for the other microbatches."""
    orders = build("1f1b", shape.num_submeshes, shape.num_microbatches).orders
    return tuple(
        tuple(
            after
            for task in order
            if task.phase != "update"
            for after in ((task, Task(task.stage, task.microbatch, "update")) if task.phase == "backward" else (task,))
        )
        for order in orders
    )


def _own_gradient_only(orders: Orders, edges: Edges) -> Needs:
    needs = synchronous_needs(orders, edges)
    return {t: (B(t.stage, t.microbatch),) if t.phase == "update" else before for t, before in needs.items()}


NEVER_DRAINED = ScheduleKind(
    name="immediate", description="An update after each microbatch.", orders=_never_drained, needs=_own_gradient_only
)


def test_an_asynchronous_schedule() -> None:
    p, m = 3, 6
    schedule = build(NEVER_DRAINED, p, m)
    assert Counter(task.phase for task in schedule.tasks) == {"forward": 18, "backward": 18, "update": 18}
    timeline = simulate(schedule, lambda task: 1)
    first_update = min(span.end_s for span in timeline.spans if span.task.phase == "update")
    last_forward = max(span.start_s for span in timeline.spans if span.task.phase == "forward")
    assert first_update < last_forward
    assert longest_path(schedule, lambda task: 1)[0] == timeline.makespan_s


# -- pictures ----------------------------------------------------------------------------------


def a_timeline(kind: ScheduleKind, num_microbatches: int = 8) -> PipelineTimeline:
    virtual = 1 if unmet(kind, PipelineShape(4, num_microbatches)) is None else 2
    schedule = build(kind, 4, num_microbatches, virtual=virtual)
    return even_timeline(schedule, EvenPipeline(PipelineShape(4, num_microbatches, virtual), 1, 1, 1))


@pytest.mark.sampled(3)
@EVERY
@pytest.mark.parametrize("num_microbatches", [8, 64])
def test_svg_shows_every_task_where_it_runs(kind: ScheduleKind, num_microbatches: int) -> None:
    timeline = a_timeline(kind, num_microbatches)
    root = ElementTree.fromstring(timeline_svg(timeline))
    rectangles = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    bubbles = [r for r in rectangles if r.get("class") == "bubble"]
    tasks = [r for r in rectangles if r.get("class") != "bubble"]
    assert len(bubbles) == timeline.num_submeshes
    assert len(tasks) == len(timeline.spans)
    scale = box(bubbles[0])[2] / timeline.makespan_s
    told = {title(r).split(", submesh")[0]: r for r in tasks}
    for span in timeline.spans:
        left, top, width, _ = box(told[str(span.task)])
        row = box(bubbles[span.submesh])
        assert left == pytest.approx(row[0] + span.start_s * scale, abs=0.02)
        assert width == pytest.approx(span.seconds * scale, abs=0.02)
        assert top == row[1]
        assert title(told[str(span.task)]).endswith(f"{span.start_s} s to {span.end_s} s, {span.seconds} s")


@EVERY
def test_svg_texts_overlap_nothing(kind: ScheduleKind) -> None:
    """By the width that an 11 pixel Helvetica digit has at most; every text is on the canvas."""
    root = ElementTree.fromstring(timeline_svg(a_timeline(kind), a_timeline(kind)))
    rectangles = [box(r) for r in root.iter(f"{SVG}rect") if r.get("class") not in (None, "bubble")]
    numbers = [text for text in root.iter(f"{SVG}text") if text.get("class") == "number"]
    assert len(numbers) >= len(rectangles) / 3
    for text in numbers:
        x, y, half = float(text.get("x", "")), float(text.get("y", "")), 6.2 * len(text.text or "") / 2
        inside = [r for r in rectangles if r[0] <= x - half and x + half <= r[0] + r[2] and r[1] < y < r[1] + r[3]]
        assert len(inside) == 1
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    lines = defaultdict[float, list[tuple[float, float]]](list)
    for text in root.iter(f"{SVG}text"):
        size = {"title": 8.5, "key": 7.0, "name": 7.0}.get(text.get("class", ""), 6.2) * len(text.text or "")
        x = float(text.get("x", "")) - (size / 2 if text.get("class") == "number" or text.get("text-anchor") else 0)
        assert x >= 0
        assert x + size <= width
        assert float(text.get("y", "")) <= height
        if text.get("class") != "number":
            lines[float(text.get("y", ""))].append((x, x + size))
    for spans in lines.values():
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(spans)))


def test_svg_escapes_titles() -> None:
    timeline = PipelineTimeline('a < b & "c"', 1, (Span(0, Task(0, 0, "forward"), 0, 1),))
    root = ElementTree.fromstring(timeline_svg(timeline))
    assert (root.get("aria-label") or "").startswith('a < b & "c"')


def test_a_timeline_of_nothing_can_be_drawn() -> None:
    timeline = PipelineTimeline("nothing", 2, ())
    ElementTree.fromstring(timeline_svg(timeline))
    assert "0 s" in timeline_text(timeline).plain
    assert len(perfetto_trace(timeline)["traceEvents"]) == 3


def box(rectangle: ElementTree.Element) -> tuple[float, float, float, float]:
    return tuple(float(rectangle.get(name, "")) for name in ("x", "y", "width", "height"))  # pyright: ignore


def title(rectangle: ElementTree.Element) -> str:
    found = rectangle.find(f"{SVG}title")
    assert found is not None
    return found.text or ""


def test_text_of_1f1b() -> None:
    drawn = timeline_text(
        simulate(build("1f1b", 3, 4), lambda t: {"forward": 1e-3, "backward": 2e-3, "update": 1e-3}[t.phase])
    )
    assert drawn.plain.splitlines() == [
        "1f1b, simulated: 19.0 ms, bubble 32 %",
        "submesh 0 F0 F1 F2 ............B0    F3 B1    ...B2    ...B3    U     32 %",
        "submesh 1 ...F0 F1 ......B0    F2 B1    F3 B2    ...B3    U  ......   32 %",
        "submesh 2 ......F0 B0    F1 B1    F2 B2    F3 B3    U  ............   32 %",
        "F forward, B backward, U update; number: the microbatch; . idle; right: the idle share",
    ]


@EVERY
@pytest.mark.parametrize("width", [60, 100, 200])
def test_text_fits_and_shows_shares(kind: ScheduleKind, width: int) -> None:
    timeline = a_timeline(kind)
    for drawn in (timeline_text(timeline, width=width), timeline_text(timeline, timeline, width=width)):
        lines = [line for line in drawn.plain.splitlines() if line.startswith("submesh")]
        assert all(len(line) <= width for line in lines)
        for line, fraction in zip(lines, timeline.bubble_fractions * 2, strict=False):
            cells = re.sub(r"^submesh \d+ (.*)  [ \d]+ %$", r"\1", line)
            assert cells.count(".") / len(cells) == pytest.approx(fraction, abs=0.1)


@EVERY
def test_text_shows_every_task_in_order_where_there_is_room(kind: ScheduleKind) -> None:
    timeline = a_timeline(kind)
    lines = [line for line in timeline_text(timeline, width=500).plain.splitlines() if line.startswith("submesh")]
    for submesh, line in enumerate(lines):
        stages = timeline.stages_on(submesh)
        tasks = [span.task for span in timeline.on(submesh) if span.seconds]
        assert re.findall(r"[FBIWU]\d*[a-z]?", line.removeprefix(f"submesh {submesh}")) == [
            label(t, stages) for t in tasks
        ]


def test_perfetto_has_every_task() -> None:
    timeline = a_timeline(SCHEDULES["interleaved"])
    moved = PipelineTimeline(
        "measured", 4, tuple(Span(s.submesh, s.task, s.start_s + 5, s.end_s + 5) for s in timeline.spans)
    )
    trace = json.loads(json.dumps(perfetto_trace(timeline, moved)))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {(process, submesh): f"submesh {submesh}" for process in (0, 1) for submesh in range(4)}
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["interleaved, simulated", "measured"]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 2 * len(timeline.spans)
    for process in (0, 1):  # a measurement begins when its step does
        found = {
            (e["tid"], e["args"]["stage"], e["args"]["microbatch"], e["cat"]): (e["ts"], e["dur"])
            for e in slices
            if e["pid"] == process
        }
        assert found == {
            (s.submesh, s.task.stage, s.task.microbatch, s.task.phase): (1e6 * s.start_s, 1e6 * s.seconds)
            for s in timeline.spans
        }


def test_the_pictures_of_the_guide_are_those_drawn() -> None:
    from scripts.draw_schedules import FOLDER, pictures

    drawn = pictures()
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(drawn) == set(SCHEDULES)
    for name, svg in drawn.items():
        assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == svg, "run scripts/draw_schedules.py"


def test_the_guide_tells_every_schedule() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    for name, kind in SCHEDULES.items():
        assert f"(images/schedules/{name}.svg)" in page
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| {kind.bubble} |" in row
