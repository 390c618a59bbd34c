"""Ways to compute more and more again, from nothing to all that saves memory.

In: a program's trace and graph, a plan's assignment and its device's program. Out: rungs, each of which holds less from
the forward to the backward pass than the one before, and takes longer. They follow from a price of memory that rises:
at each price, every segment of every site keeps what is worth its bytes. From one price to the next the segments go
over one after the other, the first of the forward pass first: what they hold is held longest.
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
from autopar.plans.records import Again, Recomputation
from autopar.rules.grouping import SMALL_SIZE
from autopar.transforms.remat.sites import Site, sites_of

#: Prices of memory, in seconds a byte: from a tenth of the time it takes to write a byte and to read it again, by factors
#: of two, to a thousand times that.
_PRICES = tuple(0.1 * 2**n for n in range(14))
#: Rungs from one price to the next.
_PARTS = 4


@dataclass(frozen=True, slots=True)
class Rung:
    """What is computed again where memory has a price.

    Args:
        price: seconds per byte.
    """

    again: tuple[Recomputation, ...]
    price: float

    @property
    def saved_bytes(self) -> float:
        return sum(one.saved_bytes for one in self.again)

    @property
    def time_s(self) -> float:
        return sum(one.time_s for one in self.again)


def ladder(
    trace: Trace,
    f: Formulation,
    choices: Sequence[int],
    device: DeviceProgram,
    exposed: Mapping[str, float] | None = None,
) -> list[Rung]:
    """The rungs, by the memory they save, from the first that computes anything again; empty where there is no backward
    pass. How much of what is sent again is hidden shows only when the step is scheduled: so they are those that follow
    if as much of it is as told, and those if nothing is.

    Args:
        exposed: by kind of collective, the part of what is sent again that nothing will hide; by default all of it.
    """
    sites = sites_of(trace)
    if not sites:
        return []
    told, full = (numbers_of(f, choices, device, sites[0].start, part) for part in (exposed or {}, {}))
    found = {rung.again: rung for weighed in (full, told) for rung in _climbed(f, sites, weighed, told)}
    return sorted(found.values(), key=lambda rung: (rung.saved_bytes, rung.time_s))


def _climbed(f: Formulation, sites: Sequence[Site], weighed: Numbers, told: Numbers) -> list[Rung]:
    """The rungs that follow from one price of what is sent again.

    Args:
        weighed: with what is weighed of its seconds. told: with those that are told.
    """
    bodies: list[list[Recomputation | None]] = []
    for site in sites:
        for segment in segments_of(f.graph, site, weighed):
            levels = _levels(f, site, segment, weighed, told)
            if any(levels):
                bodies.append(levels)
    rungs = [Rung((), 0.0)]
    for level, price in enumerate(_prices(f)):
        changing = [i for i, levels in enumerate(bodies) if levels[level] != (levels[level - 1] if level else None)]
        for part in range(1, _PARTS + 1):
            over = set(changing[: -(-len(changing) * part // _PARTS)])
            at = [
                levels[level] if i in over or i not in changing else (levels[level - 1] if level else None)
                for i, levels in enumerate(bodies)
            ]
            again = tuple(one for one in at if one is not None)
            if again != rungs[-1].again:
                rungs.append(Rung(again, price))
    return rungs[1:]


def _levels(
    f: Formulation, site: Site, segment: Segment, numbers: Numbers, told: Numbers
) -> list[Recomputation | None]:
    """What a segment computes again at each price.

    Args:
        numbers: what is weighed. told: the same with the seconds that are told.
    """
    graph = f.graph
    steps, needed = _steps(graph, site, segment, numbers)
    as_told, _ = _steps(graph, site, segment, told)
    if not needed:
        return [None] * len(_PRICES)
    found: list[Recomputation | None] = []
    for price in _prices(f):
        states = cheapest(steps, needed, price)
        found.append(_recomputation(graph, site, as_told, states, numbers))
    return found


def _prices(f: Formulation) -> list[float]:
    """Seconds per byte."""
    return [price * 2 / f.profile.hbm_bytes_per_s for price in _PRICES]


def _steps(graph: Graph, site: Site, segment: Segment, numbers: Numbers) -> tuple[dict[int, Step], list[int]]:
    """Equations of a segment, and what it is given and could keep; by position, and by -1 - value."""
    makers = {v: n for n in segment.nodes for v in graph.nodes[n].results}
    steps: dict[int, Step] = {}
    for value in site.fixed if site.is_loop else ():
        makers[value] = -1 - value
        steps[-1 - value] = Step(site.trips * numbers.num_bytes[value], float("inf"), ())
    for value in () if site.is_loop else _gathered(graph, site, segment, numbers):
        makers[value] = -1 - value
        steps[-1 - value] = Step(numbers.held[value], site.repeat * numbers.seconds[value], ())
    for n in segment.nodes:
        node = graph.nodes[n]
        seconds = sum(numbers.seconds.get(v, 0.0) for v in node.results)
        reads = {makers[v] for v in node.operands if v is not None and v in makers}
        steps[n] = Step(
            _kept_bytes(graph, site, node.results, numbers),
            float("inf") if n in segment.fixed else site.repeat * site.trips * seconds,
            tuple(sorted(reads)),
        )
    needed = dict.fromkeys(makers[v] for v in site.read if v in makers)
    return steps, list(needed)


def _gathered(graph: Graph, site: Site, segment: Segment, numbers: Numbers) -> list[int]:
    """Inputs that this segment alone reads otherwise split than they are stored, and the backward pass after it."""
    inputs, own = set(graph.inputs), set(segment.nodes)
    read = {v for n in segment.nodes for v in graph.nodes[n].operands if v in inputs and numbers.held.get(v)}
    elsewhere = {
        v for n, node in enumerate(graph.nodes[: site.start]) if n not in own for v in node.operands if v is not None
    }
    return sorted(v for v in read - elsewhere if v is not None and v in site.read and v in numbers.seconds)


def _kept_bytes(graph: Graph, site: Site, results: Sequence[int], numbers: Numbers) -> float:
    """What it takes to keep an equation's results. Those that stay inside kernels are computed again by kernels of the
    backward pass as it is, and nothing makes XLA keep them."""
    if site.is_loop:
        return site.trips * sum(numbers.num_bytes[v] for v in results)
    large = [v for v in results if graph.values[v].size > SMALL_SIZE]
    kept = [numbers.held.get(v) or numbers.num_bytes[v] for v in large if v in numbers.stored]
    return float("inf") if large and not kept else sum(kept)


def _recomputation(
    graph: Graph, site: Site, steps: dict[int, Step], states: States, numbers: Numbers
) -> Recomputation | None:
    """What is run again: where a kernel of the backward pass computes a value from others that are kept, it does so
    anyway; but what is run again must be given what is kept, and nothing that is inside a kernel alone."""
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
    return Recomputation(
        again=Again(nodes=nodes, before=before, renewed=renewed, kept=kept, onward=onward),
        path=common_path([graph.nodes[n].path for n in nodes]) or graph.nodes[largest].path,
        saved_bytes=held - extra,
        time_s=sum(steps[n].seconds for n in again),
    )


def _kept_of(
    graph: Graph, site: Site, steps: dict[int, Step], states: States, again: set[int], numbers: Numbers
) -> tuple[int, ...]:
    """What is kept that is made of what is computed again, as a softmax's sums are of its scores. XLA may put it off to
    where it is read, in the backward pass, and hold the first scores till then."""
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
    """The first value in memory that is made, like one that is kept, of what is computed again.

    Args:
        following: the forward pass from the segment on; none before it reads what is made in it.
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
        return site.trips * sum(numbers.num_bytes[v] for v in made if v in site.read)
    return sum(numbers.held.get(v, 0.0) for v in made)


def _is_held(site: Site, values: set[int], numbers: Numbers) -> bool:
    return any(v in site.read if site.is_loop else v in numbers.held for v in values)


def common_path(paths: Sequence[str]) -> str:
    """The module that all are in."""
    parts = [path.split("/") for path in paths if path]
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return "/".join(common)
