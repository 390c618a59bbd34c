"""Each consistency policy in a store: what it applies, discards, holds back and lets read."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from stores import ones, run_workers, zeros

from autopar.versions.consistency.simulate import simulate
from autopar.versions.store import VersionedStore


def test_every_n_iterations_pulls_and_pushes_once() -> None:
    """Within its period a worker gets what it pulled at the start; its updates are added up."""
    store = VersionedStore(zeros(w=(2,)), workers=2, consistency="every(3, bsp)")
    for iteration in range(6):
        for worker in (0, 1):
            pulled = store.pull(worker=worker)
            assert pulled.values["w"].tolist() == [12.0 * (iteration // 3)] * 2
            store.push("w", ones(2) * (1 + 2 * worker), worker=worker)
            assert store.clock(worker=worker) == (iteration + 1) // 3
    report = store.report()
    assert report.versions == (2,)
    assert {key: (t.pushed_bytes, t.pulled_bytes) for key, t in report.traffic.items()} == {
        (worker, 0): (2 * 8, 2 * 8) for worker in (0, 1)
    }


def test_local_sgd_averages_the_weights_of_its_workers() -> None:
    """Each worker takes three steps of its own and pushes the difference; the server takes the mean."""
    store = VersionedStore(zeros(w=(2,)), workers=2, update=optax.scale(0.5))
    for _ in range(4):
        before = store.pull(worker=None).values["w"]
        for worker in (0, 1):
            own = start = store.pull(worker=worker).values["w"]
            for _ in range(3):
                own = own - 0.1 * (own - (1.0 + worker))
            store.push("w", own - start, worker=worker)
            store.clock(worker=worker)
        target = before * 0.9**3 + 1.5 * (1 - 0.9**3)
        np.testing.assert_allclose(store.pull(worker=None).values["w"], target, rtol=1e-6)


def test_the_largest_updates_go_first_and_all_arrive_within_the_hold() -> None:
    store = VersionedStore(zeros(a=(4,), b=(4,), c=(4,)), consistency="largest(16, 2, async)")
    sent = []
    for _ in range(4):
        store.push(["a", "b"], {"a": ones(4), "b": 10 * ones(4)})
        store.clock()
        sent.append({key: float(array[0]) for key, array in store.pull(worker=None).values.items()})
    assert sent == [
        {"a": 0, "b": 10, "c": 0},
        {"a": 0, "b": 20, "c": 0},
        {"a": 3, "b": 20, "c": 0},  # held for two clocks, so it goes first, and uses the budget
        {"a": 3, "b": 40, "c": 0},
    ]
    store.push("c", ones(4))
    store.leave()
    assert float(store.pull(worker=None).values["a"][0]) == 4  # what was held back; the open clock is dropped
    assert float(store.pull(worker=None).values["c"][0]) == 0


def test_an_old_update_is_discarded() -> None:
    store = VersionedStore(zeros(w=(1,)), workers=2, consistency="discard(2)")
    store.pull(worker=0)
    for _ in range(3):
        store.pull(worker=1)
        store.push("w", ones(1), worker=1)
        store.clock(worker=1)
    store.push("w", 100 * ones(1), worker=0)
    store.clock(worker=0)
    assert store.pull(worker=0).values["w"].tolist() == [3.0]
    store.push("w", 100 * ones(1), worker=0)
    store.clock(worker=0)
    assert store.pull(worker=0).values["w"].tolist() == [103.0]
    assert store.report().num_discarded == 1


def test_a_late_update_is_discarded_and_its_worker_goes_on_with_the_newest_clock() -> None:
    store = VersionedStore(zeros(w=(1,)), workers=3, consistency="backup(1)")
    store.pull(worker=2)
    for _ in range(4):
        for worker in (0, 1):
            store.pull(worker=worker, timeout_s=0)
            store.push("w", ones(1), worker=worker)
            store.clock(worker=worker)
    store.push("w", 100 * ones(1), worker=2)
    assert store.clock(worker=2) == 1
    pulled = store.pull(worker=2, timeout_s=0)
    assert (pulled.values["w"].tolist(), pulled.clock) == ([8.0], 4)
    store.push("w", 2 * ones(1), worker=2)
    store.clock(worker=2)
    store.push("w", ones(1), worker=0)
    store.clock(worker=0)
    assert store.pull(worker=None).values["w"].tolist() == [11.0]
    assert store.report().num_discarded == 1


def test_a_clock_of_partial_participation_has_the_updates_of_those_drawn() -> None:
    store = VersionedStore(zeros(w=(1,)), workers=4, consistency="partial(2, 3)")

    def work(index: int) -> None:
        while (clock := store.pull(worker=index).clock) < 30:
            assert store.report().versions[0] == clock
            store.push("w", ones(1), worker=index)
            store.clock(worker=index)
        store.leave(index)

    run_workers(work)
    assert store.pull(worker=None).values["w"].tolist() == [60.0]


@pytest.mark.parametrize("policy", ["bsp", "ssp(2)", "async", "backup(1)", "partial(2)", "discard(3)"])
def test_a_store_follows_the_simulation(policy: str) -> None:
    """Where the simulator lets a worker read, the store does not wait; both apply and discard the same updates."""
    store = VersionedStore(zeros(w=(1,)), workers=4, consistency=policy)
    rng = np.random.default_rng(0)

    def read(worker: int, now_s: float) -> None:
        store.pull(worker=worker, timeout_s=0)

    def push(worker: int, now_s: float) -> None:
        store.push("w", ones(1), worker=worker)
        store.clock(worker=worker)

    run = simulate(
        policy,
        4,
        30,
        lambda worker, iteration: float(rng.exponential()),
        on_read=read,
        on_push=push,
    )
    report = store.report()
    assert (report.versions[0], report.num_discarded) == (run.num_versions, run.num_discarded)
    assert store.pull(worker=None).values["w"].tolist() == [run.num_applied]
    assert report.staleness == run.staleness
