"""What of a step runs once, and what once for each microbatch.

In: a graph, its loops and branches, and where the batch stands. Out: `Split`. Each equation runs before the loop over
the microbatches, inside it, or after it. Inside, a value holds the examples of a microbatch, or is the same in all of
them, or is one term of a reduction over the batch: a *partial* value, which is combined over the microbatches. So the
rule is simple: whatever reads a reduction over the batch runs after the loop. If it has examples itself, the batch
feeds back: either it depends on the data alone, then it is computed before the loop, on the whole batch; or the step
is none that microbatches could run one after another, and is refused by name.
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

#: What a value is inside the loop. `rows`: examples of the microbatch. `same`: the same in each microbatch; `zero`
#: so, and nothing but zeros. `own`: each microbatch has its own, in place of the whole batch's. All others are
#: partial: what combines the terms of the microbatches.
Kind = Literal["rows", "same", "zero", "own", "sum", "max", "min", "prod", "and", "or"]
PARTIAL = frozenset(["sum", "max", "min", "prod", "and", "or"])


@dataclass(frozen=True, slots=True)
class Split:
    """What runs where. Equations of a loop or a branch of the program go where it goes.

    Args:
        before, inside, after: equations. One may be in two of them: what is wanted of the whole batch and of each
            microbatch.
        kinds: of values made inside.
        factors: of the equations inside that have the batch for a loop, which one.
        own: reductions over the batch of which each microbatch takes its own.
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
    """Say what of a step runs where.

    Args:
        graph: of the trace.
        places: of the graph, where there are any yet.
        own_statistics: where a reduction over the batch is read by the examples again, let each microbatch take its
            own instead: not what the step computes.
        alone: there is one microbatch only. So it may read whatever it has made, and nothing is refused: what is
            traced as forward or backward runs inside.

    Raises:
        MicrobatchError: naming the equation in which the batch feeds back, or in which examples meet.
    """
    return _Classifier(trace, graph, places or Places(graph), own_statistics, alone).run()


class _BlockedError(Exception):
    """An equation cannot run inside."""

    def __init__(self, node: int, why: str) -> None:
        super().__init__(why)
        self.node = node


class _Classifier:
    """Walks through a step once; the one mutable object of this module."""

    def __init__(self, trace: Trace, graph: Graph, places: Places, own_statistics: bool, alone: bool) -> None:
        self.trace, self.graph, self.places, self.own_statistics = trace, graph, places, own_statistics
        self.alone = alone
        self.batch = _batch_or_none(places) if alone else places.batch()
        self.words = Refusals(graph, places, self.batch, own_statistics)
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
                raise MicrobatchError(f"{_REFUSED}: {self.words.of(blocked.node)}: {blocked}") from None
            return
        self.sides["inside"].add(i)
        self.kinds.update(found)

    def _place_without_batch(self, i: int) -> None:
        item = self.items[i]
        if all(v in self.early for v in item.operands):
            self._put_before(i)
        elif all(v in self.early or self.kinds.get(v) in ("same", "zero") for v in item.operands):
            self.sides["inside"].add(i)  # computed anew there, as what it is made of is
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
        """See that a value is there inside the loop."""
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
        raise _BlockedError(node, self.words.feedback(node, value))

    def _is_summand(self, node: int, value: int) -> bool:
        """Whether a scatter adds to a value that is itself a term."""
        one = self.graph.nodes[node]
        return traits_of(one.primitive).scatters_sum and one.operands[0] == value and value not in one.operands[1:]

    def _compute_before(self, values: Sequence[int], last: int | None = None) -> bool:
        """Compute values on the whole batch, before the loop, where they depend on the data alone.

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
        """Let each microbatch use its own of a value that is made of reductions over the batch."""
        if self.kinds.get(value) in PARTIAL:
            self.own.add(value)
            return
        i = self.producer[value]
        item = self.items[i]
        if self._has_batch(item) or item.region is not None:
            raise _BlockedError(node, self.words.feedback(node, value))
        for operand in item.operands:
            if operand not in self.early and self.kinds.get(operand) not in ("same", "zero", "own"):
                self._take_own(node, operand)
        self.sides["inside"].add(i)
        self.kinds.update(dict.fromkeys(item.results, "own"))

    def _bring(self, values: Sequence[int]) -> None:
        """Have values inside, whatever they are made of."""
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
        """A loop's carry may turn from zeros to terms in its first trip, so its body is looked at again."""
        equations = self.trace.equations
        carries = [n for n in range(*region.enter) if equations[n].piece == "enter_carry"]
        ends = [n for n in range(*region.exit) if equations[n].piece == "exit_carry"]
        for n in range(*region.enter):
            kind = self._kind(n, of)
            if equations[n].piece == "index" and kind not in ("same", "zero", "own"):
                raise _BlockedError(n, "what chooses a branch depends on the examples")
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
                raise _BlockedError(n, "how often a loop runs depends on the examples")
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
                raise _BlockedError(n, self.words.feedback(n, self._value(n, partial[0])))
            return "sum"
        if all(kind == "zero" for kind in kinds) and kinds and passes_zero(equation):
            return "zero"
        return "own" if "own" in kinds else "same"

    def _kind_with_batch(self, n: int, kinds: Sequence[Kind]) -> Kind:
        factor = self.places.factor(n, self.batch)
        if factor is None:
            raise _BlockedError(n, self.words.meeting(n))
        self.factors[n] = factor
        node = self.graph.nodes[n]
        reduction = self.places.reduction(n, factor)
        for i, kind in enumerate(kinds):
            begins = i == 0 and traits_of(node.primitive).in_place == "scatter" and reduction is not None
            if begins and kind != "zero" and kind != reduction:
                raise _BlockedError(n, "it adds to what is not zero, which would count once for each microbatch")
            if kind in PARTIAL and not begins:
                raise _BlockedError(n, self.words.feedback(n, self._value(n, i)))
        return reduction or "rows"  # type: ignore[return-value]

    def _value(self, n: int, index: int) -> int:
        atom = self.trace.equations[n].operands[index]
        assert isinstance(atom, int)
        return atom

    # -- sums of partial values --------------------------------------------------------------

    def _add_inside(self) -> None:
        """Add terms to one another before they are summed over the microbatches, where only their sum is read: one
        accumulator in place of two."""
        readers = Counter(value for item in self.items for value in item.operands)
        readers.update(output for output in self.graph.outputs if output is not None)

        def chain(value: int) -> list[int] | None:
            """Items from a term to a value that nothing else reads."""
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
        """Where the step is cut into layers, terms of two layers are added to one another after the loop, and so is
        what is added to that: in place of a term of each microbatch, their sum passes from one to the other."""
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
        """Whether a unit makes terms of terms."""
        item = self.items[i]
        is_sum = all(self.kinds.get(v) == "sum" for v in item.results)
        return is_sum and item.region is None and not self._has_batch(item)

    def _meets_layers(self, item: Unit) -> bool:
        """Whether a unit reads terms that two layers make."""
        producers = (self.items[self.producer[v]] for v in item.operands if self.kinds.get(v) == "sum")
        return len({self.trace.equations[producer.start].layer for producer in producers}) > 1

    # -- refusals ----------------------------------------------------------------------------

    def _check_outputs(self) -> None:
        """Refuse a step of which nothing would run inside."""
        if self.alone and self.sides["inside"]:
            return
        if not any(self._has_batch(self.items[i]) for i in self.sides["inside"]):
            paths = ", ".join(f"`{self.graph.input_paths[p]}`" for p in self.batch.inputs[:3])
            raise MicrobatchError(
                f"there is nothing to run in microbatches: no operation meets the leading dim of {paths}"
                f" ({self.batch.size} examples)"
            )


_REFUSED = "the batch cannot be split into microbatches"


def _batch_or_none(places: Places) -> Batch:
    try:
        return places.batch()
    except MicrobatchError:
        return Batch(1, (), {})


def _either_kind(node: int, kinds: Sequence[Kind]) -> Kind:
    """What a value is that may be one or the other."""
    found = set(kinds) - {"zero"}
    if not found:
        return "zero"
    if found == {"same", "own"}:
        return "own"
    if len(found) > 1 or ("zero" in kinds and found & (PARTIAL - {"sum"})):
        raise _BlockedError(
            node, "what a loop or a branch hands on is a sum over the batch in one case, and not in another"
        )
    return found.pop()
