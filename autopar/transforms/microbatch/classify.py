"""Decide which equations run once per step and which run once per microbatch.

In: a graph, its loops and branches, and its batch dims. Out: `Split`. Each equation runs before the loop over
microbatches, inside it, or after it. Inside the loop, a value holds a microbatch's examples, or is the same in all
microbatches, or is one term of a reduction over the batch. Such a term is a *partial* value: it is combined over the
microbatches. An equation that reads a completed reduction over the batch therefore runs after the loop. If such an
equation also has a batch dim, the batch feeds back. Then there are two cases. If the reduction depends on data alone,
it is computed before the loop, on the whole batch. Otherwise the step is refused, and the error names the equation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.errors import MicrobatchError
from autopar.frontend.equations import LiteralOperand, Region
from autopar.frontend.trace import Trace
from autopar.ir.graph import Graph
from autopar.rules.table import traits_of
from autopar.transforms.microbatch.batch_dims import Batch, Factor, Places
from autopar.transforms.microbatch.errors import Refusals
from autopar.transforms.microbatch.linear_ops import adds_up, is_zero, passes_zero
from autopar.transforms.microbatch.units import Unit, units_of

#: The kind of a value inside the loop. `rows`: examples of the microbatch. `same`: equal in all microbatches. `zero`:
#: equal in all, and all zeros. `own`: computed per microbatch in place of the whole batch's value. The others are
#: partial, and name the reduction that combines the microbatches' terms.
Kind = Literal["rows", "same", "zero", "own", "sum", "max", "min", "prod", "and", "or"]
PARTIAL = frozenset(["sum", "max", "min", "prod", "and", "or"])


@dataclass(frozen=True, slots=True)
class Split:
    """Where each equation runs. A loop or a branch of the program runs as a whole in one place.

    Args:
        before, inside, after: positions of equations. An equation is in two of them if both the whole batch and each
            microbatch need its result.
        kinds: the kind of each value made inside the loop.
        factors: for each equation inside the loop with a batch dim, the factor that is the batch.
        own: reductions over the batch that each microbatch replaces by its own.
    """

    batch: Batch
    before: frozenset[int]
    inside: frozenset[int]
    after: frozenset[int]
    kinds: dict[int, Kind]
    factors: dict[int, Factor]
    own: frozenset[int]


def classify(
    trace: Trace, graph: Graph, places: Places | None = None, *, own_statistics: bool = False, alone: bool = False
) -> Split:
    """Decide where each equation of a step runs.

    Args:
        graph: graph of the trace.
        places: batch dims of the graph, if they are known already.
        own_statistics: whether examples that read a reduction over the batch get their microbatch's own reduction. This
            changes what the step computes.
        alone: whether there is only one microbatch. Then equations may read any value and nothing is refused: all
            equations traced as forward or backward run inside the loop.

    Raises:
        MicrobatchError: the batch feeds back, or examples are combined; the error names the equation.
    """
    return _Classifier(trace, graph, places or Places(graph), own_statistics, alone).run()


class _BlockedError(Exception):
    """An equation cannot run inside the loop."""

    def __init__(self, node: int, why: str) -> None:
        super().__init__(why)
        self.node = node


class _Classifier:
    """Classifies the equations in one pass; the one mutable object of this module."""

    def __init__(self, trace: Trace, graph: Graph, places: Places, own_statistics: bool, alone: bool) -> None:
        self.trace, self.graph, self.places, self.own_statistics = trace, graph, places, own_statistics
        self.alone = alone
        self.batch = _batch_or_none(places) if alone else places.batch()
        self.refusals = Refusals(graph, places, self.batch, own_statistics)
        self.items = list(units_of(trace, graph))
        self.producer = {value: i for i, item in enumerate(self.items) for value in item.results}
        self.sides: dict[str, set[int]] = {"before": set(), "inside": set(), "after": set()}
        self.kinds: dict[int, Kind] = {}
        self.factors: dict[int, Factor] = {}
        self.own: set[int] = set()
        carried = {graph.inputs[position] for position, _ in graph.carried}
        self.early = {*graph.inputs, *graph.constants}
        self.zeros: set[int] = set()
        self.of_state = carried

    def run(self) -> Split:
        for i in range(len(self.items)):
            self._place(i)
        self._add_inside()
        self._add_between_layers_after()
        self._check_outputs()

        def equations(side: str) -> frozenset[int]:
            return frozenset(n for i in self.sides[side] for n in range(self.items[i].start, self.items[i].stop))

        return Split(
            self.batch,
            equations("before"),
            equations("inside"),
            equations("after"),
            self.kinds,
            self.factors,
            frozenset(self.own),
        )

    # -- one item ----------------------------------------------------------------------------

    def _place(self, i: int) -> None:
        item = self.items[i]
        if any(v in self.of_state for v in item.operands):
            self.of_state.update(item.results)
        if not self._has_batch(item):
            self._place_without_batch(i)
            return
        known = dict(self.kinds)
        try:
            found = self._inside(item)
        except _BlockedError as blocked:
            self.kinds = known
            if self.alone:
                self._bring(item.results)
            elif not self._compute_before(item.results, i):
                raise MicrobatchError(f"{_REFUSED}: {self.refusals.of(blocked.node)}: {blocked}") from None
            return
        self.sides["inside"].add(i)
        self.kinds.update(found)

    def _place_without_batch(self, i: int) -> None:
        item = self.items[i]
        if all(v in self.early for v in item.operands):
            self._put_before(i)
        elif all(v in self.early or self.kinds.get(v) in ("same", "zero") for v in item.operands):
            self.sides["inside"].add(i)  # computed in each microbatch, as its operands are
            self.kinds.update(self._kinds_of(item))
        elif self.alone and self.trace.equations[item.start].phase != "update":
            self._bring(item.results)
        else:
            self.sides["after"].add(i)

    def _put_before(self, i: int) -> None:
        item = self.items[i]
        self.sides["before"].add(i)
        self.early.update(item.results)
        if item.region is None and not self._has_batch(item) and self._kind(item.start, self._early_kind) == "zero":
            self.zeros.update(item.results)

    def _early_kind(self, value: int) -> Kind:
        return "zero" if value in self.zeros else "same"

    def _inside(self, item: Unit) -> dict[int, Kind]:
        for n, value in self._reads(item):
            self._needed(n, value)
        return self._kinds_of(item)

    def _has_batch(self, item: Unit) -> bool:
        nodes = self.graph.nodes[item.start : item.stop]
        return any(self.batch.places.get(v) for node in nodes for v in (*node.operands, *node.results) if v is not None)

    def _reads(self, item: Unit) -> Iterator[tuple[int, int]]:
        nodes = range(item.start, item.stop) if item.region is None else range(*item.region.enter)
        return ((n, v) for n in nodes for v in self.graph.nodes[n].operands if v is not None)

    def _needed(self, node: int, value: int) -> None:
        """Make a value available inside the loop."""
        kind = self.kinds.get(value)
        has_batch = value in self.batch.places
        if value in self.early or kind == "rows" or kind in ("same", "zero", "own"):
            return
        if value in self.own or (self._is_summand(node, value) and kind == "sum"):
            return
        if self._compute_before([value]):
            return
        if self.alone:
            self._bring([value])
            return
        if self.own_statistics and not has_batch:
            self._take_own(node, value)
            return
        raise _BlockedError(node, self.refusals.feedback(node, value))

    def _is_summand(self, node: int, value: int) -> bool:
        """Whether a node is a scatter that adds to a partial sum."""
        one = self.graph.nodes[node]
        return traits_of(one.primitive).scatters_sum and one.operands[0] == value and value not in one.operands[1:]

    def _compute_before(self, values: Sequence[int], last: int | None = None) -> bool:
        """Compute values before the loop, on the whole batch; False if they depend on more than data.

        Args:
            last: an item that has not been placed yet.
        """
        waiting, found = list(values), set[int]()
        while waiting:
            value = waiting.pop()
            if value in self.early:
                continue
            if value in self.of_state or value not in self.producer:
                return False
            i = self.producer[value]
            item = self.items[i]
            if any(self.graph.nodes[n].effect for n in range(item.start, item.stop)):
                return False
            if i not in found:
                found.add(i)
                waiting += item.operands
        for i in sorted(found):
            if i != last:
                self.sides["after"].discard(i)
            self._put_before(i)
        return True

    def _take_own(self, node: int, value: int) -> None:
        """Let each microbatch use its own version of a value computed from reductions over the batch."""
        if self.kinds.get(value) in PARTIAL:
            self.own.add(value)
            return
        i = self.producer[value]
        item = self.items[i]
        if self._has_batch(item) or item.region is not None:
            raise _BlockedError(node, self.refusals.feedback(node, value))
        for operand in item.operands:
            if operand not in self.early and self.kinds.get(operand) not in ("same", "zero", "own"):
                self._take_own(node, operand)
        self.sides["inside"].add(i)
        self.kinds.update(dict.fromkeys(item.results, "own"))

    def _bring(self, values: Sequence[int]) -> None:
        """Compute values inside the loop, whatever their operands are."""
        for value in values:
            kind = self.kinds.get(value)
            if value in self.early or kind in ("rows", "same", "zero", "own"):
                continue
            if kind in PARTIAL:
                self.own.add(value)
                continue
            i = self.producer[value]
            self._bring(self.items[i].operands)
            self.sides["after"].discard(i)
            self.sides["inside"].add(i)
            self.kinds.update(dict.fromkeys(self.items[i].results, "own"))

    # -- kinds -------------------------------------------------------------------------------

    def _kinds_of(self, item: Unit) -> dict[int, Kind]:
        found: dict[int, Kind] = {}

        def of(value: int) -> Kind:
            if value in found:
                return found[value]
            if value in self.batch.places:
                return "rows"
            if value in self.early:
                return self._early_kind(value)
            return "own" if value in self.own else self.kinds[value]

        self._span(item.start, item.stop, found, of)
        return found

    def _span(self, start: int, stop: int, found: dict[int, Kind], of: Callable[[int], Kind]) -> None:
        for n, _, region in self.trace.walk(start, stop):
            if region is not None:
                self._region(region, found, of)
                continue
            for value in self.graph.nodes[n].results:
                found[value] = self._kind(n, of)

    def _region(self, region: Region, found: dict[int, Kind], of: Callable[[int], Kind]) -> None:
        """Classify a loop's body until its carries do not change: an iteration may turn zeros into partial sums."""
        equations = self.trace.equations
        carries = [n for n in range(*region.enter) if equations[n].piece == "enter_carry"]
        ends = [n for n in range(*region.exit) if equations[n].piece == "exit_carry"]
        for n in range(*region.enter):
            kind = self._kind(n, of)
            if equations[n].piece == "index" and kind not in ("same", "zero", "own"):
                raise _BlockedError(n, "the choice of a branch depends on the examples")
            found.update(dict.fromkeys(equations[n].results, kind))
        before = None
        while before != [found[equations[n].results[0]] for n in carries]:
            before = [found[equations[n].results[0]] for n in carries]
            for section in region.sections:
                self._span(*section, found, of)
            for enter, leave in zip(carries, ends, strict=True):
                value = equations[enter].results[0]
                if value not in self.batch.places:
                    found[value] = _either_kind(enter, [found[value], self._operand_kind(leave, 0, of)])
        for n in range(*region.exit):
            kinds: list[Kind] = [self._operand_kind(n, i, of) for i in range(len(equations[n].operands))]
            kind = self._kind(n, of) if self.batch.touches(self.graph.nodes[n]) else _either_kind(n, kinds)
            if equations[n].piece == "predicate" and kind not in ("same", "zero", "own"):
                raise _BlockedError(n, "the number of iterations of a loop depends on the examples")
            found.update(dict.fromkeys(equations[n].results, kind))

    def _operand_kind(self, n: int, index: int, of: Callable[[int], Kind]) -> Kind:
        atom = self.trace.equations[n].operands[index]
        if isinstance(atom, LiteralOperand):
            return "zero" if is_zero(atom) else "same"
        return of(atom)

    def _kind(self, n: int, of: Callable[[int], Kind]) -> Kind:
        equation = self.trace.equations[n]
        kinds: list[Kind] = [self._operand_kind(n, i, of) for i in range(len(equation.operands))]
        if self.batch.touches(self.graph.nodes[n]):
            return self._kind_with_batch(n, kinds)
        partial = [i for i, kind in enumerate(kinds) if kind in PARTIAL]
        if partial:
            if equation.piece is not None:
                return _either_kind(n, kinds)
            if not adds_up(equation, kinds):
                raise _BlockedError(n, self.refusals.feedback(n, self._value(n, partial[0])))
            return "sum"
        if all(kind == "zero" for kind in kinds) and kinds and passes_zero(equation):
            return "zero"
        return "own" if "own" in kinds else "same"

    def _kind_with_batch(self, n: int, kinds: Sequence[Kind]) -> Kind:
        factor = self.places.factor(n, self.batch)
        if factor is None:
            raise _BlockedError(n, self.refusals.meeting(n))
        self.factors[n] = factor
        node = self.graph.nodes[n]
        reduction = self.places.reduction(n, factor)
        for i, kind in enumerate(kinds):
            begins = i == 0 and traits_of(node.primitive).in_place == "scatter" and reduction is not None
            if begins and kind != "zero" and kind != reduction:
                raise _BlockedError(n, "it adds to a value that is not zero, which would count once per microbatch")
            if kind in PARTIAL and not begins:
                raise _BlockedError(n, self.refusals.feedback(n, self._value(n, i)))
        return reduction or "rows"  # type: ignore[return-value]

    def _value(self, n: int, index: int) -> int:
        atom = self.trace.equations[n].operands[index]
        assert isinstance(atom, int)
        return atom

    # -- sums of partial values --------------------------------------------------------------

    def _add_inside(self) -> None:
        """Move an addition of partial sums into the loop if nothing else reads these: the loop then has one accumulator
        instead of two."""
        readers = Counter(value for item in self.items for value in item.operands)
        readers.update(output for output in self.graph.outputs if output is not None)

        def chain(value: int) -> list[int] | None:
            """Items between a partial sum and a value, if each result on the way has one user."""
            found: list[int] = []
            while self.kinds.get(value) != "sum" or value in self.own:
                i = self.producer.get(value)
                if i is None or i not in self.sides["after"] - self.sides["inside"] or readers[value] != 1:
                    return None
                item = self.items[i]
                equation = self.trace.equations[item.start]
                if item.region is not None or not traits_of(equation.primitive).one_to_one or len(item.operands) != 1:
                    return None
                found.append(i)
                value = item.operands[0]
            return found if readers[value] == 1 else None

        for i in sorted(self.sides["after"]):
            item = self.items[i]
            node, traits = self.graph.nodes[item.start], traits_of(self.graph.nodes[item.start].primitive)
            if item.region is not None or i not in self.sides["after"] or i in self.sides["inside"]:
                continue
            adds = traits.elementwise and traits.linear == "all" and len(set(item.operands)) == 2
            chains = [chain(v) for v in item.operands] if adds else [None]
            if any(one is None for one in chains) or node.effect or self._meets_layers(item):
                continue
            moved = [i, *(j for one in chains for j in one or ())]
            for j in moved:
                self.sides["after"].discard(j)
                self.sides["inside"].add(j)
                self.kinds.update(dict.fromkeys(self.items[j].results, "sum"))

    def _add_between_layers_after(self) -> None:
        """Move additions of two layers' terms, and additions that read them, after the loop if the step is cut into
        layers: one total passes between layers instead of a term per microbatch."""
        readers: dict[int, list[int]] = {}
        for i in sorted(self.sides["inside"]):
            for value in self.items[i].operands:
                readers.setdefault(value, []).append(i)
        for i in sorted(self.sides["inside"]):
            if i not in self.sides["inside"] or not self._only_adds(i) or not self._meets_layers(self.items[i]):
                continue
            moved = [i]
            for j in moved:
                moved += [r for v in self.items[j].results for r in readers.get(v, ()) if r not in moved]
            if all(self._only_adds(j) for j in moved):
                self.sides["inside"].difference_update(moved)
                self.sides["after"].update(moved)
                for j in moved:
                    for value in self.items[j].results:
                        self.kinds.pop(value, None)

    def _only_adds(self, i: int) -> bool:
        """Whether a unit only computes partial sums from partial sums."""
        item = self.items[i]
        is_sum = all(self.kinds.get(v) == "sum" for v in item.results)
        return is_sum and item.region is None and not self._has_batch(item)

    def _meets_layers(self, item: Unit) -> bool:
        """Whether a unit reads partial sums that two layers make."""
        producers = (self.items[self.producer[v]] for v in item.operands if self.kinds.get(v) == "sum")
        return len({self.trace.equations[producer.start].layer for producer in producers}) > 1

    # -- refusals ----------------------------------------------------------------------------

    def _check_outputs(self) -> None:
        """Refuse a step with nothing to run inside the loop."""
        if self.alone and self.sides["inside"]:
            return
        if not any(self._has_batch(self.items[i]) for i in self.sides["inside"]):
            paths = ", ".join(f"`{self.graph.input_paths[p]}`" for p in self.batch.inputs[:3])
            raise MicrobatchError(
                f"there is nothing to run in microbatches: no operation runs over the leading dim of {paths}"
                f" ({self.batch.size} examples)"
            )


_REFUSED = "the batch cannot be split into microbatches"


def _batch_or_none(places: Places) -> Batch:
    try:
        return places.batch()
    except MicrobatchError:
        return Batch(1, (), {})


def _either_kind(node: int, kinds: Sequence[Kind]) -> Kind:
    """The kind of a value that has one of several kinds, as the result of a branch has."""
    found = set(kinds) - {"zero"}
    if not found:
        return "zero"
    if found == {"same", "own"}:
        return "own"
    if len(found) > 1 or ("zero" in kinds and found & (PARTIAL - {"sum"})):
        raise _BlockedError(
            node, "a loop or a branch returns a sum over the batch in one case, and something else in another"
        )
    return found.pop()
