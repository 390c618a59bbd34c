"""Stand-ins for devices that this machine does not have, to lower programs for them as if they were here.

In: a number of devices and their kind. Out: `AbsentDevice`s, of which JAX builds meshes and shardings like of any device;
programs with such shardings can be traced and lowered, not run. The shardings that XLA chose for a compiled program's
outputs, as JAX names them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import sharding_impls as _sharding_impls
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import xla_client as _xla_client

#: JAX's name of the memory of a device.
_MEMORY = "device"


class _Memory(str):
    """A memory, which is its kind: JAX reads such a device's memories for their kind, or compares them with one."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class _Client:
    """What JAX reads of a device's client when it lowers a program."""

    platform: str
    process: int
    platform_version: str = "absent"
    runtime_type: str = "absent"

    def process_index(self) -> int:
        return self.process


@dataclass(frozen=True, slots=True)
class AbsentDevice:
    """A device that is not here.

    Args:
        platform: as `jax.Device.platform` has it, e.g. `gpu`.
        lowered_for: the platform of the programs that it runs, e.g. `cuda`.
        process_index: the process that it counts as a device of.
    """

    id: int
    platform: str
    lowered_for: str
    device_kind: str
    process_index: int = 0
    num_cores: int | None = None

    @property
    def client(self) -> Any:
        """What JAX takes for its client."""
        return _Client(self.lowered_for, self.process_index)

    def default_memory(self) -> Any:
        """What JAX takes for its memory."""
        return _Memory(_MEMORY)

    def addressable_memories(self) -> list[Any]:
        """All its memories."""
        return [_Memory(_MEMORY)]


def absent_devices(kinds: Sequence[str], platform: str, lowered_for: str) -> list[Any]:
    """A device of each of these kinds (`jax.Device.device_kind`), in order, all of this process."""
    with _without_plugin_errors():
        here = jax.process_index()
    return [AbsentDevice(number, platform, lowered_for, kind, here) for number, kind in enumerate(kinds)]


@contextmanager
def _without_plugin_errors() -> Iterator[None]:
    """Open JAX's backends without its report on plugins for accelerators that are not here."""
    logger = logging.getLogger("jax._src.xla_bridge")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def serialized_output_shardings(executable: Any) -> list[str]:
    """The shardings of a compiled program's outputs, as text; empty where it has one device."""
    return [one.SerializeToString().hex() for one in executable.get_output_shardings() or ()]


def output_shardings(
    serialized: Sequence[str], pinned: Sequence[NamedSharding | None], outputs: Sequence[Any], mesh: Mesh
) -> list[NamedSharding]:
    """The shardings that `jax.jit` gives the results of a program.

    Args:
        serialized: XLA's, by `serialized_output_shardings`.
        pinned: the `out_shardings` of `jax.jit`.
        outputs: shape and dtype of each result.
        mesh: the mesh by whose axes JAX names XLA's choices.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    found: list[NamedSharding] = []
    for number, (given, aval) in enumerate(zip(pinned, outputs, strict=True)):
        if given is not None or not serialized:
            found.append(given or replicated)
            continue
        proto = _xla_client.OpSharding()
        proto.ParseFromString(bytes.fromhex(serialized[number]))
        chosen: Any = _sharding_impls.GSPMDSharding(tuple(mesh.devices.flat), proto)
        if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
            chosen = _sharding_impls.logical_sharding(aval.shape, aval.dtype, chosen)
        spec = _sharding_impls.parse_flatten_op_sharding(chosen._hlo_sharding, mesh)[0]
        found.append(NamedSharding(mesh, spec))
    return found


def naming_mesh(inputs: Sequence[Any], default: Mesh) -> Mesh:
    """The mesh by which JAX names XLA's choices of a program: that of its first input with a named sharding.

    Args:
        inputs: the inputs that the program reads.
    """
    named = (one.sharding.mesh for one in inputs if isinstance(one.sharding, NamedSharding))
    return next((mesh for mesh in named if isinstance(mesh, Mesh)), default)
