"""Arrays of a store that are divided by rows over its shards: the same calls and numbers as of whole arrays."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import StoreError
from autopar.extend.layouts import ArraySize, Layout, Piece, Server, plan_layout
from autopar.versions.row_wise import is_elementwise

FREE = Server(message_s=0.0)
#: The rows of "w", 7 of 12, are divided; "b" is whole.
LAYOUT = Layout(
    {"w": (Piece(2, 0, 3), Piece(0, 3, 2), Piece(1, 5, 7)), "b": (Piece(1, 0, 5),)},
    (None, None, None),
    (Fraction(0),) * 3,
    Fraction(0),
    False,
)


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(12, 5)).astype(np.float32), "b": rng.normal(size=5).astype(np.float32)}


def stores(**options: Any) -> list[autopar.VersionedStore]:
    """One with whole arrays, one with divided ones."""
    return [
        autopar.VersionedStore(values(), **options),
        autopar.VersionedStore(values(), **options, shards=jax.devices()[1:4], layout=LAYOUT),
    ]


def same(first: dict[str, jax.Array], second: dict[str, jax.Array]) -> None:
    assert list(first) == list(second)
    for key, array in first.items():
        np.testing.assert_allclose(array, second[key], rtol=1e-5, atol=1e-6, err_msg=key)  # fused arithmetic differs
        assert array.dtype == second[key].dtype


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("update", "consistency"),
    [
        (None, "bsp"),
        (None, "largest(1000, 2)"),
        (optax.sgd(0.5), "async"),
        (optax.adam(0.1), "bsp"),
        (optax.adam(0.1), "every(2, bsp)"),
    ],
)
def test_random_calls_do_what_they_do_to_whole_arrays(update: Any, consistency: str) -> None:
    rng = random.Random(consistency)
    whole, divided = stores(update=update, consistency=consistency)
    for _ in range(12):
        rows = [rng.randrange(12) for _ in range(rng.randrange(5))]
        keys: Any = rng.choice(
            [None, ["b", "w"], {"b": None, "w": rows}, "w", slice("c", None), {"w": rows}][: 6 if update is None else 3]
        )
        same(whole.pull(keys).values, divided.pull(keys).values)
        pushed = {key: np.asarray(array) * 0.25 for key, array in whole.pull(keys).values.items()}
        with_factors = rng.random() < 0.3
        for store in (whole, divided):
            store.push(keys, pushed)
            if with_factors:
                store.push("w", autopar.SufficientFactors(jnp.ones((1, 12)), jnp.full((1, 5), 0.5)))
            store.clock()
    same(whole.pull(worker=None).values, divided.pull(worker=None).values)


def test_pulled_arrays_are_where_they_were_asked_for() -> None:
    _, store = stores()
    assert store.pull().values["w"].devices() == {jax.devices()[3]}  # the first part's
    assert store.pull(to=jax.devices()[6]).values["w"].devices() == {jax.devices()[6]}
    sharding = NamedSharding(Mesh(np.array(jax.devices()[4:8]), ("x",)), P("x"))
    pulled = store.pull("w", to=sharding).values["w"]
    assert pulled.sharding == sharding
    np.testing.assert_array_equal(pulled, values()["w"])
    assert store.pull().versions == {0: 0, 1: 0, 2: 0}
    assert store.pull({"w": [3, 4]}).versions == {0: 0}
    assert store.pull({"w": []}).values["w"].shape == (0, 5)
    store.push({"w": [3]}, {"w": np.ones((1, 5), np.float32)})
    store.clock()
    assert store.pull().versions == {0: 1, 1: 1, 2: 1}  # the other parts' step is zero
    assert store.kinds["w"] == ((12, 5), np.dtype(np.float32))


def test_each_part_sends_factors_or_rows_whichever_is_less() -> None:
    _, store = stores()
    left, right = np.random.default_rng(1).normal(size=(1, 12)), np.ones((1, 5))
    store.push("w", autopar.SufficientFactors(jnp.asarray(left, jnp.float32), jnp.asarray(right, jnp.float32)))
    traffic = {shard: one.pushed_bytes for (_, shard), one in store.report().traffic.items()}
    assert traffic == {2: 4 * (3 + 5), 0: 4 * (2 + 5), 1: 4 * (7 + 5)}
    store.clock()
    np.testing.assert_allclose(store.pull("w").values["w"], values()["w"] + left.T @ right, rtol=1e-5)


def test_a_store_divides_large_arrays_over_devices_by_itself() -> None:
    big = {"w": np.zeros((4096, 64), np.float32), "b": np.zeros(64, np.float32)}

    def rows(update: Any, places: Any = None) -> int:
        store = autopar.VersionedStore(big, update=update, workers=2, shards=places or jax.devices()[:4])
        return len(store._division.divided.get("w", "w"))

    assert rows(None) == 4 and rows(optax.adamw(1e-3)) == 4
    assert rows(optax.lamb(1e-3)) == 1  # norms of whole arrays
    assert rows(lambda weights, total: weights) == 1
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    assert rows(None, [NamedSharding(mesh, P("x")), NamedSharding(mesh, P())]) == 1
    small = autopar.VersionedStore(values(), workers=2, shards=jax.devices()[:4])
    assert not small._division.divided
    named = {"w": big["w"], "w[0:1024]": np.zeros(3, np.float32)}  # no part may have the name of a key
    assert not autopar.VersionedStore(named, shards=jax.devices()[:4])._division.divided


@pytest.mark.parametrize(
    ("update", "elementwise"),
    [
        (None, True),
        (optax.sgd(0.1), True),
        (optax.sgd(0.1, momentum=0.9, nesterov=True), True),
        (optax.adam(optax.cosine_decay_schedule(0.1, 100)), True),
        (optax.adamw(0.1, mask={"w": True, "b": False}), True),
        (optax.rmsprop(0.1), True),
        (optax.lion(0.1), True),
        (optax.chain(optax.clip(1.0), optax.scale(-1.0)), True),
        (optax.multi_transform({"w": optax.sgd(1.0), "b": optax.adam(1.0)}, {"w": "w", "b": "b"}), True),
        (optax.clip_by_global_norm(1.0), False),
        (optax.clip_by_block_rms(1.0), False),
        (optax.lamb(0.1), False),
        (optax.lars(0.1), False),
        (optax.adafactor(0.1), False),
        (optax.lbfgs(0.1, linesearch=None), False),
        (optax.add_noise(0.1, 0.5, 0), False),
        (optax.centralize(), False),
        (lambda weights, total: total, False),
        (3, False),
    ],
)
def test_an_update_is_elementwise_or_not(update: Any, elementwise: bool) -> None:
    """Where it is, an update of rows is the rows of the update."""
    kinds = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in values().items()}
    assert is_elementwise(update, kinds) is elementwise
    if not elementwise or update is None:
        return
    gradients = {key: jnp.asarray(array) + 0.5 for key, array in values().items()}
    whole, rows = (
        jax.tree.map(jnp.asarray, values()),
        {"w": jnp.asarray(values()["w"][4:9]), "b": jnp.asarray(values()["b"])},
    )
    for _ in range(2):
        expected, _ = update.update(gradients, update.init(whole), whole)
        found, _ = update.update(gradients | {"w": gradients["w"][4:9]}, update.init(rows), rows)
        np.testing.assert_allclose(found["w"], expected["w"][4:9], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": [Server()]}, "`servers` and `layout` are for several shards: give `shards` a device"),
        ({"layout": LAYOUT}, "`servers` and `layout` are for several shards: give `shards` a device"),
        ({"shards": jax.devices()[:2], "layout": LAYOUT}, "the layout has 3 servers, and there are 2 `shards`"),
        (
            {"shards": jax.devices()[:2], "servers": [Server()]},
            "`servers` has 1 servers for 2 shards: give one for each",
        ),
        (
            {"shards": jax.devices()[:3], "servers": [Server()] * 3, "layout": LAYOUT},
            "`layout` says what each server has, and `servers` plans it: give one of them",
        ),
        (
            {"shards": jax.devices()[:3], "layout": replace(LAYOUT, pieces={"w": LAYOUT.pieces["w"], "x": ()})},
            "the layout is of other arrays: 'b', 'x' is only there or only in `values`",
        ),
        *[
            (
                {"shards": jax.devices()[:3], "layout": replace(LAYOUT, pieces=dict(LAYOUT.pieces) | {"w": pieces})},
                "the layout does not have the 12 rows of 'w' once each, in order, on servers of their own",
            )
            for pieces in [
                (),
                (Piece(0, 0, 11),),
                (Piece(0, 0, 5), Piece(1, 6, 6)),
                (Piece(0, 0, 6), Piece(0, 6, 6)),
                (Piece(0, 0, 6), Piece(3, 6, 6)),
                (Piece(0, 0, 13),),
            ]
        ],
    ],
)
def test_layouts_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        autopar.VersionedStore(values(), **options)


def test_the_part_of_a_server_is_what_its_process_needs() -> None:
    layout = plan_layout({"w": ArraySize(12, 20), "b": ArraySize(5, 4)}, [FREE] * 3, 2, whole=["b"])
    parts = [layout.part(values(), server) for server in range(3)]
    assert sum(part["w"].size for part in parts if "w" in part) == 60
    assert sum("b" in part for part in parts) == 1


def test_a_snapshot_of_a_divided_store_is_loaded_into_another() -> None:
    _, first = stores(update=optax.adam(0.1), consistency="every(2, bsp)", workers=1)
    _, second = stores(update=optax.adam(0.1), consistency="every(2, bsp)", workers=1)
    for _ in range(3):
        first.push(None, first.pull().values)
        first.clock()
    first.push({"w": [1, 9]}, {"w": np.ones((2, 5), np.float32)})
    second.load(first.snapshot())
    for store in (first, second):
        store.push("w", np.ones((12, 5), np.float32))
        store.clock()
    same(first.pull().values, second.pull().values)
    assert first.pull().versions == second.pull().versions == {0: 2, 1: 2, 2: 2}
