"""The keeper's rules, played without processes: any order of failures, in simulated time."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from autopar.membership.copies import newest_complete, partners_of
from autopar.membership.deal import Deal, better, dealt
from autopar.membership.job import BLAME_S, CLOSED_S, DEAL_S, Job
from autopar.membership.records import Assignment, Place, Report, Terms
from autopar.membership.state_file import Saved
from autopar.membership.wire import WireError

TICK_S = 0.1


class Member:
    """An agent and its worker, which do what they are assigned.

    Attributes:
        alive: whether it reports. frozen: whether its worker does no step.
    """

    def __init__(self, name: str, host: str = "") -> None:
        self.report = Report(name, host or name, 1, f"{name}:1", f"{name}:2", standby=True)
        self.alive, self.frozen = True, False
        self.standby_at_s = 0.0
        self.over: int | None = None

    def follow(self, wanted: Assignment, now_s: float) -> None:
        one = self.report
        one = replace(one, held=tuple(copy for copy in one.held if copy[:2] >= wanted.floor))
        if wanted.phase == "over":
            self.over = wanted.code
        elif wanted.phase == "idle" and one.worker == "running":
            one = replace(one, worker="failed", why="was ended with its generation")
        elif wanted.place is not None and wanted.place.generation > one.generation and one.standby:
            start = wanted.place.restore.step if wanted.place.restore else 0
            one = replace(one, generation=wanted.place.generation, worker="running", position=start, why="")
            one, self.standby_at_s = replace(one, standby=False, stops_at=None), now_s + 1.0
        if wanted.border == "ask" and one.stops_at is None and one.worker == "running":
            one = replace(one, stops_at=one.position + 1)
        if not one.standby and now_s >= self.standby_at_s:
            one = replace(one, standby=True)
        self.report = one


class Fleet:
    """A job and its members, in steps of `TICK_S`. Workers do one step a tick, all together."""

    def __init__(self, terms: Terms, names: str, saved: Saved | None = None, steps: int = 10**6) -> None:
        self.job, self.terms, self.steps = Job(terms, saved, 0.0), terms, steps
        self.members = {name: Member(name) for name in names}
        self.now_s = 0.0
        self.events: list[str] = []
        self.starts: list[tuple[int, int, int]] = []  # generation, members, step

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def tick(self) -> None:
        self.now_s += TICK_S
        before = self.job.generation
        for member in self.members.values():
            if member.alive and member.over is None:
                self.job.heard(Report.from_json(member.report.to_json()), self.now_s)
        self.job.tick(self.now_s)
        self.events += self.job.events
        self.job.events.clear()
        if self.job.places and self.job.generation != before:
            (step,) = {0 if place.restore is None else place.restore.step for place in self.job.places.values()}
            self.starts.append((self.job.generation, len(self.job.places), step))
        for name, member in self.members.items():
            if member.alive and member.over is None:
                member.follow(Assignment.from_json(self.job.assignment(name).to_json()), self.now_s)
        self._work()

    def _work(self) -> None:
        """One step of all workers, if every one takes part; copies every `every` steps."""
        places = self.job.places
        at_work = [self.members[name] for name in places if name in self.members]
        ready = [one for one in at_work if one.alive and not one.frozen and one.report.worker == "running"]
        if not places or len(ready) < len(places) or any(one.report.generation != self.job.generation for one in ready):
            return
        border = self.job.border
        limits = [border if isinstance(border, int) else one.report.stops_at or 10**9 for one in ready]
        if any(one.report.position >= limit for one, limit in zip(ready, limits, strict=True)):
            for one in ready if border != "ask" else ():
                self._copy(one, places[one.report.agent], one.report.position)
                one.report = replace(one.report, worker="yielded")
            return
        for one in ready:
            step = one.report.position + 1
            one.report = replace(one.report, position=step)
            if step % self.terms.every == 0:
                self._copy(one, places[one.report.agent], step)
            state: Any = "finished" if step >= self.steps else "running"
            one.report = replace(one.report, worker=state)

    def _copy(self, one: Member, place: Place, step: int) -> None:
        for member in self.members.values():
            if member.report.memory in place.partners and member.alive:
                copy = (place.generation, step, place.rank, place.count)
                member.report = replace(member.report, held=tuple(sorted({*member.report.held, copy})))


TERMS = Terms(4, timeout_s=2.0, every=5, ahead=0)


def started(terms: Terms = TERMS, names: str = "abcd", **options: Any) -> Fleet:
    fleet = Fleet(terms, names, **options)
    fleet.run(5.0)
    assert fleet.starts == [(1, 4, 0)], fleet.events
    return fleet


def test_the_first_generation_waits_for_all_members() -> None:
    fleet = Fleet(TERMS, "abc")
    fleet.run(100.0)
    assert not fleet.starts and fleet.events.count("waiting for members: 3 of 4 are ready") == 1
    fleet.members["d"] = Member("d")
    fleet.run(1.0)
    assert fleet.starts == [(1, 4, 0)]


def test_a_killed_worker_is_replaced_and_named() -> None:
    fleet = started()
    for name, why in (("a", "failed at x.py:1: JaxRuntimeError: Gloo"), ("c", "was ended by signal 9 (SIGKILL)")):
        fleet.members[name].report = replace(fleet.members[name].report, worker="failed", why=why)
    at_step = fleet.members["b"].report.position
    fleet.run(BLAME_S + 1.0)
    assert any("worker 2, of c (host c), was ended by signal 9" in event for event in fleet.events)
    assert fleet.starts[1:] == [(2, 4, at_step // 5 * 5)]


def test_the_job_goes_on_without_a_lost_member_within_the_timeout() -> None:
    fleet = started()
    fleet.members["b"].alive = False
    lost_s = fleet.now_s
    while len(fleet.starts) == 1:
        fleet.tick()
        assert fleet.now_s < lost_s + TERMS.timeout_s + 1.0
    assert fleet.starts[1][:2] == (2, 3)
    assert [(place.rank, place.count) for place in fleet.job.places.values()] == [(0, 3), (1, 3), (2, 3)]


def test_a_closed_connection_counts_only_after_the_generation_broke() -> None:
    fleet = started()
    fleet.members["b"].alive = False
    fleet.job.closed("b", fleet.now_s)
    fleet.run(1.5)
    assert len(fleet.starts) == 1
    fleet.members["a"].report = replace(fleet.members["a"].report, worker="failed", why="JaxRuntimeError: Gloo")
    fleet.run(BLAME_S + 0.3)
    assert len(fleet.starts) == 2 and fleet.starts[1][1] == 3
    assert any("b (host b) closed the connection" in event for event in fleet.events)
    assert TERMS.timeout_s > CLOSED_S


def test_a_returning_member_is_taken_back_at_a_step_border() -> None:
    fleet = started()
    fleet.members.pop("b")
    fleet.run(6.0)
    fleet.members["e"] = Member("e")
    fleet.run(3.0)
    step = fleet.starts[2][2]
    assert fleet.starts[2][:2] == (3, 4) and any(f"ended at the border of step {step}" in one for one in fleet.events)
    assert [*fleet.job.places] == ["a", "c", "d", "e"]


def test_workers_end_at_the_latest_border_of_the_steps_that_they_are_in() -> None:
    fleet = started()
    members = [one.report for one in fleet.members.values()]
    fleet.job.border = "ask"
    for report, at in zip(members, (20, 22, 21, 20), strict=True):
        fleet.job.heard(replace(report, position=at - 1, stops_at=at), fleet.now_s)
    fleet.job.tick(fleet.now_s)
    assert fleet.job.assignment("a").border == 22


def test_a_member_that_leaves_goes_when_the_others_have_the_state() -> None:
    fleet = started()
    leaving = fleet.members["c"]
    leaving.report = replace(leaving.report, leaving=True)
    fleet.run(0.5)
    assert leaving.over is None
    fleet.run(4.0)
    assert leaving.over == 0 and fleet.starts[1][:2] == (2, 3)
    assert not any("failed" in event or "is gone" in event for event in fleet.events)


def test_the_last_member_may_leave() -> None:
    fleet = Fleet(Terms(1, timeout_s=2.0, every=5, ahead=0), "a")
    fleet.run(3.0)
    fleet.members["a"].report = replace(fleet.members["a"].report, leaving=True)
    fleet.run(3.0)
    assert fleet.members["a"].over == 0 and fleet.job.code is None


def test_fewer_than_the_least_wait() -> None:
    fleet = started(replace(TERMS, least=3))
    for name in "ab":
        fleet.members.pop(name)
    fleet.run(80.0)
    assert len(fleet.starts) == 1
    fleet.members["e"] = Member("e")
    fleet.run(2.0)
    assert fleet.starts[1][:2] == (2, 3)


def test_a_spare_replaces_a_member_that_is_slow() -> None:
    fleet = started(names="abcde")
    for name, slow_s in zip("abcd", (0.1, 0.1, 0.35, 0.1), strict=True):
        fleet.members[name].report = replace(fleet.members[name].report, step_s=slow_s)
    fleet.run(3.0)
    assert [*fleet.job.places] == ["a", "b", "d", "e"]
    fleet.run(20.0)
    assert len(fleet.starts) == 2, "the slow one is not taken back while there is no other reason"


def test_microbatches_are_dealt_by_measured_speed_and_again_when_it_changes() -> None:
    fleet = started(replace(TERMS, microbatches=12))
    assert {place.microbatches for place in fleet.job.places.values()} == {(3, 3, 3, 3)}

    def measured(*seconds: float) -> None:
        for name, step_s in zip("abcd", seconds, strict=True):
            fleet.members[name].report = replace(fleet.members[name].report, step_s=step_s)
        fleet.run(DEAL_S + 6.0)

    measured(0.1, 0.1, 0.3, 0.1)
    assert fleet.starts[1][:2] == (2, 4) and any("they compute 4, 4, 1, 3 microbatches" in one for one in fleet.events)
    assert [place.microbatches for place in fleet.job.places.values()] == [(4, 4, 1, 3)] * 4
    measured(0.1, 0.11, 0.3, 0.1)
    assert len(fleet.starts) == 2, "a change that gains little is not made"
    for name, step_s in zip("abcd", (0.3, 0.1, 0.3, 0.1), strict=True):
        fleet.members[name].report = replace(fleet.members[name].report, step_s=step_s)
    fleet.run(DEAL_S / 2)
    measured(0.1, 0.1, 0.3, 0.1)
    assert len(fleet.starts) == 2, "nor one whose reason is gone soon"
    measured(0.1, 0.1, 0.1, 0.1)
    assert {place.microbatches for place in fleet.job.places.values()} == {(3, 3, 3, 3)}
    fleet.members["b"].alive = False
    fleet.run(4.0)
    assert [place.microbatches for place in fleet.job.places.values()] == [(4, 4, 4)] * 3


def test_a_deal_ends_as_early_as_any() -> None:
    rng = random.Random(0)
    for _ in range(200):
        seconds = [rng.choice([0.5, 1.0, 1.7, 4.0]) for _ in range(rng.randint(1, 3))]
        total = rng.randint(len(seconds), 9)
        every = (one for one in itertools.product(range(1, total + 1), repeat=len(seconds)) if sum(one) == total)
        best_s = min(max(n * s for n, s in zip(one, seconds, strict=True)) for one in every)
        found = dealt(total, seconds)
        assert sum(found) == total and max(n * s for n, s in zip(found, seconds, strict=True)) == best_s
    deal = [Deal((3, 1, 2), rank) for rank in range(3)]
    assert [*itertools.chain(*(one.own for one in deal))] == [*range(6)] and len(deal[0].own) == 3
    assert better((6, 6), [0.1, 0.0]) is None, "not measured yet"


@pytest.mark.parametrize("step", [1, 13])
def test_a_job_that_always_fails_at_the_same_step_stops(step: int) -> None:
    fleet = Fleet(TERMS, "abcd")
    for _ in range(1000):
        fleet.tick()
        first = fleet.members["a"]
        first.frozen = first.report.worker == "running" and first.report.position >= step
        if first.frozen:
            first.report = replace(first.report, worker="failed", why="failed at x.py:1: KeyError: 'y'")
    assert fleet.job.code == 1 and f"without getting beyond step {step}" in fleet.events[-1]
    assert len(fleet.starts) == TERMS.attempts + 1


def test_no_step_within_the_limit_ends_a_generation() -> None:
    fleet = started(replace(TERMS, step_timeout_s=3.0))
    fleet.members["a"].frozen = True
    fleet.run(3.5)
    assert any("no step was done for 3 s" in event for event in fleet.events)


def test_a_successor_goes_on_with_the_members_that_run() -> None:
    fleet = started()
    saved = Saved("x:1", fleet.job.generation, dict(fleet.job.places))
    again = Fleet(TERMS, "", saved)
    again.members = fleet.members
    again.run(5.0)
    assert not again.starts and again.job.generation == 1 and len(again.job.places) == 4
    lost = Fleet(TERMS, "", saved)
    lost.members = {name: one for name, one in fleet.members.items() if name != "d"}
    lost.run(TERMS.timeout_s - 0.3)
    assert not lost.starts
    lost.run(2.0)
    assert lost.starts[0][:2] == (2, 3)


def test_a_successor_withdraws_the_request_of_the_keeper_before() -> None:
    """A keeper that died while a border was being agreed on has left answers of earlier steps."""
    fleet = started()
    again = Fleet(TERMS, "", Saved("x:1", fleet.job.generation, dict(fleet.job.places)))
    again.members = {**fleet.members, "e": Member("e")}
    again.job.terms = replace(TERMS, wanted=5)
    for name in "abcd":
        again.members[name].report = replace(again.members[name].report, stops_at=3)
    again.run(1.0)
    assert again.job.assignment("a").border is None
    for name in "abcd":
        again.members[name].report = replace(again.members[name].report, stops_at=None)
    again.run(3.0)
    assert again.starts[0][:2] == (2, 5)


def test_a_successor_without_state_takes_newer_numbers() -> None:
    fleet = started()
    again = Fleet(TERMS, "")
    again.members = fleet.members
    again.run(3.0)
    assert again.starts[0][:2] == (2, 4) and again.starts[0][2] > 0


def test_compiling_ahead_is_done_once_for_each_number_and_cancelled_by_failures() -> None:
    fleet = started(replace(TERMS, ahead=2))

    def rehearsing() -> list[int]:
        return [place.count for name in fleet.members if (place := fleet.job.assignment(name).rehearsal) is not None]

    assert rehearsing() == [3, 3, 3]
    fleet.members["a"].report = replace(fleet.members["a"].report, worker="failed", why="was ended by signal 9")
    fleet.run(BLAME_S + 0.2)
    assert not rehearsing()
    fleet.run(3.0)
    for count in (3, 2):
        assert rehearsing() == [count] * count
        number = next(p.generation for n in "abcd" if (p := fleet.job.assignment(n).rehearsal) is not None)
        for one in fleet.members.values():
            one.report = replace(one.report, rehearsed=(number, True))
        fleet.run(0.2)
    fleet.run(2.0)
    assert not rehearsing() and sum("is compiled ahead" in event for event in fleet.events) == 2


def test_copies_are_complete_with_the_shards_of_every_worker() -> None:
    first, second = Report("a", "a", 1, "a:1", "a:2"), Report("b", "b", 1, "b:1", "b:2")
    first = replace(first, held=((1, 10, 0, 2), (1, 20, 0, 2)))
    second = replace(second, held=((1, 10, 1, 2), (1, 10, 0, 2), (1, 20, 0, 2)))
    found = newest_complete([first, second])
    assert found is not None and (found.step, found.sources) == (10, (("a:1", "b:1"), ("b:1",)))
    assert newest_complete([first]) is None
    later = replace(second, held=((2, 5, 0, 1), *second.held))
    found = newest_complete([first, later])
    assert found is not None and (found.generation, found.step) == (2, 5)


def test_partners_are_on_other_hosts_where_there_are_any() -> None:
    members = [Report(name, host, 1, f"{name}:1", "") for name, host in ("ax", "bx", "cy", "dy")]
    partners = partners_of(members, 1)
    assert partners == [("a:1", "c:1"), ("b:1", "c:1"), ("c:1", "a:1"), ("d:1", "a:1")]
    assert partners_of(members[:1], 2) == [("a:1",)]
    assert [len(one) for one in partners_of(members, 9)] == [4, 4, 4, 4]


def test_reports_that_cannot_be_read_are_refused() -> None:
    good = Report("a", "a", 1, "a:1", "a:2").to_json()
    bad = ({}, {**good, "held": [[1]]}, {**good, "extra": 1}, {**good, "held": 3}, {**good, "rehearsed": []})
    for data in bad:
        with pytest.raises(WireError, match="cannot be read"):
            Report.from_json(data)


@pytest.mark.parametrize("seed", range(20))
def test_any_failures_leave_a_job_that_ends_with_all_steps(seed: int) -> None:
    """Ranks are dense, generations and what they restore never go back, and the job finishes."""
    rng = random.Random(seed)
    fleet = Fleet(replace(TERMS, attempts=1000), "abcd", steps=300)
    number = 0
    while fleet.job.code is None and fleet.now_s < 600:
        fleet.run(rng.uniform(0.1, 6.0))
        names = list(fleet.members)
        chance = rng.random()
        if fleet.now_s > 120:
            chance = 1.0  # from here on nothing fails any more
        if chance < 0.25 and len(names) > 1:
            fleet.members.pop(rng.choice(names))
        elif chance < 0.5 and names:
            one = fleet.members[rng.choice(names)]
            if one.report.worker == "running":
                one.report = replace(one.report, worker="failed", why="was ended by signal 9 (SIGKILL)")
        elif chance < 0.6 and names:
            one = fleet.members[rng.choice(names)]
            one.report = replace(one.report, leaving=True)
        elif len(names) < 5:
            number += 1
            fleet.members[f"n{number}"] = Member(f"n{number}")
        for member in [name for name, one in fleet.members.items() if one.over is not None]:
            del fleet.members[member]
        ranks = sorted(place.rank for place in fleet.job.places.values())
        assert ranks == list(range(len(ranks))) and len(ranks) <= 4
    assert fleet.job.code == 0, fleet.events[-5:]
    assert [start[0] for start in fleet.starts] == list(range(1, len(fleet.starts) + 1))


def failing(fleet: Fleet, why: str, *names: str, seconds: float = 30.0) -> None:
    """Let the workers of these members fail whenever they run, before they do a step."""
    for _ in range(round(seconds / TICK_S)):
        for name in names:
            one = fleet.members[name]
            one.frozen = True
            if one.report.worker == "running":
                one.report = replace(one.report, worker="failed", why=why)
        fleet.tick()


def test_a_member_whose_workers_always_fail_is_left_out() -> None:
    """As a host with a broken device: the job goes on without it, also from its first start on."""
    fleet = Fleet(TERMS, "abcd")
    failing(fleet, "failed at x.py:1: RuntimeError: no device", "b")
    assert fleet.job.code is None and fleet.starts[-1][1] == 3 and len(fleet.starts) == 3
    assert sum("b (host b) is left out" in event for event in fleet.events) == 1
    assert fleet.members["a"].report.position > 10, "the others train"
    fleet.members["e"] = Member("e")
    fleet.run(5.0)
    assert fleet.starts[-1][1] == 4, "another one is taken in its place"


def test_a_member_with_another_program_is_left_out() -> None:
    """All report that programs differ; those that trained together before are not the cause."""
    fleet = started()
    fleet.members.pop("d")
    fleet.run(TERMS.timeout_s + 2.0)
    fleet.members["e"] = Member("e")
    fleet.members["e"].frozen = True  # no step is done with it
    for _ in range(600):
        fleet.tick()
        if "e" in fleet.job.places:
            for name in "abce":
                one = fleet.members[name]
                if one.report.worker == "running" and one.report.generation == fleet.job.generation:
                    one.report = replace(one.report, worker="failed", why="failed: ProcessError: programs differ")
    assert fleet.job.code is None and fleet.starts[-1][1] == 3
    assert any("e (host e) is left out" in event for event in fleet.events)
    assert fleet.members["a"].report.position > 30


def test_members_that_fail_are_not_left_out_if_too_few_others_are_there() -> None:
    fleet = Fleet(replace(TERMS, least=4), "abcd")
    failing(fleet, "failed at x.py:1: RuntimeError: no device", "b")
    assert fleet.job.code == 1 and all(count == 4 for _, count, _ in fleet.starts)


def test_names_of_members_do_not_reach_the_terminal_as_they_are() -> None:
    report = Report("a\x1b[2J\nb\udcff" + "c" * 500, "h\r", 1, "a:1", "a:2")
    assert str(report).isprintable() and len(str(report)) < 300 and "\\n" in str(report)


@pytest.mark.parametrize(
    "change",
    [{"position": "1"}, {"position": -1}, {"stops_at": 1.5}, {"step_s": float("nan")}, {"step_s": "x"}, {"agent": 3}, {"standby": 1},
     {"worker": "asleep"}, {"held": [[1, 1, 0, 10**9]], "pid": None}],
)  # fmt: skip
def test_reports_with_fields_of_another_type_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        Report.from_json({**Report("a", "a", 1, "a:1", "a:2").to_json(), **change})


def test_copies_of_a_huge_number_of_workers_cost_nothing() -> None:
    report = replace(Report("a", "a", 1, "a:1", "a:2"), held=((1, 1, 0, 10**12), (1, 1, -1, 1), (0, 5, 0, 1)))
    found = newest_complete([report])
    assert found is not None and (found.generation, found.step) == (0, 5)
