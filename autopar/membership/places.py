"""Choose the members of the next generation, and give each its place."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from autopar.membership.copies import partners_of
from autopar.membership.deal import dealt
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


def placed(
    members: Sequence[Report], generation: int, restore: Restore | None, terms: Terms, seconds: Mapping[str, float]
) -> dict[str, Place]:
    """The places of the members, by agent; their ranks are their order.

    Args:
        seconds: that each agent's devices need for one microbatch, where it was measured. Others count as the median of these.
    """
    partners = partners_of(members, terms.copies)
    known = [seconds[one.agent] for one in members if one.agent in seconds]
    usual_s = statistics.median(known) if known else 1.0
    each_s = [seconds.get(one.agent, usual_s) for one in members]
    microbatches = dealt(terms.microbatches, each_s) if terms.microbatches else ()
    return {
        one.agent: Place(
            *(generation, rank, len(members), members[0].coordinator, restore),
            *(partners[rank], terms.every, terms.timeout_s),
            microbatches=microbatches,
        )
        for rank, one in enumerate(members)
    }
