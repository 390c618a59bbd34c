"""Keep one object for all equal tables, and compute each result from them once.

Identical layers give identical tables, and the rules of `presolve` turn these into identical tables again, layer by
layer. In: tables. Out: the one object that represents all tables equal to it. Results computed from such tables are
cached by the tables' identity, so a reduction pays for distinct layers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np

from autopar.solve.compact_costs import Table

Result = TypeVar("Result")
_MOST_BYTES = 1 << 28  # size of the cache: with that many distinct tables, few lookups would hit


class SharedTables:
    """A cache of tables and of results computed from them. Its arrays are shared and must not be written to."""

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], Table] = {}
        self._results: dict[
            tuple[object, ...], tuple[object, object]
        ] = {}  # keeps the keyed objects alive: their `id`s stay unique
        self._bytes = 0

    def per_table(self, name: str, compute: Callable[[Table], Result], table: Table) -> Result:
        """The cached result of a function of one table of this store; faster than `once`."""
        key = (name, id(table))
        found = self._results.get(key)
        return self._store(key, (table,), compute(table)) if found is None else cast(Result, found[1])

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
        return self._store(key, tuple(of), compute())

    def _store(self, key: tuple[object, ...], of: tuple[object, ...], result: Result) -> Result:
        self._make_room(_num_bytes(result))
        self._results[key] = (of, result)
        return result

    def one(self, table: Table) -> Table:
        """The table that represents all tables equal to this one."""
        key = (table.core.shape, table.rows.tobytes(), table.cols.tobytes(), table.core.tobytes())
        if key not in self._tables:
            self._make_room(2 * _num_bytes(table))  # the table and its key
            self._tables[key] = table
        return self._tables[key]

    def of(self, costs: np.ndarray) -> Table:
        """`Table.of` for an array that is never written to."""
        return self.once("of", [costs], [], lambda: self.one(Table.of(np.asarray(costs, float))))

    def transposed(self, table: Table) -> Table:
        """`Table.transposed`."""
        return self.per_table("transposed", self._transposed, table)

    def _transposed(self, table: Table) -> Table:
        return self.one(table.transposed())

    def take(self, table: Table, rows: np.ndarray) -> Table:
        """`Table.take`."""
        return self.once("take", [table], [rows], lambda: self.one(table.take(rows)))

    def plus(self, table: Table, other: Table) -> Table:
        """`Table.plus`."""
        return self.once("plus", [table, other], [], lambda: self.one(table.plus(other)))

    def normalised(self, table: Table) -> tuple[Table | None, np.ndarray | None, np.ndarray | None]:
        """`Table.normalised`, with None for a table and for amounts that are zero."""
        return self.per_table("normalised", self._normalised, table)

    def _normalised(self, table: Table) -> tuple[Table | None, np.ndarray | None, np.ndarray | None]:
        normal, *shifts = table.normalised()
        of_rows, of_columns = (shift if shift.any() else None for shift in shifts)
        if normal.is_zero():
            return None, of_rows, of_columns
        return table if normal is table else self.one(normal), of_rows, of_columns

    def dense(self, table: Table) -> np.ndarray:
        """`Table.dense`."""
        return self.per_table("dense", Table.dense, table)

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
