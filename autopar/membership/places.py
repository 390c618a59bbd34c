"""Choose the members of the next generation, and give each its place."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.membership.copies import partners_of
from autopar.membership.records import Place, Report, Restore, Terms


def chosen(ready: Sequence[Report], last: Sequence[str], slow: str, wanted: int) -> list[Report]:
    """The next members: those of the last generation in their order, then others.

    Args:
        last: the members of the last generation.
        slow: a member that comes last; empty for none.
        wanted: the number of members.
    """
    order = {agent: rank for rank, agent in enumerate(last)}
    ranked = sorted(ready, key=lambda one: (one.agent == slow, order.get(one.agent, len(order)), one.agent))
    return ranked[:wanted]


def placed(members: Sequence[Report], generation: int, restore: Restore | None, terms: Terms) -> dict[str, Place]:
    """The places of the members, by agent; their ranks are their order."""
    partners = partners_of(members, terms.copies)
    return {
        one.agent: Place(
            *(generation, rank, len(members), members[0].coordinator, restore),
            *(partners[rank], terms.every, terms.timeout_s),
        )
        for rank, one in enumerate(members)
    }
