"""Checkpoints of versioned stores, and of steps that workers run: resuming under BSP has the bits of a run without a break."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import AutoparError, CheckpointError, StepSignatureError, StoreError
from autopar.versions.snapshot import Snapshot
from autopar.versions.store import VersionedStore

OPTIMIZER = optax.adam(1e-2)


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    key, drawn = jax.random.split(state["key"])
    kept = jax.random.bernoulli(drawn, 0.8, batch.shape)
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(((batch * kept) @ w - batch.sum(1)) ** 2))(state["weights"])
    changes, optimizer = OPTIMIZER.update(gradient, state["optimizer"])
    return {"weights": optax.apply_updates(state["weights"], changes), "optimizer": optimizer, "key": key}, loss


def new_state() -> Any:
    weights = jnp.linspace(0, 1, 6)
    return {"weights": weights, "optimizer": OPTIMIZER.init(weights), "key": jax.random.key(7)}


def batches(first: int, stop: int) -> Iterator[np.ndarray]:
    return (np.random.default_rng(n).normal(size=(8, 6)).astype(np.float32) for n in range(first, stop))


def step_under(policy: str, **options: Any) -> Any:
    return autopar.parallelize(
        train_step, consistency=policy, cache=False, workers=2, num_devices=2, **{"carry": ["state"], **options}
    )


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        one_raw, other_raw = (np.asarray(jax.random.key_data(x) if is_key else x) for x in (a, b))
        np.testing.assert_array_equal(one_raw, other_raw)


LOCAL = {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)}


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("bsp", {}),
        pytest.param("every(2, bsp)", {}, marks=pytest.mark.slow),
        ("every(3, bsp)", LOCAL),
        pytest.param("largest(8, 2)", {}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_stream_has_the_bits_of_one_without_a_break(
    policy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = step_under(policy, **options)
    losses = list(whole.stream(new_state(), batches(0, 8)))
    first, second = step_under(policy, **options), step_under(policy, **options)
    stream = first.stream(new_state(), batches(0, 8))
    with autopar.StoreCheckpoints(tmp_path / "run") as checkpoints:
        before = list(itertools.islice(stream, 4 if "every(2" not in policy else 2))
        checkpoints.save(4, first, extra={"epoch": 1})
    with autopar.StoreCheckpoints(tmp_path / "run") as checkpoints:
        state, number = checkpoints.restore(second, new_state(), next(batches(0, 1)))
        assert (number, checkpoints.extra()) == (4, {"epoch": 1})
    after = list(second.stream(state, batches(number, 8)))
    np.testing.assert_array_equal(np.array(before + after), np.array(losses))
    assert_same(second.drain(), whole.drain())


def test_calls_go_on_from_the_restored_state(tmp_path: Path) -> None:
    step = step_under("bsp")
    state, expected = new_state(), new_state()
    with autopar.StoreCheckpoints(tmp_path) as checkpoints:
        for number, batch in enumerate(batches(0, 4)):
            expected, _ = step(expected, batch)
            if number == 1:
                checkpoints.save(2, step)
        other = step_under("bsp")
        state, number = checkpoints.restore(other, new_state(), next(batches(0, 1)))
    for batch in batches(number, 4):
        state, _ = other(state, batch)
    assert_same(state, expected)


@pytest.mark.parametrize(
    "policy",
    [pytest.param("ssp(1)", marks=pytest.mark.slow), "async", pytest.param("backup(1)", marks=pytest.mark.slow)],
)
def test_every_share_is_computed_once_across_a_break(policy: str, tmp_path: Path) -> None:
    first, second, others = step_under(policy), step_under(policy), set(threading.enumerate())
    stream = first.stream(new_state(), batches(0, 12))
    before = sum(1 for _ in itertools.islice(stream, 5))
    with autopar.StoreCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, first, wait=True)
        first.drain()
        state, number = checkpoints.restore(second, new_state(), next(batches(0, 1)))
    applied = second.report().num_versions
    assert before <= applied
    after = len(list(second.stream(state, batches(number, 12))))
    report = second.report()
    assert report.num_versions == applied + after
    if policy != "backup(1)":
        assert report.num_versions == 24
    second.drain()
    assert not [thread for thread in {*threading.enumerate()} - others if thread.name.startswith("worker ")]


def run(store: VersionedStore, clocks: int) -> None:
    for _, worker in itertools.product(range(clocks), range(2)):
        pulled = store.pull("w", worker=worker).values["w"]
        store.push("w", (worker + 1) * jnp.cos(pulled), worker=worker)
        store.push({"table": [worker]}, {"table": np.ones((1, 2), np.float32)}, worker=worker)
        store.clock(worker=worker)


def new_store(policy: str = "ssp(2)", **options: Any) -> VersionedStore:
    values = {"w": np.ones(3, np.float32), "table": np.zeros((4, 2), np.float32)}
    return VersionedStore(values, **{"update": optax.adam(0.1), "workers": 2, "consistency": policy} | options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "policy", [pytest.param("bsp", marks=pytest.mark.slow), "ssp(2)", "every(2, ssp(1))", "largest(8, 2, ssp(1))"]
)
def test_a_store_comes_back_with_clocks_and_what_is_pending(policy: str, tmp_path: Path) -> None:
    whole, first, second = new_store(policy), new_store(policy), new_store(policy)
    run(first, 3)
    store_open = first.pull("w", worker=0).values["w"]
    first.push("w", store_open, worker=0)
    with autopar.StoreCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(0, first)
        checkpoints.restore(second)
    run(whole, 3)
    whole.push("w", whole.pull("w", worker=0).values["w"], worker=0)
    for store in (whole, second):
        store.clock(worker=0)
        store.clock(worker=1)
        run(store, 2)
    assert_same(whole.pull(worker=None).values, second.pull(worker=None).values)
    one, other = whole.report(), second.report()
    assert (one.versions, one.clocks, one.staleness) == (other.versions, other.clocks, other.staleness)


# -- refusals ------------------------------------------------------------------------------------


def refused(folder: Path, make: Callable[[], Any]) -> Any:
    with autopar.StoreCheckpoints(folder) as checkpoints:
        return checkpoints.restore(make())


def test_another_store_is_refused(tmp_path: Path) -> None:
    with autopar.StoreCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(3, new_store())
        with pytest.raises(CheckpointError, match="give a number above 3, which is there"):
            checkpoints.save(3, new_store())
    with pytest.raises(StoreError, match=r"of 2 workers under 'ssp\(2\)', and the store has 3 under 'ssp\(2\)'"):
        refused(tmp_path, lambda: new_store(workers=3))
    with pytest.raises(StoreError, match=r"and the store has 2 under 'bsp'"):
        refused(tmp_path, lambda: new_store("bsp"))
    with pytest.raises(StoreError, match="the snapshot has state 0 of shard 0 as int32"):
        refused(tmp_path, lambda: new_store(update=optax.sgd(0.1, momentum=0.9)))
    other = VersionedStore({"v": np.ones(3, np.float32)}, workers=2, consistency="ssp(2)")
    with pytest.raises(StoreError, match="differ in the key"):
        refused(tmp_path, lambda: other)
    with (
        autopar.StoreCheckpoints(tmp_path) as checkpoints,
        pytest.raises(StoreError, match="says nothing about batches"),
    ):
        checkpoints.restore(step_under("bsp"), new_state(), next(batches(0, 1)))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    with autopar.StoreCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(1, new_store())
    store = new_store()
    run(store, 1)
    before = store.pull(worker=None).values
    for part, text in (("store", "clocks"), ("about", "leaves")):
        file = tmp_path / "1" / part / "metadata"
        good = file.read_text()
        file.write_text(good.replace(text, "clacks"))
        with pytest.raises(CheckpointError, match="is damaged"):
            refused(tmp_path, lambda: store)
        file.write_text(good)
    data = max(
        (path for path in (tmp_path / "1" / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        refused(tmp_path, lambda: store)
    assert_same(store.pull(worker=None).values, before)


def test_a_hostile_snapshot_leaves_the_store_as_it_was() -> None:
    store = new_store()
    run(store, 1)
    snapshot, before = store.snapshot(), store.report()
    fields = ("clocks", "iterations", "pending", "held", "open", "before", "staleness", "has_read", "read_versions")
    for field, value in itertools.product(fields, [None, [], [[1]], "text", {"0": 1}]):
        if value != snapshot.about[field]:
            with pytest.raises(AutoparError):
                store.load(Snapshot(snapshot.arrays, {**snapshot.about, field: value}))
            assert store.report() == before, (field, value)


def test_what_does_not_run_is_not_saved(tmp_path: Path) -> None:
    step = step_under("bsp")
    with autopar.StoreCheckpoints(tmp_path) as checkpoints:
        with pytest.raises(StepSignatureError, match="does not run"):
            checkpoints.save(0, step)
        list(step.stream(new_state(), batches(0, 1)))
        with pytest.raises(StoreError, match="the stream is over"):
            checkpoints.save(0, step)
        with pytest.raises(CheckpointError, match="there is none"):
            checkpoints.restore(new_store())
    with pytest.raises(CheckpointError, match="`keep` is 0"):
        autopar.StoreCheckpoints(tmp_path, keep=0)
