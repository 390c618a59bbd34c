"""Collect the arrays of a pull from the shards of one state.

In: the shards, and the parts and rows that were named. Out: arrays by part, handed over to the reader, and the version of each
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from autopar.errors import StoreError
from autopar.versions.division import Part
from autopar.versions.host_memory.memory_kinds import host_sharding, in_host_memory, put
from autopar.versions.keys import Selected, shown
from autopar.versions.layout_choice import Place
from autopar.versions.shards import Shard

#: From the number of a shard, its arrays by part, and the bytes of the numbers of rows, the arrays at the reader.
HandOver = Callable[[int, Mapping[str, jax.Array], int], dict[str, jax.Array]]


def gathered(
    shards: Sequence[Shard], chosen: Selected, parts: Mapping[str, Part], hand_over: HandOver
) -> tuple[dict[str, jax.Array], dict[int, int]]:
    """The arrays that a pull returns, and by number of the shard their versions.

    Raises:
        StoreError: a reader has donated an array of the store.
    """
    by_shard: dict[int, dict[str, jax.Array]] = {}
    row_bytes: dict[int, int] = {}
    for name, rows in chosen.items():
        number = parts[name].shard
        array = shards[number].weights[parts[name].key]
        if array.is_deleted():
            raise StoreError(
                f"the array of {shown(name)} was donated by a reader: copy what you pull before donating it"
            )
        if rows is not None:
            array = _rows(array, rows)
            row_bytes[number] = row_bytes.get(number, 0) + rows.nbytes
        by_shard.setdefault(number, {})[name] = array
    values: dict[str, jax.Array] = {}
    for number, arrays in by_shard.items():
        values |= hand_over(number, arrays, row_bytes.get(number, 0))
    return {name: values[name] for name in chosen}, {number: shards[number].version for number in by_shard}


def _rows(array: jax.Array, rows: np.ndarray) -> jax.Array:
    if not in_host_memory(array):
        return array[rows]
    return jax.device_put(np.asarray(array)[rows], host_sharding(array))  # devices do not index host memory


def kept_of(
    before: Mapping[str, tuple[jax.Array, Mapping[int, int]]], chosen: Selected, to: Place | None
) -> tuple[dict[str, jax.Array], dict[int, int]] | None:
    """What a worker pulled before of these keys, as `gathered` returns it; None if it did not pull them, or chooses rows.

    Args:
        before: by key the array, and the versions of its shards.
    """
    if any(rows is not None or key not in before for key, rows in chosen.items()):
        return None
    values = {key: before[key][0] for key in chosen}
    versions = {shard: version for key in chosen for shard, version in before[key][1].items()}
    return values if to is None else {key: put(array, to) for key, array in values.items()}, versions
