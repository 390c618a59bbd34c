"""A transfer between submeshes is complete, and sends the smallest parts that both shardings allow."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding, replicated
from autopar.pipeline.cut.wires import Split, even_part, wire_between
from autopar.pipeline.run.transfers import Crossing, devices_of, unchanged_wire, wire


def on(devices: slice, *sizes: int, spec: P) -> NamedSharding:
    chosen = np.array(jax.devices()[devices], dtype=object).reshape(sizes)
    return NamedSharding(Mesh(chosen, ("a", "b")[: len(sizes)]), spec)


@pytest.mark.parametrize(
    ("source", "target", "parts"),
    [
        (on(slice(0, 2), 2, spec=P("a")), on(slice(2, 4), 2, spec=P("a")), 2),
        (on(slice(0, 2), 2, spec=P()), on(slice(2, 4), 2, spec=P(None, "a")), 2),  # sliced before it is sent
        (on(slice(0, 2), 2, spec=P("a")), on(slice(2, 4), 2, spec=P()), 2),  # gathered after
        (on(slice(0, 4), 2, 2, spec=P("a", "b")), on(slice(4, 8), 4, spec=P("a")), 4),
        (on(slice(0, 2), 2, spec=P("a")), on(slice(2, 6), 4, spec=P(None, "a")), 2),
        (on(slice(0, 4), 4, spec=P("a")), on(slice(4, 6), 2, spec=P("a")), 2),
        (on(slice(0, 3), 3, spec=P()), on(slice(3, 5), 2, spec=P("a")), 1),
        (on(slice(0, 2), 2, spec=P("a")), on(slice(0, 2), 2, spec=P(None, "a")), 2),  # the same devices
    ],
)
def test_a_value_arrives(source: NamedSharding, target: NamedSharding, parts: int) -> None:
    value = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    passing = wire(value.shape, source, target)
    crossing = Crossing(value.shape, value.dtype, passing)
    assert value.size // np.prod(passing.source.shard_shape(value.shape)) == parts
    assert passing.source.shard_shape(value.shape) == passing.target.shard_shape(value.shape)
    moved = crossing.move(jax.device_put(value, passing.source))
    assert moved.sharding == passing.target and moved.committed
    assert tuple(devices_of(passing.target).flat) == tuple(devices_of(target).flat)  # one program takes it
    np.testing.assert_array_equal(moved, value)
    assert crossing.is_here == (source.device_set == target.device_set)


def test_a_wire_without_resharding_needs_equal_sizes() -> None:
    two, other, four = (on(slice(i, i + n), n, spec=P("a")) for i, n in ((0, 2), (2, 2), (4, 4)))
    passing = unchanged_wire(two, other)
    assert passing is not None and (passing.source, passing.target.spec) == (two, two.spec)
    assert unchanged_wire(two, four) is None


def test_a_value_passes_in_even_parts_to_a_stage_that_splits_it_unevenly() -> None:
    mesh, both = MeshShape(("a", "b"), (3, 2)), TensorSharding((("a",), ("b",)))
    assert even_part(both, (6, 8), mesh) == both
    assert even_part(both, (8, 8), mesh) == TensorSharding(((), ("b",)))
    assert even_part(both, (8, 7), mesh) == replicated(2)


def test_a_wire_is_chosen_without_devices() -> None:
    """The search knows the same wire as the executor."""
    rows, columns = TensorSharding((("a",), ())), TensorSharding(((), ("a",)))
    four, two = MeshShape(("a",), (4,)), MeshShape(("a",), (2,))
    finer = Split(four, columns)
    assert wire_between((8, 8), Split(four, replicated(2)), finer) == (finer, finer)
    assert wire_between((8, 8), finer, Split(four, replicated(2))) == (finer, finer)
    here, there = wire_between((8, 8), Split(four, rows), Split(two, columns))
    assert here == Split(MeshShape(("part", "copy"), (2, 2)), TensorSharding(((), ("part",))))
    assert there == Split(MeshShape(("part", "copy"), (2, 1)), here.sharding)
    odd, _ = wire_between((7, 5), Split(four, rows), Split(two, rows))
    assert odd.sharding == replicated(2)  # no dim divides
