"""Divide devices among data-parallel workers.

In: the options of `parallelize`. Out: `Division`: each worker's devices, and the options with which its program is planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import MeshError, OptionError
from autopar.ir.mesh import MeshShape, mesh_of
from autopar.runtime.distributed.device_order import in_host_order

#: Options of `autopar.plan` that hold for the parts of a step as for a whole one.
PASSED = (
    "hardware",
    "memory_budget_bytes",
    "rematerialize",
    "attention",
    "solver",
    "time_limit_s",
    "progress",
    "cache",
)
#: Options that are read here or in tracing.
READ = ("mesh", "num_devices", "workers", "outer", "static_argnames", "carry", "per_microbatch_statistics")


@dataclass(frozen=True, slots=True)
class Division:
    """Each worker's devices.

    Args:
        devices: of each worker, in the order of its submesh. With more workers than devices, workers share devices.
        options: planning options for a program on one worker's devices.
        own: with several processes, the worker of this one; its devices are the process's.
    """

    devices: tuple[tuple[Any, ...], ...]
    options: Mapping[str, Any]
    own: int | None = None

    @property
    def num_workers(self) -> int:
        return len(self.devices)

    @property
    def is_shared(self) -> bool:
        """Whether a program of a worker runs on several devices, which another thread must not use in another order."""
        return len(self.devices[0]) > 1


def check_options(options: Mapping[str, Any], plan: Any) -> None:
    """Refuse what does not go together with `consistency`.

    Raises:
        OptionError: an option that is unknown, or that workers do not have.
    """
    if plan is not None:
        raise OptionError(
            "`plan` is one program's; with `consistency` workers and server have a plan each: leave `plan` out"
        )
    for name in options:
        if name not in PASSED and name not in READ:
            raise OptionError(
                f"`{name}` does not go with `consistency`; with it, `parallelize` takes {', '.join((*READ, *PASSED))}"
            )


def divided(options: Mapping[str, Any]) -> Division:
    """The devices of the workers.

    `mesh` is the mesh of all: its first axis is divided among the workers. Without it, each device is a worker.

    Raises:
        MeshError: the devices cannot be divided equally, or are not visible.
    """
    given, workers = options.get("mesh"), options.get("workers")
    if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise OptionError(f"`workers` is {workers!r}: give the number of data-parallel workers, at least 1")
    if jax.process_count() > 1:
        return _by_process(options, workers)
    devices, shape = _devices(given, options.get("num_devices"))
    if workers is None:
        workers = len(devices) if shape is None else shape.axis_sizes[0]
    passed = {name: options[name] for name in PASSED if name in options}
    planning = {"cache": True, "all_devices": True} | passed
    if workers > len(devices) and workers % len(devices) == 0 and (shape is None or len(shape.axis_sizes) == 1):
        each = tuple((devices[worker % len(devices)],) for worker in range(workers))
        return Division(each, planning | {"num_devices": 1})
    first = len(devices) if shape is None else shape.axis_sizes[0]
    if first % workers:
        what = f"{first} devices" if shape is None else f"the first axis of mesh {shape.describe()}"
        raise MeshError(
            f"{what} cannot be divided among {workers} workers: choose a number of `workers` that divides {first}"
        )
    size = len(devices) // workers
    each = tuple(tuple(devices[worker * size : (worker + 1) * size]) for worker in range(workers))
    if shape is None or size == 1:
        return Division(each, planning | {"num_devices": size})
    names, sizes = shape.axis_names, (first // workers, *shape.axis_sizes[1:])
    kept = [(name, count) for name, count in zip(names, sizes, strict=True) if count > 1]
    return Division(each, planning | {"mesh": MeshShape(tuple(n for n, _ in kept), tuple(s for _, s in kept))})


def _by_process(options: Mapping[str, Any], workers: int | None) -> Division:
    """Each process is a worker, with the devices that it has."""
    count = jax.process_count()
    if workers not in (None, count) or options.get("mesh") is not None or options.get("num_devices") is not None:
        raise MeshError(
            f"with {count} processes each is a worker with its own devices: leave `workers`, `mesh` and `num_devices` out"
        )
    each = [tuple(device for device in jax.devices() if device.process_index == process) for process in range(count)]
    if len({len(devices) for devices in each}) > 1:
        numbers = ", ".join(str(len(devices)) for devices in each)
        raise MeshError(f"workers have equal numbers of devices, but the processes have {numbers}")
    passed = {name: options[name] for name in PASSED if name in options}
    planning = {"cache": True, "all_devices": True} | passed | {"num_devices": len(each[0])}
    return Division(tuple(each), planning, jax.process_index())


def _devices(given: Any, num_devices: Any) -> tuple[list[Any], MeshShape | None]:
    """The devices in order, and the mesh that the user named."""
    if isinstance(given, jax.sharding.Mesh):
        return list(given.devices.flat), MeshShape(tuple(given.axis_names), tuple(given.axis_sizes))
    visible = in_host_order(jax.devices())
    shape = None if given is None else mesh_of(given)
    count = len(visible) if num_devices is None and shape is None else num_devices or (shape and shape.num_devices)
    if shape is not None and count != shape.num_devices:
        raise MeshError(f"mesh {shape.describe()} has {shape.num_devices} devices, but `num_devices` is {num_devices}")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= len(visible):
        raise MeshError(f"{count} devices were requested, and {len(visible)} are visible")
    return visible[:count], shape
