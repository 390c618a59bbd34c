"""Let orbax write and read arrays with shards in only some processes, such as the state of a pipeline stage.

In: the arguments of orbax's own array handler. Out: the same files. Orbax expects a shard of each array in every
process, and process 0 to write the metadata; here each process writes and reads the arrays that it has shards of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def handler_of_state() -> ocp.PyTreeCheckpointHandler:
    """The handler that writes and reads nested dicts of such arrays."""
    own = _ArraysOfSome(primary_host=None, enable_write_sharding_file=False)
    numbers = ocp.type_handlers.NumpyHandler()
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, own), (np.ndarray, numbers))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class _Shards:
    """Wrap an array for orbax, which refuses a `jax.Array` with shards in this process alone."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class _ArraysOfSome(ocp.type_handlers.ArrayHandler):
    """An array handler that skips arrays without shards in this process."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Start to write this process's shards."""
        args = args or [ocp.SaveArgs()] * len(values)
        mine = [n for n, value in enumerate(values) if value.addressable_shards]
        if not mine:
            return []
        shards: Any = [_Shards(values[n]) for n in mine]
        return await super().serialize(shards, [infos[n] for n in mine], [args[n] for n in mine])

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Read this process's shards; return other arrays without local shards."""
        assert args is not None, "each has the sharding that it is read into"
        mine = [n for n, arg in enumerate(args) if arg.sharding.addressable_devices]
        read = await super().deserialize([infos[n] for n in mine], [args[n] for n in mine]) if mine else []
        found = dict(zip(mine, read, strict=True))
        return [found[n] if n in found else _without_shards(arg) for n, arg in enumerate(args)]


def _without_shards(arg: Any) -> jax.Array:
    return jax.make_array_from_single_device_arrays(arg.global_shape, arg.sharding, [], dtype=arg.dtype)
