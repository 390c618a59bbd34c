"""Define what stages send to each other, and the links that their transfers share.

In: stages on submeshes.
Out: `Exchange`, what one stage sends to another; `Send`, the same with its seconds; `links_of`, the links that it holds.

The model of links: every connection is full duplex, so each direction is a link of its own. The devices of a submesh
have one link out and one in, inside their host or NVLink domain. A host has one link out to the network and one in,
which all its submeshes share; the hosts of a submesh of several belong to it alone. A transfer holds the sender's link
out and the receiver's link in until it ends. It runs at the rate that it has alone, so transfers that share a link run
one after another. What crosses a switch from other submeshes to others does not count.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.pipeline.partition.cluster import Submesh

#: In each microbatch, or once per step: before its first task, or after its last microbatch.
When = Literal["microbatch", "start", "end"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Values that one stage sends to another at one time.

    Args:
        source, target: the stages. Activations pass to a later stage, their gradients to an earlier one.
        num_bytes: bytes of all values, from all devices together.
        num_values: the number of values; each is a transfer.
    """

    source: int
    target: int
    num_bytes: float
    num_values: int = 1
    when: When = "microbatch"


@dataclass(frozen=True, slots=True)
class Send:
    """The transfer of an exchange.

    Args:
        source, target: the stages. Activations pass to a later stage, their gradients to an earlier one.
        num_bytes: the bytes of one microbatch, or of a step, from all devices together; 0 if both stages use the same
            devices.
        seconds: the seconds of the transfer over free links.
        over_network: whether it passes between hosts that no NVLink domain connects.
        when: how often it takes place.
    """

    source: int
    target: int
    num_bytes: float
    seconds: float
    over_network: bool = False
    when: When = "microbatch"


def links_of(send: Send, source: Submesh, target: Submesh) -> tuple[Hashable, ...]:
    """The links that a transfer between two submeshes holds; none if both are the same devices."""
    if source.devices == target.devices:
        return ()
    if send.over_network:
        return ("network out", source.first_host), ("network in", target.first_host)
    return ("out", source.first_device), ("in", target.first_device)


def edges_between(sends: Iterable[Exchange | Send]) -> tuple[tuple[int, int], ...]:
    """Pairs of stages that exchange values in each microbatch, the lower one first."""
    pairs = ((one.source, one.target) for one in sends if one.when == "microbatch")
    return tuple(sorted({(min(pair), max(pair)) for pair in pairs}))
