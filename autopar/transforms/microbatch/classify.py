"""Decide which equations run once per step and which run once per microbatch.

In: a graph, its loops and branches, and its batch dims. Out: `Split`. Each equation runs before the loop over
microbatches, inside it, or after it. Inside the loop, a value holds a microbatch's examples, or is the same in all
microbatches, or is one term of a reduction over the batch. Such a term is a *partial* value: it is combined over the
microbatches. An equation that reads a completed reduction over the batch therefore runs after the loop. If such an
equation also has a batch dim, the batch feeds back. Then there are two cases. If the reduction depends on data alone,
it is computed before the loop, on the whole batch. Otherwise the step is refused, and the error names the equation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from autopar.errors import MicrobatchError
from autopar.frontend.trace import Trace
from autopar.ir.graph import Graph
from autopar.rules.table import traits_of
from autopar.transforms.microbatch import partial_sums
from autopar.transforms.microbatch.batch_dims import Batch, Factor, Places
from autopar.transforms.microbatch.errors import Refusals
from autopar.transforms.microbatch.units import Placement, Unit, units_of
from autopar.transforms.microbatch.value_kinds import PARTIAL, BlockedError, Kind, ValueKinds

_REFUSED = "the batch cannot be split into microbatches"


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
            changes what the step computes: the mean, over the microbatches, of what it would for a batch of copies of each.
        alone: whether there is only one microbatch. Then equations may read any value and nothing is refused: all
            equations traced as forward or backward run inside the loop.

    Raises:
        MicrobatchError: the batch feeds back, or examples are combined; the error names the equation.
    """
    places = places or Places(graph)
    own = frozenset[int]()
    # What reads a reduction before examples do follows it too: only the next pass knows that the reduction is their own.
    while True:
        split = _Classifier(trace, graph, places, own_statistics, alone, own).run()
        if alone or split.own <= own:
            return split
        own |= split.own


class _Classifier:
    """Places the units of a step in one pass; the one mutable object of this module.

    Args:
        known_own: reductions that examples read according to earlier passes.
    """

    def __init__(
        self,
        trace: Trace,
        graph: Graph,
        places: Places,
        own_statistics: bool,
        alone: bool,
        known_own: frozenset[int],
    ) -> None:
        self.trace, self.graph, self.own_statistics, self.alone = trace, graph, own_statistics, alone
        self.known_own = known_own
        self.batch = _batch_or_none(places) if alone else places.batch()
        self.refusals = Refusals(graph, places, self.batch, own_statistics)
        self.kinds = ValueKinds(trace, graph, places, self.batch, self.refusals)
        self.placed = Placement(units_of(trace, graph))
        self.of_state = {graph.inputs[position] for position, _ in graph.carried}

    def run(self) -> Split:
        placed, kinds = self.placed, self.kinds
        for i, unit in enumerate(placed.units):
            self._place(i, unit)
        partial_sums.add_inside(placed, kinds)
        partial_sums.add_between_layers_after(placed, kinds)
        self._check_outputs()
        before, inside, after = map(placed.equations, (placed.before, placed.inside, placed.after))
        return Split(self.batch, before, inside, after, kinds.made, kinds.factors, frozenset(kinds.own))

    def _place(self, i: int, unit: Unit) -> None:
        if any(v in self.of_state for v in unit.operands):
            self.of_state.update(unit.results)
        if not self.kinds.has_batch(unit):
            self._place_without_batch(i, unit)
            return
        made = dict(self.kinds.made)
        try:
            for n, value in self._reads(unit):
                self._make_available(n, value)
            found = self.kinds.of_unit(unit)
        except BlockedError as blocked:
            self.kinds.made = made
            if self.alone:
                self._bring(unit.results)
            elif not self._compute_before(unit.results, i):
                raise MicrobatchError(f"{_REFUSED}: {self.refusals.of(blocked.node)}: {blocked}") from None
            return
        self.placed.inside.add(i)
        self.kinds.made.update(found)

    def _place_without_batch(self, i: int, unit: Unit) -> None:
        is_update = self.trace.equations[unit.start].phase == "update"
        if self.alone and not self.batch.inputs and not is_update:  # a batch of one example has no dim to follow
            self._bring(unit.results)
        elif all(v in self.kinds.early for v in unit.operands):
            self._put_before(i)
        elif all(map(self.kinds.is_shared, unit.operands)):
            self.placed.inside.add(i)  # computed in each microbatch, as its operands are
            self.kinds.made.update(self.kinds.of_unit(unit))
        elif self.alone and not is_update:
            self._bring(unit.results)
        elif not self._follow_own(i, unit):
            self.placed.after.add(i)

    def _follow_own(self, i: int, unit: Unit) -> bool:
        """Run a unit inside the loop if it reads a value computed from a microbatch's own reductions, such as a variance: a
        product of two of them is another one for the whole batch. Optimizers run once, on the mean over the microbatches.
        Returns whether it was placed."""
        kinds, placed = self.kinds, self.placed
        reads_own = any(kinds.made.get(v) == "own" or v in self.known_own for v in unit.operands)
        if not self.own_statistics or not reads_own or self.trace.equations[unit.start].phase == "update":
            return False
        if unit.region is not None or not self._are_floats(unit) or self.graph.nodes[unit.start].effect:
            return False
        before = dict(kinds.made), set(kinds.own), set(placed.inside), set(placed.after)
        try:
            for operand in unit.operands:
                if not kinds.is_shared(operand) and kinds.made.get(operand) != "own":
                    self._take_own(unit.start, operand)
        except BlockedError:
            kinds.made, kinds.own, placed.inside, placed.after = before
            return False
        placed.inside.add(i)
        kinds.made.update(dict.fromkeys(unit.results, "own"))
        return True

    def _are_floats(self, unit: Unit) -> bool:
        """Whether the mean of what a unit makes over the microbatches is one of its kind."""
        return all(jnp.issubdtype(self.trace.avals[v].dtype, jnp.floating) for v in unit.results)

    def _put_before(self, i: int) -> None:
        self.placed.before.add(i)
        self.kinds.add_early(self.placed.units[i])

    def _reads(self, unit: Unit) -> Iterator[tuple[int, int]]:
        nodes = range(unit.start, unit.stop) if unit.region is None else range(*unit.region.enter)
        return ((n, v) for n in nodes for v in self.graph.nodes[n].operands if v is not None)

    def _make_available(self, node: int, value: int) -> None:
        """Make a value available to a node inside the loop."""
        kinds = self.kinds
        if kinds.is_complete(value) or value in kinds.own:
            return
        if (self._is_summand(node, value) and kinds.made.get(value) == "sum") or self._compute_before([value]):
            return
        if self.alone:
            self._bring([value])
        elif self.own_statistics and value not in self.batch.places:
            self._take_own(node, value)
        else:
            raise BlockedError(node, self.refusals.feedback(node, value))

    def _is_summand(self, node: int, value: int) -> bool:
        """Whether a node is a scatter that adds to a partial sum."""
        one = self.graph.nodes[node]
        return traits_of(one.primitive).scatters_sum and one.operands[0] == value and value not in one.operands[1:]

    def _compute_before(self, values: Sequence[int], last: int | None = None) -> bool:
        """Compute values before the loop, on the whole batch; False if they depend on more than data.

        Args:
            last: a unit that has not been placed yet.
        """
        waiting, found = list(values), set[int]()
        while waiting:
            value = waiting.pop()
            if value in self.kinds.early:
                continue
            if value in self.of_state or value not in self.placed.producers:
                return False
            i = self.placed.producers[value]
            unit = self.placed.units[i]
            if any(self.graph.nodes[n].effect for n in range(unit.start, unit.stop)):
                return False
            if i not in found:
                found.add(i)
                waiting += unit.operands
        for i in sorted(found):
            if i != last:
                self.placed.after.discard(i)
            self._put_before(i)
        return True

    def _take_own(self, node: int, value: int) -> None:
        """Let each microbatch use its own version of a value computed from reductions over the batch."""
        kinds = self.kinds
        if kinds.made.get(value) in PARTIAL:
            kinds.own.add(value)
            return
        i = self.placed.producers[value]
        unit = self.placed.units[i]
        if kinds.has_batch(unit) or unit.region is not None:
            raise BlockedError(node, self.refusals.feedback(node, value))
        for operand in unit.operands:
            if not kinds.is_shared(operand) and kinds.made.get(operand) != "own":
                self._take_own(node, operand)
        if self._are_floats(unit):
            self.placed.move_inside(i)
        else:
            self.placed.inside.add(i)
        kinds.made.update(dict.fromkeys(unit.results, "own"))

    def _bring(self, values: Sequence[int]) -> None:
        """Compute values inside the loop, whatever their operands are."""
        for value in values:
            if self.kinds.is_complete(value):
                continue
            if self.kinds.made.get(value) in PARTIAL:
                self.kinds.own.add(value)
                continue
            i = self.placed.producers[value]
            unit = self.placed.units[i]
            self._bring(unit.operands)
            self.placed.move_inside(i)
            self.kinds.made.update(dict.fromkeys(unit.results, "own"))

    def _check_outputs(self) -> None:
        """Refuse a step with nothing to run inside the loop."""
        if self.alone and self.placed.inside:
            return
        if not any(self.kinds.has_batch(self.placed.units[i]) for i in self.placed.inside):
            paths = ", ".join(f"`{self.graph.input_paths[p]}`" for p in self.batch.inputs[:3])
            of_data = f"of {paths} ({self.batch.size} examples)" if paths else "of any data"
            raise MicrobatchError(
                f"there is nothing to run in microbatches: no operation runs over the leading dim {of_data}"
            )


def _batch_or_none(places: Places) -> Batch:
    try:
        return places.batch()
    except MicrobatchError:
        return Batch(1, (), {})
