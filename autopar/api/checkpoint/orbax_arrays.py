"""Let orbax write and read arrays that only some processes have, such as the state of a pipelined step.

In: the arguments of orbax's own array handler. Out: the same files. Orbax expects a part of each array in every
process, and process 0 to write the array's metadata. Here each process writes and reads the arrays of which it has
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def handler_of_state() -> ocp.PyTreeCheckpointHandler:
    """The handler that writes and reads nested dicts of such arrays."""
    arrays = _ArraysOfSome(primary_host=None, enable_write_sharding_file=False)
    numbers = ocp.type_handlers.NumpyHandler()
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays), (np.ndarray, numbers))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class _Shards:
    """A wrapper around an array, because orbax rejects a `jax.Array` that only this process has."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class _ArraysOfSome(ocp.type_handlers.ArrayHandler):
    """An array handler that skips the arrays of other processes."""

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Start to write this process's shards."""
        args = args or [ocp.SaveArgs()] * len(values)
        mine = [n for n, value in enumerate(values) if value.addressable_shards]
        if not mine:
            return []
        shards: Any = [_Shards(values[n]) for n in mine]
        return await super().serialize(shards, [infos[n] for n in mine], [args[n] for n in mine])

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Read this process's parts. An array of other processes becomes one without local shards."""
        assert args is not None, "the arguments hold the target shardings"
        mine = [n for n, arg in enumerate(args) if arg.sharding.addressable_devices]
        read = await super().deserialize([infos[n] for n in mine], [args[n] for n in mine]) if mine else []
        arrays = dict(zip(mine, read, strict=True))
        return [arrays[n] if n in arrays else _without_shards(arg) for n, arg in enumerate(args)]


def _without_shards(arg: Any) -> jax.Array:
    return jax.make_array_from_single_device_arrays(arg.global_shape, arg.sharding, [], dtype=arg.dtype)
