"""Divide arrays by rows over shards, and join them again, at the edges of a store.

In: keys, rows and updates as users name them. Out: the same by part. The part of a key that is not divided has the key's name; one of
a divided key has that of its rows, as "kernel[0:512]". Inside a store everything is by part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.versions.factors import SufficientFactors
from autopar.versions.host_memory.memory_kinds import on_device
from autopar.versions.keys import Selected
from autopar.versions.layout.layout import Piece
from autopar.versions.server_update import Pushed, Update

#: Shape and dtype by key.
Kinds = Mapping[str, tuple[tuple[int, ...], Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a key in one shard.

    Args:
        shard: its number; for a client, that of the server.
    """

    key: str
    shard: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Division:
    """Where the keys of a store are.

    Args:
        kinds: of the whole arrays, in the order of the keys.
        parts: all parts by name.
        divided: for each divided key, the names of its parts in the order of the rows.
    """

    kinds: Kinds
    parts: Mapping[str, Part]
    divided: Mapping[str, tuple[str, ...]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole arrays."""
        return {key: shape for key, (shape, _) in self.kinds.items()}

    def shards_of(self, key: str) -> tuple[int, ...]:
        """The shards that have a key, or rows of it."""
        return tuple(self.parts[name].shard for name in self.divided.get(key, (key,)))

    def chosen(self, chosen: Selected) -> Selected:
        """Keys and rows by part; parts without a chosen row are left out."""
        if self.divided.keys().isdisjoint(chosen):
            return chosen
        found: Selected = {}
        for key, rows in chosen.items():
            for name in self.divided.get(key, (key,)):
                own = rows if rows is None or key not in self.divided else rows[self._inside(name, rows)]
                if own is None or own is rows or own.size:
                    found[name] = own if own is None or own is rows else own - self.parts[name].first_row
        return found

    def update(self, update: Update) -> Update:
        """An update by part."""
        if self.divided.keys().isdisjoint(update):
            return update
        found: dict[str, Pushed] = {}
        for key, pushed in update.items():
            if key not in self.divided:
                found[key] = pushed
                continue
            # parts without a pushed row take the step of the others: an optimizer moves all rows of an array
            found |= {name: self._own(name, pushed) for name in self.divided[key]}
        return found

    def concatenated(self, values: Mapping[str, jax.Array], chosen: Selected) -> dict[str, jax.Array]:
        """Arrays, or their rows, by key; those of divided keys on the device of their first part."""
        if self.divided.keys().isdisjoint(chosen):
            return dict(values)
        return {
            key: self._concatenated(key, rows, values) if key in self.divided else values[key]
            for key, rows in chosen.items()
        }

    def _concatenated(self, key: str, rows: np.ndarray | None, values: Mapping[str, jax.Array]) -> jax.Array:
        names = [name for name in self.divided[key] if name in values]
        if not names:  # no rows were chosen
            shape, dtype = self.kinds[key]
            return jnp.zeros((0, *shape[1:]), dtype)
        place = values[names[0]].sharding
        whole = jnp.concatenate([on_device(jax.device_put(values[name], place)) for name in names])
        if rows is None:
            return whole
        order = np.concatenate([np.flatnonzero(self._inside(name, rows)) for name in names])
        return whole[np.argsort(order)]

    def _inside(self, name: str, rows: np.ndarray) -> np.ndarray:
        part = self.parts[name]
        return (rows >= part.first_row) & (rows < part.first_row + part.num_rows)

    def _own(self, name: str, pushed: Pushed) -> Pushed:
        part = self.parts[name]
        mine = slice(part.first_row, part.first_row + part.num_rows)
        wholes = [] if pushed.whole is None else [pushed.whole[mine]]
        factors: list[SufficientFactors] = []
        for one in pushed.factors:
            own = SufficientFactors(one.left[:, mine], one.right)
            matrix_bytes = part.num_rows * one.right.shape[1] * one.right.dtype.itemsize
            if own.num_bytes < matrix_bytes:
                factors.append(own)
            else:
                wholes.append(own.product())
        rows: list[tuple[np.ndarray, jax.Array]] = []
        for numbers, values in pushed.rows:
            inside = np.flatnonzero(self._inside(name, numbers))
            if inside.size or not (
                rows or wholes or factors
            ):  # a part that gets nothing gets no rows, which is a step too
                rows.append((numbers[inside] - part.first_row, values[inside]))
        whole = None
        for term in wholes:
            whole = term if whole is None else whole + term
        return Pushed(whole, tuple(rows), tuple(factors))


def division_of(kinds: Kinds, pieces: Mapping[str, Sequence[Piece]]) -> Division:
    """The division of keys whose rows are in these pieces.

    Args:
        kinds: of the whole arrays.
        pieces: of each key, in the order of the rows.
    """
    parts: dict[str, Part] = {}
    divided: dict[str, tuple[str, ...]] = {}
    for key in kinds:
        names: list[str] = []
        for piece in pieces[key]:
            last = piece.first_row + piece.num_rows
            names.append(key if len(pieces[key]) == 1 else part_name(key, f"{piece.first_row}:{last}"))
            parts[names[-1]] = Part(key, piece.server, piece.first_row, piece.num_rows)
        if len(names) > 1:
            divided[key] = tuple(names)
    return Division(kinds, parts, divided)


def part_name(key: str, rows: str = "") -> str:
    """The name of rows of a key, or what all such names begin with."""
    return f"{key}[{rows}]" if rows else f"{key}["
