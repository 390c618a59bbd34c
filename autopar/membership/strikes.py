"""Leave out members whose workers fail again and again, such as a host with a broken device or with another program: the others go on.

In: how generations end. Out: the agents that are left out. An agent that is started again is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.membership.blame import is_effect
from autopar.membership.records import Report

#: Generations in a row, none of which did a step, that a member has to end.
_MOST = 2


class Strikes:
    """Who has ended generations before they did a step."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._proven: set[str] = set()

    def proven(self, members: Iterable[str]) -> None:
        """These members have done a step together."""
        for agent in members:
            self._proven.add(agent)
            self._count.pop(agent, None)

    def failed(self, members: Sequence[Report], failed: Sequence[Report]) -> list[Report]:
        """A generation ended before it did a step. Returns the members that are left out from now on.

        It is put down to those that have not done a step yet, if others have: where programs differ, any of them reports it. Else
        it is put down to those that report an error of their own, and those that were left out before were not the cause.

        Args:
            members: of the generation.
            failed: those whose workers failed.
        """
        own = [one for one in failed if not is_effect(one.why)]
        new = [one for one in members if one.agent not in self._proven]
        if not own:
            return []
        if len(new) < len(members) and new:
            own = new
        else:
            there = {one.agent for one in members}
            self._count = {agent: count for agent, count in self._count.items() if agent in there}
        for one in own:
            self._count[one.agent] = self._count.get(one.agent, 0) + 1
        return [one for one in own if self._count[one.agent] == _MOST]

    def is_fit(self, member: Report) -> bool:
        """Whether a member is not left out."""
        return self._count.get(member.agent, 0) < _MOST
