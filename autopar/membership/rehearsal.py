"""Compile ahead: the processes that wait for their place run the step once with fewer members, so that its plan and its compiled
program are in the caches when a member fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.membership.places import placed
from autopar.membership.records import Place, Report, Terms


class Rehearsals:
    """The rehearsals of a job, one at a time.

    Args:
        events: a list that takes what happened, as text.
    """

    def __init__(self, terms: Terms, events: list[str]) -> None:
        self._terms, self._events = terms, events
        self._number, self._done = 0, set[int]()
        self._places: dict[str, Place] = {}

    def place(self, agent: str) -> Place | None:
        """The place of an agent's waiting process in the rehearsal."""
        return self._places.get(agent)

    def cancel(self) -> None:
        """End the rehearsal: its processes are needed."""
        self._places = {}

    def tick(self, members: Sequence[Report], generation: int, is_calm: bool) -> None:
        """Start a rehearsal, or note the end of one.

        Args:
            is_calm: whether the generation has done a step, and its members are not about to change.
        """
        if self._places:
            self._note(members)
        elif is_calm and generation and all(one.standby for one in members):
            self._done.add(len(members))  # it runs
            for fewer in range(1, self._terms.ahead + 1):
                count = len(members) - fewer
                if count >= max(1, self._terms.least) and count not in self._done:
                    self._start(members[:count])
                    return

    def _start(self, members: Sequence[Report]) -> None:
        self._number += 1
        places = placed(members, self._number, None, self._terms, {})
        self._places = {agent: replace(place, partners=(), rehearsal=True) for agent, place in places.items()}

    def _note(self, members: Sequence[Report]) -> None:
        reports = {one.agent: one.rehearsed for one in members}
        ended = [reports.get(agent, (self._number, False)) for agent in self._places]
        failed = any(number == self._number and not ok for number, ok in ended)
        if failed or all(number == self._number for number, _ in ended):
            count = len(self._places)
            self._done.add(count)
            succeeded = not failed
            self._events.append(
                f"the program for {count} members is compiled ahead"
                if succeeded
                else f"the program for {count} members could not be compiled ahead: it will be compiled when it is needed"
            )
            self._places = {}
