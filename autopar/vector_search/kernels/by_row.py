"""Run a program over the rows of a table on several devices: each has a part of the rows, and all of the rest.

In: a function of something whole and of a table. Out: its rows. No device waits for another, so nothing is sent but the
whole part, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_EVERY, _ROWS = PartitionSpec(), PartitionSpec("rows")


def by_row(
    function: Callable[..., jax.Array], whole: Any, table: jax.Array | np.ndarray, devices: Sequence[Any], **static: Any
) -> jax.Array:
    """`function(whole, table, **static)`, `[n, ..]`, on the first device.

    Args:
        function: a module's function, compiled once for each `static`; each row of its result depends on that row of the
            table only.
        whole: arrays, replicated.
        table: `[n, ..]`; the last device may compute some rows again.
    """
    num, size = table.shape[0], len(devices)
    some = tuple(sorted(static.items()))
    if size == 1 or num < size:
        return _on_one(function, some)(whole, table)
    padded = jnp.pad(table, ((0, -num % size), *((0, 0),) * (table.ndim - 1)), mode="wrap")
    mesh = Mesh(np.array(devices), ("rows",))
    placed = jax.device_put(whole, NamedSharding(mesh, _EVERY)), jax.device_put(padded, NamedSharding(mesh, _ROWS))
    return jax.device_put(_on_several(function, some, mesh)(*placed), devices[0])[:num]


@cache
def _on_one(function: Callable[..., jax.Array], static: tuple[tuple[str, Any], ...]) -> Callable[..., jax.Array]:
    return jax.jit(partial(function, **dict(static)))


@cache
def _on_several(
    function: Callable[..., jax.Array], static: tuple[tuple[str, Any], ...], mesh: Mesh
) -> Callable[..., jax.Array]:
    run = partial(function, **dict(static))
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(_EVERY, _ROWS), out_specs=_ROWS, check_vma=False))
