"""Price what stages send to each other.

In: the values that stages exchange, or that pass between layers, and the links of a cluster.
Out: `Send`s, and seconds of transfers over free links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.cut.exchanges import Passing, crossing_bytes
from autopar.pipeline.partition.cluster import Cluster, Submesh, SubmeshShape
from autopar.pipeline.partition.problem import Stage
from autopar.pipeline.partition.sends import Exchange, Send


def sends_of(
    exchanges: Sequence[Exchange],
    submeshes: Sequence[Submesh],
    cluster: Cluster,
    profiles: Mapping[str, HardwareProfile],
) -> tuple[Send, ...]:
    """The transfers between stages; without bytes and seconds where both are on the same devices."""
    sends: list[Send] = []
    for one in exchanges:
        here, there = submeshes[one.source], submeshes[one.target]
        num_bytes, seconds, in_domain = 0.0, 0.0, True
        if here.devices != there.devices:
            same_host, num_bytes = here.shares_host(there), one.num_bytes
            in_domain = _in_domain(here.shape, there.shape, same_host, cluster, profiles)
            seconds = sent_s(
                num_bytes, here.shape, there.shape, same_host, cluster, profiles, num_values=one.num_values
            )
        sends.append(Send(one.source, one.target, num_bytes, seconds, not in_domain, one.when))
    return tuple(sends)


def sent_s(
    num_bytes: float,
    source: SubmeshShape,
    target: SubmeshShape,
    same_host: bool,
    cluster: Cluster,
    profiles: Mapping[str, HardwareProfile],
    *,
    num_values: int = 1,
) -> float:
    """Seconds between two submeshes over free links. Each value is a transfer and pays the latency. Inside a host or an NVLink domain, each device of the smaller side sends its share;
    over the network, the devices of the smaller side share the host's whole network bandwidth. Where the devices of a
    kind fill several domains, every transfer between hosts counts as one over the network."""
    ends = (profiles[source.kind], profiles[target.kind])
    in_domain = _in_domain(source, target, same_host, cluster, profiles)
    links = [end.host_link if in_domain else end.network_link for end in ends]
    rate, latency = min(link.bytes_per_s for link in links), max(link.latency_s for link in links)
    senders = min(source.num_devices, target.num_devices)
    if not in_domain:
        hosts = min(source.num_hosts, target.num_hosts)
        senders = max(senders, hosts * min(end.devices_per_host for end in ends))
    return num_bytes / senders / rate + num_values * latency


def _in_domain(
    source: SubmeshShape,
    target: SubmeshShape,
    same_host: bool,
    cluster: Cluster,
    profiles: Mapping[str, HardwareProfile],
) -> bool:
    """Whether a transfer stays inside a host or an NVLink domain."""
    one_kind = source.kind == target.kind
    return same_host or (one_kind and _is_one_domain(source.kind, cluster, profiles[source.kind]))


def _is_one_domain(kind: str, cluster: Cluster, profile: HardwareProfile) -> bool:
    """Whether all devices of a kind lie in one NVLink domain of several hosts."""
    domain = profile.nvlink_domain_devices
    return domain is not None and sum(g.num_devices for g in cluster.groups if g.kind == kind) <= domain


def there_and_back_s(
    num_bytes: Sequence[float], cluster: Cluster, profiles: Mapping[str, HardwareProfile]
) -> Callable[[int, SubmeshShape, SubmeshShape, bool], float]:
    """The seconds of one microbatch's activations and gradients, by the bytes that pass before each layer."""

    def transfer_s(boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
        return 2 * sent_s(num_bytes[boundary], source, target, same_host, cluster, profiles)

    return transfer_s


def direct_bytes(passing: Sequence[Passing], num_layers: int, stages: Sequence[Stage]) -> list[float]:
    """Bytes before each layer, if each value counts once per stage that gets it from its producer, spread evenly over the
    boundaries between stages that it crosses; at the other boundaries it counts whole."""
    if not stages:
        return [crossing_bytes(passing, layer) for layer in range(num_layers)]
    number, found = stage_of(stages), [0.0] * num_layers
    for one in passing:
        source, last = number[one.producer], number[one.readers[-1]]
        receivers = len({number[reader] for reader in one.readers} - {source})
        share = receivers / (last - source) if receivers else 1.0
        for layer in range(one.producer + 1, one.readers[-1] + 1):
            found[layer] += share * one.num_bytes
    return found


def stage_of(stages: Sequence[Stage]) -> list[int]:
    """The stage of each layer."""
    return [s for s, stage in enumerate(stages) for _ in range(stage.first, stage.last + 1)]
