"""Assign each equation of a step to a layer.

In: a step's flow, and the layer of each unit of its forward pass. Out: the layer of each unit. A backward unit belongs
to the layer whose forward values it reads, so that only cotangents pass between layers. The layers of all its
cotangents must depend on it. Layers need not form a chain: the cotangents of parallel branches meet in the layer where
the branches fork. A unit outside the loop over microbatches belongs to the layer of most of its operands, by bytes: an
optimizer's update belongs to the layer of the gradient. Module names play no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.frontend.trace import Trace
from autopar.pipeline.cut.flow import Flow
from autopar.pipeline.cut.recompute_aliases import aliases_of
from autopar.transforms.microbatch.value_kinds import PARTIAL


@dataclass(frozen=True, slots=True)
class Homes:
    """The layer of each unit and of each value that enters the loop.

    Args:
        layers: layer of each unit; None for a unit that each layer runs for itself.
        lies: layer of each value that no unit makes.
        is_chain: whether each layer depends, directly or not, on all layers before it.
        aliases: aliases of recomputed values (`aliases_of`).
    """

    layers: tuple[int | None, ...]
    lies: dict[int, int]
    is_chain: bool
    aliases: dict[int, int]


def homes_of(flow: Flow, layer_of: Sequence[int]) -> Homes:
    """Find the layer of each unit.

    Args:
        layer_of: layer of each unit in `Flow.forward`. A layer reads no layer with a higher number.
    """
    return _Homes(flow, layer_of).run()


def labelled(flow: Flow, homes: Homes) -> Trace:
    """The trace with the layer of each equation.

    A layer that reads a value recomputed in another layer reads its alias instead, which it received in the forward
    pass. A unit that reads what the backward pass of another layer makes is of the backward pass, however it was traced:
    in its stage, that value is an input like those from forward passes.
    """
    equations = list(flow.trace.equations)
    layer_of = dict[int, int | None]()
    for unit, layer in zip(flow.units, homes.layers, strict=True):
        layer_of.update(dict.fromkeys(unit.results, layer))
    cotangents = {v for i in flow.backward - flow.free for v in flow.units[i].results}
    for unit, layer in zip(flow.units, homes.layers, strict=True):
        others = {v for v in unit.operands if layer_of.get(v, layer) != layer}
        elsewhere = {v: t for v in others if (t := homes.aliases.get(v)) is not None}
        is_backward = unit.start in flow.split.inside and not cotangents.isdisjoint(others - elsewhere.keys())
        for n in range(unit.start, unit.stop):
            phase = "backward" if is_backward else equations[n].phase
            equations[n] = equations[n].reading(elsewhere, layer=layer, phase=phase)
    return replace(flow.trace, equations=tuple(equations))


class _Homes:
    """Finds the layers; the one mutable object of this module."""

    def __init__(self, flow: Flow, layer_of: Sequence[int]) -> None:
        self.flow = flow
        self.layer = dict(zip(flow.forward, layer_of, strict=True))  # unit -> layer
        self.last = max(layer_of, default=0)
        #: For each layer, the layers it depends on, and itself, one bit each.
        self.sources = self._sources()
        self.is_chain = all(found == (2 << layer) - 1 for layer, found in enumerate(self.sources))
        #: Value from outside the loop -> layer.
        self.lies: dict[int, int] = {}
        self.present = self._present()
        self.aliases = aliases_of(flow)

    def run(self) -> Homes:
        flow = self.flow
        for i in sorted(flow.backward - flow.free):
            self.layer[i] = self._backward(i)
        self._settle_undecided()
        self._pull_down()
        self._outside()
        layers = tuple(None if i in flow.free else self.layer.get(i, 0) for i in range(len(flow.units)))
        return Homes(layers, self.lies, self.is_chain, self.aliases)

    def _sources(self) -> list[int]:
        flow = self.flow
        read: dict[int, set[int]] = defaultdict(set)
        for i in flow.forward:
            for value in flow.units[i].operands:
                producer = flow.producer.get(value)
                if producer in self.layer and self.layer[producer] != self.layer[i]:
                    assert self.layer[producer] < self.layer[i], "a layer reads one with a higher number"
                    read[self.layer[i]].add(self.layer[producer])
        found: list[int] = []
        for layer in range(self.last + 1):
            mask = 1 << layer
            for one in read[layer]:
                mask |= found[one]
            found.append(mask)
        return found

    # -- the loop over microbatches ----------------------------------------------------------

    def _present(self) -> dict[int, set[int]]:
        """For each value that is not a cotangent, the layers that produce or read it in the forward pass."""
        present: dict[int, set[int]] = defaultdict(set)
        for i in self.flow.forward:
            unit = self.flow.units[i]
            for value in (*unit.operands, *unit.results):
                if value not in self.flow.free_values:
                    present[value].add(self.layer[i])
        # A layer that has a value made before the loop has the operands of that value too.
        for i in range(len(self.flow.units) - 1, -1, -1):
            if i in self.flow.inside:
                continue
            unit = self.flow.units[i]
            found = set[int]().union(*(present.get(v, set()) for v in unit.results))
            for value in unit.operands:
                if found and value not in self.flow.free_values:
                    present[value] |= found
        # A value that only the backward pass reads, such as a transposed kernel, is where its operands are.
        for i, unit in enumerate(self.flow.units):
            if unit.start not in self.flow.split.before or i in self.flow.free:
                continue
            made_of = [present[v] for v in unit.operands if present.get(v)]
            for value in unit.results if made_of else ():
                if not present.get(value):
                    present[value] |= set.intersection(*made_of) or set.union(*made_of)
        return present

    def _backward(self, i: int) -> int:
        flow, unit = self.flow, self.flow.units[i]
        again = {self.layer.get(flow.producer.get(self.aliases[v], -1)) for v in unit.results if v in self.aliases}
        if len(again) == 1 and None not in again:
            return max(layer for layer in again if layer is not None)
        read = dict.fromkeys(self.aliases.get(v, v) for v in unit.operands)
        known = [(v, flow.producer.get(v)) for v in read if v not in flow.free_values]
        before = {self.layer[producer] for _, producer in known if producer in flow.backward and producer in self.layer}
        may = (2 << self.last) - 1
        for layer in before:
            may &= self.sources[layer]
        most = may.bit_length() - 1 if may else min(before, default=self.last)
        held = [(v, self.present[v]) for v, producer in known if producer not in flow.backward and self.present.get(v)]
        if not held:
            are_terms = any(flow.split.kinds.get(v) in PARTIAL for v in unit.operands)
            of_parameter = set[int]() if are_terms else self._renews(unit.results)
            return max(_among(of_parameter, may), default=most)
        common = _among(set.intersection(*(where for _, where in held)), may)
        if common:
            # A term of a gradient where the parameter is: else the gradient would pass between layers after the loop.
            return max(self._renews(unit.results).intersection(common) or common)
        # In a chain, the values of such a layer pass the cut before it, or are all made before the cut after it.
        between = range(max(min(where) for _, where in held), min(max(where) for _, where in held) + 1)
        between = between if self.is_chain else range(0)
        largest = max(held, key=lambda one: flow.graph.values[one[0]].num_bytes)[1]
        return max(_among(between, may) or _among(largest, may), default=most)

    def _renews(self, terms: Sequence[int]) -> set[int]:
        """The layers of the parameter that terms of a gradient update.

        That is the first parameter that is combined with values of the gradient's size after the loop.
        """
        flow = self.flow
        if not any(flow.split.kinds.get(v) in PARTIAL for v in terms):
            return set()
        size = max(flow.graph.values[v].size for v in terms)
        waiting, seen = list(terms), set(terms)
        for value in waiting:
            for reader in flow.readers.get(value, ()):
                unit = flow.units[reader]
                for other in unit.operands:
                    if other not in flow.producer and flow.graph.values[other].size == size and self.present.get(other):
                        return self.present[other]
                new = [v for v in unit.results if flow.graph.values[v].size == size and v not in seen]
                seen.update(new)
                waiting += new
        return set()

    def _settle_undecided(self) -> None:
        """Move backward units that read no cotangent, such as recomputed ones, to the layer that reads them."""
        flow = self.flow
        for i in sorted(flow.backward - flow.free, reverse=True):
            unit = flow.units[i]
            if self.aliases or any(flow.producer.get(v) in flow.backward - flow.free for v in unit.operands):
                continue
            readers = [self.layer[r] for v in unit.results for r in flow.readers.get(v, ()) if r in self.layer]
            held = [self.present[v] for v in unit.operands if self.present.get(v)]
            if readers and (not held or max(readers) in set.intersection(*held)):
                self.layer[i] = max(readers)

    def _pull_down(self) -> None:
        """Move a backward unit that reads only cotangents to the lower layer that reads its results, unless more bytes
        then pass between layers. Operands that pass there anyway do not count."""
        flow = self.flow
        for i in sorted(flow.backward - flow.free, reverse=True):
            unit = flow.units[i]
            own = {v for v in unit.operands if v not in flow.free_values}
            if any(flow.producer.get(v) not in flow.backward for v in own):
                continue
            below = [self.layer[r] for v in unit.results for r in flow.readers.get(v, ()) if r in self.layer]
            if not below or max(below) >= self.layer[i]:
                continue
            to = max(below)
            if not _has(self.sources[self.layer[i]], to) or not all(_has(self.sources[to], one) for one in below):
                continue
            readers = ((v, self.layer.get(r)) for v in own for r in flow.readers[v] if r != i)
            anyway = {v for v, layer in readers if layer is not None and _has(self.sources[to], layer)}
            terms = any(flow.split.kinds.get(v) in PARTIAL for v in unit.results)  # a total passes once per step
            if flow.num_bytes(iter(own - anyway)) <= (0 if terms else flow.num_bytes(iter(unit.results))):
                self.layer[i] = to

    # -- around it ---------------------------------------------------------------------------

    def _outside(self) -> None:
        """Assign the units outside the loop, in passes forward and backward until none can be added."""
        flow = self.flow
        for value, where in self.present.items():
            if value not in flow.producer:
                self.lies[value] = min(where)
        outside = [i for i in range(len(flow.units)) if i not in flow.inside and i not in flow.free]
        carried = [(flow.graph.inputs[a], flow.graph.outputs[b]) for a, b in flow.graph.carried]
        found = -1
        while found != len(self.layer) + len(self.lies):
            found = len(self.layer) + len(self.lies)
            for i in outside:
                self._try(i, flow.units[i].operands)
            for start, end in carried:
                if end is not None and start not in self.lies and self._of(end) is not None:
                    self.lies[start] = self._of(end) or 0
            for i in reversed(outside):
                self._try_readers(i)

    def _of(self, value: int) -> int | None:
        return self.lies.get(value, self.layer.get(self.flow.producer.get(value, -1)))

    def _try(self, i: int, values: Iterable[int]) -> None:
        """Assign a unit to the layer that has most of its operands by bytes; the operands without a layer follow it."""
        if i not in self.layer:
            weight: dict[int, float] = defaultdict(float)
            for value in values:
                layer = self._of(value)
                if layer is not None and value not in self.flow.free_values:
                    weight[layer] += self.flow.graph.values[value].num_bytes
            before = [min(where) for v in self.flow.units[i].results if (where := self.present.get(v))]
            if before:  # the loop reads its results
                self.layer[i] = min(before)
            elif weight:
                self.layer[i] = max(weight, key=lambda layer: (weight[layer], -layer))
        if i in self.layer:
            for value in self.flow.units[i].operands:
                if self._of(value) is None and value not in self.flow.producer and value not in self.flow.free_values:
                    self.lies[value] = self.layer[i]

    def _try_readers(self, i: int) -> None:
        if i in self.layer:
            return
        flow = self.flow
        readers = [self.layer[r] for v in flow.units[i].results for r in flow.readers.get(v, ()) if r in self.layer]
        if readers:
            self.layer[i] = min(readers)
            self._try(i, ())


def _has(layers: int, layer: int) -> bool:
    """Whether a set of layers, one bit each, has a layer."""
    return bool(layers >> layer & 1)


def _among(these: Iterable[int], layers: int) -> list[int]:
    """Those of some layers that are in a set of layers."""
    return [layer for layer in these if _has(layers, layer)]
