"""Plans that keep to a memory budget: by splitting otherwise, and by computing forward values again.

In: a program, its plan without a budget, the budget. Out: the fastest plan found that fits, perhaps of the program with
some of its values computed again; where none does, what is missing and the ways out, priced. The two are weighed in the
plan's own prediction: the rungs of a ladder compute more and more again (`rematerialise.ladder`), each at a price of memory,
and on each the solver splits at the same price.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import BudgetError, MicrobatchError, TimeLimitError
from autopar.formulate.formulation import Formulation, formulate
from autopar.ir.device_program import Buffer, buffers_at_peak, stored_values
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.planner.fork_pool import Least
from autopar.planner.plan_assembly import Assembled, assemble
from autopar.planner.remat.candidates import Rung, ladder
from autopar.plans.records import Prediction, Recomputation
from autopar.rules.grouping import Group
from autopar.solve.ilp import minimum_memory
from autopar.solve.problem import Solution, Solver, Status
from autopar.system.units import human_bytes
from autopar.transforms.program import Program, recomputing

#: The part of a memory budget that a plan leaves free: for what XLA's fusion holds beyond the plan's
#: estimate, and for the allocator, whose memory is never all in one piece.
BUDGET_MARGIN = 0.05

#: How often the solver's measure of memory is set right by a whole plan's.
_MOST_TIGHTENINGS = 4
#: How much faster a plan has to be to be looked for on the rungs between two.
_WORTH_LOOKING = 0.01
#: What of a plan's time is hidden at the most by how its collectives are merged and awaited, which comes after.
_MOST_HIDDEN = 0.03
#: How often the next rung to look at is guessed by memory, before those left are halved.
_MOST_GUESSES = 3
#: Of a collective that is run again, the part that nothing hides is so much at the least.
_LEAST_EXPOSED = 0.1
#: More microbatches are no way out once the last that were added saved less than this part of the peak.
_LEAST_SAVED = 0.02
#: Tensors that an error names of those in memory at the peak.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Made:
    """A plan's parts, and the program that they are of.

    Args:
        recomputed: what the program computes again, of the program that it was made of.
    """

    program: Program
    formulation: Formulation
    solution: Solution
    parts: Assembled
    recomputed: tuple[Recomputation, ...] = ()

    @property
    def step_time_s(self) -> float:
        return self.parts.prediction.step_time_s

    @property
    def compared_s(self) -> float:
        """By what plans are compared: the geometric mean of both opinions of the step time, where there are two. Each
        knows something that the other does not of what hides what. XLA's estimator takes a loop for one short operation; and it
        has one price for a convolution and for attention in a library whatever their size, so what these take beyond that by
        the device's own rates is added."""
        told = self.parts.prediction
        if told.xla_step_time_s is None or self.program.graph.loops:
            return told.step_time_s
        return math.sqrt(told.step_time_s * (told.xla_step_time_s + self.parts.simulation.unestimated_s))

    @property
    def peak_bytes(self) -> float:
        return self.parts.prediction.peak_bytes


class _TooLargeError(Exception):
    """No plan of a program fits.

    Args:
        least: the plan that needs least of those made. estimate: about what another mesh needs at the least.
    """

    def __init__(self, least: Made, estimate: Callable[[MeshShape], float]) -> None:
        super().__init__()
        self.least, self.estimate = least, estimate


class NothingFitsError(Exception):
    """No plan on a mesh fits. As text: what is missing, and what is in memory at the peak.

    Ways out take planning to price, so they are asked for only by who tells the user.

    Args:
        ways: given whether splitting the batch over time is one, the ways out in words.
        least_bytes: what the plan needs that needs least of those tried, per device.
    """

    def __init__(self, text: str, ways: Callable[[bool], list[str]], least_bytes: float) -> None:
        super().__init__(text)
        self.ways, self.least_bytes = ways, least_bytes

    def told(self, *, split_over_time: bool) -> BudgetError:
        """The user's error."""
        ways = "; ".join([*self.ways(split_over_time), "a smaller batch or model"])
        return BudgetError(f"{self}. Ways out: {ways}.")


@dataclass(frozen=True, slots=True)
class Planning:
    """What all plans on one mesh share.

    Args:
        limited: solver of problems with a limit of memory.
        groups_of: the groups of a graph.
        held: values of the graph as it is before anything is computed again, and how they must be made.
    """

    pins: dict[int, TensorSharding]
    solver: Solver
    limited: Solver
    groups_of: Callable[[Graph], tuple[Group, ...]]
    held: Mapping[int, TensorSharding] = field(default_factory=dict)

    def free(
        self, program: Program, like: Formulation, recomputed: tuple[Recomputation, ...], seconds_per_byte: float = 0.0
    ) -> Made:
        """The plan of a program without a budget.

        Args:
            seconds_per_byte: what it costs to hold arguments.

        Raises:
            TimeLimitError: the solver found none.
        """
        graph = program.graph
        groups = like.groups if graph is like.graph else self.groups_of(graph)
        f = formulate(graph, groups, like.mesh, like.profile, pins=self.pins, memory_budget_bytes=None, held=self.held)
        solution = self.solver.solve(f.with_memory_priced(seconds_per_byte))
        if solution.choices:
            paid_s = solution.cost - f.problem.evaluate(solution.choices)
            solution = replace(solution, cost=solution.cost - paid_s, lower_bound=solution.lower_bound - paid_s)
        return self.made(program, f, solution, recomputed)

    def made(
        self, program: Program, f: Formulation, solution: Solution, recomputed: tuple[Recomputation, ...] = ()
    ) -> Made:
        """The plan of a solution.

        Raises:
            TimeLimitError: it has no choices.
        """
        if len(solution.choices) != len(f.decisions):
            raise TimeLimitError(f"planning for mesh {f.mesh} ended with: {solution.status.value}")
        return Made(program, f, solution, assemble(f, solution.choices, self.pins), recomputed)


def within_budget(
    budget: float,
    free: Made,
    planning: Planning,
    *,
    rematerialize: bool,
    any_that_fits: bool = False,
    time_limit_s: float = math.inf,
    fastest: Least | None = None,
) -> Made:
    """The fastest plan found that keeps to a budget.

    Args:
        free: the plan without one, which does not. rematerialize: whether values may be computed again.
        any_that_fits: the first plan found will do: one that splits otherwise, or computes most again.
        time_limit_s: once it has passed, the fastest plan found that fits will do.
        fastest: seconds of the fastest plan on any mesh so far. Where what fits could not be faster, a plan that is slower
            will do, whether it fits or not.

    Raises:
        NothingFitsError: none does.
        TimeLimitError: the solver found none in its time.
    """
    found: list[Made] = []
    late: TimeLimitError | None = None
    least, estimate = free, None
    deadline = time.monotonic() + time_limit_s
    rungs = _rungs(free) if rematerialize else []
    try:
        found.append(_split_otherwise(budget, free, planning, at_least=not rungs))
    except _TooLargeError as short:
        least, estimate = short.least, short.estimate
    except TimeLimitError as error:
        late = error
    if rungs and not (any_that_fits and found):
        own_s = min((made.compared_s for made in found), default=math.inf)
        rungs = rungs[-1:] if any_that_fits else rungs
        climb = _Climb(budget, free, planning, rungs, least, own_s, fastest, deadline)
        try:
            again = climb.fastest()
            found += [] if again is None else [again]
        except TimeLimitError as error:
            late = error
        least = climb.least
        if climb.outdone is not None:
            found = found or [climb.outdone]
    if found:
        return min(found, key=lambda made: made.compared_s)
    if late is not None or estimate is None:
        raise late or TimeLimitError(f"planning for mesh {free.formulation.mesh} ended without a plan")
    priced = estimate

    def ways(split_over_time: bool) -> list[str]:
        return _ways_out(
            budget, free, least, priced, planning, rematerialize=rematerialize, split_over_time=split_over_time
        )

    raise NothingFitsError(_missing(budget, least), ways, least.peak_bytes)


# -- splitting otherwise -----------------------------------------------------------------------


def _split_otherwise(budget: float, free: Made, planning: Planning, *, at_least: bool = True) -> Made:
    """A plan of the same program whose predicted peak keeps to a budget.

    The problem counts the values that the free plan has in memory; what XLA would really keep is known only of a
    whole plan. So the problem's limit is the budget by the ratio of the two, set again where a plan is still over.

    Args:
        at_least: where nothing is found, look for what needs least.

    Raises:
        _TooLargeError: there is none.
    """
    stored = stored_values(free.parts.device)
    before, choices, parts = free.formulation, free.solution.choices, free.parts

    def formulation(mesh: MeshShape) -> Formulation:
        graph, groups, profile = before.graph, before.groups, before.profile
        return formulate(
            graph,
            groups,
            mesh,
            profile,
            pins=planning.pins,
            memory_budget_bytes=budget,
            stored=stored,
            held=planning.held,
        )

    f = formulation(before.mesh)
    ratio = f.problem.peak_memory(_with_copies(before, f, choices)) / parts.prediction.peak_bytes
    limit = budget * ratio
    least, status = free, Status.NOT_FOUND
    for _ in range(_MOST_TIGHTENINGS):
        limited = replace(f, problem=replace(f.problem, memory_limit=limit))
        solution = planning.limited.solve(limited.problem)
        status = solution.status
        if len(solution.choices) != len(f.decisions):
            break
        made = planning.made(free.program, limited, solution, free.recomputed)
        if made.peak_bytes <= budget:
            return made
        least = min(least, made, key=lambda one: one.peak_bytes)
        limit *= 0.995 * budget / made.peak_bytes
    if status is Status.NOT_FOUND:
        raise TimeLimitError(f"planning for mesh {before.mesh} within its memory budget ended without a plan")

    smallest = minimum_memory(f.problem) if at_least else None
    if smallest is not None and smallest.choices:  # XLA may store more of that plan than the problem counts
        solution = Solution(smallest.choices, f.problem.evaluate(smallest.choices), 0.0, Status.FEASIBLE)
        made = planning.made(free.program, f, solution, free.recomputed)
        if made.peak_bytes <= budget:
            return made
        least = min(least, made, key=lambda one: one.peak_bytes)

    def estimate(mesh: MeshShape) -> float:
        return minimum_memory(formulation(mesh).problem).peak_bytes / ratio

    raise _TooLargeError(least, estimate)


def _with_copies(free: Formulation, limited: Formulation, choices: Sequence[int]) -> tuple[int, ...]:
    """Choices of the problem without a budget as those of the one with. That has copies of more values, and its copies
    say too whether they are their maker's own buffer; those come first."""
    copies = {d.value: choice for d, choice in zip(free.decisions, choices, strict=True) if d.kind == "copy"}
    others = iter(choice for d, choice in zip(free.decisions, choices, strict=True) if d.kind != "copy")
    mapped = [-1 if decision.kind == "copy" else next(others) for decision in limited.decisions]
    made = {f.target: f.made[mapped[f.source]] for f in limited.flows if limited.decisions[f.target].kind == "copy"}
    wanted = {f.source: f.wanted[mapped[f.target]] for f in limited.flows if f.source in made}
    for node, own in made.items():
        decision = limited.decisions[node]
        options = decision.shardings[: decision.num_strategies // 2]
        known = copies.get(decision.value)
        choice = options.index(wanted[node]) if known is None else known
        mapped[node] = choice if options[choice] == own else choice + len(options)
    assert all(0 <= c < d.num_strategies for c, d in zip(mapped, limited.decisions, strict=True))
    return tuple(mapped)


# -- computing again ---------------------------------------------------------------------------


def _rungs(free: Made) -> list[Rung]:
    """The ladder from a plan; empty where the program has no backward pass."""
    exposed = _exposed(free.parts.prediction)
    return ladder(free.program.trace, free.formulation, free.solution.choices, free.parts.device, exposed)


def _exposed(told: Prediction) -> dict[str, float]:
    """By kind of collective, the part that nothing will hide of what is sent again: as much as in this plan, but not
    less than a tenth, for it has but a part of the backward pass to run beside."""
    return {
        kind: min(1.0, max(_LEAST_EXPOSED, told.exposed_s.get(kind, 0.0) / seconds))
        for kind, seconds in told.collective_s.items()
        if seconds > 0
    }


class _Climb:
    """The plans on the rungs of one ladder, made when they are asked for.

    Attributes:
        least: of all plans made, the one that needs least.
        outdone: where other plans ended the search, one that is slower than they are.
        late: of a plan for which the solver had too little time.
    """

    def __init__(
        self,
        budget: float,
        free: Made,
        planning: Planning,
        rungs: Sequence[Rung],
        least: Made,
        own_s: float = math.inf,
        fastest: Least | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.budget, self.free, self.planning, self.rungs, self.least = budget, free, planning, rungs, least
        self.outdone: Made | None = None
        self._own_s, self._fastest, self._deadline = own_s, fastest, deadline
        self.late: TimeLimitError | None = None
        self._needed = free.peak_bytes - budget  # by the ladder's figures
        self._without_limit: dict[tuple[int, bool], Made | None] = {}

    @property
    def to_beat(self) -> float:
        """Seconds of the fastest plan so far; of those on other meshes, before what is hidden later."""
        others = math.inf if self._fastest is None else self._fastest.value / (1 - _MOST_HIDDEN)
        return min(self._own_s, others)

    def fastest(self) -> Made | None:
        """The fastest plan found that fits; None where none does, or none is faster than another.

        Up the ladder a plan needs less and takes longer, whether arguments are split further or values computed again: the
        two have one price. So the fastest that fits is on the lowest rung where one does.

        Raises:
            TimeLimitError: none was found, and for one that might fit the solver had too little time.
        """
        rung, best = self._lowest(len(self.rungs), prompt=False)
        if best is None:  # it is sums that wait that take memory, of which those plans say nothing
            self._needed = self.free.peak_bytes - self.budget
        _, prompt = self._lowest(rung, prompt=True)
        best = prompt or best
        if best is None and self.outdone is None:  # that or nothing
            best = self._by_splitting(len(self.rungs) - 1)
            if best is None and self.late is not None:
                raise self.late
        return best

    def _lowest(self, end: int, *, prompt: bool) -> tuple[int, Made | None]:
        """The lowest rung before `end` where a plan fits and is faster than another, and the plan; where none is, the rung
        from which on they are slower, or `end`.

        Where to look follows from what the ladder has each rung save, and from how far that was out for the last plan.
        """
        saved = [rung.saved_bytes for rung in self.rungs]
        low, high, best, tries = 0, end, None, 0
        while low < high:  # those below `low` do not fit; from `high` on they take longer, or there are none
            if self.to_beat < math.inf and time.monotonic() > self._deadline:
                self.outdone = self.outdone or self.free
                break
            rung = next((i for i in range(low, high) if saved[i] >= self._needed), high - 1)
            rung, tries = (rung if tries < _MOST_GUESSES else (low + high) // 2), tries + 1
            made = self._on(rung, prompt=prompt)
            if made is None:
                low = rung + 1
                continue
            self._needed = made.peak_bytes + saved[rung] - self.budget
            if made.peak_bytes <= self.budget:
                high = rung
                if made.compared_s < self.to_beat:
                    best, self._own_s = made, made.compared_s
                else:
                    self.outdone = made
            elif made.compared_s > (1 - _WORTH_LOOKING) * self.to_beat:  # those above that fit are hardly faster
                self.outdone = made
                return rung, best
            else:
                low = rung + 1
        return high, best

    def _on(self, rung: int, *, prompt: bool = False) -> Made | None:
        """The plan that a rung's price of memory leads to; None where the solver had too little time.

        Args:
            prompt: gradients are summed at once: that holds less, but nothing hides the sums.
        """
        key = rung, prompt
        if key not in self._without_limit:
            again = tuple(replace(one, again=replace(one.again, prompt=prompt)) for one in self.rungs[rung].again)
            program = recomputing(self.free.program, [one.again for one in again])
            self._without_limit[key] = None
            try:
                made = self.planning.free(program, self.free.formulation, again, self.rungs[rung].price)
                self._without_limit[key] = made
                self.least = min(self.least, made, key=lambda one: one.peak_bytes)
            except TimeLimitError as error:
                self.late = error
        return self._without_limit[key]

    def _by_splitting(self, rung: int) -> Made | None:
        """A plan that fits by splitting otherwise, if one is found; or else the one that needs least."""
        for prompt in (False, True):
            made = self._on(rung, prompt=prompt)
            if made is None:
                continue
            try:
                return _split_otherwise(self.budget, made, self.planning)
            except _TooLargeError as short:
                self.least = min(self.least, short.least, key=lambda one: one.peak_bytes)
            except TimeLimitError as error:
                self.late = error
        return None


# -- nothing fits --------------------------------------------------------------------------------


def _ways_out(
    budget: float,
    free: Made,
    least: Made,
    estimate: Callable[[MeshShape], float],
    planning: Planning,
    *,
    rematerialize: bool,
    split_over_time: bool,
) -> list[str]:
    """What would fit, with what it costs where that is known; each a few words. Another kind of way out is another
    line here."""
    mesh, ways = free.formulation.mesh, []
    if not rematerialize:
        rungs = _rungs(free)
        made = _Climb(budget, free, planning, rungs, least).fastest() if rungs else None
        if made is not None:
            ways.append(f"let forward values be computed again (`rematerialize=True`; {_slower(made, free)})")
    if split_over_time and (made := _split_over_time(budget, free, planning)) is not None:
        count = made.program.num_microbatches
        ways.append(f'split the batch over time (`num_microbatches={count}`, or `"auto"`; {_slower(made, free)})')
    ways.append(f"give `memory_budget_bytes={1.001 * least.peak_bytes / (1 - BUDGET_MARGIN):.4g}` or more")
    for times in (2, 4, 8):
        larger = MeshShape(mesh.axis_names, (mesh.axis_sizes[0] * times, *mesh.axis_sizes[1:]))
        if estimate(larger) <= budget:
            ways.append(f"use {larger.num_devices} devices (mesh {larger})")
            break
    return ways


def _slower(made: Made, free: Made) -> str:
    return f"{100 * (made.step_time_s / free.step_time_s - 1):+.0f} %"


def _split_over_time(budget: float, free: Made, planning: Planning) -> Made | None:
    """The plan with the fewest microbatches, of 2, 4, 8, ..., that fits without computing anything again."""
    count, before = 2, free.peak_bytes
    while True:
        try:
            split = free.program.in_microbatches(count)  # ends where the batch has not so many parts
            made = planning.free(split.forms[-1], free.formulation, ())
        except (MicrobatchError, TimeLimitError):
            return None
        if made.peak_bytes <= budget:
            return made
        if made.peak_bytes > (1 - _LEAST_SAVED) * before:
            return None
        try:
            return _split_otherwise(budget, made, planning, at_least=False)
        except (_TooLargeError, TimeLimitError):
            count, before = 2 * count, made.peak_bytes


def _missing(budget: float, least: Made) -> str:
    needed = least.peak_bytes
    short = f"{human_bytes(needed - budget)} short" if needed > 1.001 * budget else "just short"
    tried = "sharding tried" if not least.recomputed else "sharding tried reaches, computing forward values again,"
    return (
        f"no plan on mesh {least.formulation.mesh} fits the memory budget of"
        f" {human_bytes(budget / (1 - BUDGET_MARGIN))} per device, of which {100 * BUDGET_MARGIN:g} % stay free: the"
        f" least that any {tried}{'' if least.recomputed else ' reaches'} is {human_bytes(needed)},"
        f" {_at_the_peak(least)}, {short}"
    )


def _at_the_peak(made: Made) -> str:
    """When a plan needs most, and what is in memory then."""
    told, graph = made.parts.prediction, made.formulation.graph
    instant, buffers = buffers_at_peak(made.parts.device)
    held = [
        ("parameters", told.parameter_bytes),
        ("optimizer state", told.optimizer_bytes),
        ("data", told.data_bytes + told.output_bytes),
        *_by_maker(buffers, graph),
    ]
    named = sorted(held, key=lambda one: -one[1])[: _MOST_NAMED + 1]
    parts = ", ".join(f"{human_bytes(size)} of {name}" for name, size in named if size > 0.01 * told.peak_bytes)
    if not made.parts.device.ops:
        return f"with {parts}"
    node = graph.nodes[made.parts.device.ops[instant].node]
    where = f"`{node.path}`" if node.path else f"a {node.primitive}"
    source = f" ({node.source})" if node.source else ""
    return f"in the {node.phase} pass at {where}{source}, with {parts}"


def _by_maker(buffers: Sequence[Buffer], graph: Graph) -> list[tuple[str, float]]:
    sizes: dict[str, float] = {}
    for buffer in buffers:
        node = graph.producer(buffer.value)
        name = f"`{node.primitive}` results" if node else "gathered inputs"
        sizes[name] = sizes.get(name, 0.0) + buffer.num_bytes
    return list(sizes.items())
