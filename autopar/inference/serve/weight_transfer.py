"""Move weights from the shardings of a trainer to those of the served programs.

In: weights on any devices in any shardings, the shapes and shardings that the programs take. Out: `WeightTransfer`, which moves one array
after the other. The collectives of each are planned (`changes_between`) and compiled once for each shape and pair of shardings, so
the layers of a model share them, and a later update compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.errors import InferenceError
from autopar.inference.model.sharded_load import load_sharded
from autopar.jax_interop.partition_spec import partition_spec
from autopar.pipeline.cut.wires import changes_between
from autopar.pipeline.run.transfers import Crossing, devices_of, seen_as, split_of, wire
from autopar.runtime.jit import auto_mesh

_Moved = Callable[[Any], jax.Array]


class WeightTransfer:
    """Weights of a trainer to the served weights.

    Args:
        served: the shapes and dtypes of the served weights, a pytree. shardings: those that the programs take, by leaf.
    """

    def __init__(self, served: Any, shardings: tuple[NamedSharding, ...]) -> None:
        self._served, self._shardings = jax.tree_util.tree_flatten_with_path(served), shardings
        self._compiled: dict[Any, _Moved] = {}

    def prepare(self, params: Any) -> list[tuple[Any, _Moved]]:
        """Check weights, and compile what moves them where that is not done. Returns each array with the function that moves it.

        Raises:
            InferenceError: they are not weights of this model.
        """
        known, structure = self._served
        given, found = jax.tree_util.tree_flatten_with_path(params)
        if found != structure:
            paths = [{jax.tree_util.keystr(path) for path, _ in each} for each in (given, known)]
            odd = sorted(paths[0] ^ paths[1])[:3]
            raise InferenceError(
                f"the weights are not those of the served model: {', '.join(odd) or 'the structure'} is only in one of them. Give"
                " weights as `Decoder(config).init` has them; an engine with quantized weights takes none"
            )
        prepared: list[tuple[Any, _Moved]] = []
        for (path, leaf), (_, wanted), target in zip(given, known, self._shardings, strict=True):
            _check(jax.tree_util.keystr(path), leaf, wanted)
            source = leaf.sharding if isinstance(leaf, jax.Array) else None
            key = (leaf.shape, leaf.dtype, wanted.dtype, source, target)
            if key not in self._compiled:
                self._compiled[key] = _moved(leaf, wanted.dtype, target)
            prepared.append((leaf, self._compiled[key]))
        return prepared


def _check(path: str, leaf: Any, wanted: Any) -> None:
    """Refuse an array that cannot be this weight."""
    if tuple(leaf.shape) != tuple(wanted.shape):
        raise InferenceError(
            f"the weight {path} has the shape {list(leaf.shape)}, but the served model's has {list(wanted.shape)}: give weights"
            " of the same configuration"
        )
    if leaf.dtype != wanted.dtype and not all(jnp.issubdtype(each.dtype, jnp.floating) for each in (leaf, wanted)):
        raise InferenceError(
            f"the weight {path} has the dtype {leaf.dtype}, and the served model's has {wanted.dtype}: only floats are converted"
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise InferenceError(
            f"the weight {path} was donated to a train step: give the weights that the step returned, not those that it was given"
        )


def _moved(leaf: Any, dtype: Any, target: NamedSharding) -> _Moved:
    """A function that moves such an array, with a result that shares no memory with it: a trainer donates its weights."""
    source = leaf.sharding if isinstance(leaf, jax.Array) else None
    if isinstance(source, SingleDeviceSharding):
        source = NamedSharding(Mesh(np.array(list(source.device_set)), ("one",)), PartitionSpec())
    if not isinstance(source, NamedSharding):
        return lambda array: load_sharded(np.asarray(array), dtype, target)
    shape, source, target = tuple(leaf.shape), _auto(source), _auto(target)
    narrow = min(leaf.dtype, dtype, key=lambda each: each.itemsize)
    if np.array_equal(devices_of(source), devices_of(target)):
        move = resharding_program(shape, leaf.dtype, dtype, source, target)
        return lambda array: move(seen_as(array, source))
    between = wire(shape, source, target)
    send = resharding_program(shape, leaf.dtype, narrow, source, between.source)
    crossing = Crossing(shape, narrow, between)
    receive = resharding_program(shape, narrow, dtype, between.target, target)
    return lambda array: receive(crossing.move(send(seen_as(array, source))))


def resharding_program(
    shape: tuple[int, ...], dtype: Any, wanted: Any, source: NamedSharding, target: NamedSharding
) -> jax.stages.Compiled:
    """Compile the planned collectives between two shardings on the same devices, and the conversion of dtypes.

    Args:
        dtype, wanted: of the array and of the result.
    """
    narrow = min(dtype, wanted, key=lambda each: each.itemsize)
    axes, moves = changes_between(shape, narrow.itemsize, split_of(source, shape), split_of(target, shape))
    mesh = Mesh(devices_of(source).reshape(axes.axis_sizes), axes.axis_names)

    def run(array: jax.Array) -> jax.Array:
        array = jnp.copy(array).astype(narrow)
        for move in moves:
            array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, partition_spec(move.result)))
        return array.astype(wanted)

    return jax.jit(run, out_shardings=target).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=source)).compile()


def _auto(sharding: NamedSharding) -> NamedSharding:
    assert isinstance(sharding.mesh, Mesh), "arrays are on devices"
    return NamedSharding(auto_mesh(sharding.mesh), sharding.spec)
