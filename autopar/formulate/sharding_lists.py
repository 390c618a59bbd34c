"""List the strategies and shardings on one mesh, with one object per distinct list.

In: groups, dims, shapes. Out: lists with one entry per strategy of a decision. Equal lists are one object, so that
callers can cache results by `id`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.rules.factors import ContextLoop, DimFactors, Factor
from autopar.rules.grouping import Group
from autopar.rules.halo_window import Window
from autopar.rules.strategies import Strategy, enumerate_strategies

Shardings = tuple[TensorSharding, ...]  # one per strategy of a decision


class ShardingLists:
    """The lists of one mesh; they live as long as this object."""

    def __init__(self, mesh: MeshShape) -> None:
        self.mesh = mesh
        self._strategies: dict[tuple[object, ...], tuple[Strategy, ...]] = {}
        self._shardings: dict[tuple[object, ...], Shardings] = {}
        self._known: dict[Shardings, Shardings] = {}
        self._distinct: dict[int, tuple[Shardings, np.ndarray]] = {}

    def strategies(self, group: Group) -> tuple[Strategy, ...]:
        """All strategies of a group."""
        manual = group.region.manual if group.region else frozenset()
        windows: dict[int, Sequence[Window | ContextLoop]] = {**group.windows()}
        context = group.region.context if group.region else None
        if context is not None:
            windows[context.factor] = [context]
        windowed = tuple((factor, tuple(found)) for factor, found in windows.items())
        key = (group.factors, group.even, group.fixed, manual, group.pinned, windowed)
        if key not in self._strategies:
            self._strategies[key] = enumerate_strategies(
                group.factors,
                self.mesh,
                even=group.even,
                fixed=group.fixed,
                manual=manual,
                windows=windows,
                pinned=group.pinned,
            )
        return self._strategies[key]

    def shardings(self, strategies: tuple[Strategy, ...], dims: DimFactors, pending: tuple[int, ...] = ()) -> Shardings:
        """The sharding of a tensor under each of a group's strategies."""
        key = (id(strategies), dims, pending)
        if key not in self._shardings:
            self._shardings[key] = self.one(tuple(s.sharding(dims, pending) for s in strategies))
        return self._shardings[key]

    def even(self, shape: tuple[int, ...]) -> Shardings:
        """All shardings that `jax.jit` accepts for an input or output: split dims divide evenly."""
        key = ("even", shape)
        if key not in self._shardings:
            factors = [Factor(size) for size in shape if size > 1]
            dims = iter(range(len(factors)))
            named = tuple((next(dims),) if size > 1 else () for size in shape)
            strategies = enumerate_strategies(factors, self.mesh, even=range(len(factors)))
            self._shardings[key] = self.one(tuple(s.sharding(named) for s in strategies))
        return self._shardings[key]

    def any_of(self, made: Shardings, wanted: Sequence[Shardings]) -> Shardings:
        """The possible shardings of a shared copy: the producer's without pending reductions, or any that a user needs."""
        key = (id(made), *map(id, wanted))
        if key not in self._shardings:
            options = dict.fromkeys([*(m.resolved() for m in made), *(w for ws in wanted for w in ws)])
            self._shardings[key] = self.one(tuple(options))
        return self._shardings[key]

    def one(self, shardings: Shardings) -> Shardings:
        """The one object that represents all equal lists of shardings."""
        return self._known.setdefault(shardings, shardings)

    def distinct(self, shardings: Shardings) -> tuple[Shardings, np.ndarray]:
        """The distinct shardings of a list from `one`, and the index of each entry among them."""
        if id(shardings) not in self._distinct:
            number: dict[TensorSharding, int] = {}
            labels = np.array([number.setdefault(s, len(number)) for s in shardings], int)
            self._distinct[id(shardings)] = (tuple(number), labels)
        return self._distinct[id(shardings)]
