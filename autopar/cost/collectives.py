"""Predict the time of a collective over some mesh axes, from the table of collectives.

In: kind, payload, mesh, hardware profile. Out: seconds by an alpha-beta model, plus a launch. With n devices, payload
B (the largest buffer that a device starts or ends with), bandwidth b per device and hop latency a:

    all-reduce            2 (n-1)/n B/b + 2 (n-1) a + launch   by the ring
    all-gather            (n-1)/n B/b + (n-1) a + launch       B: the gathered buffer
    reduce-scatter        (n-1)/n B/b + (n-1) a + launch       B: the unscattered buffer
    all-to-all            (n-1)/n B/(e b) + (n-1) a + launch   B: the local buffer; e: its efficiency
    collective-permute    B/b + a + launch                     B: the local buffer

These are the costs of the bandwidth-optimal ring (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
Communication Operations in MPICH", sections 4.1 to 4.5; NCCL's ring is the same). An all-reduce takes the back end's
cheapest algorithm for its size and devices (`all_reduce`): the ring in one host, hierarchical algorithms or trees
between hosts. All-gather and reduce-scatter are its halves, by the flat or the hierarchical ring, whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autopar.cost.all_reduce import ALGORITHMS, BACKENDS, Load, Workers, backend_of, cheapest_all_reduce
from autopar.cost.collective_entry import Call, Collective
from autopar.cost.user_collectives import registered, registered_for
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape


def workers_of(axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile) -> Workers:
    """The devices of a collective over these axes, counted by host.

    If hosts split an axis unevenly, hierarchical algorithms do not apply, and each device counts as its own host.
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
    """The back end's all-reduce algorithms; with `in_halves` only those made of a reduce-scatter and an all-gather."""
    names = BACKENDS[backend_of(profile.platform)]
    return tuple(name for name in names if ALGORITHMS[name].in_halves) if in_halves else names


def all_reduce_choice(
    num_bytes: float, axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile
) -> tuple[str, Load]:
    """The name and load, without a launch, of the algorithm that an unmerged all-reduce takes."""
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
        kind: name of a built-in or registered collective.
        num_bytes: payload per device, by the table above.
        combinable: whether XLA merges it with others of its kind (parameter all-gathers, gradient reductions) up to
            its combiner threshold. It then pays only its share of launch and latency, but at least
            `combined_launch_fraction` of them.
    """
    if mesh.sizes(axes) == 1:
        return 0.0
    share = 1.0
    if combinable:
        share = min(1.0, max(num_bytes / profile.combine_threshold_bytes, profile.combined_launch_fraction))
    return collective(kind).seconds(Call(num_bytes, axes, mesh, profile, share))


def collective(kind: str) -> Collective:
    """The entry of a built-in or registered kind."""
    return BUILT_IN.get(kind) or registered()[kind]


def cheaper_than_built_in(
    change: str,
    num_bytes: float,
    axes: tuple[str, ...],
    mesh: MeshShape,
    profile: HardwareProfile,
    *,
    combinable: bool,
) -> str:
    """The name of the fastest registered collective for a change; empty if the built-in one is faster."""
    own = {one.name: collective_time(one.name, num_bytes, axes, mesh, profile) for one in registered_for(change)}
    if not own:
        return ""
    best = min(own, key=own.__getitem__)
    built_in = collective_time(change, num_bytes, axes, mesh, profile, combinable=combinable)
    return best if own[best] < built_in else ""


def _by_halves(num_halves: int) -> Callable[[Call], float]:
    """The formula of an all-reduce (`num_halves` 2), or of a reduce-scatter or all-gather (1)."""
    part = num_halves / 2

    def seconds(call: Call) -> float:
        names = algorithms_of(call.profile, in_halves=num_halves == 1)
        workers = workers_of(call.axes, call.mesh, call.profile)
        _, load = cheapest_all_reduce(call.num_bytes, workers, names, latency_share=call.share)
        return part * load.transfer_s + call.share * (part * load.latency_s + call.profile.collective_launch_s)

    return seconds


def _all_to_all(call: Call) -> float:
    n, rate = call.num_devices, call.link.bytes_per_s * call.profile.all_to_all_efficiency
    latency_s = (n - 1) * call.link.latency_s
    return (n - 1) / n * call.num_bytes / rate + call.share * (latency_s + call.profile.collective_launch_s)


def _permute(call: Call) -> float:
    link = call.link
    return call.num_bytes / link.bytes_per_s + call.share * (link.latency_s + call.profile.collective_launch_s)


#: XLA's own collectives.
BUILT_IN: Mapping[str, Collective] = MappingProxyType(
    {
        one.name: one
        for one in (
            Collective("all-reduce", "all-reduce", _by_halves(2), is_sum=True),
            Collective("all-gather", "all-gather", _by_halves(1)),
            Collective("reduce-scatter", "reduce-scatter", _by_halves(1), is_sum=True, gives_part=True),
            Collective("all-to-all", "all-to-all", _all_to_all, is_merged=False),
            Collective("collective-permute", "collective-permute", _permute),
        )
    }
)
KINDS = tuple(BUILT_IN)
