"""Assign arrays to servers, whole or by rows, so that the slowest server takes as little time as possible.

In: rows and bytes of each array, servers, the number of workers. Out: a `Layout`. Whole arrays are scheduled jobs on machines of
different speeds (Q||Cmax): largest first, improved by branch and bound, which proves small cases. Where the slowest server then takes
longer than the fractional bound allows, arrays are divided by rows: at most one more piece per server.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from autopar.errors import StoreError
from autopar.versions.layout.bound import fractional_bound
from autopar.versions.layout.layout import Layout, Piece
from autopar.versions.layout.servers import ClockCost, Server, clock_costs
from autopar.versions.layout.whole import Job, assigned

#: Halvings of the interval between the bound and the time without divided arrays.
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class ArraySize:
    """What a layout needs of an array.

    Args:
        num_rows: 1 for an array without dims.
        row_bytes: of each row.
    """

    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def has_rows(self) -> bool:
        """Whether it can be divided."""
        return self.num_rows > 1 and self.row_bytes > 0


def plan_layout(
    sizes: Mapping[str, ArraySize],
    servers: Sequence[Server],
    num_workers: int,
    *,
    whole: Collection[str] | None = (),
    tolerance: float = 0.05,
) -> Layout:
    """The layout of these arrays over these servers.

    Args:
        sizes: of each array by key.
        whole: keys of arrays that must not be divided; None for all.
        tolerance: arrays are divided only if the slowest server takes longer than the fractional bound by this part of it.

    Raises:
        StoreError: no server, a rate that is no positive number, or a worker that is not there.
    """
    if not servers:
        raise StoreError("a layout needs at least one server")
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise StoreError(f"`num_workers` is {num_workers!r}: give a whole number, at least 1")
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise StoreError(f"`tolerance` is {tolerance!r}: give a number of at least 0, as 0.05")
    total = sum(size.num_bytes for size in sizes.values())
    costs = clock_costs(servers, num_workers, total)
    level, shares = fractional_bound(costs, total)
    bound = level
    fixed = set(sizes) if whole is None else {key for key, size in sizes.items() if key in whole or not size.has_rows}
    if all(cost.byte_s >= 0 for cost in costs):  # an array that stays whole is on some server
        least = (min(cost.seconds(sizes[key].num_bytes, 1) for cost in costs) for key in fixed)
        bound = max(bound, *least, Fraction(0))
    jobs = [Job(key, size.num_bytes) for key, size in sizes.items()]
    found, proven = assigned(jobs, costs, shares, bound)
    pieces = {key: (Piece(server, 0, sizes[key].num_rows),) for key, server in found.items()}
    seconds = _seconds(pieces, sizes, costs)
    if len(servers) > 1 and fixed < sizes.keys() and max(seconds) > bound * (1 + Fraction(tolerance)):
        divided = _divided(sizes, fixed, costs, shares, bound - level, max(seconds) - level)
        after = seconds if divided is None else _seconds(divided, sizes, costs)
        more = 0 if divided is None else sum(map(len, divided.values())) - len(divided)
        messages_s = 2 * more * Fraction(max(server.message_s for server in servers))  # of each worker
        if divided is not None and max(after) + messages_s < max(seconds):
            pieces, seconds, proven = divided, after, False
    ordered = {key: tuple(sorted(pieces[key], key=lambda piece: piece.first_row)) for key in sizes}
    return Layout(ordered, tuple(server.worker for server in servers), seconds, bound, proven or max(seconds) == bound)


def _divided(
    sizes: Mapping[str, ArraySize],
    fixed: Collection[str],
    costs: Sequence[ClockCost],
    shares: Sequence[Fraction],
    low_s: Fraction,
    high_s: Fraction,
) -> dict[str, tuple[Piece, ...]] | None:
    """The layout of least time that filling the servers finds; None if there is none.

    Args:
        low_s, high_s: between which times beyond that of the fractional solution to look.
    """
    best = _filled(sizes, fixed, costs, shares, low_s)
    if best is not None:
        return best
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        found = _filled(sizes, fixed, costs, shares, middle_s)
        low_s, high_s, best = (middle_s, high_s, best) if found is None else (low_s, middle_s, found)
    return best


def _filled(
    sizes: Mapping[str, ArraySize],
    fixed: Collection[str],
    costs: Sequence[ClockCost],
    shares: Sequence[Fraction],
    beyond_s: Fraction,
) -> dict[str, tuple[Piece, ...]] | None:
    """Every array on servers that take at most so much time beyond the fractional solution's; None if that does not succeed."""
    room = [_Room(cost, share, beyond_s) for cost, share in zip(costs, shares, strict=True)]
    pieces: dict[str, tuple[Piece, ...]] = {}
    for key, size in sorted(sizes.items(), key=lambda item: (item[0] not in fixed, -item[1].num_bytes, item[0])):
        order = sorted(range(len(room)), key=lambda number: (-room[number].left, number))
        target = next((number for number in order if room[number].left >= size.num_bytes), None)
        if target is not None:
            room[target].take(size.num_bytes)
            pieces[key] = (Piece(target, 0, size.num_rows),)
            continue
        if key in fixed:
            return None
        first, parts = 0, list[Piece]()
        for number in order:
            rows = min(size.num_rows - first, math.floor(room[number].left / size.row_bytes))
            if rows > 0:
                room[number].take(rows * size.row_bytes)
                parts.append(Piece(number, first, rows))
                first += rows
        if first < size.num_rows:
            return None
        pieces[key] = tuple(parts)
    return pieces


class _Room:
    """The bytes that a server can still take within a time: its share of the fractional solution, and what fits into the time
    that is allowed beyond that solution's."""

    __slots__ = ("_piece_bytes", "left")

    def __init__(self, cost: ClockCost, share: Fraction, beyond_s: Fraction) -> None:
        rate = cost.byte_s if cost.byte_s > 0 else None
        self._piece_bytes = Fraction(0) if rate is None else cost.piece_s / rate
        # where bytes cost no time, a row may be too many for the share
        self.left = share + (share + 1 if rate is None and beyond_s else beyond_s / (rate or 1)) - self._piece_bytes

    def take(self, num_bytes: int) -> None:
        self.left -= num_bytes + self._piece_bytes


def _seconds(
    pieces: Mapping[str, Sequence[Piece]], sizes: Mapping[str, ArraySize], costs: Sequence[ClockCost]
) -> tuple[Fraction, ...]:
    num_bytes, counts = [0] * len(costs), [0] * len(costs)
    for key, parts in pieces.items():
        for piece in parts:
            num_bytes[piece.server] += piece.num_rows * sizes[key].row_bytes
            counts[piece.server] += 1
    return tuple(cost.seconds(size, count) for cost, size, count in zip(costs, num_bytes, counts, strict=True))
