"""Collect the arrays of a pull from the shards of one state.

In: the shards, and the keys and rows that were named. Out: arrays by key, handed over to the reader, and the version of each
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from autopar.errors import StoreError
from autopar.versions.keys import Selected, shown
from autopar.versions.shards import Place, Shard

#: From the number of a shard, its arrays by key, and the bytes of the numbers of rows, the arrays at the reader.
HandOver = Callable[[int, Mapping[str, jax.Array], int], dict[str, jax.Array]]


def gathered(
    shards: Sequence[Shard], chosen: Selected, shard_of: Mapping[str, int], hand_over: HandOver
) -> tuple[dict[str, jax.Array], dict[int, int]]:
    """The arrays that a pull returns, and by number of the shard their versions.

    Raises:
        StoreError: a reader has donated an array of the store.
    """
    by_shard: dict[int, dict[str, jax.Array]] = {}
    row_bytes: dict[int, int] = {}
    for key, rows in chosen.items():
        number = shard_of[key]
        array = shards[number].weights[key]
        if array.is_deleted():
            raise StoreError(
                f"the array of {shown(key)} was donated by a reader: copy what you pull before donating it"
            )
        if rows is not None:
            array = array[rows]
            row_bytes[number] = row_bytes.get(number, 0) + rows.nbytes
        by_shard.setdefault(number, {})[key] = array
    values: dict[str, jax.Array] = {}
    for number, arrays in by_shard.items():
        values |= hand_over(number, arrays, row_bytes.get(number, 0))
    return {key: values[key] for key in chosen}, {number: shards[number].version for number in by_shard}


def kept_of(
    before: Mapping[str, tuple[jax.Array, int]], chosen: Selected, shard_of: Mapping[str, int], to: Place | None
) -> tuple[dict[str, jax.Array], dict[int, int]] | None:
    """What a worker pulled before of these keys, as `gathered` returns it; None if it did not pull them, or chooses rows.

    Args:
        before: by key the array and its version.
    """
    if any(rows is not None or key not in before for key, rows in chosen.items()):
        return None
    values = {key: before[key][0] for key in chosen}
    versions = {shard_of[key]: before[key][1] for key in chosen}
    return values if to is None else jax.device_put(values, to), versions
