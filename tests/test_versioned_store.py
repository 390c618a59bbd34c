"""A versioned store in one process: BSP is the synchronous step, reads keep their promise, and misuse is named."""

from __future__ import annotations

import functools
import gc
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from stores import WORKERS, batch, gradients, ones, run_workers, train, weights, zeros

from autopar.errors import StoreError
from autopar.versions.store import VersionedStore

# -- consistency -----------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("num_shards", [None, 1, 3])
def test_bsp_is_the_synchronous_step_bit_for_bit(name: str, num_shards: int | None) -> None:
    """The synchronous step adds up the gradients in the order of the workers, and updates the keys of each shard at once."""
    optimizer = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-2)}[name]
    devices = jax.devices()
    places = None if num_shards is None else devices[:num_shards]
    store = VersionedStore(weights(), update=optimizer, workers=WORKERS, shards=places)
    train(store, 20, devices[4:8])

    @jax.jit
    def update(params: Any, state: Any, total: Any) -> Any:
        changes, state = optimizer.update(total, state, params)
        return optax.apply_updates(params, changes), state

    params = weights()
    parts = [[*shard.weights] for shard in store._state.shards]
    assert len(parts) == (num_shards or 1)
    states = [optimizer.init({key: params[key] for key in keys}) for keys in parts]
    for clock in range(20):
        each = [gradients(params, batch(worker, clock)) for worker in range(WORKERS)]
        total = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), each)
        for number, keys in enumerate(parts):
            before, terms = ({key: tree[key] for key in keys} for tree in (params, total))
            after, states[number] = update(before, states[number], terms)
            params = params | after
    pulled = store.pull(worker=None)
    assert set(pulled.versions.values()) == {20} and pulled.clock == 20
    for key, array in params.items():
        assert np.asarray(pulled.values[key]).tobytes() == np.asarray(array).tobytes(), key
    report = store.report()
    assert all(max(counts) == 0 for counts in report.staleness)


@pytest.mark.parametrize("s", [0, 2])
def test_no_thread_reads_more_than_s_clocks_ahead(s: int) -> None:
    store = VersionedStore(zeros(w=(4,)), workers=3, consistency=f"ssp({s})")

    def work(index: int) -> None:
        rng = np.random.default_rng(index)
        for clock in range(60):
            seen = store.pull(worker=index).values["w"]
            assert float(seen[0]) >= 3 * (clock - s)  # the updates of all workers in all clocks before clock - s
            time.sleep(rng.exponential(1e-3) * (1 + 9 * (rng.random() < 0.1)))
            store.push("w", ones(4), worker=index)
            store.clock(worker=index)

    run_workers(work, 3)
    counts = sum(store.report().staleness, Counter[int]())
    assert counts.total() == 180 and max(counts) == s
    np.testing.assert_array_equal(store.pull(worker=None).values["w"], 180 * ones(4))
    assert store.report().versions == (60 if s == 0 else 180,)


@pytest.mark.slow
def test_ssp_applies_more_updates_per_second_than_bsp_in_threads() -> None:
    """Of four workers one, drawn for each clock, sleeps for 100 ms, the others for 20 ms; 200 clocks."""
    slow = [int(worker) for worker in np.random.default_rng(0).integers(0, 4, size=200)]
    seconds: dict[str, float] = {}
    for policy in ("bsp", "ssp(3)"):
        store = VersionedStore(zeros(w=(4,)), workers=4, consistency=policy)

        def work(index: int, store: VersionedStore = store) -> None:
            for clock in range(200):
                store.pull(worker=index)
                time.sleep(0.1 if slow[clock] == index else 0.02)
                store.push("w", ones(4), worker=index)
                store.clock(worker=index)

        started_s = time.monotonic()
        run_workers(work)
        seconds[policy] = time.monotonic() - started_s
        np.testing.assert_array_equal(store.pull(worker=None).values["w"], 800 * ones(4))
    assert seconds["bsp"] / seconds["ssp(3)"] >= 1.5, seconds


def test_what_one_pull_returns_is_one_version_of_each_shard() -> None:
    """Each version adds one to all arrays of a shard; readers that see two values saw two versions."""
    store = VersionedStore(zeros(a=(4,), b=(4,), c=(4,)), workers=2, consistency="async", shards=jax.devices()[:2])
    torn: list[Any] = []

    def work(index: int) -> None:
        for _ in range(200):
            store.push(None, {key: ones(4) for key in "abc"}, worker=index)
            store.clock(worker=index)
            pulled = store.pull(worker=index)
            for key, array in pulled.values.items():
                if set(np.asarray(array)) != {float(pulled.versions[store._division.shards_of(key)[0]])}:
                    torn.append(pulled)

    run_workers(work, 2)
    assert not torn
    assert store.report().versions == (400, 400)


def test_an_old_version_is_kept_as_long_as_somebody_reads_it() -> None:
    store = VersionedStore(zeros(w=(1000,)), workers=1, consistency="async")
    pulled = store.pull()
    seen = weakref.ref(pulled.values["w"])
    for _ in range(3):
        store.push("w", ones(1000))
        store.clock()
    np.testing.assert_array_equal(pulled.values["w"], np.zeros(1000))
    del pulled
    gc.collect()
    assert seen() is None
    np.testing.assert_array_equal(store.pull().values["w"], 3 * ones(1000))


def test_an_applied_update_is_not_kept() -> None:
    store = VersionedStore(zeros(w=(1000,)), workers=2)
    seen = []
    for worker in (0, 1):
        update = jax.device_put(ones(1000))
        seen.append(weakref.ref(update))
        store.push("w", update, worker=worker)
        store.clock(worker=worker)
        del update
    gc.collect()
    assert [one() for one in seen] == [None, None]


def test_a_push_is_seen_after_the_clock_only() -> None:
    store = VersionedStore(zeros(w=(2,)), consistency="async")
    store.push("w", ones(2))
    assert store.pull().versions == {0: 0}
    assert store.clock() == 1
    assert store.pull().values["w"].tolist() == [1.0, 1.0]
    assert store.clock() == 2  # of nothing
    assert store.pull().versions == {0: 1}


def test_one_worker_never_waits() -> None:
    for policy in ("bsp", "ssp(0)", "ssp(3)", "async", "backup(0)", "partial(1)", "discard(0)"):
        store = VersionedStore(zeros(w=(2,)), consistency=policy)
        for clock in range(5):
            assert store.pull(timeout_s=0).values["w"].tolist() == [clock, clock], policy
            store.push("w", ones(2))
            store.clock()


def test_at_least_clock_waits_without_consistency_and_does_not_loosen_a_policy() -> None:
    store = VersionedStore(zeros(w=(2,)), workers=2, consistency="async")
    store.clock(worker=0)
    assert store.pull(worker=0).clock == 1
    with pytest.raises(
        StoreError, match=r"worker 0, at clock 1, has waited 0.05 s for 1 complete clocks; 0 are complete"
    ):
        store.pull("w", 1, worker=0, timeout_s=0.05)
    with pytest.raises(StoreError, match="waits for 2 complete clocks, which the others cannot reach alone"):
        store.pull("w", 2, worker=0)
    store.clock(worker=1)
    assert store.pull("w", 1, worker=0).clock == 1
    bsp = VersionedStore(zeros(w=(2,)), workers=2)
    bsp.clock(worker=0)
    with pytest.raises(StoreError, match="has waited 0 s for 1 complete clocks"):
        bsp.pull("w", -5, worker=0, timeout_s=0)
    with pytest.raises(StoreError, match="`at_least_clock` is 1"):
        bsp.pull("w", 1.5)  # pyright: ignore[reportArgumentType]


# -- keys, ranges, rows ----------------------------------------------------------------------


def test_keys_are_named_alone_in_lists_in_ranges_and_by_rows() -> None:
    store = VersionedStore({"a": ones(2), "b": ones(3, 2), "c/x": ones(1), "d": np.float32(4)})
    assert store.keys == ("a", "b", "c/x", "d")
    assert [*store.pull().values] == ["a", "b", "c/x", "d"]
    assert [*store.pull("b").values] == ["b"]
    assert [*store.pull(["d", "a"]).values] == ["d", "a"]
    assert [*store.pull(slice("a", "c")).values] == ["a", "b"]
    assert [*store.pull(slice("b", None)).values] == ["b", "c/x", "d"]
    assert [*store.pull(slice("x", "z")).values] == [] == [*store.pull([]).values]
    pulled = store.pull({"b": [2, 0, 2], "a": None}).values
    assert pulled["b"].shape == (3, 2) and pulled["a"].shape == (2,)
    assert store.pull({"b": []}).values["b"].shape == (0, 2)


@pytest.mark.parametrize("update", [None, optax.sgd(-1.0), lambda weights, total: {"e": weights["e"] + total["e"]}])
def test_rows_of_several_workers_are_added(update: Any) -> None:
    store = VersionedStore(zeros(e=(5, 2)), workers=2, update=update)
    store.push({"e": [1, 3, 1]}, {"e": ones(3, 2)}, worker=0)
    store.push({"e": np.array([3], np.uint8)}, {"e": jnp.full((1, 2), 5.0)}, worker=1)
    store.push({"e": []}, {"e": ones(0, 2)}, worker=1)
    for worker in (0, 1):
        store.clock(worker=worker)
    expected = np.zeros((5, 2), np.float32)
    np.add.at(expected, [1, 3, 1, 3], [[1.0], [1.0], [1.0], [5.0]])
    np.testing.assert_array_equal(store.pull().values["e"], expected)
    store.push("e", ones(5, 2), worker=0)  # rows and the whole array in one clock
    store.push({"e": [0]}, {"e": ones(1, 2)}, worker=0)
    for worker in (0, 1):
        store.clock(worker=worker)
    expected = expected + 1
    expected[0] += 1
    np.testing.assert_array_equal(store.pull().values["e"], expected)


def test_what_is_pushed_twice_is_added_up() -> None:
    store = VersionedStore(zeros(w=(2,)))
    store.push("w", ones(2))
    store.push("w", {"w": 2 * ones(2)})
    store.clock()
    assert store.pull().values["w"].tolist() == [3.0, 3.0]
    assert store.pull().versions == {0: 1}


@pytest.mark.parametrize("key", ["", "a b", "*", "[x]", "../../etc", "é\n\x00", "' or 1", "x" * 5000, "{0}", "%s"])
def test_any_string_is_a_key(key: str) -> None:
    store = VersionedStore({key: ones(2), "zz": ones(1)})
    store.push(key, ones(2))
    store.clock()
    assert store.pull(key).values[key].tolist() == [2.0, 2.0]
    with pytest.raises(StoreError) as raised:
        store.push(key, ones(3))
    assert len(str(raised.value)) < 500


def test_empty_arrays_and_single_numbers() -> None:
    store = VersionedStore({"none": np.zeros((0, 3), np.float32), "one": np.float32(2), "whole": np.int32(1)})
    store.push(None, {"none": np.zeros((0, 3), np.float32), "one": np.float32(3), "whole": np.int32(4)})
    store.clock()
    values = store.pull({"none": [], "one": None, "whole": None}).values
    assert (values["none"].shape, float(values["one"]), int(values["whole"])) == ((0, 3), 5.0, 5)


# -- shards and places -----------------------------------------------------------------------


def test_shards_have_about_equal_bytes_on_their_devices() -> None:
    devices = jax.devices()[:3]
    store = VersionedStore(zeros(a=(100,), b=(10,), c=(50,), d=(40,), e=(60,)), shards=devices)
    owners = {key: next(iter(array.devices())) for key, array in store.pull().values.items()}
    assert [{key for key, device in owners.items() if device == one} for one in devices] == [
        {"a"},
        {"b", "e"},
        {"c", "d"},
    ]
    there = store.pull(["a", "e"], to=devices[2])
    assert all(array.devices() == {devices[2]} for array in there.values.values())
    store.push("a", ones(100))
    store.clock()
    assert store.pull().versions == {0: 1, 1: 0, 2: 0}


@pytest.mark.parametrize("update", [None, optax.adam(0.1)])
def test_a_shard_may_be_sharded_over_a_submesh(update: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    store = VersionedStore(zeros(w=(8, 3)), update=update, shards=[sharding])
    other = NamedSharding(Mesh(np.array(jax.devices()[4:8]), ("data",)), P("data"))
    for _ in range(2):
        pulled = store.pull(to=other).values["w"]
        assert pulled.sharding == other
        store.push("w", pulled + 1)
        store.push({"w": [1]}, {"w": ones(1, 3)})
        store.clock()
        assert store.pull().values["w"].sharding == sharding
    with pytest.raises(StoreError, match="a shard of w cannot be placed on"):
        VersionedStore(zeros(w=(7, 3)), shards=[sharding])


def test_the_users_arrays_stay_theirs() -> None:
    """Neither a donated argument nor a changed NumPy array reaches the store."""
    given = jnp.zeros(1000)
    host = np.zeros(1024, np.float32)
    store = VersionedStore({"w": given, "h": host}, consistency="async")
    jax.jit(lambda x: x + 1, donate_argnums=0)(given)
    host += 7
    update = np.ones(1000, np.float32)
    store.push("w", update)
    update *= 0
    store.clock()
    pulled = store.pull().values
    assert float(pulled["w"].sum()) == 1000 and float(pulled["h"].sum()) == 0
    jax.jit(lambda x: x + 1, donate_argnums=0)(pulled["w"])
    if pulled["w"].is_deleted():
        with pytest.raises(StoreError, match="the array of 'w' was donated by a reader"):
            store.pull("w")


def test_arrays_stay_where_they_are_without_places() -> None:
    mesh = Mesh(np.array(jax.devices()[2:4]), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    values = {"w": jax.device_put(jnp.zeros((4, 2)), sharding)}
    store = VersionedStore(values, update=optax.sgd(1.0))
    store.push("w", ones(4, 2))
    store.clock()
    assert store.pull().values["w"].sharding == sharding
    with pytest.raises(StoreError, match=r"'b' is on \S+ and 'w' on \S+, \S+, but a shard is on one device or submesh"):
        VersionedStore({**values, "b": jnp.zeros(2)})


def test_an_update_that_was_donated_is_named() -> None:
    store = VersionedStore(zeros(w=(1000,)))
    update = jnp.ones(1000)
    store.push("w", update)
    jax.jit(lambda x: x + 1, donate_argnums=0)(update)
    if update.is_deleted():
        with pytest.raises(StoreError, match="the update of 'w' was donated after it was pushed: push a copy"):
            store.clock()


# -- the server's update ---------------------------------------------------------------------


def test_lbfgs_without_a_line_search_runs_on_the_server() -> None:
    scale = jnp.arange(1.0, 5.0)
    store = VersionedStore(zeros(w=(4,)), workers=2, update=optax.lbfgs(0.5, linesearch=None))
    for _ in range(60):
        for worker in (0, 1):
            w = store.pull(worker=worker).values["w"]
            store.push("w", scale * (w - 1.0) / 2, worker=worker)
            store.clock(worker=worker)
    np.testing.assert_allclose(store.pull(worker=None).values["w"], np.ones(4), atol=1e-3)


def test_a_transformation_that_needs_a_loss_is_refused() -> None:
    with pytest.raises(StoreError, match=r"a server evaluates no loss. Give one that does not, as `optax.lbfgs"):
        VersionedStore(zeros(w=(4,)), update=optax.lbfgs())


def test_a_function_is_the_update() -> None:
    def soft_threshold(weights: dict[str, jax.Array], total: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {key: jnp.sign(total[key]) * jnp.maximum(abs(total[key]) - 1, 0) for key in weights}

    store = VersionedStore(zeros(a=(3,), b=(1,)), workers=2, update=soft_threshold)
    store.push("a", np.array([1, -2, 0.5], np.float32), worker=0)
    store.push("a", np.array([1, -2, 0.0], np.float32), worker=1)
    for worker in (0, 1):
        store.clock(worker=worker)
    assert store.pull().values["a"].tolist() == [1.0, -3.0, 0.0]
    assert store.pull().values["b"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda weights, total: None, "must return new weights for ['w']; it returned NoneType"),
        (lambda weights, total: {}, "must return new weights for ['w']; it returned []"),
        (lambda weights, total: {"w": total["w"][:1]}, "returned float32(1,) for 'w', whose weights are float32(2,)"),
        (lambda weights, total: {"w": total["w"].astype("int8")}, "returned int8(2,) for 'w'"),
    ],
)
def test_an_update_that_fails_leaves_the_store_as_it_was(function: Any, message: str) -> None:
    calls = []

    def update(weights: Any, total: Any) -> Any:
        calls.append(total)
        return function(weights, total) if len(calls) == 1 else {"w": weights["w"] + total["w"]}

    store = VersionedStore(zeros(w=(2,)), update=update)
    store.push("w", ones(2))
    with pytest.raises(StoreError, match=re.escape(message)):
        store.clock()
    assert store.report().versions == (0,) and store.report().clocks == (0,)
    assert store.clock() == 1
    assert store.pull().values["w"].tolist() == [1.0, 1.0]


# -- misuse ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: s.pull("kernal"),
            "the store has no key 'kernal'. Did you mean 'kernel'? Its keys are 'e', 'kernel'",
        ),
        (lambda s: s.pull(["e", 3]), "the store has no key 3"),
        (lambda s: s.pull(3.5), "`keys` is 3.5: give a key, a list of keys"),
        (lambda s: s.pull(slice(0, 1)), "a range of keys is from one string to another"),
        (lambda s: s.pull(slice("a", "b", 2)), "a range of keys has no step"),
        (lambda s: s.pull({"e": [3]}), "'e' has rows 0 to 2; got row 3"),
        (lambda s: s.pull({"e": [-1]}), "'e' has rows 0 to 2; got row -1"),
        (lambda s: s.pull({"e": [0.5]}), "the rows of 'e' are float64 of shape (1,): give a list of whole numbers"),
        (lambda s: s.pull({"e": [True, False, True]}), "the rows of 'e' are bool of shape (3,)"),
        (lambda s: s.pull({"e": [[1]]}), "the rows of 'e' are int64 of shape (1, 1)"),
        (lambda s: s.pull({"e": [[1], [1, 2]]}), "the rows of 'e' are [[1], [1, 2]], not whole numbers"),
        (lambda s: s.pull({"s": [0]}), "'s' is a single number and has no rows"),
        (lambda s: s.push("e", ones(3)), "the update of 'e' is float32(3,), and the store takes float32(3, 2)"),
        (
            lambda s: s.push("e", ones(3, 2).astype("float16")),
            "the update of 'e' is float16(3, 2), and the store takes",
        ),
        (lambda s: s.push("e", [[1.0]]), "the update of 'e' is a list, not an array"),
        (lambda s: s.push({"e": [1]}, {"e": ones(2, 2)}), "the update of 1 rows of 'e' is float32(2, 2)"),
        (lambda s: s.push(None, ones(3, 2)), "`update` is a ndarray: give an array by key"),
        (lambda s: s.push(["e"], {}), "`update` has no array for 'e'"),
        (lambda s: s.push("e", {"e": ones(3, 2), "x": 1}), "`update` has arrays for 'x', which `keys` does not name"),
        (lambda s: s.pull(worker=1), "there is no worker 1: the store was made for workers 0"),
        (lambda s: s.push("e", ones(3, 2), worker=-1), "there is no worker -1"),
        (lambda s: s.clock(worker=None), "there is no worker None"),
        (lambda s: s.worker(9), "there is no worker 9"),
    ],
)
def test_a_call_that_cannot_be_served_is_refused_and_changes_nothing(
    call: Callable[[VersionedStore], Any], message: str
) -> None:
    store = VersionedStore(zeros(e=(3, 2), kernel=(1,), s=()))
    with pytest.raises(StoreError, match=re.escape(message)):
        call(store)
    store.clock()
    assert store.report().versions == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "a store needs arrays by key"),
        (([ones(1)],), "a store needs arrays by key"),
        (({1: ones(1)},), "the key 1 is no string"),
        (({"w": "text"},), "the value of 'w' is no array, but a str"),
        (({"w": {"x": ones(1)}},), "the value of 'w' is no array, but a dict"),
    ],
)
def test_values_that_are_no_arrays_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        VersionedStore(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": 3}, "`update` is a int: give None to add"),
        ({"workers": 0}, "`workers` is 0"),
        ({"consistency": "bulk"}, "there is no policy 'bulk'"),
        ({"consistency": "partial(2)"}, "the policy 'partial(2)' needs at least 2 workers, not 1"),
        ({"shards": []}, "`shards` is empty: give a device or sharding for each shard"),
        ({"shards": [None, None]}, "`shards` has None: give a device or sharding for each shard"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        VersionedStore(zeros(w=(1,)), **options)
