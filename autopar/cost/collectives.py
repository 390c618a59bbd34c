"""Predict the time of a collective over some mesh axes, from the table of collectives.

In: kind, payload, mesh, hardware profile. Out: seconds by an alpha-beta model, plus a launch. With n devices, payload
B (the largest buffer that a device starts or ends with), bandwidth b per device and hop latency a:

    all-reduce            2 (n-1)/n B/b + 2 (n-1) a + launch   by the ring
    all-gather            (n-1)/n B/b + (n-1) a + launch       B: the gathered buffer
    reduce-scatter        (n-1)/n B/b + (n-1) a + launch       B: the unscattered buffer
    all-to-all            (n-1)/n B/(e b) + (n-1) a + launch   B: the local buffer; e: its efficiency; between hosts
                                                               (n-local)/n B/(e b_net), one a_net more
    collective-permute    B/b + a + launch                     B: the local buffer

These are the costs of the bandwidth-optimal ring (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
Communication Operations in MPICH", sections 4.1 to 4.5; NCCL's ring is the same). An all-reduce takes the back end's
cheapest algorithm for its size and devices (`all_reduce`): the ring in one host, hierarchical algorithms, trees or
one ring per network card between hosts or NVLink domains. All-gather and reduce-scatter are the halves of its rings,
whichever is cheapest.

Inside an NVLink domain, a profile with XLA's tables has fits to measured collectives of 2, 4 and 8 devices, and the fit
counts. With another number of devices or another link, the nearest fit is scaled by the ratio of both times in the model
above. Between domains, a collective takes no less than inside one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from autopar.cost.all_reduce import ALGORITHMS, BACKENDS, Load, Workers, backend_of, cheapest_all_reduce
from autopar.cost.collective_entry import Call, Collective, link_of
from autopar.cost.user_collectives import registered, registered_for
from autopar.hardware.profile import HardwareProfile, LinkProfile
from autopar.hardware.xla_estimator import CollectiveFit
from autopar.ir.mesh import MeshShape


def groupings(axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile) -> tuple[Workers, ...]:
    """The devices of a collective over these axes, in each grouping that a hierarchical algorithm may use.

    Inside one NVLink domain they are grouped by host, and NVLink connects the hosts. Otherwise they are grouped by
    domain, and by host if a domain has several hosts. The network then connects the groups.
    """
    near, far = profile.host_link, profile.network_link
    host, domain = profile.devices_per_host, profile.domain_in(mesh.num_devices)
    if domain == host:
        return (_grouped(axes, mesh, host, near, far),)
    if link_of(axes, mesh, profile) == near:
        return (_grouped(axes, mesh, host, near, near),)
    return _grouped(axes, mesh, domain, near, far), _grouped(axes, mesh, host, near, far)


def _grouped(axes: tuple[str, ...], mesh: MeshShape, size: int, near: LinkProfile, far: LinkProfile) -> Workers:
    """The devices of a collective, counted by groups of `size` consecutive devices of the mesh.

    If groups split an axis unevenly, hierarchical algorithms do not apply, and each device counts as its own group.
    """
    num_devices = mesh.sizes(axes)
    if mesh.num_devices <= size:
        return Workers(num_devices, 1, near, far)
    num_local = 1
    for axis in axes:
        stride, span = mesh.stride(axis), mesh.size(axis) * mesh.stride(axis)
        if size % span == 0:
            num_local *= mesh.size(axis)
        elif size % stride == 0 and span % size == 0:
            num_local *= size // stride
        elif stride % size:
            return Workers(1, num_devices, near, far)
    return Workers(num_local, num_devices // num_local, near, far)


def algorithms_of(profile: HardwareProfile, *, in_halves: bool = False) -> tuple[str, ...]:
    """The back end's all-reduce algorithms; with `in_halves` only those made of a reduce-scatter and an all-gather."""
    names = BACKENDS[backend_of(profile.platform)]
    return tuple(name for name in names if ALGORITHMS[name].in_halves) if in_halves else names


def all_reduce_choice(
    num_bytes: float, axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile
) -> tuple[str, Load]:
    """The name and load, without a launch, of the algorithm that an unmerged all-reduce takes."""
    return _cheapest(num_bytes, groupings(axes, mesh, profile), algorithms_of(profile))


def _cheapest(
    num_bytes: float, groupings: tuple[Workers, ...], names: tuple[str, ...], latency_share: float = 1.0
) -> tuple[str, Load]:
    """The name and load of the fastest algorithm in the best grouping."""
    found = [cheapest_all_reduce(num_bytes, workers, names, latency_share=latency_share) for workers in groupings]
    return min(found, key=lambda one: latency_share * one[1].latency_s + one[1].transfer_s)


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
    # A registered name may get another collective later.
    return (_kept_time if kind in BUILT_IN else _time)(kind, num_bytes, axes, mesh, profile, combinable)


def _time(
    kind: str, num_bytes: float, axes: tuple[str, ...], mesh: MeshShape, profile: HardwareProfile, combinable: bool
) -> float:
    if mesh.sizes(axes) == 1:
        return 0.0
    share = 1.0
    if combinable and collective(kind).is_merged:
        share = min(1.0, max(num_bytes / profile.combine_threshold_bytes, profile.combined_launch_fraction))
    call = Call(num_bytes, axes, mesh, profile, share)
    estimator = profile.xla_estimator
    fits = estimator.collectives.get(kind) if estimator else None
    if estimator is None or not fits or num_bytes <= 0:
        return collective(kind).seconds(call)
    devices, in_domain = call.num_devices, call.link == profile.host_link
    nearest = min(fits, key=lambda measured: abs(math.log(measured / devices)))
    fitted = _fitted_seconds(fits[nearest], call)
    link = LinkProfile(estimator.fitted_link_bytes_per_s, estimator.fitted_link_latency_s)
    if devices != nearest or profile.host_link != link:

        def model(num_devices: int, over: LinkProfile) -> float:
            mesh = MeshShape(("devices",), (num_devices,))
            inside = replace(profile, host_link=over, network_link=over)
            return BUILT_IN[kind].seconds(replace(call, axes=mesh.axis_names, mesh=mesh, profile=inside))

        fitted *= model(devices, profile.host_link) / model(nearest, link)
    return fitted if in_domain else max(fitted, collective(kind).seconds(call))


#: Timelines of one plan ask for the same collectives again and again.
_kept_time = functools.lru_cache(maxsize=1 << 16)(_time)


def _fitted_seconds(fit: CollectiveFit, call: Call) -> float:
    """Seconds by a fit to measured collectives."""
    # Merged, it pays its part of the root of the whole payload, smaller than its own root by the root of its share.
    root = fit.s_per_root_byte * math.sqrt(call.share * call.num_bytes)
    return call.share * fit.launch_s + root + fit.s_per_byte * call.num_bytes


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
        _, load = _cheapest(call.num_bytes, groupings(call.axes, call.mesh, call.profile), names, call.share)
        return part * load.transfer_s + call.share * (part * load.latency_s + call.profile.collective_launch_s)

    return seconds


def _all_to_all(call: Call) -> float:
    profile, n = call.profile, call.num_devices
    part = call.num_bytes / n / profile.all_to_all_efficiency

    def transfer_s(workers: Workers) -> float:
        """Both links are busy at once, and the slower one bounds the time."""
        local = workers.num_local
        inside, between = (local - 1) * part, (n - local) * part
        return max(inside / workers.host_link.bytes_per_s, between / workers.network_link.bytes_per_s)

    far_s = call.link.latency_s if call.link != profile.host_link else 0.0
    latency_s = (n - 1) * profile.host_link.latency_s + far_s
    fastest = min(map(transfer_s, groupings(call.axes, call.mesh, profile)))
    return fastest + call.share * (latency_s + profile.collective_launch_s)


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
