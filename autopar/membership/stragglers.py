"""Find the member that slows the others: by the time that each worker took for the same work on its own devices."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autopar.membership.records import Report


def slowest(members: Sequence[Report], factor: float) -> Report | None:
    """The member whose time exceeds the median of the others' by `factor`; None if none does, or `factor` is 0."""
    measured = [one for one in members if one.step_s > 0]
    if factor <= 0 or len(measured) < 3:
        return None
    last = max(measured, key=lambda one: one.step_s)
    others = statistics.median(one.step_s for one in measured if one is not last)
    return last if last.step_s > factor * others else None
