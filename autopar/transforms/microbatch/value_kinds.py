"""Determine what each value inside the loop over microbatches holds.

In: a trace, its batch dims, and the kinds of the values made so far. Out: `ValueKinds.of_unit`, the kinds of the values that
an equation, loop or branch makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from autopar.frontend.equations import LiteralOperand, Region
from autopar.frontend.trace import Trace
from autopar.ir.graph import Graph
from autopar.rules.table import traits_of
from autopar.transforms.microbatch.batch_dims import Batch, Factor, Places
from autopar.transforms.microbatch.errors import Refusals
from autopar.transforms.microbatch.linear_ops import adds_up, is_zero, passes_zero
from autopar.transforms.microbatch.units import Unit

#: The kind of a value inside the loop. `rows`: examples of the microbatch. `same`: equal in all microbatches. `zero`:
#: equal in all, and all zeros. `own`: computed per microbatch in place of the whole batch's value. The others are
#: partial, and name the reduction that combines the microbatches' terms.
Kind = Literal["rows", "same", "zero", "own", "sum", "max", "min", "prod", "and", "or"]
PARTIAL = frozenset(["sum", "max", "min", "prod", "and", "or"])


class BlockedError(Exception):
    """An equation cannot run inside the loop."""

    def __init__(self, node: int, why: str) -> None:
        super().__init__(why)
        self.node = node


class ValueKinds:
    """The kinds of a step's values.

    Attributes:
        made: the kind of each value made inside the loop.
        own: reductions over the batch that each microbatch replaces by its own.
        factors: for each equation inside the loop with a batch dim, the factor that is the batch.
        early: values known before the loop. zeros: those that are all zeros.
    """

    def __init__(self, trace: Trace, graph: Graph, places: Places, batch: Batch, refusals: Refusals) -> None:
        self.trace, self.graph, self.places, self.batch, self.refusals = trace, graph, places, batch, refusals
        self.made: dict[int, Kind] = {}
        self.own: set[int] = set()
        self.factors: dict[int, Factor] = {}
        self.early = {*graph.inputs, *graph.constants}
        self.zeros: set[int] = set()

    def has_batch(self, unit: Unit) -> bool:
        """Whether a value that a unit reads or makes has a batch dim."""
        nodes = self.graph.nodes[unit.start : unit.stop]
        return any(self.batch.places.get(v) for node in nodes for v in (*node.operands, *node.results) if v is not None)

    def is_complete(self, value: int) -> bool:
        """Whether an equation inside the loop may read a value: it is no term of a reduction over the batch."""
        return value in self.early or self.made.get(value) in ("rows", "same", "zero", "own")

    def is_shared(self, value: int) -> bool:
        """Whether a value is equal in all microbatches."""
        return value in self.early or self.made.get(value) in ("same", "zero")

    def add_early(self, unit: Unit) -> None:
        """Record that a unit runs before the loop."""
        self.early.update(unit.results)
        if unit.region is None and not self.has_batch(unit) and self._kind(unit.start, self._early_kind) == "zero":
            self.zeros.update(unit.results)

    def _early_kind(self, value: int) -> Kind:
        return "zero" if value in self.zeros else "same"

    def of_unit(self, unit: Unit) -> dict[int, Kind]:
        """The kinds of the values that a unit makes.

        Raises:
            BlockedError: it cannot run inside the loop.
        """
        found: dict[int, Kind] = {}

        def of(value: int) -> Kind:
            if value in found:
                return found[value]
            if value in self.batch.places:
                return "rows"
            if value in self.early:
                return self._early_kind(value)
            return "own" if value in self.own else self.made[value]

        self._span(unit.start, unit.stop, found, of)
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
                raise BlockedError(n, "the choice of a branch depends on the examples")
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
                raise BlockedError(n, "the number of iterations of a loop depends on the examples")
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
                raise BlockedError(n, self.refusals.feedback(n, self._value(n, partial[0])))
            return "sum"
        if all(kind == "zero" for kind in kinds) and kinds and passes_zero(equation):
            return "zero"
        return "own" if "own" in kinds else "same"

    def _kind_with_batch(self, n: int, kinds: Sequence[Kind]) -> Kind:
        factor = self.places.factor(n, self.batch)
        if factor is None:
            raise BlockedError(n, self.refusals.meeting(n))
        self.factors[n] = factor
        node = self.graph.nodes[n]
        reduction = self.places.reduction(n, factor)
        for i, kind in enumerate(kinds):
            begins = i == 0 and traits_of(node.primitive).in_place == "scatter" and reduction is not None
            if begins and kind != "zero" and kind != reduction:
                raise BlockedError(n, "it adds to a value that is not zero, which would count once per microbatch")
            if kind in PARTIAL and not begins:
                raise BlockedError(n, self.refusals.feedback(n, self._value(n, i)))
        return reduction or "rows"  # type: ignore[return-value]

    def _value(self, n: int, index: int) -> int:
        atom = self.trace.equations[n].operands[index]
        assert isinstance(atom, int)
        return atom


def _either_kind(node: int, kinds: Sequence[Kind]) -> Kind:
    """The kind of a value that has one of several kinds, as the result of a branch has."""
    found = set(kinds) - {"zero"}
    if not found:
        return "zero"
    if found == {"same", "own"}:
        return "own"
    if len(found) > 1 or ("zero" in kinds and found & (PARTIAL - {"sum"})):
        raise BlockedError(
            node, "a loop or a branch returns a sum over the batch in one case, and something else in another"
        )
    return found.pop()
