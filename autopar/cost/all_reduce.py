"""Predict the time of an all-reduce by each known algorithm, and pick the cheapest.

In: bytes, the workers and the links between them (`Workers`). Out: a `Load` per algorithm: the steps and bytes on its
critical path, and the bytes it sends. `cheapest_all_reduce` picks among the algorithms of a back end. `ALGORITHMS` is
the table. `all_reduce_steps` runs each algorithm message by message; tests check these formulas against it.

The model is Hockney's: a worker sends one message and receives one message at a time, and a message of `B` bytes takes
`latency + B / bandwidth`. The time of an algorithm is the sum over its steps of the latency and of the step's longest
message. Below, `M` is the buffer size, `n` the number of workers, `lg` the logarithm to base 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.hardware.profile import LinkProfile


@dataclass(frozen=True, slots=True)
class Workers:
    """The participants: `num_hosts` hosts with `num_local` workers each.

    Between NVLink domains of several machines, a host here may be one domain. Inside a domain, `network_link` is NVLink
    as well.

    Args:
        num_local: number of workers per host.
        num_hosts: number of hosts; 1 if all messages stay in one host.
        host_link: link between workers of one host.
        network_link: link between hosts, per worker.
    """

    num_local: int
    num_hosts: int
    host_link: LinkProfile
    network_link: LinkProfile

    @property
    def num_workers(self) -> int:
        return self.num_local * self.num_hosts

    @property
    def slowest_link(self) -> LinkProfile:
        """The link that bounds every step of an algorithm that ignores hosts."""
        return self.network_link if self.num_hosts > 1 else self.host_link


@dataclass(frozen=True, slots=True)
class Path:
    """Consecutive steps over one kind of link, and the sum of each step's longest message in bytes."""

    link: LinkProfile
    num_steps: int
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Load:
    """The steps and bytes of one all-reduce.

    Args:
        paths: critical path, one entry per kind of link.
        total_bytes: bytes sent by all workers together.
        worker_bytes: bytes sent by the busiest worker.
    """

    paths: tuple[Path, ...]
    total_bytes: float
    worker_bytes: float

    @property
    def num_steps(self) -> int:
        return sum(path.num_steps for path in self.paths)

    @property
    def latency_s(self) -> float:
        return sum(path.num_steps * path.link.latency_s for path in self.paths)

    @property
    def transfer_s(self) -> float:
        return sum(path.num_bytes / path.link.bytes_per_s for path in self.paths)

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s


def naive(num_bytes: float, workers: Workers) -> Load:
    """Every worker sends its whole buffer to every other: (n-1) (a + M/b); n (n-1) M in total.

    Source: the definition; Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in
    MPICH", start from it. A worker has one port, so there is one step per other worker. In step k every worker sends to
    the k-th worker after it, so no two workers send to the same receiver.
    """
    n = workers.num_workers
    return _flat(workers, n - 1, (n - 1) * num_bytes, n * (n - 1) * num_bytes, (n - 1) * num_bytes)


def parameter_server(num_bytes: float, workers: Workers) -> Load:
    """One worker sums for all: 2 (n-1) (a + M/b); 2 (n-1) M in total, half of it sent by the server.

    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", with a single server that
    is one of the workers. Its one port receives the pushes one after another and sends the pulls one after another.
    """
    n = workers.num_workers
    once = (n - 1) * num_bytes
    return _flat(workers, 2 * (n - 1), 2 * once, 2 * once, once)


def sharded_parameter_server(num_bytes: float, workers: Workers) -> Load:
    """Every worker is the server of 1/n of the buffer: 2 (n-1) (a + M/(n b)); 2 (n-1)/n M per worker.

    Source: Li et al. 2014, with as many servers as workers. It costs as much as the ring, but its messages are
    all-to-all, so this cost needs a network without bottlenecks.
    """
    n = workers.num_workers
    each = 2 * (n - 1) / n * num_bytes
    return _flat(workers, 2 * (n - 1), each, n * each, each)


def ring(num_bytes: float, workers: Workers) -> Load:
    """Reduce-scatter, then all-gather, around a ring: 2 (n-1) a + 2 (n-1)/n M/b.

    Source: Patarasu, Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations": no algorithm sends less than 2 (n-1)/n M per worker.
    """
    n = workers.num_workers
    each = 2 * (n - 1) / n * num_bytes
    return _flat(workers, 2 * (n - 1), each, n * each, each)


def tree(num_bytes: float, workers: Workers) -> Load:
    """Binomial tree: reduce to one worker, then broadcast: 2 ceil(lg n) (a + M/b); 2 (n-1) M in total.

    Source: Thakur, Rabenseifner, Gropp 2005, sections on reduce and broadcast of short messages. For any n: the tree
    omits the branches past the last worker. The root sends most.
    """
    n = workers.num_workers
    rounds = ceil_log2(n)
    return _flat(workers, 2 * rounds, 2 * rounds * num_bytes, 2 * (n - 1) * num_bytes, rounds * num_bytes)


def double_tree(num_bytes: float, workers: Workers) -> Load:
    """Two binary trees, each for one half of the buffer, pipelined in pieces.

    2 ceil(lg n) a + 2 M/b: the first piece goes up and down the tree (a step serves both children of a node), and the
    pipeline of the other pieces keeps the busiest worker sending; 2 (n-1) M in total. An inner node of one tree is a leaf
    of the other, so no worker sends more than 2 M (M for n = 2, 3/2 M for n = 3).

    Source: Sanders, Speck, Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan". For any
    n: the next ancestor replaces a parent past the last worker.
    """
    n = workers.num_workers
    most = double_tree_worker_bytes(num_bytes, n)
    return _flat(workers, 2 * ceil_log2(n), most, 2 * (n - 1) * num_bytes, most)


def nccl_tree(num_bytes: float, workers: Workers) -> Load:
    """NCCL's tree: a double binary tree over hosts, and a chain through the workers of each host.

    2 (local-1) steps inside the host and 2 ceil(lg hosts) steps between hosts. Both links are busy at once, and the
    slower one bounds the time: 2 M/b, or less for few workers. Inside one host it is a chain, never faster than the ring.

    Source: NCCL (src/graph/trees.cc for the trees, tuning.cc for the steps); Sanders, Speck, Traeff 2009.
    """
    local, hosts = workers.num_local, workers.num_hosts
    between = double_tree_worker_bytes(num_bytes, hosts)
    inside = min(local - 1, 2) * num_bytes  # in the middle of a chain: up and down
    paths = _at_once(workers, (2 * (local - 1), inside), (2 * ceil_log2(hosts), between))
    head = between + min(local - 1, 1) * num_bytes  # feeds the tree and its own chain
    return Load(paths, 2 * (workers.num_workers - 1) * num_bytes, max(head, inside))


def halving_doubling(num_bytes: float, workers: Workers) -> Load:
    """Recursive halving, then recursive doubling (butterfly): 2 lg n a + 2 (n-1)/n M/b if n is a power of two.

    Otherwise p is the largest power of two below n. Each of the n-p remaining workers first sends its buffer to a partner
    and receives the result from it at the end: 2 (lg p + 1) a + (2 + 2 (p-1)/p) M/b.

    Source: Rabenseifner 2004, "Optimization of Collective Reduction Operations"; Thakur, Rabenseifner, Gropp 2005,
    section on all-reduce of long messages, with its extension to other n.
    """
    n = workers.num_workers
    rounds = n.bit_length() - 1
    p = 1 << rounds
    folded = int(n > p)
    inner = 2 * (p - 1) / p * num_bytes
    total = 2 * (n - 1) * num_bytes
    return _flat(workers, 2 * (rounds + folded), inner + 2 * folded * num_bytes, total, inner + folded * num_bytes)


def hierarchical(num_bytes: float, workers: Workers) -> Load:
    """Reduce-scatter inside each host, a ring between hosts per part, all-gather inside each host.

    2 (local-1) a_host + 2 (local-1)/local M/b_host + 2 (hosts-1) a_net + 2 (hosts-1)/hosts (M/local)/b_net:
    the network carries 1/local of the bytes of a flat ring.

    Source: Cho et al. 2019, "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous
    Network Hierarchy", with two levels.
    """
    return _hierarchical(num_bytes, workers, ring)


def hierarchical_tree(num_bytes: float, workers: Workers) -> Load:
    """Like `hierarchical`, with a double binary tree between hosts: fewer steps, slightly more network traffic.

    Source: Cho et al. 2019 for the levels. NCCL's NVLSTree has this form, with reduce-scatter and all-gather in the
    switch.
    """
    return _hierarchical(num_bytes, workers, double_tree)


def parallel_rings(num_bytes: float, workers: Workers) -> Load:
    """NCCL's ring over several hosts: one ring per worker of a host, each with 1/local of the buffer.

    Each ring leaves a host at another worker, so every network card carries one ring, 2 (n-1)/n (M/local)/b_net, while
    NVLink carries the other local-1 of each worker, 2 (n-1)/n M (local-1)/local/b_host. Both are busy at once, and the
    slower one bounds the time. 2 (n-hosts) steps are inside hosts, 2 (hosts-1) between them.

    Source: NCCL (src/graph/rings.cc and connect.cc for the rings, tuning.cc for the steps).
    """
    n, local, hosts = workers.num_workers, workers.num_local, workers.num_hosts
    each = 2 * (n - 1) / n * num_bytes
    inside, between = each * (local - 1) / local, each / local
    paths = _at_once(workers, (2 * (n - hosts), inside), (2 * (hosts - 1), between))
    return Load(paths, n * each, each)


def _at_once(workers: Workers, inside: tuple[int, float], between: tuple[int, float]) -> tuple[Path, Path]:
    """The paths of an algorithm whose two links are busy at once: the bytes of the slower one bound the time.

    Args:
        inside, between: steps and bytes over NVLink, and over the network.
    """
    (near_steps, near), (far_steps, far) = inside, between
    slow_network = far / workers.network_link.bytes_per_s >= near / workers.host_link.bytes_per_s
    return (
        Path(workers.host_link, near_steps, 0.0 if slow_network else near),
        Path(workers.network_link, far_steps, far if slow_network else 0.0),
    )


def _hierarchical(num_bytes: float, workers: Workers, between: Callable[[float, Workers], Load]) -> Load:
    local, hosts = workers.num_local, workers.num_hosts
    inside = 2 * (local - 1) / local * num_bytes
    peers = Workers(1, hosts, workers.host_link, workers.network_link)
    outside = between(num_bytes / local, peers)
    return Load(
        (Path(workers.host_link, 2 * (local - 1), inside), *outside.paths),
        workers.num_workers * inside + local * outside.total_bytes,
        inside + outside.worker_bytes,
    )


def _flat(workers: Workers, num_steps: int, critical: float, total: float, worker: float) -> Load:
    """The load of an algorithm that ignores hosts: some message of each step crosses hosts."""
    return Load((Path(workers.slowest_link, num_steps, critical),), total, worker)


def ceil_log2(n: int) -> int:
    """The number of doublings from 1 to at least n.

    >>> [ceil_log2(n) for n in (1, 2, 3, 4, 5, 8)]
    [0, 1, 2, 2, 3, 3]
    """
    return (n - 1).bit_length()


def double_tree_worker_bytes(num_bytes: float, n: int) -> float:
    """Bytes sent by the busiest worker of a double binary tree over n workers."""
    return {1: 0.0, 2: 1.0, 3: 1.5}.get(n, 2.0) * num_bytes


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An all-reduce algorithm: its title, and its load as a function of bytes and workers."""

    title: str
    load: Callable[[float, Workers], Load]
    pipelined: bool = False  # in pieces: the busiest worker's bytes bound the time, not the longest messages
    in_halves: bool = False  # a reduce-scatter, then an all-gather that costs the same
    needs_levels: bool = False  # needs several hosts with several workers each


#: Every algorithm, by name; `all_reduce_steps.SCHEDULES` has the same names.
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "naive": Algorithm("naive, all to all", naive),
        "parameter-server": Algorithm("parameter server", parameter_server),
        "sharded-parameter-server": Algorithm("sharded server", sharded_parameter_server),
        "tree": Algorithm("binomial tree", tree),
        "double-tree": Algorithm("double binary tree", double_tree, pipelined=True),
        "halving-doubling": Algorithm("halving-doubling", halving_doubling),
        "ring": Algorithm("ring", ring, in_halves=True),
        "nccl-tree": Algorithm("NCCL tree", nccl_tree, pipelined=True),
        "hierarchical": Algorithm("hierarchical, ring", hierarchical, in_halves=True, needs_levels=True),
        "hierarchical-tree": Algorithm("hierarchical, tree", hierarchical_tree, pipelined=True, needs_levels=True),
        "parallel-rings": Algorithm(
            "ring per network card", parallel_rings, pipelined=True, in_halves=True, needs_levels=True
        ),
    }
)

#: The algorithms of each back end; docs/backends.md gives the sources.
BACKENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "nccl": ("ring", "nccl-tree", "hierarchical", "hierarchical-tree", "parallel-rings"),
        "gloo": ("ring",),  # XLA uses only the ring, though Gloo has halving-doubling too
        "mpi": ("ring", "tree", "halving-doubling"),  # the choices of MPICH and Open MPI
    }
)


def backend_of(platform: str) -> str:
    """The name in `BACKENDS` of the back end that JAX uses by default; unknown platforms count as Gloo."""
    return "nccl" if platform == "gpu" else "gloo"


def available(names: Sequence[str], workers: Workers) -> tuple[str, ...]:
    """The algorithms of `names` that these workers can run: levels need several hosts with several workers each."""
    levels = workers.num_local > 1 and workers.num_hosts > 1
    return tuple(name for name in names if levels or not ALGORITHMS[name].needs_levels)


def cheapest_all_reduce(
    num_bytes: float, workers: Workers, names: Sequence[str], *, latency_share: float = 1.0
) -> tuple[str, Load]:
    """The fastest algorithm and its load; ties go to the first name.

    Args:
        names: entries of `ALGORITHMS`, e.g. those of a back end.
        latency_share: share of the latency that this buffer pays if it is merged with others. The choice is then
            optimal for the merged buffer, because all other terms are proportional to bytes.
    """

    def seconds(entry: tuple[str, Load]) -> float:
        return latency_share * entry[1].latency_s + entry[1].transfer_s

    return min(((name, ALGORITHMS[name].load(num_bytes, workers)) for name in available(names, workers)), key=seconds)
