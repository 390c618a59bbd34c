"""Define which server has which rows of which array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of an array on one server.

    Args:
        server: its number.
        first_row: the first of these rows.
        num_rows: how many; of an array without dims, 1.
    """

    server: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the keys of a store are.

    Args:
        pieces: of each key, in the order of the rows; one for a key that is not divided.
        workers: for each server, the worker on its machine or None.
        seconds: for each server, of one clock.
        bound_s: no layout has a slowest server that is faster.
        is_optimal: whether it is proven that no layout is faster; if no array is divided here, none that divides no array.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    workers: tuple[int | None, ...]
    seconds: tuple[Fraction, ...]
    bound_s: Fraction
    is_optimal: bool

    @property
    def num_servers(self) -> int:
        return len(self.workers)

    def keys_of(self, server: int) -> dict[str, Piece]:
        """What one server has."""
        return {key: piece for key, pieces in self.pieces.items() for piece in pieces if piece.server == server}

    def part(self, values: Mapping[str, Any], server: int) -> dict[str, Any]:
        """The arrays, or their rows, of one server: what its process passes to `VersionedStore`."""
        return {
            key: values[key]
            if len(self.pieces[key]) == 1
            else values[key][piece.first_row : piece.first_row + piece.num_rows]
            for key, piece in self.keys_of(server).items()
        }

    def __str__(self) -> str:
        divided = sum(len(pieces) > 1 for pieces in self.pieces.values())
        slowest = max(self.seconds)
        over = float(slowest / self.bound_s - 1) if self.bound_s else 0.0
        return (
            f"{len(self.pieces)} {'array' if len(self.pieces) == 1 else 'arrays'} on {self.num_servers} servers, {divided} of them divided by rows: a clock takes the"
            f" slowest server {float(slowest):.3g} s, {100 * over:.1f} % over the bound"
        )
