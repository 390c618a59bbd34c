"""What an all-reduce costs by each algorithm of the field, and which one is cheapest.

In: bytes, the workers and the links between them (`Workers`). Out: a `Load` per algorithm, which is
its steps and bytes on the critical path and the bytes it sends; `cheapest_all_reduce` picks among the
algorithms that a back end has. `ALGORITHMS` is the table; `all_reduce_steps` carries each out
message by message, and its tests hold these formulas to it.

The model (Hockney's): a worker sends one message and receives one at a time; one of `B` bytes takes
`latency + B / bandwidth`. So an algorithm's seconds are the sum over its steps of the latency and of
the step's longest message. Below, `M` is the buffer, `n` the workers, `lg` the logarithm to base 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.cost.hardware_profile import LinkProfile


@dataclass(frozen=True, slots=True)
class Workers:
    """Who takes part: `num_hosts` hosts with `num_local` workers each.

    Args:
        num_local: workers in each host.
        num_hosts: hosts; 1 where nothing leaves the host.
        host_link: between workers of one host.
        network_link: between hosts, per worker.
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
        """What an algorithm that knows no hosts has to wait for in every step."""
        return self.network_link if self.num_hosts > 1 else self.host_link


@dataclass(frozen=True, slots=True)
class Path:
    """Steps that follow each other over one kind of link, and the bytes of the longest message of each, summed."""

    link: LinkProfile
    num_steps: int
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Load:
    """What one all-reduce does.

    Args:
        paths: the critical path, one entry per kind of link.
        total_bytes: sent by all workers together.
        worker_bytes: sent by the worker that sends most.
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
    """Everyone sends its whole buffer to everyone: (n-1) (a + M/b); n (n-1) M in all.

    Source: the definition; Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
    Communication Operations in MPICH", start from it. One step for each of the n-1 others, because a
    worker has one port; in step k everyone sends to the k-th after it, so no receiver is shared.
    """
    n = workers.num_workers
    return _flat(workers, n - 1, (n - 1) * num_bytes, n * (n - 1) * num_bytes, (n - 1) * num_bytes)


def parameter_server(num_bytes: float, workers: Workers) -> Load:
    """One worker sums for all: 2 (n-1) (a + M/b); 2 (n-1) M in all, half of it by the server.

    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", with a
    single server, which is one of the workers. Pushes arrive one after another at its one port, and
    pulls leave one after another.
    """
    n = workers.num_workers
    once = (n - 1) * num_bytes
    return _flat(workers, 2 * (n - 1), 2 * once, 2 * once, once)


def sharded_parameter_server(num_bytes: float, workers: Workers) -> Load:
    """Every worker is the server of 1/n of the buffer: 2 (n-1) (a + M/(n b)); 2 (n-1)/n M per worker.

    Source: Li et al. 2014, with as many servers as workers. It costs what the ring costs, but its
    messages go from everyone to everyone, which only a network without bottlenecks carries at this price.
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
    """Binomial tree: reduce to one worker, then broadcast: 2 ceil(lg n) (a + M/b); 2 (n-1) M in all.

    Source: Thakur, Rabenseifner, Gropp 2005, sections on reduce and broadcast of short messages. Any
    n: the tree lacks the branches that would go past the last worker. The root sends most.
    """
    n = workers.num_workers
    rounds = ceil_log2(n)
    return _flat(workers, 2 * rounds, 2 * rounds * num_bytes, 2 * (n - 1) * num_bytes, rounds * num_bytes)


def double_tree(num_bytes: float, workers: Workers) -> Load:
    """Two binary trees, each for one half of the buffer, cut into pieces that follow each other.

    2 ceil(lg n) a + 2 M/b: the first piece goes up and down (a step serves both children of a node), the
    others follow so closely that the busiest worker never rests; 2 (n-1) M in all. Who is inside one tree is a leaf of the other, so
    nobody sends more than 2 M (M where n is 2, 3/2 M where n is 3).

    Source: Sanders, Speck, Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan". Any n: a parent past the last worker is replaced by the next above it.
    """
    n = workers.num_workers
    most = double_tree_worker_bytes(num_bytes, n)
    return _flat(workers, 2 * ceil_log2(n), most, 2 * (n - 1) * num_bytes, most)


def nccl_tree(num_bytes: float, workers: Workers) -> Load:
    """NCCL's tree: a double binary tree over hosts, a chain through the workers of each host.

    2 (local-1) steps inside the host and 2 ceil(lg hosts) between hosts; both links are busy at once,
    and the slower decides: 2 M/b (less where there are few). Inside one host it is a chain, so it
    never beats the ring there.

    Source: NCCL (src/graph/trees.cc for the trees, tuning.cc for the steps); Sanders, Speck, Traeff 2009.
    """
    local, hosts = workers.num_local, workers.num_hosts
    between = double_tree_worker_bytes(num_bytes, hosts)
    inside = min(local - 1, 2) * num_bytes  # in the middle of a chain: up and down
    slow_network = between / workers.network_link.bytes_per_s >= inside / workers.host_link.bytes_per_s
    paths = (
        Path(workers.host_link, 2 * (local - 1), 0.0 if slow_network else inside),
        Path(workers.network_link, 2 * ceil_log2(hosts), between if slow_network else 0.0),
    )
    head = between + min(local - 1, 1) * num_bytes  # feeds the tree and its own chain
    return Load(paths, 2 * (workers.num_workers - 1) * num_bytes, max(head, inside))


def halving_doubling(num_bytes: float, workers: Workers) -> Load:
    """Recursive halving, then recursive doubling (butterfly): 2 lg n a + 2 (n-1)/n M/b where n is a power of two.

    Otherwise p is the largest power of two below n, and each of the n-p workers too many first gives
    its buffer to a partner and gets the result from it in the end: 2 (lg p + 1) a + (2 + 2 (p-1)/p) M/b.

    Source: Rabenseifner 2004, "Optimization of Collective Reduction Operations"; Thakur, Rabenseifner,
    Gropp 2005, section on all-reduce of long messages, with its way for other n.
    """
    n = workers.num_workers
    rounds = n.bit_length() - 1
    p = 1 << rounds
    folded = int(n > p)
    inner = 2 * (p - 1) / p * num_bytes
    total = 2 * (n - 1) * num_bytes
    return _flat(workers, 2 * (rounds + folded), inner + 2 * folded * num_bytes, total, inner + folded * num_bytes)


def hierarchical(num_bytes: float, workers: Workers) -> Load:
    """Reduce-scatter inside each host, rings between hosts for what each worker then holds, all-gather inside.

    2 (local-1) a_host + 2 (local-1)/local M/b_host + 2 (hosts-1) a_net + 2 (hosts-1)/hosts (M/local)/b_net:
    the network carries 1/local of what a flat ring sends over it.

    Source: Cho et al. 2019, "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous
    Network Hierarchy", with two levels.
    """
    return _hierarchical(num_bytes, workers, ring)


def hierarchical_tree(num_bytes: float, workers: Workers) -> Load:
    """As `hierarchical`, with a double binary tree between hosts: fewer steps, a little more on the network.

    Source: Cho et al. 2019 for the levels; NCCL's NVLSTree has this form, its reduce-scatter and
    all-gather done by the switch.
    """
    return _hierarchical(num_bytes, workers, double_tree)


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
    """The load of an algorithm that does not ask who is in which host: some message of each step crosses hosts."""
    return Load((Path(workers.slowest_link, num_steps, critical),), total, worker)


def ceil_log2(n: int) -> int:
    """Rounds until one has become n by doubling.

    >>> [ceil_log2(n) for n in (1, 2, 3, 4, 5, 8)]
    [0, 1, 2, 2, 3, 3]
    """
    return (n - 1).bit_length()


def double_tree_worker_bytes(num_bytes: float, n: int) -> float:
    """What the busiest worker of a double binary tree over n workers sends."""
    return {1: 0.0, 2: 1.0, 3: 1.5}.get(n, 2.0) * num_bytes


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to all-reduce: what people call it, and its load by bytes and workers."""

    title: str
    load: Callable[[float, Workers], Load]
    pipelined: bool = False  # the buffer goes in pieces, so the busiest worker's bytes decide, not the longest messages
    in_halves: bool = False  # a reduce-scatter, then an all-gather that costs the same
    needs_levels: bool = False  # only where several hosts have several workers each


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
    }
)

#: The algorithms that each back end has; docs/backends.md says from where we know.
BACKENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "nccl": ("ring", "nccl-tree", "hierarchical", "hierarchical-tree"),
        "gloo": ("ring",),  # what XLA asks Gloo for, though Gloo has halving-doubling too
        "mpi": ("ring", "tree", "halving-doubling"),  # what MPICH and Open MPI choose from
    }
)


def backend_of(platform: str) -> str:
    """The back end that JAX uses by default, by its name in `BACKENDS`; one we do not know is taken to have the ring."""
    return "nccl" if platform == "gpu" else "gloo"


def available(names: Sequence[str], workers: Workers) -> tuple[str, ...]:
    """Those of `names` that these workers can run: levels need several hosts with several workers each."""
    levels = workers.num_local > 1 and workers.num_hosts > 1
    return tuple(name for name in names if levels or not ALGORITHMS[name].needs_levels)


def cheapest_all_reduce(
    num_bytes: float, workers: Workers, names: Sequence[str], *, latency_share: float = 1.0
) -> tuple[str, Load]:
    """The algorithm with the least seconds, and its load; of equals the one named first.

    Args:
        names: entries of `ALGORITHMS`, e.g. those of a back end.
        latency_share: the part of the latency that this buffer pays, where it is one of several that are
            reduced together. The choice is then the one for the buffers together: all terms but the
            latency are proportional to bytes.
    """

    def seconds(entry: tuple[str, Load]) -> float:
        return latency_share * entry[1].latency_s + entry[1].transfer_s

    return min(((name, ALGORITHMS[name].load(num_bytes, workers)) for name in available(names, workers)), key=seconds)
