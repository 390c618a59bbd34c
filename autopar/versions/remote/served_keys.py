"""Put together what the servers of a store announce.

In: for each server, by key the shape and dtype of its array, the first row of it, and the rows of the whole. Out: a `Division` over the
servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from autopar.errors import StoreError
from autopar.versions.consistency.policy import Policy
from autopar.versions.consistency.table import find
from autopar.versions.division import Division, division_of
from autopar.versions.keys import shown
from autopar.versions.layout.layout import Piece


def served_keys(announced: Sequence[Mapping[str, Any]]) -> Division:
    """Where the keys of a served store are.

    Raises:
        StoreError: two servers have the same rows, or some rows are missing.
    """
    kinds: dict[str, tuple[tuple[int, ...], Any]] = {}
    pieces: dict[str, list[Piece]] = {}
    for server, keys in enumerate(announced):
        for key, (shape, dtype, first, total) in keys.items():
            kinds[key] = ((total, *shape[1:]) if shape else (), jnp.dtype(dtype))
            pieces.setdefault(key, []).append(Piece(server, first, shape[0] if shape else 1))
    for key, parts in pieces.items():
        parts.sort(key=lambda piece: (piece.first_row, piece.server))
        end, last = 0, parts[0]
        for piece in parts:
            if piece.first_row < end or (piece is not last and piece.first_row == last.first_row):
                raise StoreError(f"servers {last.server} and {piece.server} both have the key {key!r:.80}")
            if piece.first_row > end:
                break
            end, last = end + piece.num_rows, piece
        whole = kinds[key][0][0] if kinds[key][0] else 1
        if end != whole:
            raise StoreError(
                f"no server has row {end} of {shown(key)}: start all servers of the layout, and say how many (`servers=`)"
            )
    return division_of(dict(sorted(kinds.items())), pieces)


def held_back_by(names: Sequence[str]) -> Policy:
    """The policy by which a worker holds back what it pushes.

    Args:
        names: for each server the name of the policy, empty if workers hold nothing back.

    Raises:
        StoreError: the servers have different ones.
    """
    if len(set(names)) > 1:
        raise StoreError(
            f"the servers have different policies: {', '.join(repr(name) for name in dict.fromkeys(names))}; give all the same, as"
            " workers hold back what they push by it"
        )
    return find(names[0] or "async")


@dataclass(frozen=True, slots=True)
class ServedTerms:
    """What workers push in place of updates of arrays.

    Args:
        kinds: shape and dtype of each; empty if they push updates.
        at_once: those that are never held back.
    """

    kinds: Mapping[str, tuple[tuple[int, ...], Any]]
    at_once: frozenset[str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: shape for key, (shape, _) in self.kinds.items()}


def served_terms(announced: Sequence[Mapping[str, Any]]) -> ServedTerms:
    """The terms that a server takes.

    Raises:
        StoreError: several servers, of which one takes terms: it makes all arrays.
    """
    if len(announced) > 1 and any(announced):
        raise StoreError("a server whose update is from terms makes all arrays, so there can be one server only")
    kinds = {key: (tuple(shape), jnp.dtype(dtype)) for key, (shape, dtype, _) in announced[0].items()}
    return ServedTerms(kinds, frozenset(key for key, (_, _, at_once) in announced[0].items() if at_once))
