"""Price what stages send to each other.

In: the values that stages exchange, or that pass between layers, and the links of a cluster.
Out: `Send`s, and seconds of transfers over free links.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.cut.exchanges import Passing, crossing_bytes
from autopar.pipeline.partition.cluster import Cluster, Placed, Submesh, SubmeshShape
from autopar.pipeline.partition.problem import Stage, StageCost
from autopar.pipeline.partition.sends import Exchange, Send


def sends_of(
    exchanges: Sequence[Exchange],
    stages: Sequence[Placed],
    cluster: Cluster,
    profiles: Mapping[str, HardwareProfile],
    costs: Sequence[StageCost] = (),
) -> tuple[Send, ...]:
    """The transfers between stages; without bytes and seconds where both are on the same devices. Between stages with
    replicas, that of the replica whose transfer takes longest.

    Args:
        costs: the cost of each stage; with it, what its replicas exchange is included.
    """
    between_stages = tuple(
        max(
            (
                _send(one, here, there, cluster, profiles)
                for here, there in _ways(stages[one.source], stages[one.target])
            ),
            key=lambda send: send.seconds,
        )
        for one in exchanges
    )
    return (*between_stages, *_between_replicas(stages, costs, cluster, profiles)) if costs else between_stages


def _between_replicas(
    stages: Sequence[Placed],
    costs: Sequence[StageCost],
    cluster: Cluster,
    profiles: Mapping[str, HardwareProfile],
) -> tuple[Send, ...]:
    """What each replica of a stage sends to the others after its microbatches, at the pace of the slowest pair."""
    sends: list[Send] = []
    for s, (stage, cost) in enumerate(zip(stages, costs, strict=True)):
        places = (stage.submesh, *stage.replicas)
        size, values = stage.submesh.shape.num_devices * cost.accumulated_bytes, round(cost.num_accumulated)
        to_one = Exchange(s, s, size, values, "end")
        pairs = itertools.combinations(places, 2)
        slowest = max(
            (_send(to_one, *pair, cluster, profiles) for pair in pairs), key=lambda send: send.seconds, default=None
        )
        if slowest is not None and size:
            others = len(stage.replicas)
            sends.append(replace(slowest, num_bytes=others * slowest.num_bytes, seconds=others * slowest.seconds))
    return tuple(sends)


def exchange_s(cluster: Cluster, profiles: Mapping[str, HardwareProfile]) -> Callable[[StageCost, SubmeshShape], float]:
    """The seconds in which two replicas of a stage exchange what they accumulate, elementwise where a cost's fields are
    arrays. They count as on one host if all of the cluster is."""
    same_host = sum(group.num_hosts for group in cluster.groups) == 1

    def seconds(cost: StageCost, shape: SubmeshShape) -> float:
        num_bytes = shape.num_devices * cost.accumulated_bytes
        return sent_s(num_bytes, shape, shape, same_host, cluster, profiles, num_values=cost.num_accumulated)

    return seconds


def _send(
    one: Exchange, here: Submesh, there: Submesh, cluster: Cluster, profiles: Mapping[str, HardwareProfile]
) -> Send:
    if here.devices == there.devices:
        return Send(one.source, one.target, 0.0, 0.0, False, one.when)
    same_host = here.shares_host(there)
    in_domain = _in_domain(here.shape, there.shape, same_host, cluster, profiles)
    seconds = sent_s(one.num_bytes, here.shape, there.shape, same_host, cluster, profiles, num_values=one.num_values)
    return Send(one.source, one.target, one.num_bytes, seconds, not in_domain, one.when)


def _ways(source: Placed, target: Placed) -> list[tuple[Submesh, Submesh]]:
    """The submeshes of two stages, replica by replica."""
    ends = ((stage.submesh, *stage.replicas) for stage in (source, target))
    return list(zip(*ends, strict=False))


def sent_s(
    num_bytes: float,
    source: SubmeshShape,
    target: SubmeshShape,
    same_host: bool,
    cluster: Cluster,
    profiles: Mapping[str, HardwareProfile],
    *,
    num_values: float = 1,
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
