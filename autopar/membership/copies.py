"""Which copies of the state are complete, who has them, and who is to take the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from autopar.membership.records import Report, Restore


def newest_complete(reports: Iterable[Report]) -> Restore | None:
    """The newest state of which these agents have the shards of every worker; None if there is none.

    A later generation is newer than a later step: it was restored from what the earlier one left.
    """
    found: dict[tuple[int, int], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    counts: dict[tuple[int, int], int] = {}
    for report in reports:
        for generation, step, owner, count in report.held:
            found[generation, step][owner].append(report.memory)
            counts[generation, step] = count
    complete = [key for key, of in found.items() if len(of) == counts[key] and all(0 <= n < counts[key] for n in of)]
    if not complete:
        return None
    generation, step = max(complete)
    owners = found[generation, step]
    return Restore(generation, step, tuple(tuple(owners[owner]) for owner in range(len(owners))))


def partners_of(members: Sequence[Report], copies: int) -> list[tuple[str, ...]]:
    """For each member, the addresses of the agents that take copies of its shards: its own, then the next ones in a ring, those on
    other hosts first."""
    taken = []
    for rank, own in enumerate(members):
        others = [members[(rank + i) % len(members)] for i in range(1, len(members))]
        others.sort(key=lambda other: other.host == own.host)
        taken.append((own.memory, *(other.memory for other in others[:copies])))
    return taken
