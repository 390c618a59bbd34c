"""Search rematerialization levels: activation checkpointing from no value to all values that save memory.

In: a program's trace and graph, a plan's assignment, its device program. Out: `RematLevel`s. Each level stores fewer bytes from
the forward to the backward pass than the level before, and takes longer. The levels follow from a rising price of memory: at
each price, a minimum cut decides for every segment which values to keep. Between two prices the segments change one after the
other, in the order of the forward pass, because the activations of the first segment are live longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.formulate.formulation import Formulation
from autopar.frontend.trace import Trace
from autopar.ir.device_program import DeviceProgram
from autopar.ir.graph import Graph, Node
from autopar.planner.remat.costs import Costs, costs_of
from autopar.planner.remat.min_cut import States, Step, cheapest
from autopar.planner.remat.segments import Segment, segments_of
from autopar.plans.records import Rematerialization, RematSegment
from autopar.rules.grouping import SMALL_SIZE
from autopar.transforms.remat.sites import Site, sites_of

#: Prices of memory per byte, relative to the time to write a byte to device memory and read it back: from 0.1 to 819.
_PRICES = tuple(0.1 * 2**n for n in range(14))
#: Number of levels between two prices.
_PARTS = 4


@dataclass(frozen=True, slots=True)
class RematLevel:
    """The rematerializations at one price of memory.

    Args:
        price: the price of memory in seconds per byte.
    """

    recomputed: tuple[Rematerialization, ...]
    price: float

    @property
    def saved_bytes(self) -> float:
        return sum(one.saved_bytes for one in self.recomputed)

    @property
    def time_s(self) -> float:
        return sum(one.time_s for one in self.recomputed)


def remat_levels(
    trace: Trace,
    f: Formulation,
    choices: Sequence[int],
    device: DeviceProgram,
    exposed: Mapping[str, float] | None = None,
) -> list[RematLevel]:
    """The levels in order of the memory they save; empty where there is no backward pass.

    The exposed share of repeated collectives is known only after the step is scheduled. So levels are searched twice: with
    the expected exposed share, and with all repeated collectives exposed.

    Args:
        exposed: expected exposed share of repeated collectives, by kind; 1 for a missing kind.
    """
    sites = sites_of(trace)
    if not sites:
        return []
    expected, full = (costs_of(f, choices, device, sites[0].start, part) for part in (exposed or {}, {}))
    found = {level.recomputed: level for weighed in (full, expected) for level in _levels(f, sites, weighed, expected)}
    return sorted(found.values(), key=lambda level: (level.saved_bytes, level.time_s))


def _levels(f: Formulation, sites: Sequence[Site], weighed: Costs, expected: Costs) -> list[RematLevel]:
    """The levels that follow from one assumption about exposed communication.

    Args:
        weighed: the costs by which cuts are chosen.
        expected: the costs that the levels report.
    """
    bodies: list[list[Rematerialization | None]] = []
    for site in sites:
        for segment in segments_of(f.graph, site, weighed):
            by_price = _at_each_price(f, site, segment, weighed, expected)
            if any(by_price):
                bodies.append(by_price)
    levels = [RematLevel((), 0.0)]
    for n, price in enumerate(_prices(f)):
        changing = [i for i, by_price in enumerate(bodies) if by_price[n] != (by_price[n - 1] if n else None)]
        for part in range(1, _PARTS + 1):
            over = set(changing[: -(-len(changing) * part // _PARTS)])
            at = [
                by_price[n] if i in over or i not in changing else (by_price[n - 1] if n else None)
                for i, by_price in enumerate(bodies)
            ]
            recomputed = tuple(one for one in at if one is not None)
            if recomputed != levels[-1].recomputed:
                levels.append(RematLevel(recomputed, price))
    return levels[1:]


def _at_each_price(
    f: Formulation, site: Site, segment: Segment, weighed: Costs, expected: Costs
) -> list[Rematerialization | None]:
    """The rematerialization of a segment at each price; None where it rematerializes nothing.

    Args:
        weighed: the costs by which the cut is chosen.
        expected: the costs that the result reports.
    """
    graph = f.graph
    steps, needed = _steps(graph, site, segment, weighed)
    reported, _ = _steps(graph, site, segment, expected)
    if not needed:
        return [None] * len(_PRICES)
    found: list[Rematerialization | None] = []
    for price in _prices(f):
        states = cheapest(steps, needed, price)
        found.append(_recomputation(graph, site, reported, states, weighed))
    return found


def _prices(f: Formulation) -> list[float]:
    """The prices of memory in seconds per byte."""
    return [price * 2 / f.profile.memory_bytes_per_s for price in _PRICES]


def _steps(graph: Graph, site: Site, segment: Segment, costs: Costs) -> tuple[dict[int, Step], list[int]]:
    """The steps of the minimum cut, and the keys of those that the backward pass reads. The key of an equation is its position;
    the key of an input that the segment could keep is -1 - value."""
    producers = {v: n for n in segment.nodes for v in graph.nodes[n].results}
    steps: dict[int, Step] = {}
    for value in site.fixed if site.is_loop else ():
        producers[value] = -1 - value
        steps[-1 - value] = Step(site.num_iterations * costs.num_bytes[value], float("inf"), ())
    for value in () if site.is_loop else _gathered(graph, site, segment, costs):
        producers[value] = -1 - value
        steps[-1 - value] = Step(costs.live_bytes[value], site.repeat * costs.seconds[value], ())
    for n in segment.nodes:
        node = graph.nodes[n]
        seconds = sum(costs.seconds.get(v, 0.0) for v in node.results)
        reads = {producers[v] for v in node.operands if v is not None and v in producers}
        steps[n] = Step(
            _kept_bytes(graph, site, node.results, costs),
            float("inf") if n in segment.fixed else site.repeat * site.num_iterations * seconds,
            tuple(sorted(reads)),
        )
    needed = dict.fromkeys(producers[v] for v in site.read if v in producers)
    return steps, list(needed)


def _gathered(graph: Graph, site: Site, segment: Segment, costs: Costs) -> list[int]:
    """Inputs that are gathered for this segment, and that only the segment and the backward pass read."""
    inputs, own = set(graph.inputs), set(segment.nodes)
    read = {v for n in segment.nodes for v in graph.nodes[n].operands if v in inputs and costs.live_bytes.get(v)}
    elsewhere = {
        v for n, node in enumerate(graph.nodes[: site.start]) if n not in own for v in node.operands if v is not None
    }
    return sorted(v for v in read - elsewhere if v is not None and v in site.read and v in costs.seconds)


def _kept_bytes(graph: Graph, site: Site, results: Sequence[int], costs: Costs) -> float:
    """The bytes to keep an equation's results. Results that exist only inside kernels cannot be kept; kernels of the backward
    pass compute them again in any case."""
    if site.is_loop:
        return site.num_iterations * sum(costs.num_bytes[v] for v in results)
    large = [v for v in results if graph.values[v].size > SMALL_SIZE]
    kept = [costs.live_bytes.get(v) or costs.num_bytes[v] for v in large if v in costs.stored]
    return float("inf") if large and not kept else sum(kept)


def _recomputation(
    graph: Graph, site: Site, steps: dict[int, Step], states: States, costs: Costs
) -> Rematerialization | None:
    """The rematerialization that follows from a cut; None where the backward pass reads nothing of it.

    A value that exists only inside a kernel is computed again from kept values by the kernels of the backward pass, and needs
    no equation of its own. But an equation that runs again must not read such a value, so its producer runs again too.
    """
    again: set[int] = set()
    for n in sorted(states.again):
        stored = site.is_loop or n < 0 or any(v in costs.stored for v in graph.nodes[n].results)
        if stored or any(read in again for read in steps[n].reads):
            again.add(n)
    for n in sorted(states.again, reverse=True):
        if n in again:
            again |= states.again.intersection(steps[n].reads)
    nodes = tuple(sorted(n for n in again if n >= 0))
    regathered = tuple(sorted(-1 - n for n in again if n < 0))
    values = {v for n in nodes for v in graph.nodes[n].results} | set(regathered)
    read = [site.read[v] for v in values if v in site.read]
    if not read:
        return None
    kept = _kept_of(graph, site, steps, states, again, costs)
    live = _live_bytes(site, values, costs)
    extra = sum(
        steps[n].num_bytes
        for n in states.kept
        if (results := {-1 - n} if n < 0 else set(graph.nodes[n].results)) and not _is_live(site, results, costs)
    )
    largest = max(nodes or (0,), key=lambda n: sum(costs.live_bytes.get(v, 0.0) for v in graph.nodes[n].results))
    onward = None
    if len(kept) == 1:
        start = min(n for n in steps if n >= 0)
        onward = _onward(graph.nodes[start : site.start], values, kept[0], costs)
    before = min([*read, *(site.read[v] for v in kept)])
    return Rematerialization(
        segment=RematSegment(nodes=nodes, before=before, regathered=regathered, kept=kept, onward=onward),
        path=common_path([graph.nodes[n].path for n in nodes]) or graph.nodes[largest].path,
        saved_bytes=live - extra,
        time_s=sum(steps[n].seconds for n in again),
    )


def _kept_of(
    graph: Graph, site: Site, steps: dict[int, Step], states: States, again: set[int], costs: Costs
) -> tuple[int, ...]:
    """Kept values that are computed from rematerialized values, such as the sums of a softmax from its scores. XLA may postpone
    their producers to the backward pass, which would keep the scores of the forward pass live until then."""
    if site.is_loop:
        return ()
    dependent = {v for n in again if n >= 0 for v in graph.nodes[n].results}
    kept: list[int] = []
    for n in sorted(n for n in steps if n >= 0 and n not in again):
        node = graph.nodes[n]
        if dependent.isdisjoint(v for v in node.operands if v is not None):
            continue
        if n in states.kept:
            kept += [v for v in node.results if v in site.read and v in costs.stored]
        else:
            dependent.update(node.results)
    return tuple(kept)


def _onward(following: Sequence[Node], values: set[int], kept: int, costs: Costs) -> int | None:
    """The first value in memory after a kept value that, like it, is computed from rematerialized values.

    Args:
        following: the forward pass from the segment on.
        values: the rematerialized values.
    """
    dependent, is_later = set(values), False
    for node in following:
        is_later |= kept in node.results
        if kept in node.results or dependent.isdisjoint(v for v in node.operands if v is not None):
            continue
        dependent.update(node.results)
        found = next((v for v in node.results if v in costs.stored and v not in values), None)
        if is_later and found is not None:
            return found
    return None


def _live_bytes(site: Site, values: set[int], costs: Costs) -> float:
    if site.is_loop:
        return site.num_iterations * sum(costs.num_bytes[v] for v in values if v in site.read)
    return sum(costs.live_bytes.get(v, 0.0) for v in values)


def _is_live(site: Site, values: set[int], costs: Costs) -> bool:
    return any(v in site.read if site.is_loop else v in costs.live_bytes for v in values)


def common_path(paths: Sequence[str]) -> str:
    """The innermost module that contains all paths."""
    parts = [path.split("/") for path in paths if path]
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return "/".join(common)
