"""Give the bytes that each node sends and receives per clock, in closed form, for each way to exchange gradients.

In: the bytes of the arrays, the numbers of workers and servers. Out: payload bytes, sent plus received, exact (a `Fraction`
where shards do not divide). Names of variables follow Poseidon (Zhang et al. 2017): P1 workers, P2 servers, matrices of M x N
elements, K examples per worker. `transport` counts the same bytes; tests compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal


@dataclass(frozen=True, slots=True)
class ServerTraffic:
    """Bytes of one clock in which every worker pulls all weights and pushes all updates.

    Args:
        worker_bytes: of a worker; 2MN elements.
        server_bytes: of each server; 2 P1 MN / P2 elements with equal shards.
        colocated_bytes: of a node that is a worker and this server, whose own shard costs nothing; 2MN(P1 + P2 - 2) / P2
            elements with equal shards.
    """

    worker_bytes: int
    server_bytes: tuple[int, ...]
    colocated_bytes: tuple[int, ...]


def parameter_server_bytes(shard_bytes: Sequence[int], num_workers: int) -> ServerTraffic:
    """Servers with these shards; a centralized parameter server has one (Li et al. 2014).

    >>> parameter_server_bytes([100], 4)
    ServerTraffic(worker_bytes=200, server_bytes=(800,), colocated_bytes=(600,))
    """
    total = sum(shard_bytes)
    return ServerTraffic(
        worker_bytes=2 * total,
        server_bytes=tuple(2 * num_workers * size for size in shard_bytes),
        colocated_bytes=tuple(2 * (total - size) + 2 * (num_workers - 1) * size for size in shard_bytes),
    )


def ring_bytes(num_bytes: int, num_workers: int) -> Fraction:
    """Decentralized, by a ring all-reduce: each worker sends and receives 2(P - 1)/P of the buffer."""
    return Fraction(4 * (num_workers - 1) * num_bytes, num_workers)


def gossip_bytes(num_bytes: int, num_neighbors: int) -> int:
    """Decentralized, by exchanging weights with neighbors (D-PSGD, Lian et al. 2017)."""
    return 2 * num_neighbors * num_bytes


def byteps_shares(num_workers: int, num_cpu_machines: int) -> tuple[Fraction, Fraction]:
    """The parts of the weights that a worker's machine and an idle CPU machine serve, so that all links are equally busy.

    With n workers and k CPU machines they are (n - k) / (n^2 + kn - 2k) and 2(n - 1) / (n^2 + kn - 2k) (BytePS, Jiang et
    al. 2020); with k >= n, 0 and 1/k.

    >>> byteps_shares(4, 2)
    (Fraction(1, 10), Fraction(3, 10))
    """
    n, k = num_workers, num_cpu_machines
    if k >= n:
        return Fraction(0), Fraction(1, k)
    if n == 1:
        return Fraction(1), Fraction(0)
    whole = n * n + k * n - 2 * k
    return Fraction(n - k, whole), Fraction(2 * (n - 1), whole) if k else Fraction(0)


def byteps_bytes(num_bytes: int, num_workers: int, num_cpu_machines: int) -> tuple[Fraction, Fraction]:
    """Bytes of a worker's machine and of a CPU machine, with the shares of `byteps_shares`.

    With k < n CPU machines both are 4n(n - 1) / (n^2 + kn - 2k) of the buffer; without any, a ring's.
    """
    n, (own, cpu) = num_workers, byteps_shares(num_workers, num_cpu_machines)
    return 2 * num_bytes * (1 - own + (n - 1) * own), 2 * num_bytes * n * cpu


def factor_broadcast_bytes(factor_bytes: int, num_workers: int) -> int:
    """Decentralized, by sending sufficient factors to all other workers: 2K(P1 - 1)(M + N) elements (Xie et al. 2016).

    Args:
        factor_bytes: of one worker's factors, K(M + N) elements.
    """
    return 2 * factor_bytes * (num_workers - 1)


def sends_less(
    rows: int, columns: int, examples: int, num_workers: int, num_servers: int
) -> Literal["gradient", "factors"]:
    """Whether a node that is a worker and a server sends less of a layer as sufficient factors or as the full gradient:
    2K(P1 - 1)(M + N) against 2MN(P1 + P2 - 2) / P2 elements (Poseidon, algorithm 1). The gradient in a tie.

    >>> sends_less(4096, 4096, 32, 8, 8), sends_less(256, 256, 512, 8, 8)
    ('factors', 'gradient')
    """
    factors = 2 * examples * (num_workers - 1) * (rows + columns)
    gradient = Fraction(2 * rows * columns * (num_workers + num_servers - 2), num_servers)
    return "factors" if factors < gradient else "gradient"
