"""Parameters in pinned host memory: few of them on the device at one time, with the numbers of parameters that are all there."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import EffectError, OptionError
from autopar.versions.store import VersionedStore

LAYERS, WIDTH, BATCH = 4, 64, 4
LAYER_BYTES = 4 * WIDTH * WIDTH
HOST = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    # not in the order of their use
    names = [f"{(3 * number) % LAYERS}/{number}" for number in range(LAYERS)]
    return {name: (rng.normal(size=(WIDTH, WIDTH)) / 8).astype(np.float32) for name in names}


def in_use(params: dict[str, Any]) -> list[str]:
    return sorted(params, key=lambda name: int(name.split("/")[1]))


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for name in in_use(params):
        x = jax.nn.gelu(x @ params[name]) + x
    return jnp.mean(x**2)


def x() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)


def hosted(params: dict[str, Any]) -> dict[str, jax.Array]:
    return {key: jax.device_put(array, HOST) for key, array in params.items()}


def device_bytes() -> int:
    return sum(
        array.nbytes
        for array in jax.live_arrays()
        if array.sharding.memory_kind != "pinned_host" and array.shape == (WIDTH, WIDTH)
    )


@pytest.mark.parametrize("results", ["device", "host"])
def test_few_layers_are_on_the_device_at_one_time_with_the_same_bits(results: Any) -> None:
    gradients = jax.value_and_grad(loss)
    resident = {key: jnp.asarray(array) for key, array in weights().items()}
    expected = autopar.stream_parameters(gradients)(resident, x())
    compiled = jax.jit(gradients)(resident, x())
    del resident
    params = hosted(weights())
    before, seen = device_bytes(), list[int]()
    kept = {key: np.asarray(array) for key, array in expected[1].items()}
    del expected
    streamed = autopar.stream_parameters(
        gradients, results=results, on_piece=lambda number: seen.append(device_bytes() - before)
    )
    before = device_bytes()
    value, found = streamed(params, x())
    assert list(found) == list(kept)
    for key, array in kept.items():
        np.testing.assert_array_equal(found[key], array)
        np.testing.assert_allclose(found[key], compiled[1][key], rtol=1e-4, atol=5e-6)
        assert found[key].sharding.memory_kind == ("pinned_host" if results == "host" else "device")
    np.testing.assert_allclose(value, compiled[0], rtol=1e-5)
    report = streamed.streaming(params, x())
    assert report.order == tuple(f"['{name}']" for name in in_use(params))
    assert report.peak_bytes == 2 * LAYER_BYTES
    assert (
        report.num_pieces == len(seen) == 2 * LAYERS - 2
    )  # the last layer is there for both passes, and the first not read again
    assert report.copied_bytes == (2 * LAYERS - 2) * LAYER_BYTES
    extra = 0 if results == "host" else LAYERS * LAYER_BYTES  # gradients that stay
    assert max(seen) <= 2 * LAYER_BYTES + extra
    if results == "host":
        assert seen[LAYERS] <= 2 * LAYER_BYTES and device_bytes() == before


def test_a_larger_budget_copies_less() -> None:
    gradients = jax.grad(loss)
    copied = []
    for layers in (2, 4, 12):
        streamed = autopar.stream_parameters(gradients, budget_bytes=layers * LAYER_BYTES)
        report = streamed.streaming(hosted(weights()), x())
        assert report.peak_bytes <= layers * LAYER_BYTES
        copied.append(report.copied_bytes)
        expected = jax.grad(loss)({key: jnp.asarray(array) for key, array in weights().items()}, x())
        for key, array in streamed(hosted(weights()), x()).items():
            np.testing.assert_allclose(array, expected[key], rtol=1e-4, atol=5e-6)
    assert copied == sorted(copied, reverse=True) and copied[0] > copied[-1] == LAYERS * LAYER_BYTES


def test_any_function_of_parameters_streams_them() -> None:
    """Loops, branches, custom derivatives, constants, results that are arguments, other kinds of arguments."""

    @jax.custom_jvp
    def clipped(y: jax.Array) -> jax.Array:
        return jnp.clip(y, -1, 1)

    clipped.defjvp(lambda primals, tangents: (clipped(primals[0]), tangents[0] * 2))
    table = jnp.arange(WIDTH, dtype=jnp.float32)

    def function(params: Any, y: jax.Array, scale: float, options: Any) -> Any:
        first, second = params["pair"]
        y = jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), y, first)[0]
        y = jax.lax.cond(y.sum() > 0, lambda y: y @ second, lambda y: y - second[0], y)
        drawn = jax.random.normal(options["key"], y.shape)
        return {
            "y": clipped(jax.jit(jnp.sin)(y) * scale + table + drawn),
            "same": params["alone"],
            "arg": options["n"],
            "one": 1.5,
        }

    rng = np.random.default_rng(0)
    params = {
        "pair": (
            rng.normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 8,
            rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        ),
        "alone": np.ones(3, np.float32),
    }
    args = (x(), 0.5, {"key": jax.random.key(3), "n": jnp.int32(7)})
    there = jax.tree.map(lambda array: jax.device_put(array, HOST), params)
    streamed = autopar.stream_parameters(function)
    for _ in range(2):
        found, expected = streamed(there, *args), jax.jit(function)(params, *args)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    longer = streamed(there, np.concatenate([x(), x()]), *args[1:])  # other shapes are traced again
    assert longer["y"].shape == (2 * BATCH, WIDTH)


def test_parameters_on_a_submesh_stay_sharded() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = NamedSharding(mesh, P(None, "x"), memory_kind="pinned_host")
    params = {key: jax.device_put(array, sharding) for key, array in weights().items()}
    found = autopar.stream_parameters(jax.grad(loss), results="host")(
        params, jax.device_put(x(), NamedSharding(mesh, P()))
    )
    expected = jax.grad(loss)({key: jnp.asarray(array) for key, array in weights().items()}, x())
    for key, array in found.items():
        np.testing.assert_allclose(array, expected[key], rtol=1e-4, atol=5e-6)
        assert array.sharding.memory_kind == "pinned_host"


def test_options_that_cannot_be_are_refused() -> None:
    params = hosted(weights())
    with pytest.raises(
        OptionError, match=f"one operation reads parameters of {LAYER_BYTES} bytes.*at least {2 * LAYER_BYTES}"
    ):
        autopar.stream_parameters(loss, budget_bytes=LAYER_BYTES)(params, x())
    with pytest.raises(OptionError, match="`budget_bytes` is 0: give a number of bytes"):
        autopar.stream_parameters(loss, budget_bytes=0)
    with pytest.raises(OptionError, match=re.escape('`results` is \'cpu\': give "device" or "host"')):
        autopar.stream_parameters(loss, results="cpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="`function` is a int"):
        autopar.stream_parameters(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="a parameter is a ndarray: put it in host memory"):
        autopar.stream_parameters(loss)(weights(), x())

    def prints(params: Any, y: jax.Array) -> jax.Array:
        jax.debug.print("{}", y[0, 0], ordered=True)
        return loss(params, y)

    with pytest.raises(EffectError, match="has an ordered effect"):
        autopar.stream_parameters(prints)(params, x())


@pytest.mark.parametrize(
    ("update", "policy"),
    [
        (None, "bsp"),
        (optax.adam(0.1), "largest(20000, 2)"),
        (lambda weights, total: {key: weights[key] - total[key] for key in weights}, "bsp"),
    ],
)
def test_a_store_in_host_memory_has_the_bits_of_one_on_the_device(update: Any, policy: str) -> None:
    values = {key: jnp.asarray(array) for key, array in weights().items()}
    stores = [
        VersionedStore(values, update=update, consistency=policy, shards=[place]) for place in (jax.devices()[0], HOST)
    ]
    gradients = autopar.stream_parameters(jax.grad(loss), results="host")
    key = next(iter(values))
    for _ in range(3):
        pushed = [gradients(store.pull().values, x()) for store in stores]
        for store, update_of in zip(stores, pushed, strict=True):
            store.push(None, update_of)
            store.push(key, update_of[key])
            store.push({key: [3, 1, 3]}, {key: np.ones((3, WIDTH), np.float32)})
            store.clock()
        rows = [store.pull({key: [5, 3]}, to=jax.devices()[1]).values[key] for store in stores]
        np.testing.assert_array_equal(rows[0], rows[1])
        assert rows[1].sharding.memory_kind == "device"
    assert stores[1].pull({key: [5]}).values[key].sharding.memory_kind == "pinned_host"
    for name, array in stores[1].pull().values.items():
        assert array.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(array, stores[0].pull(name).values[name])
    state = [leaf for leaf in jax.tree.leaves(stores[1]._state.shards[0].state) if isinstance(leaf, jax.Array)]
    assert all(leaf.sharding.memory_kind == "pinned_host" for leaf in state)


def test_a_snapshot_of_a_store_in_host_memory_is_loaded_there() -> None:
    stores = [VersionedStore(weights(seed), update=optax.adam(0.1), shards=[HOST]) for seed in (0, 1)]
    for store in stores:
        store.push(None, store.pull().values)
    stores[0].clock()
    stores[0].push({next(iter(weights())): [2]}, {next(iter(weights())): np.ones((1, WIDTH), np.float32)})
    stores[1].load(stores[0].snapshot())
    for store in stores:
        store.clock()
    for key, array in stores[0].pull().values.items():
        np.testing.assert_array_equal(array, stores[1].pull(key).values[key])
        assert stores[1].pull(key).values[key].sharding.memory_kind == "pinned_host"
