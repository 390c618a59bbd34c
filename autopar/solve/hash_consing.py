"""Keep one object for all equal tables, and compute each result from them once.

Identical layers give identical tables, and the rules of `presolve` turn these into identical tables again, layer by
layer. In: tables. Out: the one object that represents all tables equal to it. Results computed from such tables are
cached by the tables' identity, so a reduction pays for distinct layers only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np

from autopar.solve.compact_costs import Table

Result = TypeVar("Result")
_MOST_BYTES = 1 << 28  # size of the cache: with that many distinct tables, few lookups would hit


class SharedTables:
    """A cache of tables and of results computed from them. Its arrays are shared and must not be written to."""

    def __init__(self) -> None:
        self._tables: dict[bytes, Table] = {}
        self._results: dict[
            tuple[object, ...], tuple[object, object]
        ] = {}  # keeps the keyed objects alive: their `id`s stay unique
        self._bytes = 0

    def once(
        self, name: str, of: Sequence[Table | np.ndarray], more: Sequence[np.ndarray], compute: Callable[[], Result]
    ) -> Result:
        """The cached result of `compute`, which must depend on `of` and `more` only.

        Args:
            name: name of the computation.
            of: tables of this store, or arrays that are never written to; compared by identity.
            more: arrays compared by content.
        """
        key = (name, *map(id, of), *((a.dtype.char, a.tobytes()) for a in more))
        if key in self._results:
            return cast(Result, self._results[key][1])
        result = compute()
        self._make_room(_num_bytes(result))
        self._results[key] = (tuple(of), result)
        return result

    def one(self, table: Table) -> Table:
        """The table that represents all tables equal to this one."""
        shape = (len(table.rows), len(table.cols), *table.core.shape)
        digest = hashlib.blake2b(repr(shape).encode(), digest_size=16)
        for array in (table.rows, table.cols, table.core):
            digest.update(np.ascontiguousarray(array))
        key = digest.digest()
        if key not in self._tables:
            self._make_room(_num_bytes(table))
            self._tables[key] = table
        return self._tables[key]

    def of(self, costs: np.ndarray) -> Table:
        """`Table.of` for an array that is never written to."""
        return self.once("of", [costs], [], lambda: self.one(Table.of(np.asarray(costs, float))))

    def transposed(self, table: Table) -> Table:
        """`Table.transposed`."""
        return self.once("transposed", [table], [], lambda: self.one(table.transposed()))

    def take(self, table: Table, rows: np.ndarray) -> Table:
        """`Table.take`."""
        return self.once("take", [table], [rows], lambda: self.one(table.take(rows)))

    def plus(self, table: Table, other: Table) -> Table:
        """`Table.plus`."""
        return self.once("plus", [table, other], [], lambda: self.one(table.plus(other)))

    def normalised(self, table: Table) -> tuple[Table | None, np.ndarray, np.ndarray]:
        """`Table.normalised`, with None for a table that is zero."""

        def compute() -> tuple[Table | None, np.ndarray, np.ndarray]:
            normal, of_rows, of_columns = table.normalised()
            return None if normal.is_zero() else self.one(normal), of_rows, of_columns

        return self.once("normalised", [table], [], compute)

    def dense(self, table: Table) -> np.ndarray:
        """`Table.dense`."""
        return self.once("dense", [table], [], table.dense)

    def _make_room(self, num_bytes: int) -> None:
        """Empty the cache once it exceeds its size. Tables already returned stay valid."""
        self._bytes += num_bytes
        if self._bytes > _MOST_BYTES:
            self._tables, self._results, self._bytes = {}, {}, num_bytes


def _num_bytes(result: object) -> int:
    if isinstance(result, np.ndarray):
        return result.nbytes
    if isinstance(result, Table):
        return result.rows.nbytes + result.cols.nbytes + result.core.nbytes
    return sum(map(_num_bytes, result)) if isinstance(result, tuple) else 0
