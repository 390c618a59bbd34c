"""Divide the cost of a planned step among its layers, so that any run of them has a price.

In: the figures of all layers planned as one stage on a submesh. Out: `LayerShares`, with the `StageCost` of any run.

One plan prices every run of layers on a submesh. The price of a run is a sum, so a cut costs what it changes: layers
that do not repeat need not be planned in every combination. Each kernel belongs to the layer of its equation, and time in
which kernels wait for a collective to the layer of the next kernel. A residual belongs to the layer that makes it, and
to each other layer whose backward pass reads it, if that one is in another run. A cut through a kernel adds the time to
write the values that the kernel kept to itself, and to read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autopar.ir.device_program import Op
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.estimates import PHASES, StageFigures
from autopar.pipeline.search.residuals import Crossing


@dataclass(frozen=True, slots=True)
class _Residuals:
    """The residuals at one price of stashed bytes.

    Args:
        written_s, recompute_s, made: per layer, seconds to write residuals, seconds of rematerialization in its backward
            pass, and bytes of the residuals that it makes; cumulative, float[layers + 1].
        kept, passed: per layer, bytes that its weight part reads of the forward pass, and of the input part; cumulative.
        made_by, read_by, read_before: per residual and other layer whose backward pass reads it, the layer that makes it,
            that layer, and the last layer before it that reads the residual.
        sizes: bytes of these residuals.
        recompute_bytes: most bytes that are rematerialized together.
    """

    written_s: np.ndarray
    recompute_s: np.ndarray
    made: np.ndarray
    kept: np.ndarray
    passed: np.ndarray
    made_by: np.ndarray
    read_by: np.ndarray
    read_before: np.ndarray
    sizes: np.ndarray
    recompute_bytes: float

    def received(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Bytes of residuals that runs read and that others make, by the run's first and last part, float[parts, parts].
        Each counts where the run's first layer that reads it is."""
        known = np.maximum(self.made_by, self.read_before)
        least = np.searchsorted(starts, known, side="right")  # the first start after
        beyond = np.searchsorted(starts, self.read_by, side="right")
        part = np.searchsorted(ends, self.read_by, side="right")
        counts = (least < beyond) & (part < len(ends))
        table = np.zeros((len(starts) + 1, len(ends)))
        np.add.at(table, (least[counts], part[counts]), self.sizes[counts])
        np.add.at(table, (beyond[counts], part[counts]), -self.sizes[counts])
        return np.maximum(table.cumsum(axis=0)[:-1].cumsum(axis=1), 0.0)


class LayerShares:
    """The shares of each layer in the cost of all.

    Args:
        figures: figures of the planned step; its equations know their layers.
        num_layers: number of layers.
    """

    def __init__(self, figures: StageFigures, num_layers: int) -> None:
        self.figures, self.candidate, self.num_layers = figures, figures.candidate, num_layers
        self._equations = figures.layout.trace.equations
        self._layers: dict[int, int] = {}
        self._seconds = {phase: self._summed(self._phase_s(phase)) for phase in PHASES}
        self._state = self._summed(self._state_bytes())
        accumulated = [(self._layer(node), num_bytes) for node, num_bytes in figures.accumulated.items()]
        self._accumulated = self._summed_of(accumulated)
        self._num_accumulated = self._summed_of([(layer, 1.0) for layer, _ in accumulated])
        self._border_s = self._unstored_bytes() / self.candidate.formulation.profile.memory_bytes_per_s
        self._residuals: dict[float, _Residuals] = {}
        whole = figures.cost(figures.crossings.without_recompute())
        self._working_bytes = whole.working_bytes

    def seconds(self) -> np.ndarray:
        """Seconds of each layer's forward and backward pass for one microbatch, float[layers]."""
        return np.diff(sum(self._seconds[phase] for phase in PHASES[:3]))

    def cost(self, first: int, last: int, stash_price: float) -> StageCost:
        """The cost of layers `first` to `last`.

        Args:
            stash_price: as in `Crossings.at`.
        """
        table = self.table((first, last + 1), stash_price)
        return StageCost(**{field.name: float(getattr(table, field.name)[0, 0]) for field in fields(StageCost)})

    def table(self, borders: Sequence[int], stash_price: float) -> StageCost:
        """The costs of all runs of layers between borders, as arrays over a run's first and last part,
        float[parts, parts]; entries whose last part is before the first have no meaning.

        Args:
            borders: the first layer of each part, and the end of the last; int[parts + 1].
        """
        held = self._held(stash_price)
        starts, ends = np.array(borders[:-1]), np.array(borders[1:])

        def of(cumulative: np.ndarray) -> np.ndarray:
            return cumulative[ends] - cumulative[starts][:, None]

        flight_bytes, kept_bytes, passed_bytes = (
            of(held.made) + held.received(starts, ends),
            of(held.kept),
            of(held.passed),
        )
        border_s = self._border_s[starts][:, None] + self._border_s[ends]
        written_s, waited_s, weight_s = of(held.written_s), of(self._seconds["backward"]), of(self._seconds["weight"])
        if starts[0] == 0 and self.figures.splits_backward:  # no stage waits for the first one
            weight_s[0] += waited_s[0]
            waited_s[0] = 0.0
            kept_bytes[0], passed_bytes[0] = flight_bytes[0], 0.0
        tables: dict[str, Any] = {
            "forward_s": of(self._seconds["forward"]) + written_s + border_s,
            "backward_s": waited_s + written_s + of(held.recompute_s) + border_s,
            "weight_s": weight_s,
            "update_s": of(self._seconds["update"]),
            "state_bytes": of(self._state),
            "flight_bytes": flight_bytes,
            "kept_bytes": np.minimum(kept_bytes, flight_bytes),
            "passed_bytes": passed_bytes,
            "working_bytes": np.full(written_s.shape, self._working_bytes + held.recompute_bytes),
            "accumulated_bytes": of(self._accumulated),
            "num_accumulated": of(self._num_accumulated),
        }
        return StageCost(**tables)

    # -- layers --------------------------------------------------------------------------------

    def _layer(self, n: int) -> int:
        """The layer of an equation; for one that each layer runs for itself, the first layer that reads it."""
        found = self._layers.get(n)
        if found is None:
            self._layers[n] = 0  # equations that read each other through a loop
            found = self._layers[n] = self._found(n)
        return found

    def _found(self, n: int) -> int:
        own = self._equations[n].layer
        if own is not None:
            return own
        graph = self.candidate.formulation.graph
        users = [user for value in graph.nodes[n].results for user, _ in graph.users.get(value, ())]
        if users:
            return min(map(self._layer, users))
        made_of = [graph.producers.get(v) for v in graph.nodes[n].operands if v is not None]
        return max((self._layer(m) for m in made_of if m is not None), default=0)

    def _layer_of_value(self, value: int) -> int:
        """The layer of what makes a value; for an input, the first layer that reads it."""
        graph = self.candidate.formulation.graph
        producer = graph.producers.get(value)
        if producer is not None:
            return self._layer(producer)
        return min((self._layer(user) for user, _ in graph.users.get(value, ())), default=0)

    def _summed(self, shares: Mapping[int, float]) -> np.ndarray:
        per_layer = np.zeros(self.num_layers + 1)
        for layer, share in shares.items():
            per_layer[layer + 1] += share
        return np.cumsum(per_layer)

    def _summed_of(self, shares: Iterable[tuple[int, float]]) -> np.ndarray:
        of_layer: dict[int, float] = defaultdict(float)
        for layer, share in shares:
            of_layer[layer] += share
        return self._summed(of_layer)

    # -- seconds -------------------------------------------------------------------------------

    def _phase_s(self, phase: str) -> dict[int, float]:
        """Seconds of a phase by layer."""
        timeline = self.figures.timeline(phase)
        found: dict[int, float] = defaultdict(float)
        if timeline is None or not timeline.ran:
            return found
        until = 0.0
        for one in sorted(timeline.ran, key=lambda one: one.end_s):
            if one.op.kind != "collective" and one.end_s > until:
                found[self._layer_of_op(one.op)] += one.end_s - until
                until = one.end_s
        found[self._layer_of_op(timeline.ran[-1].op)] += max(0.0, timeline.step_time_s - until)
        return found

    def _layer_of_op(self, op: Op) -> int:
        return self._layer(op.node) if op.node >= 0 else 0

    # -- bytes ---------------------------------------------------------------------------------

    def _state_bytes(self) -> dict[int, float]:
        """Bytes that are held all the time, by layer."""
        found: dict[int, float] = defaultdict(float)
        parts, layout = self.candidate.parts, self.figures.layout
        for tensor, value in zip(parts.inputs, layout.trace.inputs, strict=True):
            if layout.inputs[value].kind not in ("inside", "buffer"):
                found[self._layer_of_value(value)] += tensor.num_bytes
        for at, size in self.figures.held_by_node():
            found[self._layer(at)] += size
        missing = self.figures.state_bytes - sum(found.values())
        for layer in list(found) or [0]:  # outputs that are no state, in proportion
            found[layer] += missing * (found[layer] / total if (total := sum(found.values())) else 1.0)
        return found

    def _unstored_bytes(self) -> np.ndarray:
        """Bytes of the forward values that pass each border between layers inside a kernel, float[layers + 1]. As many
        bytes of gradients pass back."""
        graph, crossings = self.candidate.formulation.graph, self.figures.crossings
        passing = np.zeros(self.num_layers + 2)
        for n, layer in crossings.layer_of.items():
            if layer is None:
                continue
            for value in (v for v in graph.nodes[n].results if v not in crossings.costs.stored):
                readers = (crossings.layer_of.get(user) for user, _ in graph.users.get(value, ()))
                last = max((reader for reader in readers if reader is not None), default=layer)
                size = crossings.num_bytes([value]) if last > layer else 0.0
                passing[layer + 1] += size
                passing[last + 1] -= size
        return np.cumsum(passing)[:-1]

    def _held(self, stash_price: float) -> _Residuals:
        if stash_price not in self._residuals:
            self._residuals[stash_price] = self._residuals_of(self.figures.crossings.at(stash_price))
        return self._residuals[stash_price]

    def _read_last(self, crossing: Crossing) -> tuple[dict[int, float], dict[int, float]]:
        """Bytes that the weight part of each layer reads of the forward pass, and of the input part."""
        figures, crossings = self.figures, self.figures.crossings
        passed_on, kept_of = figures.passed_on(crossing), crossing.passing
        kept: dict[int, float] = defaultdict(float)
        passed: dict[int, float] = defaultdict(float)
        seen: set[tuple[int, int]] = set()
        for unit in figures.units("weight"):
            layer = self._layer(unit.start)
            for value in unit.operands:
                if (layer, value) not in seen:
                    seen.add((layer, value))
                    kept[layer] += crossings.num_bytes([value]) if value in kept_of else 0.0
                    passed[layer] += crossings.num_bytes([value]) if value in passed_on else 0.0
        return kept, passed

    def _residuals_of(self, crossing: Crossing) -> _Residuals:
        crossings = self.figures.crossings
        kept, passed = self._read_last(crossing)
        made: dict[int, float] = defaultdict(float)
        written: dict[int, float] = defaultdict(float)
        recompute: dict[int, float] = defaultdict(float)
        rows: list[tuple[int, int, int, float]] = []
        for value, readers in crossing.read_by.items():
            layer, size = self._layer_of_value(value), crossings.num_bytes([value])
            if value in crossing.passing:
                made[layer] += size
                written[layer] += crossings.fused_bytes([value]) / crossings.profile.memory_bytes_per_s
            before = -1
            for reader in sorted(readers - {layer}):
                rows.append((layer, reader, before, size))
                before = reader
        for node, seconds in crossing.recomputed_s.items():
            recompute[self._layer(node)] += seconds
        table = np.array(rows, float).reshape(len(rows), 4)
        made_by, read_by, read_before = table[:, :3].astype(int).T
        return _Residuals(
            self._summed(written),
            self._summed(recompute),
            self._summed(made),
            self._summed(kept),
            self._summed(passed),
            made_by,
            read_by,
            read_before,
            table[:, 3],
            crossing.recompute_bytes,
        )
