"""Seconds for one collective over some mesh axes.

In: kind, payload, mesh, hardware profile. Out: seconds, as alpha-beta cost, plus a launch. With n
devices, payload B (the whole buffer one device ends or starts with), per-device bandwidth b and hop
latency a:

    all-reduce            2 (n-1)/n B/b + 2 (n-1) a + launch   by the ring
    all-gather            (n-1)/n B/b + (n-1) a + launch       B: the gathered buffer
    reduce-scatter        (n-1)/n B/b + (n-1) a + launch       B: the unscattered buffer
    all-to-all            (n-1)/n B/(e b) + (n-1) a + launch   B: the local buffer; e: its efficiency
    collective-permute    B/b + a + launch                     B: the local buffer

These are the bandwidth-optimal ring's (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
Communication Operations in MPICH", sections 4.1 to 4.5; NCCL's ring is the same). An all-reduce takes
the cheapest algorithm that the back end has for its size and devices (`all_reduce`): in one host the
ring, between hosts by levels or along trees. All-gather and reduce-scatter are its halves, by the ring
or by levels, whichever is cheaper.
"""

from __future__ import annotations

from autopar.cost.all_reduce import ALGORITHMS, BACKENDS, Load, Workers, backend_of, cheapest_all_reduce
from autopar.cost.hardware_profile import HardwareProfile, LinkProfile
from autopar.ir.mesh import MeshShape

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def link_of(axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile) -> LinkProfile:
    """The slowest link a collective over these axes must cross.

    Devices are laid row-major over the mesh, hosts are filled in order; so an axis stays inside a
    host exactly if the block it spans (its size times its stride) divides a host.
    """
    for axis in axes:
        span = mesh.size(axis) * mesh.stride(axis)
        if span > profile.devices_per_host or profile.devices_per_host % span:
            return profile.network_link if mesh.num_devices > profile.devices_per_host else profile.host_link
    return profile.host_link


def workers_of(axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile) -> Workers:
    """The devices of a collective over these axes, counted by host.

    Where hosts cut an axis unevenly there are no levels to use: each device counts as a host of its own.
    """
    num_devices, per_host = mesh.sizes(axes), profile.devices_per_host
    if mesh.num_devices <= per_host:
        return Workers(num_devices, 1, profile.host_link, profile.network_link)
    num_local = 1
    for axis in axes:
        stride, span = mesh.stride(axis), mesh.size(axis) * mesh.stride(axis)
        if per_host % span == 0:
            num_local *= mesh.size(axis)
        elif per_host % stride == 0 and span % per_host == 0:
            num_local *= per_host // stride
        elif stride % per_host:
            return Workers(1, num_devices, profile.host_link, profile.network_link)
    return Workers(num_local, num_devices // num_local, profile.host_link, profile.network_link)


def algorithms_of(profile: HardwareProfile, *, in_halves: bool = False) -> tuple[str, ...]:
    """The all-reduce algorithms that the back end has; or those of them whose halves are the other two."""
    names = BACKENDS[backend_of(profile.platform)]
    return tuple(name for name in names if ALGORITHMS[name].in_halves) if in_halves else names


def all_reduce_choice(
    num_bytes: float, axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile
) -> tuple[str, Load]:
    """The algorithm that an all-reduce on its own takes, by its name, and its load; a launch is not in it."""
    return cheapest_all_reduce(num_bytes, workers_of(axes, mesh, profile), algorithms_of(profile))


def collective_time(
    kind: str,
    num_bytes: float,
    axes: tuple[str, ...],
    mesh: MeshShape,
    profile: HardwareProfile,
    *,
    combinable: bool = False,
) -> float:
    """Seconds for one collective.

    Args:
        num_bytes: payload per device, by the table above.
        combinable: XLA merges it with others of its kind (parameter gathers, gradient reductions)
            until they reach its combiner threshold, so it pays only its share of launch and latency,
            but at least `combined_launch_fraction` of them.
    """
    assert kind in KINDS, kind
    n = mesh.sizes(axes)
    if n == 1:
        return 0.0
    share = 1.0
    if combinable:
        share = min(1.0, max(num_bytes / profile.combine_threshold_bytes, profile.combined_launch_fraction))
    if kind in ("all-reduce", "all-gather", "reduce-scatter"):
        part = 1.0 if kind == "all-reduce" else 0.5
        names = algorithms_of(profile, in_halves=kind != "all-reduce")
        _, load = cheapest_all_reduce(num_bytes, workers_of(axes, mesh, profile), names, latency_share=share)
        return part * load.transfer_s + share * (part * load.latency_s + profile.collective_launch_s)
    link = link_of(axes, mesh, profile)
    hops, moved = (1, num_bytes) if kind == "collective-permute" else (n - 1, (n - 1) / n * num_bytes)
    rate = link.bytes_per_s * (profile.all_to_all_efficiency if kind == "all-to-all" else 1.0)
    return moved / rate + share * (hops * link.latency_s + profile.collective_launch_s)
