"""Decide who trains: the keeper's rules, as a function of reports and time.

In: reports of agents, and the time. Out: an assignment for each agent, and events as text. No sockets, no clock, no process: a test
plays any order of failures.

A *generation* is a set of members whose workers train together. Collectives fail on all when one is gone, so a generation ends with
the first failure. The next one starts with the agents that are left, from the newest complete copy of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autopar.membership.blame import cause
from autopar.membership.copies import newest_complete
from autopar.membership.deal import better
from autopar.membership.places import chosen, placed
from autopar.membership.records import Assignment, Place, Report, Seen, Terms
from autopar.membership.rehearsal import Rehearsals
from autopar.membership.state_file import Saved
from autopar.membership.stragglers import slowest
from autopar.membership.strikes import Strikes

#: Seconds within which an agent whose connection broke may come back, while no generation runs.
CLOSED_S = 1.0
#: Seconds in which the other reports of one failure arrive, so that its cause is named and not one of its effects.
BLAME_S = 0.3
#: Seconds for which another deal of microbatches has to be faster, before it is made.
DEAL_S = 10.0
#: Seconds after which the keeper says that it waits for members.
WAITS_S = 15.0
#: Seconds to wait for agents that are there but not ready, and for the first members.
PATIENCE_S, FIRST_PATIENCE_S = 60.0, 600.0


class Job:
    """The state of a job.

    Args:
        saved: the state that an earlier keeper left.

    Attributes:
        events: what happened, as text, for people. The keeper prints and clears it.
        code: the exit code of the job; None while it runs.
    """

    def __init__(self, terms: Terms, saved: Saved | None, now_s: float) -> None:
        self.terms = terms
        self.seen: dict[str, Seen] = {}
        self.generation = saved.generation if saved is not None else 0
        self.places: dict[str, Place] = dict(saved.places) if saved is not None else {}
        self.border: int | Literal["ask"] | None = None
        self.code: int | None = None
        self.events: list[str] = []
        self.stopping = False
        self._rehearsals, self._strikes = Rehearsals(terms, self.events), Strikes()
        self._order: list[str] = list(self.places)
        self._slow = ""
        self._has_said = False  # that the keeper waits for members
        self._deal_since_s = 0.0  # since when another deal of microbatches would be faster
        self._seconds: dict[str, float] = {}  # of each agent, for one microbatch
        self._floor = (0, 0)  # the oldest copies to keep
        # How long to wait for members that have not come yet: at first, and after a keeper that ended between two generations.
        self._patience_s = FIRST_PATIENCE_S if saved is None else terms.timeout_s
        self._missing = set(self.places)  # members of an earlier keeper that have not reported yet
        self._since_s = now_s  # of the generation's start, or of its end
        self._broken_s = 0.0  # when its first failure was seen
        self._done, self._done_s, self._began = 0, now_s, 0
        self._furthest, self._failures = 0, 0

    # -- what happens ------------------------------------------------------------------------

    def heard(self, report: Report, now_s: float) -> None:
        """An agent reports."""
        known = self.seen.get(report.agent)
        if report.step_s > 0:
            self._seconds[report.agent] = report.step_s
        if known is None:
            self._missing.discard(report.agent)
            self.events.append(f"{report} is here")
            self.seen[report.agent] = Seen(report, now_s)
            if not self.places:  # the state of an earlier keeper was lost
                self.generation = max(self.generation, report.generation)
        else:
            known.report, known.heard_s, known.closed_s = report, now_s, None

    def closed(self, agent: str, now_s: float) -> None:
        """The connection of an agent broke."""
        if agent in self.seen:
            self.seen[agent].closed_s = now_s

    def tick(self, now_s: float) -> None:
        """Decide what follows from what was heard."""
        if self.code is not None:
            return
        self._drop(now_s)
        restore = newest_complete(one.report for one in self.seen.values())
        self._floor = (0, 0) if restore is None else (restore.generation, restore.step)
        if self.places:
            self._watch(now_s)
        if self.code is None and not self.places:
            self.code = 0 if self.stopping else None
            self._start(now_s)
        elif self.code is None:
            self._agree_on_border(now_s)
            self._rehearsals.tick(self._members(), self.generation, self.border is None and self._done > self._began)

    def assignment(self, agent: str) -> Assignment:
        """What an agent is to do."""
        floor = self._floor
        timeout_s = self.terms.timeout_s
        if self.code is not None:
            return Assignment("over", code=self.code, timeout_s=timeout_s)
        if agent in self.places:
            rehearsal = self._rehearsals.place(agent)
            return Assignment("run", self.places[agent], self.border, rehearsal, floor, timeout_s=timeout_s)
        if self._may_leave(agent):
            return Assignment("over", timeout_s=timeout_s)
        return Assignment("idle", floor=floor, timeout_s=timeout_s)

    # -- rules -------------------------------------------------------------------------------

    def _drop(self, now_s: float) -> None:
        """Forget agents that are gone."""
        for agent, one in list(self.seen.items()):
            silent_s = now_s - one.heard_s
            closed = one.closed_s is not None and agent not in self.places and now_s - one.closed_s > CLOSED_S
            if silent_s > self.terms.timeout_s or closed:
                del self.seen[agent]
                why = "its connection is closed" if closed else f"no sign of life for {silent_s:.1f} s"
                if not one.report.leaving:
                    self.events.append(f"{one.report} is gone: {why}")

    def _watch(self, now_s: float) -> None:
        """Find out whether the generation has ended, and how."""
        if self._missing and now_s - self._since_s <= self.terms.timeout_s:
            return
        members, lost = self._members(), [agent for agent in self.places if agent not in self.seen]
        done = max((one.position for one in members if one.generation == self.generation), default=0)
        if done > self._done:
            self._done, self._done_s = done, now_s
            self._strikes.proven(self.places)
        failed = [one for one in members if one.generation == self.generation and one.worker == "failed"]
        if lost or failed:
            self._broken_s = self._broken_s or now_s
            if lost or now_s - self._broken_s >= BLAME_S:
                closed = [
                    one.report for agent, one in self.seen.items() if agent in self.places and one.closed_s is not None
                ]
                if not lost and self._done <= self._began:
                    self._leave_out(members, failed)
                self._fail(cause(lost, closed, failed, self.places), now_s)
            return
        states = {one.worker if one.generation == self.generation else "none" for one in members}
        if states == {"finished"}:
            self._end(now_s)
            self.code = 0
            self.events.append(f"the job has finished after step {done}")
        elif states <= {"finished", "yielded"}:
            self.events.append(f"generation {self.generation} ended at the border of step {done}")
            self._end(now_s)
            if self.stopping:
                self.code = 0
        elif now_s - self._done_s > self.terms.step_timeout_s:
            self._fail(f"no step was done for {self.terms.step_timeout_s:g} s", now_s)

    def _leave_out(self, members: Sequence[Report], failed: Sequence[Report]) -> None:
        """Leave members out whose workers ended this generation, as others before it."""
        for one in self._strikes.failed(members, failed):
            self.events.append(
                f"{one} is left out, as long as enough others are there: its workers have failed again and again before a step was done."
                " Start it again to take it back"
            )

    def _fail(self, why: str, now_s: float) -> None:
        self._failures = 0 if self._done > self._furthest else self._failures + 1
        self._furthest = max(self._furthest, self._done)
        self.events.append(f"generation {self.generation} failed after step {self._done}: {why}")
        self._end(now_s)
        if self.stopping:
            self.code = 1
        elif self._failures >= self.terms.attempts:
            self.code = 1
            self.events.append(
                f"{self._failures} generations in a row failed without getting beyond step {self._furthest}: the job stops. See the"
                " workers' output"
            )

    def _end(self, now_s: float) -> None:
        self._order = [*self.places]
        self.places, self.border, self._since_s, self._broken_s = {}, None, now_s, 0.0
        self._missing.clear()
        self._deal_since_s = 0.0
        self._patience_s = 0.0
        self._rehearsals.cancel()

    def _start(self, now_s: float) -> None:
        """Start a generation if enough agents are ready."""
        staying = [one for one in self.seen.values() if not one.report.leaving]
        ready = [one.report for one in staying if one.closed_s is None and is_ready(one.report)]
        fit = [one for one in ready if self._strikes.is_fit(one)]
        ready = fit if len(fit) >= self.terms.least else ready
        waited_s = now_s - self._since_s
        if waited_s > WAITS_S and not self._has_said:
            self._has_said = True
            self.events.append(f"waiting for members: {len(ready)} of {self.terms.wanted} are ready")
        if len(ready) < self.terms.wanted and waited_s < self._patience_s:
            return
        former = [one.report for one in staying if one.report.agent in self._order and self._strikes.is_fit(one.report)]
        if not all(one in ready for one in former) and waited_s < PATIENCE_S:
            return
        if len(ready) < self.terms.least or self.code is not None:
            return
        members = chosen(ready, self._order, self._slow, self.terms.wanted)
        seen = sorted(
            (one.report for one in self.seen.values()), key=lambda one: one.leaving
        )  # members that leave are the last sources
        restore = newest_complete(seen)
        self.generation, self._has_said = self.generation + 1, False
        self._patience_s = 0.0
        self.places = placed(members, self.generation, restore, self.terms, self._seconds)
        self._began = self._done = 0 if restore is None else restore.step
        self._since_s = self._done_s = now_s
        source = (
            "from the last checkpoint, or with a new state"
            if restore is None
            else f"from step {restore.step} in the memory of peers"
        )
        self.events.append(
            f"generation {self.generation}: {len(members)} of {self.terms.wanted} members start {source}"
        )

    def _agree_on_border(self, now_s: float) -> None:
        """Ask the workers to stop if the members are to change; then let all run on to where the last of them stops."""
        members = self._members()
        if len(members) < len(self.places):
            return
        if self.border is None:
            # A request of an earlier keeper is withdrawn first, as its answers are of earlier steps.
            if all(one.stops_at is None for one in members) and self._wants_change(members, now_s):
                self.border = "ask"
        elif self.border == "ask":
            stops = [one.stops_at if one.generation == self.generation else None for one in members]
            if all(at is not None for at in stops):
                self.border = max(at for at in stops if at is not None)

    def _wants_change(self, members: Sequence[Report], now_s: float) -> bool:
        if self.stopping or any(one.leaving for one in members):
            return True
        others = [one.report for one in self.seen.values() if one.report.agent not in self.places]
        fit = [one for one in others if self._strikes.is_fit(one) and one.agent != self._slow]
        spares = [one for one in fit if is_ready(one) and not one.leaving]
        if self._done <= self._began or not all(one.standby for one in members):
            return False
        if spares and len(members) < self.terms.wanted:
            return True
        slow = slowest(members, self.terms.spares_after)
        if spares and slow is not None:
            self._slow = slow.agent
            self.events.append(f"{slow} is slow, and {spares[0]} takes its place")
            return True
        counts = self.places[members[0].agent].microbatches
        deal = better(counts, [one.step_s for one in members]) if counts else None
        if deal is None or not self._deal_since_s:
            self._deal_since_s = now_s if deal is not None else 0.0
        if deal is not None and now_s - self._deal_since_s < DEAL_S:
            return False
        if deal is not None:
            now, then = (", ".join(map(str, one)) for one in (counts, deal))
            self.events.append(f"members differ in speed: they compute {then} microbatches in place of {now}")
        return deal is not None

    def _may_leave(self, agent: str) -> bool:
        """Whether an agent that leaves may end: the others have all of the state."""
        one = self.seen.get(agent)
        if one is None or not one.report.leaving:
            return False
        rest = [other.report for other in self.seen.values() if not other.report.leaving]
        found = newest_complete(rest)
        return not rest or (found is not None and found.generation >= self.generation)

    def _members(self) -> list[Report]:
        return [self.seen[agent].report for agent in self.places if agent in self.seen]


def is_ready(report: Report) -> bool:
    """Whether an agent can start a worker at once."""
    return report.standby and report.worker != "running"
