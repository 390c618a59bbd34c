"""Define what a server does with pushed updates: add them, an optax transformation, or a plain function.

In: the weights of a shard, and the updates of one or several workers, in the order in which to sum them.
Out: the weights of the next version. Sums and updates are programs of their own, so that a synchronous step that adds
up gradients in the order of the workers has the same bits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.errors import StoreError
from autopar.versions.factors import SufficientFactors
from autopar.versions.host_memory.memory_kinds import in_host_memory, on_device, put

Weights = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Pushed:
    """What one worker pushed for one key in one clock.

    Args:
        whole: an update of the whole array; None if only rows were pushed.
        rows: updates of rows: their numbers and the values, of shape `(number of rows, *rest)`. A row that occurs
            several times gets the sum.
        factors: updates of a matrix by its factors.
    """

    whole: jax.Array | None = None
    rows: tuple[tuple[np.ndarray, jax.Array], ...] = ()
    factors: tuple[SufficientFactors, ...] = ()

    def plus(self, other: Pushed) -> Pushed:
        """The sum of two pushes of one worker."""
        wholes = [one.whole for one in (self, other) if one.whole is not None]
        whole = functools.reduce(_sum, wholes) if wholes else None
        return Pushed(whole, self.rows + other.rows, self.factors + other.factors)

    def dense(self, like: jax.Array) -> jax.Array:
        """The update of the whole array."""
        wholes = ([] if self.whole is None else [self.whole]) + [factors.product() for factors in self.factors]
        whole = functools.reduce(operator.add, wholes) if wholes else jnp.zeros_like(like)
        for rows, values in self.rows:
            whole = whole.at[rows].add(values)
        return whole

    def moved(self, place: Any) -> Pushed:
        """The same on another device or in another sharding; rows and factors go to all devices of a sharding."""
        whole = None if self.whole is None else put(self.whole, place)
        if not self.rows and not self.factors:
            return Pushed(whole)
        if isinstance(place, jax.sharding.NamedSharding):
            place = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
        return Pushed(
            whole,
            tuple((rows, put(values, place)) for rows, values in self.rows),
            tuple(SufficientFactors(put(one.left, place), put(one.right, place)) for one in self.factors),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of array data, the numbers of rows included."""
        whole = 0 if self.whole is None else self.whole.nbytes
        rows = sum(rows.nbytes + values.nbytes for rows, values in self.rows)
        return whole + rows + sum(one.num_bytes for one in self.factors)


#: A worker's update by key, or by part of a key.
Update = Mapping[str, Pushed]


@runtime_checkable
class ServerUpdate(Protocol):
    """How a shard makes its next version."""

    def init(self, weights: Weights) -> Any:
        """The state before the first update."""
        ...

    def apply(self, weights: Weights, state: Any, updates: Sequence[Mapping[str, Pushed]]) -> tuple[Weights, Any]:
        """The weights and state after a sum of updates, at least one of which is not empty."""
        ...


@dataclass(frozen=True, slots=True)
class Add:
    """Adds updates to the weights. Rows are added alone, to a copy of the array, as readers may have the old version."""

    def init(self, weights: Weights) -> None:
        return None

    def apply(self, weights: Weights, state: None, updates: Sequence[Mapping[str, Pushed]]) -> tuple[Weights, None]:
        after = dict(weights)
        for key in {key: None for update in updates for key in update}:
            pushed = [update[key] for update in updates if key in update]
            if any(one.whole is not None or one.factors for one in pushed):
                after[key] = _plus(weights[key], _summed([one.dense(weights[key]) for one in pushed]))
                continue
            rows = [row for one in pushed for row in one.rows if row[0].size]
            if rows:
                numbers = np.concatenate([numbers for numbers, _ in rows])
                after[key] = weights[key].at[numbers].add(jnp.concatenate([values for _, values in rows]))
        return after, None


@dataclass(frozen=True, slots=True)
class Transformation:
    """An optax transformation. Keys of a shard without an update get zeros, and rows an update of the whole array.

    Args:
        run: from the sum of the updates, the state and the weights to the new weights and state, compiled.
    """

    transformation: optax.GradientTransformation
    run: Callable[[Weights, Any, Weights], tuple[Weights, Any]]

    def init(self, weights: Weights) -> Any:
        """The state, all of it on the devices of the weights: JAX puts numbers that depend on none on its first device."""
        state = jax.jit(self.transformation.init)(weights)
        place = next((array.sharding for array in weights.values()), None)
        if isinstance(place, jax.sharding.NamedSharding):
            place = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())

        def placed(leaf: jax.Array) -> jax.Array:
            return leaf if place is None or leaf.devices() == place.device_set else jax.device_put(leaf, place)

        return jax.tree.map(placed, state)

    def apply(self, weights: Weights, state: Any, updates: Sequence[Mapping[str, Pushed]]) -> tuple[Weights, Any]:
        return self.run(_total(weights, updates), state, weights)


@dataclass(frozen=True, slots=True)
class Function:
    """A function from the weights and the sum of the updates, each by key, to the new weights. It need not be compiled."""

    function: Callable[[Weights, Weights], Mapping[str, Any]]

    def init(self, weights: Weights) -> None:
        return None

    def apply(self, weights: Weights, state: None, updates: Sequence[Mapping[str, Pushed]]) -> tuple[Weights, None]:
        after = self.function(dict(weights), _total(weights, updates))
        if not isinstance(after, Mapping) or set(after) != set(weights):
            keys = sorted(map(str, after)) if isinstance(after, Mapping) else type(after).__name__
            raise StoreError(f"the `update` function must return new weights for {sorted(weights)}; it returned {keys}")
        made = {key: jax.device_put(after[key], weights[key].sharding) for key in weights}
        for key, array in made.items():
            if (array.shape, array.dtype) != (weights[key].shape, weights[key].dtype):
                raise StoreError(
                    f"the `update` function returned {array.dtype}{array.shape} for {key!r}, whose weights are"
                    f" {weights[key].dtype}{weights[key].shape}"
                )
        return made, None


def update_of(update: Any, weights: Weights) -> ServerUpdate:
    """The server's update for a shard of these weights.

    Args:
        update: None to add, an optax transformation, a function, or a `ServerUpdate`.

    Raises:
        StoreError: it is something else, or a transformation that needs more than gradients.
    """
    if update is None:
        return Add()
    if isinstance(update, ServerUpdate):
        return update
    if isinstance(update, optax.GradientTransformation):
        shardings = {key: array.sharding for key, array in weights.items()}

        def run(total: Weights, state: Any, weights: Weights) -> tuple[Weights, Any]:
            changes, state = update.update(total, state, weights)
            return optax.apply_updates(weights, changes), state  # pyright: ignore[reportReturnType]

        try:
            jax.eval_shape(lambda weights: run(weights, update.init(weights), weights), weights)
        except TypeError as error:
            raise StoreError(
                f"the `update` transformation needs more than gradients, state and weights ({error}): a server evaluates no"
                " loss. Give one that does not, as `optax.lbfgs(rate, linesearch=None)`"
            ) from error
        return Transformation(update, jax.jit(run, out_shardings=(shardings, None)))
    if callable(update):
        return Function(cast("Callable[[Weights, Weights], Mapping[str, Any]]", update))
    raise StoreError(f"`update` is a {type(update).__name__}: give None to add, an optax transformation, or a function")


def _total(weights: Weights, updates: Sequence[Mapping[str, Pushed]]) -> Weights:
    """The sum of the updates of each key, in their order."""
    total: Weights = {}
    for key, array in weights.items():
        terms = [update[key].dense(array) for update in updates if key in update]
        total[key] = _summed(terms) if terms else jnp.zeros_like(array)
    return total


def _sum(first: Any, second: Any) -> Any:
    """The sum of two pushes, where the first one is."""
    total = on_device(first) + on_device(second)
    return jax.device_put(total, first.sharding) if in_host_memory(first) else total


@jax.jit
def _summed(terms: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


@jax.jit
def _plus(weights: jax.Array, update: jax.Array) -> jax.Array:
    return weights + update


def aggregated(weights: Weights, updates: Sequence[Mapping[str, Pushed]]) -> Update:
    """The sum of updates by key, in their order, as `apply` makes it: with it alone, `apply` gives the same bits."""
    keys = dict.fromkeys(key for update in updates for key in update)
    return {
        key: Pushed(_summed([update[key].dense(weights[key]) for update in updates if key in update])) for key in keys
    }
