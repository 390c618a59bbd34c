"""Order devices for a mesh by host, so that the inner axes stay inside one host.

In: devices of one or several processes.
Out: the same devices in order. The cost model assumes this order: `cost.collectives` fills hosts in row-major order,
and the last axes of a mesh communicate most, so they connect neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def in_host_order(devices: Sequence[Any]) -> list[Any]:
    """Devices ordered by the domain of their fast links, then by process.

    JAX orders by process, which a launcher may distribute over hosts round robin; `jax.make_mesh` refuses GPUs of
    several hosts if JAX knows their fast links.
    """
    return sorted(devices, key=lambda device: (_fast_domain(device), device.process_index, device.id))


def devices_per_domain(devices: Sequence[Any]) -> int:
    """The number of devices that fast links connect in the smallest domain: an NVLink domain, or the process of CPUs."""
    is_cpu = devices[0].platform == "cpu"
    return min(Counter(device.process_index if is_cpu else _fast_domain(device) for device in devices).values())


def _fast_domain(device: Any) -> int:
    """JAX's number for the domain of a GPU's fast links: a host or a rack. The attribute has had two names."""
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
