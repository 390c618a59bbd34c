"""Bound the time of the slowest server from below, as if every byte could be placed alone.

In: costs of servers, the bytes of all arrays. Out: the least time t with sum over servers of the bytes that each can serve in t at
least all bytes, and these bytes. Water-filling, in exact fractions; BytePS's split is a case of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from autopar.versions.layout.servers import ClockCost


def fractional_bound(costs: Sequence[ClockCost], total_bytes: int) -> tuple[Fraction, tuple[Fraction, ...]]:
    """The least time of the slowest server, and the bytes of each server in it.

    >>> two = [ClockCost(Fraction(0), Fraction(1), Fraction(0)), ClockCost(Fraction(0), Fraction(3), Fraction(0))]
    >>> fractional_bound(two, 8)
    (Fraction(6, 1), (Fraction(6, 1), Fraction(2, 1)))
    """
    saving = min(range(len(costs)), key=lambda number: costs[number].byte_s)
    if costs[saving].byte_s < 0:  # one worker, whose own machine serves it without traffic
        shares = tuple(Fraction(total_bytes * (number == saving)) for number in range(len(costs)))
        return max(cost.seconds(share) for cost, share in zip(costs, shares, strict=True)), shares
    least = max(cost.fixed_s for cost in costs)
    free = [cost.byte_s == 0 for cost in costs]
    time = least if any(free) else max(least, _filled(costs, total_bytes))
    shares = [Fraction(0) if cost.byte_s == 0 else (time - cost.fixed_s) / cost.byte_s for cost in costs]
    if not any(free):
        scale = Fraction(total_bytes) / sum(shares, Fraction(0)) if total_bytes else Fraction(0)
        return time, tuple(scale * share for share in shares)
    filled = sum(shares, Fraction(0))
    scale = min(Fraction(1), total_bytes / filled) if filled else Fraction(0)
    rest = (total_bytes - scale * filled) / sum(free)
    return time, tuple(rest if is_free else scale * share for is_free, share in zip(free, shares, strict=True))


def _filled(costs: Sequence[ClockCost], total_bytes: int) -> Fraction:
    """The level t at which sum of (t - fixed) / byte over the servers with fixed < t is all bytes."""
    below, time = Fraction(0), Fraction(0)
    inverse = Fraction(0)
    for cost in sorted(costs, key=lambda cost: cost.fixed_s):
        if inverse and time <= cost.fixed_s:
            break
        inverse += 1 / cost.byte_s
        below += cost.fixed_s / cost.byte_s
        time = (total_bytes + below) / inverse
    return time
