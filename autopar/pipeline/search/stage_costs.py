"""Compute the costs of runs of layers on submeshes by planning them as programs.

In: the layers of a step, hardware profiles, and planning options.
Out: `StageCosts`, the cost function of a `PartitionProblem`. Few runs are planned:

- If layers do not repeat, each unit of the chain counts as a layer here. All are planned together, once for each shape, and
  each has its share of that plan's cost (`layer_shares.py`).
- If they repeat, single layers and pairs of consecutive layers are planned. The cost of a longer run is

      cost(l ... m) = cost(l, l + 1) + ... + cost(m - 1, m) - cost(l + 1) - ... - cost(m - 1)

  so each layer costs what it adds to the one before it. Working bytes are the largest of any pair.
- The most common layer determines the mesh and the form of the program for each shape.
- Options of a shape trade memory for time: copies of state, and stashed activations against rematerialization. The
  latter are priced from one plan (`residuals.py`). The stages of the result are planned with their option.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.cut.extract_stages import Port
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.cut.stage_programs import Layers, StageProgram
from autopar.pipeline.partition.cluster import Cluster, SubmeshShape
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.estimates import StageFigures
from autopar.pipeline.search.layer_shares import LayerShares
from autopar.pipeline.search.piece_constraints import piece_constraints
from autopar.pipeline.search.quick_plan import Form, QuickPlanner, Way, forms_of, meshes_for
from autopar.pipeline.search.slice_seconds import slice_seconds
from autopar.pipeline.search.stage_layouts import StageLayouts
from autopar.planner.candidate import Candidate
from autopar.planner.plan_record import plan_of
from autopar.plans.plan import Plan
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Solver
from autopar.transforms.program import recomputing

#: The price of a byte stashed from the forward to the backward pass, by option of a shape, in units of the time to
#: write and read it: almost free; above everything but matmuls; above everything.
STASH_PRICES: tuple[float, ...] = (0.1, 6.0, 1000.0)
#: The price of a byte of state (`quick_plan.Way`): low; above the cost of sending it inside a host; above that of
#: sending it over a network.
STATE_PRICES: tuple[float, ...] = (0.3, 30.0, 3000.0)
#: The last options help only if all devices together hardly have room for the state.
_USUAL_OPTIONS = 2 * len(STASH_PRICES)
#: State within this factor of its fully sharded size has no copies to save.
_ALL_SPLIT = 1.03
#: All options of a shape: price of state, price of stashed activations.
OPTIONS: tuple[tuple[float, float], ...] = tuple(itertools.product(STATE_PRICES, STASH_PRICES))


def at_state_price(shape: SubmeshShape) -> SubmeshShape:
    """The shape with the first option of the same price of state; such options share one plan."""
    return replace(shape, option=shape.option - shape.option % len(STASH_PRICES))


#: Several devices may rematerialize other values than one device.
_SURE = 0.9


Ports = tuple[Port, ...]


def likely_shapes(cluster: Cluster) -> tuple[SubmeshShape, ...]:
    """The shapes of submeshes with a power of two of devices or with all devices of a kind. These numbers divide the
    sizes of most models."""
    most = {group.kind: group.num_devices for group in cluster.groups}
    shapes = cluster.shapes()
    return tuple(
        shape
        for shape in shapes
        if shape.num_devices & (shape.num_devices - 1) == 0 or shape.num_devices == most[shape.kind]
    )


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Layers planned on a submesh.

    Args:
        figures: the figures of the plan, from which its cost is.
        slices: seconds of the forward and the backward pass of each slice of tokens.
    """

    program: StageProgram
    plan: Plan
    cost: StageCost
    figures: StageFigures = field(repr=False, compare=False)
    slices: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Base:
    """A run that is planned to estimate its cost."""

    figures: StageFigures
    candidate: Candidate
    way: Way


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of a planned run, which determines its options.

    Args:
        alone: whether the run is the whole step.
    """

    shape: SubmeshShape
    alone: bool = False

    @property
    def state_price(self) -> float:
        return OPTIONS[self.shape.option][0] if self.shape.num_devices > 1 else STATE_PRICES[0]

    @property
    def stash_price(self) -> float:
        return OPTIONS[self.shape.option][1]


class StageCosts:
    """Costs of runs of layers, with a cache of plans.

    Args:
        profiles: the hardware profile of each kind of device.
        keys: numbers of layers; equal for equal layers.
        together: for each layer, a number that layers rematerialized together share, where layers do not repeat; None where
            they do, and each is rematerialized by itself.
        splits_backward: whether the backward pass has an input part and a weight part.
        layouts: the meshes and shardings of stages that the user fixes.
    """

    def __init__(
        self,
        layers: Layers,
        profiles: Mapping[str, HardwareProfile],
        keys: Sequence[int],
        *,
        together: Sequence[int] | None = None,
        splits_backward: bool = False,
        layouts: StageLayouts | None = None,
        solver: Solver | None = None,
        time_limit_s: float = 60.0,
    ) -> None:
        self.layers, self.profiles, self.keys = layers, profiles, tuple(keys)
        self.together, self.splits_backward, self.layouts = together, splits_backward, layouts or StageLayouts()
        self.planner = QuickPlanner(solver or Ilp(time_limit_s=time_limit_s))
        most, count = Counter(self.keys).most_common(1)[0]
        #: The most common layer, which determines how shapes are used; None if layers share the cost of one plan.
        self.usual = self.keys.index(most) if together is None and count > 1 else None
        self._shares: dict[_Use, LayerShares] = {}
        #: The planned representative of each run of equal layers.
        self._representative: dict[tuple[int, ...], tuple[int, int]] = {}
        if self.usual is not None:
            self._representative[most,] = (self.usual, self.usual)
        self._programs: dict[tuple[int, int], StageProgram] = {}
        self._forms: dict[tuple[int, int], tuple[Form, ...]] = {}
        self._bases: dict[tuple[tuple[int, ...], _Use], _Base] = {}
        self._costs: dict[tuple[tuple[int, ...], _Use], StageCost] = {}
        self._planned: dict[tuple[int, int, SubmeshShape, Ports, Ports], PlannedRun] = {}
        self._bounds: dict[tuple[tuple[int, ...], SubmeshShape], StageCost] = {}
        self._tables: dict[tuple[tuple[int, ...], SubmeshShape], StageCost] = {}

    @property
    def num_planned(self) -> int:
        """The number of planned runs on all shapes."""
        return len({id(base) for base in self._bases.values()}) + len(self._planned)

    def in_options(self, shapes: Sequence[SubmeshShape], budget_bytes: Mapping[str, float]) -> tuple[SubmeshShape, ...]:
        """The shapes, each in the options worth searching. If fully sharded state takes more than half of all devices'
        memory, options with the lowest price of state are skipped, because there is no room for copies. Options with
        the highest price are only for a submesh of all devices."""
        largest = max(shape.num_devices for shape in shapes)
        first: dict[str, int] = {}
        for kind in {shape.kind for shape in shapes}:
            state = self.cost(0, len(self.keys) - 1, SubmeshShape(kind, 1, 1)).state_bytes
            first[kind] = len(STASH_PRICES) if state > 0.5 * largest * budget_bytes[kind] else 0
        return tuple(
            replace(shape, option=option)
            for shape in shapes
            for option in range(first[shape.kind], len(OPTIONS) if shape.num_devices == largest else _USUAL_OPTIONS)
        )

    def cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost:
        """The cost of layers `first` to `last`; see `PartitionProblem`."""
        return self._cost(first, last, _Use(shape))

    def alone(self, shape: SubmeshShape) -> StageCost:
        """The cost of all layers as one stage, which is one program: reductions may be deferred across microbatches,
        and fusions keep values between the passes."""
        return self._cost(0, len(self.keys) - 1, _Use(shape, alone=True))

    def layers_s(self, shape: SubmeshShape) -> list[float]:
        """Seconds of each layer's forward and backward pass for one microbatch, if layers share the cost of one plan."""
        return self._shares_of(_Use(shape)).seconds().tolist()

    def reference(self, shape: SubmeshShape, *, alone: bool) -> StageCost:
        """A cost in proportion to which others change with the number of microbatches: that of the most common layer, as a part
        of a stage or as the whole step; if layers do not repeat, that of all on one device."""
        if self.usual is not None:
            return self._cost(self.usual, self.usual, _Use(shape, alone))
        return self._cost(0, len(self.keys) - 1, _Use(SubmeshShape(shape.kind, 1, 1, option=shape.option), alone))

    def bound(self, first: int, last: int, shape: SubmeshShape) -> StageCost:
        """A lower bound: the cost on one device over the number of devices, because sharding saves no work."""
        key = (self.kind_of(first, last), shape)
        if key not in self._bounds:
            one = self.cost(first, last, SubmeshShape(shape.kind, 1, 1, option=shape.option))
            self._bounds[key] = _divided(one, shape.num_devices)
        return self._bounds[key]

    def table(self, borders: tuple[int, ...], shape: SubmeshShape) -> StageCost:
        """The costs of all runs at once; see `CostTables`.

        Args:
            borders: the first layer of each run of one, and the end of the last; int[runs + 1].
        """
        key = (borders, shape)
        if key not in self._tables:
            use = _Use(shape)
            if self.together is not None:
                self._tables[key] = self._shares_of(use).table(borders, use.stash_price)
            else:
                self._tables[key] = self._table(borders, use)
        return self._tables[key]

    def bounds(self, borders: tuple[int, ...], shape: SubmeshShape) -> StageCost:
        """The table of all `bound`s."""
        one = self.table(borders, SubmeshShape(shape.kind, 1, 1, option=shape.option))
        return _divided(one, shape.num_devices)

    def _table(self, borders: tuple[int, ...], use: _Use) -> StageCost:
        count = len(borders) - 1
        tables = {field.name: np.zeros((count, count)) for field in fields(StageCost)}
        for first, start in enumerate(borders[:-1]):
            for last in range(first, count):
                cost = self._cost(start, borders[last + 1] - 1, use)
                for name, table in tables.items():
                    table[first, last] = getattr(cost, name)
        return StageCost(**dict[str, Any](tables))

    def _cost(self, first: int, last: int, use: _Use) -> StageCost:
        """The cost of a run: its layers' shares, or the sum of its pairs, less the layers that are in two of them."""
        if self.together is not None and not use.alone:
            return self._shares_of(use).cost(first, last, use.stash_price)
        key = (self.kind_of(first, last), use)
        if key not in self._costs:
            if last - first < 2 or self.together is not None:
                figures = self._base(first, last, use).figures
                self._costs[key] = figures.cost(figures.crossings.at(use.stash_price))
            else:
                self._costs[key] = _sum_of_pairs(self.keys, first, last, lambda n, m: self._cost(n, m, use))
        return self._costs[key]

    def planned(self, first: int, last: int, shape: SubmeshShape, stage: StageProgram | None = None) -> PlannedRun:
        """Layers planned on a submesh, with the rematerialization of their backward pass.

        Args:
            stage: their program as a stage of a step, which sends only what other stages read; by default a program
                that sends everything that others may read.
        """
        program = stage or self._program(first, last)
        key = (first, last, shape, program.inputs, program.outputs)
        if key in self._planned:  # equal inputs and outputs: the program is the same, wherever other stages are cut
            return replace(self._planned[key], program=program)
        use, started, profile = _Use(shape), time.perf_counter(), self._profile(shape)
        num_forms = len(program.program.forms)
        way = self._base(first, last, use).way if self.usual is None else self._usual_way(use, num_forms)
        forms = forms_of(program.program, self.layouts.pinned(program.inputs, way.mesh))
        base = self.planner.planned_in(way, forms, profile)
        crossing = self._figures(program, base).crossings.at(use.stash_price)
        rematerialized = recomputing(base.program, [one.segment for one in crossing.recomputed])
        form = Form(rematerialized, forms[way.form].pins)
        candidate = self.planner.planned_in(replace(way, form=0), (form,), profile, figures_only=False)
        seconds = time.perf_counter() - started
        plan = plan_of(
            candidate, base.program, form.unknown, form.pins, budget_bytes=profile.usable_bytes, seconds=seconds
        )
        figures = self._figures(program, candidate)
        cost = figures.cost(figures.crossings.without_recompute())
        plan = replace(plan, rematerialized=crossing.recomputed, constraints=piece_constraints(plan, figures))
        plan = replace(plan, collectives=figures.collectives())
        self._planned[key] = PlannedRun(program, plan, cost, figures, slice_seconds(figures))
        return self._planned[key]

    # -- helpers -----------------------------------------------------------------------------

    def _base(self, first: int, last: int, use: _Use) -> _Base:
        first, last = self._representative.setdefault(self.kind_of(first, last), (first, last))
        shape = replace(use.shape, option=OPTIONS.index((use.state_price, STASH_PRICES[0])))
        use = replace(use, shape=shape)
        key = (self.kind_of(first, last), use)
        if key not in self._bases and (frugal := self._as_frugal(first, last, use)) is not None:
            self._bases[key] = frugal
        if key not in self._bases:
            profile, forms = self._profile(shape), self._forms_of(first, last)
            if self.usual is None or (first, last) == (self.usual, self.usual):
                given = self.layouts.meshes(shape.num_devices)
                meshes = meshes_for(given, profile, symmetric=not self.layouts.axes)
                prices = {"state_price": use.state_price, "pending": use.alone}
                other = self._bases.get((key[0], replace(use, alone=not use.alone)))
                if other is not None and shape.num_devices == 1:  # nothing is reduced: the plan is the same
                    candidate, way = other.candidate, other.way
                else:
                    candidate, way = self.planner.quickest(meshes, forms, profile, **prices)
            else:
                way = self._usual_way(use, len(forms))
                candidate = self.planner.planned_in(way, forms, profile)
            separate = not use.alone
            by_layer = self.together is not None and separate  # layers share these figures
            options = {"separate": separate, "together": self.together, "by_layer": by_layer}
            figures = self._figures(self._program(first, last), candidate, **options)
            self._bases[key] = _Base(figures, candidate, way)
        return self._bases[key]

    def kind_of(self, first: int, last: int) -> tuple[int, ...]:
        """What equal runs of layers have in common."""
        return self.keys[first : last + 1] if self.together is None else (first, last)

    def _shares_of(self, use: _Use) -> LayerShares:
        """The shares of the layers in the cost of all, planned as one stage."""
        if use not in self._shares:
            last = len(self.keys) - 1
            base = self._base(0, last, use)
            known = (shares for shares in self._shares.values() if shares.candidate is base.candidate)
            self._shares[use] = next(known, None) or LayerShares(base.figures, last + 1)
        return self._shares[use]

    def _usual_way(self, use: _Use, num_forms: int) -> Way:
        """The way of the most common layer, for a program with this number of forms."""
        assert self.usual is not None
        way = self._base(self.usual, self.usual, use).way
        return replace(way, form=min(way.form, num_forms - 1))

    def _profile(self, shape: SubmeshShape) -> HardwareProfile:
        return replace(self.profiles[shape.kind], devices_per_host=shape.devices_per_host)

    def _as_frugal(self, first: int, last: int, use: _Use) -> _Base | None:
        """The plan at a lower price of state, if that one shards all state already."""
        cheaper = [price for price in STATE_PRICES if price < use.state_price]
        shapes = (replace(use.shape, option=OPTIONS.index((price, STASH_PRICES[0]))) for price in cheaper)
        keys = self.kind_of(first, last)
        known = [
            self._bases[keys, replace(use, shape=shape)]
            for shape in shapes
            if (keys, replace(use, shape=shape)) in self._bases
        ]
        if not known:
            return None
        whole = self._base(first, last, _Use(SubmeshShape(use.shape.kind, 1, 1))).figures.state_bytes
        is_split = known[-1].figures.state_bytes <= _ALL_SPLIT * whole / use.shape.num_devices
        return known[-1] if is_split else None

    def _figures(
        self, stage: StageProgram, candidate: Candidate, separate: bool = True, **options: Any
    ) -> StageFigures:
        layout, splits = Layout(candidate.program.trace, stage.inputs), self.splits_backward and separate
        return StageFigures(candidate, layout, splits_backward=splits, separate=separate, **options)

    def _program(self, first: int, last: int) -> StageProgram:
        if (first, last) not in self._programs:
            self._programs[first, last] = self.layers.run_of(first, last)
        return self._programs[first, last]

    def _forms_of(self, first: int, last: int) -> tuple[Form, ...]:
        if (first, last) not in self._forms:
            stage = self._program(first, last)
            self._forms[first, last] = forms_of(stage.program, self.layouts.pinned(stage.inputs))
        return self._forms[first, last]


def _divided(cost: StageCost, num_devices: int) -> StageCost:
    """The bound of a cost, or of each in a table, on so many devices, from that on one."""
    part = 1 / num_devices
    memory_part = _SURE * part  # another choice of residuals may hold less
    return StageCost(
        forward_s=part * cost.forward_s,
        backward_s=_SURE * part * cost.backward_s,
        weight_s=part * cost.weight_s,
        update_s=part * cost.update_s,
        state_bytes=part * cost.state_bytes,
        flight_bytes=memory_part * cost.flight_bytes,
    )


def _sum_of_pairs(keys: Sequence[int], first: int, last: int, cost: Callable[[int, int], StageCost]) -> StageCost:
    """The cost of a run of layers from those of single layers and of pairs."""
    pairs = Counter((keys[n], keys[n + 1]) for n in range(first, last))
    inner = Counter(keys[n] for n in range(first + 1, last))
    at = {(keys[n], keys[n + 1]): n for n in range(first, last)}
    parts = [(float(times), cost(at[pair], at[pair] + 1)) for pair, times in pairs.items()]
    for layer, times in inner.items():
        n = keys.index(layer)
        parts.append((-float(times), cost(n, n)))
    most = max(one.working_bytes for times, one in parts if times > 0)
    return replace(_sum(parts), working_bytes=most)  # one layer at a time is processed


def _sum(parts: Sequence[tuple[float, StageCost]]) -> StageCost:
    """The weighted sum of costs."""
    return StageCost(
        **{
            field.name: max(0.0, sum(times * getattr(cost, field.name) for times, cost in parts))
            for field in fields(StageCost)
        }
    )
