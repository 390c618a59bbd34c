"""Reorder sums of cotangents so that each layer adds its own terms before it sends the sum.

In: a step whose equations know their layers. Out: the same step, in which a layer receives one sum from each other
layer instead of several terms. A program adds cotangents in its own order: if the terms of two layers alternate in a
sum, each term would be sent by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autopar.frontend.equations import Equation, Item, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.pipeline.cut.flow import Flow
from autopar.rules.table import traits_of
from autopar.transforms.microbatch.value_kinds import PARTIAL


def added_where_made(flow: Flow, trace: Trace) -> Trace:
    """The trace with such sums reordered; the same trace if there are none.

    Args:
        flow: flow of the step.
        trace: the same step with the layer of each equation.
    """
    return _Additions(flow, trace).run()


class _Additions:
    """Finds the sums; the one mutable object of this module."""

    def __init__(self, flow: Flow, trace: Trace) -> None:
        self.flow, self.trace = flow, trace
        self.outputs = frozenset(atom for atom in trace.outputs if isinstance(atom, int))
        self.adds = {v: i for i in flow.backward for v in self._added(i)}

    def run(self) -> Trace:
        written: dict[int, list[Item]] = {}  # last equation of a sum -> its replacement
        gone: set[int] = set()
        for value, i in self.adds.items():
            if self._goes_on(value, self._layer(i)):
                continue
            inner, terms = self._terms(value)
            layer, by_layer = self._layer(i), defaultdict[int | None, list[int]](list)
            for term in terms:
                producer = self.flow.producer.get(term)
                is_cotangent = producer in self.flow.backward
                by_layer[self._layer(producer) if producer is not None and is_cotangent else layer].append(term)
            own = by_layer.pop(layer, [])
            if all(len(one) == 1 for one in by_layer.values()) or (not own and len(by_layer) == 1):
                continue
            last = self.flow.units[i].start
            written[last] = list(self._written(self.trace.equations[last], own, by_layer, inner))
            gone.update(self.flow.units[self.adds[v]].start for v in inner)
        if not written:
            return self.trace
        builder = TraceBuilder(self.trace)
        items = items_of(self.trace.equations, self.trace.regions)
        for (n, _, _), item in zip(self.trace.walk(), items, strict=True):
            builder.add(*written.get(n, [] if n in gone else [item]))
        return builder.finish()

    def _added(self, i: int) -> Iterator[int]:
        unit = self.flow.units[i]
        equation = self.trace.equations[unit.start]
        is_add = unit.region is None and traits_of(equation.primitive).adds and len(set(equation.reads)) == 2
        if is_add and self.flow.split.kinds.get(unit.results[0]) not in PARTIAL:
            yield unit.results[0]

    def _layer(self, i: int) -> int | None:
        return self.trace.equations[self.flow.units[i].start].layer

    def _goes_on(self, value: int, layer: int | None) -> bool:
        """Whether a sum is only read by a longer sum of the same layer."""
        readers = self.flow.readers.get(value, [])
        return (
            len(readers) == 1
            and value not in self.outputs
            and any(v in self.adds for v in self.flow.units[readers[0]].results)
            and self._layer(readers[0]) == layer
        )

    def _terms(self, value: int) -> tuple[list[int], list[int]]:
        """The partial sums within a sum, itself first, and its terms."""
        layer, inner, terms = self._layer(self.adds[value]), [value], list[int]()
        for one in inner:
            for operand in self.trace.equations[self.flow.units[self.adds[one]].start].reads:
                part_of_it = operand in self.adds and self._layer(self.adds[operand]) == layer
                (inner if part_of_it and self._goes_on(operand, layer) else terms).append(operand)
        return inner, terms

    def _written(
        self, like: Equation, own: list[int], by_layer: dict[int | None, list[int]], inner: list[int]
    ) -> Iterator[Item]:
        """The same number of additions: first the terms of each other layer, in that layer, then all the rest."""
        free = inner[1:]  # value numbers for the new partial sums; the first is the whole sum's
        for layer, terms in by_layer.items():
            total, *others = terms
            for term in others:
                made = free.pop()
                yield replace(like, operands=(total, term), results=(made,), layer=layer)
                total = made
            own.append(total)
        total, *others = own
        assert others, "a sum of terms of one layer is that layer's"
        for n, term in enumerate(others):
            made = inner[0] if n == len(others) - 1 else free.pop()
            yield replace(like, operands=(total, term), results=(made,))
            total = made
