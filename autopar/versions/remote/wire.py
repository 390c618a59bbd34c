"""Write keys and updates as JSON and a list of arrays, and read them back.

In: selected keys, or an update by key. Out: descriptions for a message, and arrays for the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.versions.factors import SufficientFactors
from autopar.versions.keys import Selected
from autopar.versions.server_update import Update


def packed_keys(chosen: Selected) -> tuple[list[Any], list[jax.Array]]:
    """Keys, each with whether rows of it are meant; and the numbers of the rows."""
    return [[key, rows is not None] for key, rows in chosen.items()], [
        jnp.asarray(rows) for rows in chosen.values() if rows is not None
    ]


def unpacked_keys(described: Sequence[Any], arrays: Sequence[jax.Array]) -> Selected:
    """What `packed_keys` wrote."""
    left = iter(arrays)
    return {key: np.asarray(next(left)) if has_rows else None for key, has_rows in described}


def packed_update(update: Update) -> tuple[list[Any], list[jax.Array]]:
    """One line for each part of an update: its key and kind; and the arrays of the parts."""
    lines: list[Any] = []
    arrays: list[jax.Array] = []
    for key, pushed in update.items():
        if pushed.whole is not None:
            lines.append([key, "whole"])
            arrays.append(jnp.asarray(pushed.whole))
        for rows, values in pushed.rows:
            lines.append([key, "rows"])
            arrays += [jnp.asarray(rows), jnp.asarray(values)]
        for factors in pushed.factors:
            lines.append([key, "factors"])
            arrays += [jnp.asarray(factors.left), jnp.asarray(factors.right)]
    return lines, arrays


def unpacked_update(lines: Sequence[Any], arrays: Sequence[jax.Array]) -> Iterator[tuple[Any, Any]]:
    """For each part, the arguments of a push."""
    left = iter(arrays)
    for key, kind in lines:
        if kind == "whole":
            yield key, next(left)
        elif kind == "rows":
            yield {key: np.asarray(next(left))}, {key: next(left)}
        else:
            yield key, SufficientFactors(next(left), next(left))
