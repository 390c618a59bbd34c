"""Decentralized training by gossip: the mean is that of SGD, workers agree as fast as the matrix says, and bytes are counted."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from several_processes import run

import autopar
from autopar.errors import StoreError
from autopar.extend.consistency import Mixing, find_mixing
from autopar.versions.traffic import gossip_bytes

PROGRAMS = Path(__file__).parent / "store_programs.py"
M, N = 6, 5
MATRIX = np.array([[0.6, 0.3, 0.1, 0], [0.3, 0.3, 0.2, 0.2], [0.1, 0.2, 0.5, 0.2], [0, 0.2, 0.2, 0.6]])
GRAPHS = [
    ("ring", 1),
    ("ring", 2),
    ("ring", 5),
    ("complete", 3),
    ("torus(2, 4)", 8),
    ("torus(3,3)", 9),
    ("hypercube", 8),
]


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(M, N)).astype(np.float32), "b": rng.normal(size=N).astype(np.float32)}


@jax.jit
def gradients(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w["w"] + w["b"]) ** 2))(weights)


def batch(worker: int, clock: int) -> np.ndarray:
    return np.random.default_rng([worker, clock]).normal(size=(8, M)).astype(np.float32)


def of_all(store: autopar.GossipStore, workers: int) -> np.ndarray:
    """All weights, as a row for each worker."""
    pulled = [store.pull(worker=worker).values for worker in range(workers)]
    return np.array(
        [np.concatenate([np.asarray(one[key]).ravel() for key in sorted(one)]) for one in pulled], np.float64
    )


# -- D-PSGD ----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.contract
@pytest.mark.parametrize(("mixing", "workers"), [*GRAPHS, (MATRIX, 4)])
def test_the_mean_takes_the_steps_of_sgd_on_averaged_gradients(mixing: Any, workers: int) -> None:
    places = [jax.devices()[worker % 8] for worker in range(workers)]
    store = autopar.GossipStore(start(), mixing, update=optax.sgd(0.5), workers=workers, places=places)
    for clock in range(12):
        mean = {key: np.asarray(array) for key, array in store.mean().items()}
        pushed = [
            gradients(store.pull(worker=w).values, jax.device_put(batch(w, clock), places[w])) for w in range(workers)
        ]
        for worker in range(workers):
            store.push(None, pushed[worker], worker=worker)
            assert store.clock(worker=worker) == clock + 1
        for key, before in mean.items():
            step = sum(np.asarray(one[key]) for one in pushed) / workers
            np.testing.assert_allclose(store.mean()[key], before - 0.5 * step, rtol=1e-5, atol=1e-6)
    for worker in range(workers):
        assert store.pull("w", worker=worker).values["w"].devices() == {places[worker]}
    each = of_all(store, workers)
    assert workers == 1 or np.ptp(each, axis=0).max() > 1e-3  # they are not all the same


@pytest.mark.parametrize(("mixing", "workers"), [*GRAPHS[1:], (MATRIX, 4)])
def test_without_gradients_workers_agree_at_least_as_fast_as_the_second_eigenvalue(mixing: Any, workers: int) -> None:
    store = autopar.GossipStore(start(), mixing, workers=workers)
    for worker in range(workers):  # far from each other
        noise = {key: np.random.default_rng(worker).normal(size=array.shape) for key, array in start().items()}
        store.push(None, {key: array.astype(np.float32) for key, array in noise.items()}, worker=worker)
    for worker in range(workers):
        store.clock(worker=worker)
    factor = find_mixing(mixing, workers).second_eigenvalue
    each = of_all(store, workers)
    mean, distance = each.mean(0), ((each - each.mean(0)) ** 2).sum()
    assert distance > 1
    for _ in range(6):
        for worker in range(workers):
            store.clock(worker=worker)
        each = of_all(store, workers)
        after = ((each - each.mean(0)) ** 2).sum()
        assert after <= factor**2 * distance * (1 + 1e-5) + 1e-11
        np.testing.assert_allclose(each.mean(0), mean, atol=1e-6)
        distance = after


@pytest.mark.parametrize(("mixing", "workers"), GRAPHS)
def test_bytes_are_those_of_the_closed_form(mixing: str, workers: int) -> None:
    store = autopar.GossipStore(start(), mixing, workers=workers)
    for _ in range(3):
        for worker in range(workers):
            store.clock(worker=worker)
    matrix = find_mixing(mixing, workers)
    for worker, traffic in enumerate(store.traffic()):
        expected = 3 * gossip_bytes(4 * (M * N + N), len(matrix.neighbors(worker)))
        assert traffic.sent_bytes == traffic.received_bytes == expected // 2


def test_threads_compute_what_a_loop_does() -> None:
    found: list[Any] = []
    for threaded in (False, True):
        store = autopar.GossipStore(start(), "ring", update=optax.adam(0.1), workers=4)

        def work(index: int, clocks: range, store: autopar.GossipStore = store) -> None:
            for clock in clocks:
                store.push(None, gradients(store.pull(worker=index).values, batch(index, clock)), worker=index)
                store.clock(worker=index)

        if threaded:
            threads = [threading.Thread(target=work, args=(index, range(10))) for index in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        else:
            for clock in range(10):
                each = [gradients(store.pull(worker=index).values, batch(index, clock)) for index in range(4)]
                for index in range(4):
                    store.push(None, each[index], worker=index)
                    store.clock(worker=index)
        found.append(of_all(store, 4))
    np.testing.assert_array_equal(*found)


def test_workers_are_submeshes_and_push_rows() -> None:
    meshes = [Mesh(np.array(jax.devices()[first : first + 2]), ("x",)) for first in (0, 2, 4)]
    places = [NamedSharding(mesh, P("x")) for mesh in meshes]
    store = autopar.GossipStore({"e": np.zeros((4, 2), np.float32)}, "complete", workers=3, places=places)
    store.push({"e": [1, 1]}, {"e": np.ones((2, 2), np.float32)}, worker=2)
    for _ in range(2):
        for worker in range(3):
            store.clock(worker=worker)
    for worker in range(3):
        array = store.pull(worker=worker).values["e"]
        assert array.sharding == places[worker]
        np.testing.assert_allclose(array, np.outer([0, 2 / 3, 0, 0], [1, 1]), rtol=1e-6)


def test_equal_weights_stay_equal_to_the_last_bit() -> None:
    store = autopar.GossipStore(start() | {"h": np.full(3, 0.1, jnp.bfloat16)}, "ring", workers=5)
    for _ in range(20):
        for worker in range(5):
            store.clock(worker=worker)
    for worker in range(5):
        pulled = store.pull(worker=worker).values
        for key, array in start().items():
            np.testing.assert_array_equal(pulled[key], array)
        assert pulled["h"].dtype == jnp.bfloat16


# -- matrices --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixing", "workers", "eigenvalue"),
    [
        ("ring", 8, (1 + 2 * np.cos(2 * np.pi / 8)) / 3),
        ("complete", 6, 0.0),
        ("hypercube", 8, 1 / 2),
        ("torus(4, 4)", 16, 3 / 5),
        ("torus(2,2,2)", 8, 1 / 2),
        ("ring", 1, 0.0),
    ],
)
def test_the_second_eigenvalues_of_graphs_are_the_known_ones(mixing: str, workers: int, eigenvalue: float) -> None:
    found = find_mixing(mixing, workers)
    assert found.second_eigenvalue == pytest.approx(eigenvalue, abs=1e-12)
    assert find_mixing(found, workers) == found
    matrix = np.array(found.weights)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(0), 1)


@pytest.mark.parametrize(
    ("mixing", "workers", "message"),
    [
        (
            "rign",
            4,
            "there is no graph 'rign'. Did you mean 'ring'? The graphs are 'ring', 'complete', 'torus', 'hypercube'",
        ),
        ("ring(", 4, "the graph 'ring(' cannot be read: give one of 'ring', 'complete'"),
        ("ring" * 1000, 4, "cannot be read"),
        ("ring(3)", 3, "the graph 'ring(3)' gives numbers to 'ring', which takes none"),
        (
            "torus(2, 3)",
            4,
            "the graph torus(2, 3) has 6 workers, and there are 4: give sizes of which the product is 4",
        ),
        ("torus", 4, "the graph torus() has 0 workers"),
        ("hypercube", 6, "the graph hypercube needs 2, 4, 8, ... workers, and there are 6"),
        ("ring", 0, "`workers` is 0: give a whole number of workers, at least 1"),
        (3, 2, "`mixing` has the shape (), and there are 2 workers"),
        (object(), 2, "`mixing` is no matrix of numbers"),
        (np.eye(3), 2, "`mixing` has the shape (3, 3), and there are 2 workers"),
        ([[1.5, -0.5], [-0.5, 1.5]], 2, "`mixing` has the weight -0.5: give weights of 0 to 1"),
        ([[np.nan, 1], [1, 0]], 2, "`mixing` has the weight nan"),
        ([[0.5, 0.5], [0.5, 0.4]], 2, "row 1 of `mixing` has the sum 0.9: a worker's new weights are a mean"),
        (
            [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]],
            3,
            "`mixing` is not symmetric: worker 0 takes 0.5 of worker 1, which takes 0.",
        ),
        (np.eye(2), 2, "`mixing` does not connect workers [0] with workers [1]: they would train models of their own"),
        (
            [[0, 1], [1, 0]],
            2,
            "`mixing` has the eigenvalue -1: two groups of workers would exchange their weights for ever",
        ),
    ],
)
def test_a_matrix_that_would_not_lead_to_the_mean_is_refused(mixing: Any, workers: int, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        autopar.GossipStore({"w": np.zeros(2, np.float32)}, mixing, workers=workers)


def test_a_matrix_in_float32_is_accepted() -> None:
    assert isinstance(find_mixing(np.full((3, 3), 1 / 3, np.float32), 3), Mixing)


# -- workers that end ------------------------------------------------------------------------


def test_a_worker_waits_for_no_neighbor_that_has_ended() -> None:
    store = autopar.GossipStore(start(), "ring", workers=3)
    with pytest.raises(ZeroDivisionError), store.worker(1) as worker:
        worker.clock()
        raise ZeroDivisionError("of the user")
    with store.worker(0) as worker:
        assert worker.clock() == 1  # worker 1 was in this clock
        message = (
            "worker 0, at clock 1, waits for the weights of its neighbor 2, which is driven by this same thread|worker 0, at clock 1,"
            r" waits for the weights of its neighbor 2, which has left at clock 0: all workers take the same number of clocks"
        )
        store.leave(2)
        with pytest.raises(StoreError, match=message):
            worker.clock()
    with pytest.raises(
        StoreError, match="worker 1 failed \\(ZeroDivisionError: of the user\\) at clock 1: it makes no calls"
    ):
        store.clock(worker=1)


def test_weights_that_a_reader_donated_are_named() -> None:
    store = autopar.GossipStore(start(), "complete")
    jax.jit(lambda array: array + 1, donate_argnums=0)(store.pull("b").values["b"])
    for call in (store.clock, store.pull):
        with pytest.raises(StoreError, match="the array of 'b' was donated by a reader: copy what you pull"):
            call()


def test_an_update_that_fails_leaves_the_weights_and_can_be_tried_again() -> None:
    failures = [ZeroDivisionError("of the user")]

    def update(weights: Any, total: Any) -> Any:
        if failures:
            raise failures.pop()
        return {"w": weights["w"] + total["w"]}

    store = autopar.GossipStore({"w": np.ones(2, np.float32)}, "complete", update=update)
    store.push("w", np.ones(2, np.float32))
    with pytest.raises(ZeroDivisionError):
        store.clock()
    assert store.pull("w").values["w"].tolist() == [1, 1] and store.pull().clock == 0
    assert store.clock() == 1
    assert store.pull("w").values["w"].tolist() == [2, 2]
    assert store.traffic()[0].received_bytes == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autopar.GossipStore({"n": np.zeros(2, np.int32)}), "'n' is int32: workers average weights"),
        (
            lambda: autopar.GossipStore(start(), workers=3, places=jax.devices()[:2]),
            "`places` has 2 places for 3 workers",
        ),
        (
            lambda: autopar.GossipStore(start()).clock(worker=2),
            "there is no worker 2: the store was made for workers 0 to 1",
        ),
        (lambda: autopar.GossipStore(start()).push("x", 1), "the store has no key 'x'"),
        (
            lambda: autopar.GossipStore(start()).push("b", np.zeros(3, np.float32)),
            "the update of 'b' is float32(3,), and",
        ),
        (lambda: autopar.GossipClient(start()), "a store is served to other processes: call `jax.distributed"),
    ],
)
def test_misuse_is_named(call: Any, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        call()


@pytest.mark.slow
def test_processes_compute_what_threads_do() -> None:
    """Also the bytes; then workers of other matrices, one that leaves early and one that dies are named."""
    ended = run("gossip", processes=3, devices=1, programs=PROGRAMS)
    assert [one.code for one in ended] == [0, 0, 0], "\n---\n".join(one.errors[-2000:] for one in ended)
    for worker, one in enumerate(ended):
        assert one.last["weights"] == one.last["expected"], worker
        assert one.last["sent"] == one.last["received"] == 8 * gossip_bytes(one.last["num_bytes"], 2) // 2
        assert re.match("workers . and . have other mixing matrices, or arrays of other names", one.last["mixing"])
        assert one.last["after"] == f"worker {worker} has left the training: it takes no clock after its block"
    left = "worker 0, at clock 1, waits for the weights of its neighbor 2, which has left at clock 1: all workers take"
    assert ended[0].last["left"].startswith(left)


@pytest.mark.slow
def test_a_process_that_dies_is_named_to_its_neighbors() -> None:
    *others, dead = run("gossip_killed", processes=3, devices=1, programs=PROGRAMS)
    assert dead.code == -9
    for one in others:
        assert one.told, one.errors[-2000:]
        assert re.search("worker 2 of the store (has given no sign of life for 10 s|ended before)", one.last["error"])
