"""Search rematerialization levels: activation checkpointing from nothing to all that saves memory.

In: a program's trace and graph, a plan's assignment, its device program. Out: `RematLevel`s. Each stores fewer bytes from the
forward to the backward pass than the level before, and takes longer. They follow from a rising price of memory: at each
price, a minimum cut keeps in every segment what is worth its bytes. Between two prices the segments switch one after the
other, the first of the forward pass first, because its activations are live longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.formulate.formulation import Formulation
from autopar.frontend.trace import Trace
from autopar.ir.device_program import DeviceProgram
from autopar.ir.graph import Graph, Node
from autopar.planner.remat.costs import Numbers, numbers_of
from autopar.planner.remat.min_cut import States, Step, cheapest
from autopar.planner.remat.segments import Segment, segments_of
from autopar.plans.records import Rematerialization, RematSegment
from autopar.rules.grouping import SMALL_SIZE
from autopar.transforms.remat.sites import Site, sites_of

#: Prices of memory per byte, in units of the time to write a byte to device memory and read it back: from a tenth, by
#: factors of two, to 819.
_PRICES = tuple(0.1 * 2**n for n in range(14))
#: Levels from one price to the next.
_PARTS = 4


@dataclass(frozen=True, slots=True)
class RematLevel:
    """What is rematerialized at one price of memory.

    Args:
        price: seconds per byte.
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

    How much of the repeated communication is hidden shows only when the step is scheduled. So levels are searched twice:
    with the expected exposed share of it, and with all of it exposed.

    Args:
        exposed: by kind of collective, the expected exposed share of what is sent again; by default all of it.
    """
    sites = sites_of(trace)
    if not sites:
        return []
    expected, full = (numbers_of(f, choices, device, sites[0].start, part) for part in (exposed or {}, {}))
    found = {level.recomputed: level for weighed in (full, expected) for level in _levels(f, sites, weighed, expected)}
    return sorted(found.values(), key=lambda level: (level.saved_bytes, level.time_s))


def _levels(f: Formulation, sites: Sequence[Site], weighed: Numbers, expected: Numbers) -> list[RematLevel]:
    """The levels that follow from one assumption about exposed communication.

    Args:
        weighed: costs by which the cut is chosen. expected: costs that the levels report.
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
    f: Formulation, site: Site, segment: Segment, numbers: Numbers, expected: Numbers
) -> list[Rematerialization | None]:
    """The cut of a segment at each price of memory.

    Args:
        numbers: costs by which the cut is chosen. expected: costs that the result reports.
    """
    graph = f.graph
    steps, needed = _steps(graph, site, segment, numbers)
    reported, _ = _steps(graph, site, segment, expected)
    if not needed:
        return [None] * len(_PRICES)
    found: list[Rematerialization | None] = []
    for price in _prices(f):
        states = cheapest(steps, needed, price)
        found.append(_recomputation(graph, site, reported, states, numbers))
    return found


def _prices(f: Formulation) -> list[float]:
    """The prices of memory to try, in seconds per byte."""
    return [price * 2 / f.profile.hbm_bytes_per_s for price in _PRICES]


def _steps(graph: Graph, site: Site, segment: Segment, numbers: Numbers) -> tuple[dict[int, Step], list[int]]:
    """The cut's nodes: the segment's equations by position, and the inputs that it could keep by -1 - value."""
    producers = {v: n for n in segment.nodes for v in graph.nodes[n].results}
    steps: dict[int, Step] = {}
    for value in site.fixed if site.is_loop else ():
        producers[value] = -1 - value
        steps[-1 - value] = Step(site.num_iterations * numbers.num_bytes[value], float("inf"), ())
    for value in () if site.is_loop else _gathered(graph, site, segment, numbers):
        producers[value] = -1 - value
        steps[-1 - value] = Step(numbers.held[value], site.repeat * numbers.seconds[value], ())
    for n in segment.nodes:
        node = graph.nodes[n]
        seconds = sum(numbers.seconds.get(v, 0.0) for v in node.results)
        reads = {producers[v] for v in node.operands if v is not None and v in producers}
        steps[n] = Step(
            _kept_bytes(graph, site, node.results, numbers),
            float("inf") if n in segment.fixed else site.repeat * site.num_iterations * seconds,
            tuple(sorted(reads)),
        )
    needed = dict.fromkeys(producers[v] for v in site.read if v in producers)
    return steps, list(needed)


def _gathered(graph: Graph, site: Site, segment: Segment, numbers: Numbers) -> list[int]:
    """Inputs that only this segment and the backward pass after it read, resharded from how they are stored."""
    inputs, own = set(graph.inputs), set(segment.nodes)
    read = {v for n in segment.nodes for v in graph.nodes[n].operands if v in inputs and numbers.held.get(v)}
    elsewhere = {
        v for n, node in enumerate(graph.nodes[: site.start]) if n not in own for v in node.operands if v is not None
    }
    return sorted(v for v in read - elsewhere if v is not None and v in site.read and v in numbers.seconds)


def _kept_bytes(graph: Graph, site: Site, results: Sequence[int], numbers: Numbers) -> float:
    """Bytes to keep an equation's results. Results that stay inside kernels cannot be kept: kernels of the backward pass
    compute them again in any case."""
    if site.is_loop:
        return site.num_iterations * sum(numbers.num_bytes[v] for v in results)
    large = [v for v in results if graph.values[v].size > SMALL_SIZE]
    kept = [numbers.held.get(v) or numbers.num_bytes[v] for v in large if v in numbers.stored]
    return float("inf") if large and not kept else sum(kept)


def _recomputation(
    graph: Graph, site: Site, steps: dict[int, Step], states: States, numbers: Numbers
) -> Rematerialization | None:
    """The equations to run again for one cut.

    A kernel of the backward pass computes fused values from kept ones in any case: those need no equation. What runs again
    must read values in memory, never one that exists only inside a kernel.
    """
    again: set[int] = set()
    for n in sorted(states.again):
        stored = site.is_loop or n < 0 or any(v in numbers.stored for v in graph.nodes[n].results)
        if stored or any(read in again for read in steps[n].reads):
            again.add(n)
    for n in sorted(states.again, reverse=True):
        if n in again:
            again |= states.again.intersection(steps[n].reads)
    nodes = tuple(sorted(n for n in again if n >= 0))
    renewed = tuple(sorted(-1 - n for n in again if n < 0))
    made = {v for n in nodes for v in graph.nodes[n].results} | set(renewed)
    read = [site.read[v] for v in made if v in site.read]
    if not read:
        return None
    kept = _kept_of(graph, site, steps, states, again, numbers)
    held = _held(graph, site, made, numbers)
    extra = sum(
        steps[n].num_bytes
        for n in states.kept
        if (values := {-1 - n} if n < 0 else set(graph.nodes[n].results)) and not _is_held(site, values, numbers)
    )
    largest = max(nodes or (0,), key=lambda n: sum(numbers.held.get(v, 0.0) for v in graph.nodes[n].results))
    onward = None
    if len(kept) == 1:
        start = min(n for n in steps if n >= 0)
        onward = _onward(graph.nodes[start : site.start], made, kept[0], numbers)
    before = min([*read, *(site.read[v] for v in kept)])
    return Rematerialization(
        segment=RematSegment(nodes=nodes, before=before, regathered=renewed, kept=kept, onward=onward),
        path=common_path([graph.nodes[n].path for n in nodes]) or graph.nodes[largest].path,
        saved_bytes=held - extra,
        time_s=sum(steps[n].seconds for n in again),
    )


def _kept_of(
    graph: Graph, site: Site, steps: dict[int, Step], states: States, again: set[int], numbers: Numbers
) -> tuple[int, ...]:
    """Kept values that are computed from rematerialized ones, as the sums of a softmax from its scores. XLA may postpone
    them to the backward pass, which would keep the first scores alive until then."""
    if site.is_loop:
        return ()
    of_those = {v for n in again if n >= 0 for v in graph.nodes[n].results}
    kept: list[int] = []
    for n in sorted(n for n in steps if n >= 0 and n not in again):
        node = graph.nodes[n]
        if of_those.isdisjoint(v for v in node.operands if v is not None):
            continue
        if n in states.kept:
            kept += [v for v in node.results if v in site.read and v in numbers.stored]
        else:
            of_those.update(node.results)
    return tuple(kept)


def _onward(following: Sequence[Node], made: set[int], kept: int, numbers: Numbers) -> int | None:
    """The first value in memory that, like a kept one, is computed from rematerialized values.

    Args:
        following: the forward pass from the segment on.
    """
    of_those, is_later = set(made), False
    for node in following:
        is_later |= kept in node.results
        if kept in node.results or of_those.isdisjoint(v for v in node.operands if v is not None):
            continue
        of_those.update(node.results)
        found = next((v for v in node.results if v in numbers.stored and v not in made), None)
        if is_later and found is not None:
            return found
    return None


def _held(graph: Graph, site: Site, made: set[int], numbers: Numbers) -> float:
    if site.is_loop:
        return site.num_iterations * sum(numbers.num_bytes[v] for v in made if v in site.read)
    return sum(numbers.held.get(v, 0.0) for v in made)


def _is_held(site: Site, values: set[int], numbers: Numbers) -> bool:
    return any(v in site.read if site.is_loop else v in numbers.held for v in values)


def common_path(paths: Sequence[str]) -> str:
    """The innermost module that contains all paths."""
    parts = [path.split("/") for path in paths if path]
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return "/".join(common)
