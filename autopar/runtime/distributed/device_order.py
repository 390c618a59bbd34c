"""In which order devices become a mesh: host after host, so that the inner axes stay inside one.

In: devices of one process or several. Out: the same, in order. A plan is priced for this order: it talks most over the
last axes of a mesh (`cost.collectives` fills hosts in row-major order), which therefore take neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def in_host_order(devices: Sequence[Any]) -> list[Any]:
    """Devices of one process next to each other, and processes whose GPUs a fast link joins.

    JAX's own order is that of processes, which a launcher may deal out over the hosts in turn; `jax.make_mesh` refuses
    GPUs of several hosts where JAX says which fast links join them.
    """
    return sorted(devices, key=lambda device: (_fast_domain(device), device.process_index, device.id))


def devices_per_host(devices: Sequence[Any]) -> int:
    """How many devices fast links join: those of the smallest host. Virtual CPU devices are joined by their process."""
    is_cpu = devices[0].platform == "cpu"
    return min(Counter(device.process_index if is_cpu else _fast_domain(device) for device in devices).values())


def _fast_domain(device: Any) -> int:
    """JAX's number for what GPUs are joined by: a host's links, or those of a rack. JAX has had two names for it."""
    for name in ("partition_index", "slice_index"):
        found = getattr(device, name, None)
        if isinstance(found, int):
            return found
    return device.process_index


def cluster_text(devices: Sequence[Any]) -> str:
    """`8 (gpu)`, `8 (gpu; 2 processes x 4)`."""
    counts = Counter(device.process_index for device in devices)
    platform = devices[0].platform if counts else "no"
    if len(counts) < 2:
        return f"{len(devices)} ({platform})"
    sizes = " or ".join(map(str, sorted(set(counts.values()))))
    return f"{len(devices)} ({platform}; {len(counts)} processes x {sizes})"
