"""Define each all-reduce algorithm as a schedule of messages.

In: the workers (numbered host by host) and the range of the buffer's elements. Out: a `Schedule`, a list of steps, each
a list of concurrent messages. `run` executes a schedule on NumPy buffers. `SCHEDULES` has an entry for every entry
of `all_reduce.ALGORITHMS`, so that tests can count the bytes and steps of those formulas.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from autopar.cost.all_reduce import Workers


@dataclass(frozen=True, slots=True)
class Message:
    """`source` sends its elements `start:stop` to `target`.

    Args:
        effect: whether `target` adds them to its own elements or replaces these.
        own_term: whether `source` sends its initial elements instead of its current ones.
    """

    source: int
    target: int
    start: int
    stop: int
    effect: Literal["add", "replace"]
    own_term: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start


Schedule = list[list[Message]]
Span = tuple[int, int]
Parents = Mapping[int, int]


def run(schedule: Schedule, buffers: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Execute a schedule. Returns the final buffer of each worker. All messages of a step are sent before any arrives."""
    held = [buffer.copy() for buffer in buffers]
    for step in schedule:
        leaving = [(buffers if m.own_term else held)[m.source][m.start : m.stop].copy() for m in step]
        for message, data in zip(step, leaving, strict=True):
            place = held[message.target][message.start : message.stop]
            place[:] = place + data if message.effect == "add" else data
    return held


def spans(span: Span, parts: int) -> list[Span]:
    """Split a range into parts whose lengths differ by at most one.

    >>> spans((0, 7), 3)
    [(0, 2), (2, 4), (4, 7)]
    """
    start, stop = span
    return list(pairwise(start + (stop - start) * k // parts for k in range(parts + 1)))


# Algorithms that ignore hosts: over any workers, and any range of the buffer.


def naive(workers: Sequence[int], span: Span) -> Schedule:
    """In step k every worker sends its initial buffer to the k-th worker after it."""
    n = len(workers)
    return [
        [Message(workers[i], workers[(i + k) % n], *span, "add", own_term=True) for i in range(n)] for k in range(1, n)
    ]


def parameter_server(workers: Sequence[int], span: Span) -> Schedule:
    """The first worker is the server: the others push one after another, then pull one after another."""
    server, *others = workers
    pushes = [[Message(worker, server, *span, "add")] for worker in others]
    return pushes + [[Message(server, worker, *span, "replace")] for worker in others]


def sharded_parameter_server(workers: Sequence[int], span: Span) -> Schedule:
    """Worker i is the server of part i: in step k every worker pushes to, later pulls from, the k-th worker after it."""
    n, parts = len(workers), spans(span, len(workers))
    pairs = [[(i, (i + k) % n) for i in range(n)] for k in range(1, n)]
    pushes = [[Message(workers[i], workers[s], *parts[s], "add") for i, s in step] for step in pairs]
    return pushes + [[Message(workers[s], workers[i], *parts[s], "replace") for i, s in step] for step in pairs]


def ring(workers: Sequence[int], span: Span) -> Schedule:
    """Reduce-scatter, then all-gather."""
    return ring_reduce_scatter(workers, span) + ring_all_gather(workers, span)


def ring_reduce_scatter(workers: Sequence[int], span: Span) -> Schedule:
    """Part i starts at worker i + 1, gains a term at each worker, and ends complete at worker i."""
    n, parts = len(workers), spans(span, len(workers))
    return [
        [Message(workers[i], workers[(i + 1) % n], *parts[(i - 1 - k) % n], "add") for i in range(n)]
        for k in range(n - 1)
    ]


def ring_all_gather(workers: Sequence[int], span: Span) -> Schedule:
    """Part i starts at worker i and travels around the ring."""
    n, parts = len(workers), spans(span, len(workers))
    return [
        [Message(workers[i], workers[(i + 1) % n], *parts[(i - k) % n], "replace") for i in range(n)]
        for k in range(n - 1)
    ]


def tree(workers: Sequence[int], span: Span) -> Schedule:
    """Binomial tree: half of the remaining workers send to the other half, until one is left; then in reverse."""
    n, up, distance = len(workers), [], 1
    while distance < n:
        up.append([(i + distance, i) for i in range(0, n - distance, 2 * distance)])
        distance *= 2
    reduce = [[Message(workers[child], workers[root], *span, "add") for child, root in step] for step in up]
    down = [[Message(workers[root], workers[child], *span, "replace") for child, root in step] for step in up[::-1]]
    return reduce + down


def halving_doubling(workers: Sequence[int], span: Span) -> Schedule:
    """Partners exchange halves of the buffer, then halves of those halves, and so on; then in reverse.

    Workers past the largest power of two send their buffer to a partner first and receive the sum last.
    """
    p = 1 << (len(workers).bit_length() - 1)
    parts, core = spans(span, p), range(p)
    extra = list(zip(workers[p:], workers, strict=False))

    def block(i: int, width: int) -> Span:  # the aligned block of parts that holds part i
        first = i // width * width
        return parts[first][0], parts[first + width - 1][1]

    widths = [1 << k for k in range(p.bit_length() - 1)]
    fold = [[Message(a, b, *span, "add") for a, b in extra]] if extra else []
    halve = [[Message(workers[i], workers[i ^ w], *block(i ^ w, w), "add") for i in core] for w in reversed(widths)]
    double = [[Message(workers[i], workers[i ^ w], *block(i, w), "replace") for i in core] for w in widths]
    unfold = [[Message(b, a, *span, "replace") for a, b in extra]] if extra else []
    return fold + halve + double + unfold


def double_tree(workers: Sequence[int], span: Span, num_pieces: int = 1) -> Schedule:
    """Each half of the buffer goes up and down its own tree, pipelined in pieces."""
    return _along_trees(workers, double_tree_parents(len(workers)), span, num_pieces)


def double_tree_parents(n: int) -> tuple[Parents, Parents]:
    """The parent of each node of 0..n-1 in two trees; no node has children in both.

    In the first tree the lowest set bit of i is the height of node i, and 0 is the root. The second tree is its mirror
    image for even n, and the first tree shifted by one for odd n.

    >>> double_tree_parents(4)
    ({1: 2, 2: 0, 3: 2}, {2: 1, 1: 3, 0: 1})
    """
    first: dict[int, int] = {}
    for i in range(1, n):
        low = i & -i
        above = (i ^ low) | (low << 1)
        first[i] = above if above < n else i ^ low
    other = {i: (n - 1 - i if n % 2 == 0 else (i + 1) % n) for i in range(n)}
    return first, {other[i]: other[above] for i, above in first.items()}


def _along_trees(workers: Sequence[int], trees: tuple[Parents, Parents], span: Span, num_pieces: int) -> Schedule:
    """All-reduce each half of the range along one tree.

    A step serves both children of a node at once, over two connections. The formula accounts for the shared port: it
    divides the bytes of both by the rate of one port.
    """
    depths = [{i: _depth(parents, i) for i in range(len(workers))} for parents in trees]
    deepest = max(max(depth.values()) for depth in depths)
    schedule: Schedule = [[] for _ in range(2 * deepest + num_pieces - 1 if deepest else 0)]
    for parents, depth, half in zip(trees, depths, spans(span, 2), strict=True):
        for piece, part in enumerate(spans(half, num_pieces)):
            for child, parent in parents.items():
                a, b = workers[child], workers[parent]
                schedule[deepest - depth[child] + piece].append(Message(a, b, *part, "add"))
                schedule[deepest + depth[parent] + piece].append(Message(b, a, *part, "replace"))
    return schedule


def _depth(parents: Parents, node: int) -> int:
    return 1 + _depth(parents, parents[node]) if node in parents else 0


# Algorithms over `num_hosts` hosts of `num_local` workers.


def nccl_tree(num_local: int, num_hosts: int, span: Span, num_pieces: int = 1) -> Schedule:
    """A double tree over the first worker of each host, with the host's other workers in a chain below it."""
    chain = {h * num_local + k: h * num_local + k - 1 for h in range(num_hosts) for k in range(1, num_local)}
    first, second = (
        {**chain, **{i * num_local: above * num_local for i, above in parents.items()}}
        for parents in double_tree_parents(num_hosts)
    )
    return _along_trees(range(num_local * num_hosts), (first, second), span, num_pieces)


def hierarchical(num_local: int, num_hosts: int, span: Span, between: FlatSchedule = ring) -> Schedule:
    """Reduce-scatter inside each host, `between` over the k-th workers of all hosts per part k, all-gather inside."""
    hosts = [range(h * num_local, (h + 1) * num_local) for h in range(num_hosts)]
    parts = spans(span, num_local)
    inside = _together([ring_reduce_scatter(host, span) for host in hosts])
    outside = _together([between([host[k] for host in hosts], part) for k, part in enumerate(parts)])
    return inside + outside + _together([ring_all_gather(host, span) for host in hosts])


def hierarchical_tree(num_local: int, num_hosts: int, span: Span) -> Schedule:
    """Like `hierarchical`, with a double tree between hosts."""
    return hierarchical(num_local, num_hosts, span, double_tree)


def parallel_rings(num_local: int, num_hosts: int, span: Span) -> Schedule:
    """One ring for each worker of a host; the k-th enters every host at its k-th worker."""
    rings = [
        [host * num_local + (k + i) % num_local for host in range(num_hosts) for i in range(num_local)]
        for k in range(num_local)
    ]
    return _together([ring(order, part) for order, part in zip(rings, spans(span, num_local), strict=True)])


def _together(schedules: Sequence[Schedule]) -> Schedule:
    """Run schedules of disjoint workers, or of disjoint parts of the buffer, concurrently."""
    return [[m for step in steps for m in step] for steps in zip_longest(*schedules, fillvalue=[])]


FlatSchedule = Callable[[Sequence[int], Span], Schedule]
LevelSchedule = Callable[[int, int, Span], Schedule]


def _regardless_of_hosts(schedule: FlatSchedule) -> LevelSchedule:
    return lambda num_local, num_hosts, span: schedule(range(num_local * num_hosts), span)


#: The schedule of each of `all_reduce.ALGORITHMS`, given workers per host, hosts, and a range of elements.
SCHEDULES: Mapping[str, LevelSchedule] = MappingProxyType(
    {
        "naive": _regardless_of_hosts(naive),
        "parameter-server": _regardless_of_hosts(parameter_server),
        "sharded-parameter-server": _regardless_of_hosts(sharded_parameter_server),
        "tree": _regardless_of_hosts(tree),
        "double-tree": _regardless_of_hosts(double_tree),
        "halving-doubling": _regardless_of_hosts(halving_doubling),
        "ring": _regardless_of_hosts(ring),
        "nccl-tree": nccl_tree,
        "hierarchical": hierarchical,
        "hierarchical-tree": hierarchical_tree,
        "parallel-rings": parallel_rings,
    }
)


#: The pipelined algorithms, as functions of the number of pieces.
_PIPELINED: Mapping[str, Callable[[int, int, Span, int], Schedule]] = MappingProxyType(
    {
        "double-tree": lambda num_local, num_hosts, span, pieces: double_tree(
            range(num_local * num_hosts), span, pieces
        ),
        "nccl-tree": nccl_tree,
        "hierarchical-tree": lambda num_local, num_hosts, span, pieces: hierarchical(
            num_local, num_hosts, span, lambda workers, part: double_tree(workers, part, pieces)
        ),
    }
)
_NUM_PIECES = (1, 4, 16, 64)


def seconds_by_messages(name: str, num_bytes: float, workers: Workers) -> float:
    """Simulate an all-reduce message by message, with the fastest number of pieces. Returns seconds.

    In a step each worker sends its messages one after another, and receives likewise, each over its link. The step
    ends with the last message.

    Args:
        name: name of an algorithm in `all_reduce.ALGORITHMS`.
    """
    span = (0, max(1, math.ceil(num_bytes)))
    if name in _PIPELINED:
        schedules = [_PIPELINED[name](workers.num_local, workers.num_hosts, span, pieces) for pieces in _NUM_PIECES]
    else:
        schedules = [SCHEDULES[name](workers.num_local, workers.num_hosts, span)]
    return min(sum(_step_seconds(step, workers) for step in schedule) for schedule in schedules)


def _step_seconds(step: Sequence[Message], workers: Workers) -> float:
    ports: dict[tuple[int, bool], float] = defaultdict(float)
    latency = 0.0
    for message in step:
        source, target = message.source // workers.num_local, message.target // workers.num_local
        link = workers.host_link if source == target else workers.network_link
        latency = max(latency, link.latency_s)
        for port in ((message.source, True), (message.target, False)):
            ports[port] += message.size / link.bytes_per_s
    return latency + max(ports.values(), default=0.0)
