"""Cut the forward pass into segments that are rematerialized one at a time.

In: the graph, a site, costs. Out: `Segment`s. All values that a segment recomputes are live at the same time, and the values that
it reads from other segments are kept. So the cuts minimize the bytes between segments plus the bytes of the largest segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.planner.remat.costs import Costs
from autopar.rules.grouping import SMALL_SIZE
from autopar.transforms.remat.sites import Site

_MOST_PLACES = 400


@dataclass(frozen=True, slots=True)
class Segment:
    """Equations that are rematerialized together.

    Args:
        nodes: the equations in order. They include the producers of values that exist only inside the segment's kernels;
            such a producer may be in several segments.
        fixed: equations that are never rematerialized, because later segments read their results.
    """

    nodes: tuple[int, ...]
    fixed: frozenset[int]


def segments_of(graph: Graph, site: Site, costs: Costs) -> tuple[Segment, ...]:
    """The segments of a site in order; the body of a loop is one segment."""
    if not site.forward:
        return ()
    if site.is_loop:
        return (Segment(site.forward, frozenset()),)
    last = _last_reads(graph, site, costs)
    ends = _ends(site, graph, costs, last)
    segments, start = [], 0
    for end in ends:
        span = site.forward[start:end]
        start = end
        stop = span[-1]
        fixed = frozenset(
            n for n in span if any(v in costs.stored and last.get(v, -1) > stop for v in graph.nodes[n].results)
        )
        segments.append(Segment(_with_fused_producers(graph, site, span, costs), fixed))
    return tuple(segments)


def _last_reads(graph: Graph, site: Site, costs: Costs) -> dict[int, int]:
    """By value, the last equation of the forward pass whose kernel reads it."""
    last: dict[int, int] = {}
    own = set(site.forward)
    for n in range(site.start - 1, -1, -1):
        node = graph.nodes[n]
        reach = n
        if n in own:
            reach = max([n, *(last.get(v, n) for v in node.results if v not in costs.stored)])
        for value in node.operands:
            if value is not None:
                last[value] = max(last.get(value, -1), reach)
    return last


def _with_fused_producers(graph: Graph, site: Site, span: Sequence[int], costs: Costs) -> tuple[int, ...]:
    found, waiting, forward = set(span), list(span), set(site.forward)
    while waiting:
        for value in graph.nodes[waiting.pop()].operands:
            producer = -1 if value is None else graph.producers.get(value, -1)
            if producer in forward and producer not in found and value not in costs.stored:
                found.add(producer)
                waiting.append(producer)
    return tuple(sorted(found))


def _ends(site: Site, graph: Graph, costs: Costs, last: dict[int, int]) -> list[int]:
    """By segment, the number of equations up to its end."""
    count = len(site.forward)
    passing, own = [0.0] * count, [0.0] * (count + 1)
    leaving: dict[int, float] = {}
    live = 0.0
    for i, n in enumerate(site.forward):
        for value in graph.nodes[n].results:
            if value not in costs.stored or graph.values[value].size <= SMALL_SIZE:
                continue
            size = costs.num_bytes[value]
            if last.get(value, -1) > n:
                live += size
                leaving[last[value]] = leaving.get(last[value], 0.0) + size
            own[i + 1] += costs.live_bytes.get(value, 0.0)
        upto = site.forward[i + 1] if i + 1 < count else site.start
        for read in [r for r in leaving if r < upto]:
            live -= leaving.pop(read)
        passing[i] = live
    for i in range(count):
        own[i + 1] += own[i]
    places = [i + 1 for i in range(count - 1) if passing[i] < passing[i + 1] and own[i + 1] > 0]
    while len(places) > _MOST_PLACES:
        places = sorted(sorted(places, key=lambda i: (passing[i - 1], i))[:_MOST_PLACES])
    places = [0, *places, count]
    best, lowest, most = [count], float("inf"), own[count]
    while most > own[count] / 1000 and most > 0:
        cuts = _cheapest_cuts(places, passing, own, most)
        if cuts is None:
            break
        largest = max(own[b] - own[a] for a, b in zip([0, *cuts], cuts, strict=False))
        total = largest + sum(passing[i - 1] for i in cuts[:-1])
        if total < lowest:
            best, lowest = cuts, total
        most = 0.8 * largest
    return best


def _cheapest_cuts(
    places: Sequence[int], passing: Sequence[float], own: Sequence[float], most: float
) -> list[int] | None:
    """The cuts with the fewest bytes between segments, while no segment holds more than `most` bytes; None where no cuts are.

    Args:
        places: possible cuts, with the start and the end.
        passing: bytes live across each equation.
        own: bytes that all equations before each one hold.
    """
    cost: list[float] = [0.0] + [float("inf")] * (len(places) - 1)
    before = [0] * len(places)
    for j in range(1, len(places)):
        through = passing[places[j] - 1] if j + 1 < len(places) else 0.0
        for i in range(j - 1, -1, -1):
            if own[places[j]] - own[places[i]] > most:
                break
            if cost[i] + through < cost[j]:
                cost[j], before[j] = cost[i] + through, i
    if cost[-1] == float("inf"):
        return None
    cuts, j = [], len(places) - 1
    while j:
        cuts.append(places[j])
        j = before[j]
    return cuts[::-1]
