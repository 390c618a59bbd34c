"""Define a server by its link and its rate of updates, and the seconds that a clock takes it.

In: bytes of a server's shard. Out: seconds, linear in these bytes, as exact fractions: the traffic is that of `traffic`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from autopar.errors import StoreError


@dataclass(frozen=True, slots=True)
class Server:
    """A server of shards.

    Args:
        link_bytes_per_s: of its machine, sent plus received. Only ratios between servers matter.
        update_bytes_per_s: of pushed updates that it applies; infinite if that is never the bottleneck.
        message_s: for each array in each pull or push; it makes many small pieces dear. The default is what a store in one
            process takes.
        worker: the worker on the same machine, which shares the link and exchanges nothing with this server over it; None
            for a machine without one, as BytePS's idle CPU machines.
    """

    link_bytes_per_s: float = 1e10
    update_bytes_per_s: float = math.inf
    message_s: float = 1e-5
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class ClockCost:
    """Seconds of one clock, in which every worker pulls and pushes everything, on a server's machine.

    Args:
        fixed_s: without a shard: what a worker on this machine exchanges with all servers.
        byte_s: for each byte of the shard; negative if moving bytes here saves more traffic than it makes.
        piece_s: for each array, or part of one, of the shard.
    """

    fixed_s: Fraction
    byte_s: Fraction
    piece_s: Fraction

    def seconds(self, num_bytes: int | Fraction, num_pieces: int = 0) -> Fraction:
        """Of a shard of so many bytes and pieces."""
        return self.fixed_s + self.byte_s * num_bytes + self.piece_s * num_pieces


def clock_costs(servers: Sequence[Server], num_workers: int, total_bytes: int) -> tuple[ClockCost, ...]:
    """The costs of each server.

    Raises:
        StoreError: a rate that is no positive number, or a worker that is not there or has two servers.
    """
    owners = [server.worker for server in servers if server.worker is not None]
    found: list[ClockCost] = []
    for number, server in enumerate(servers):
        _check(number, server, num_workers, owners)
        own = server.worker is not None
        link, update = Fraction(server.link_bytes_per_s), server.update_bytes_per_s
        others = num_workers - own
        byte_s = (2 * others - 2 * own) / link + (0 if math.isinf(update) else num_workers / Fraction(update))
        found.append(ClockCost(2 * total_bytes * own / link, Fraction(byte_s), 2 * others * Fraction(server.message_s)))
    return tuple(found)


def _check(number: int, server: Server, num_workers: int, owners: Sequence[int]) -> None:
    for name in ("link_bytes_per_s", "update_bytes_per_s", "message_s"):
        value = getattr(server, name)
        allowed = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not allowed or (name != "update_bytes_per_s" and math.isinf(value)) or (name != "message_s" and not value):
            raise StoreError(f"`{name}` of server {number} is {value!r}: give a positive number")
    if server.worker is None:
        return
    if not isinstance(server.worker, int) or isinstance(server.worker, bool) or not 0 <= server.worker < num_workers:
        raise StoreError(f"server {number} is with worker {server.worker!r}: there are workers 0 to {num_workers - 1}")
    if owners.count(server.worker) > 1:
        raise StoreError(f"worker {server.worker} is with two servers: a machine is one server")
