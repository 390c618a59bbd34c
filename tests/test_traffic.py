"""Bytes counted where arrays are handed to the transport, or message by message, equal the closed forms exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost import all_reduce_steps
from autopar.errors import StoreError
from autopar.extend.layouts import ArraySize, Layout, Piece, Server, plan_layout
from autopar.versions.store import VersionedStore
from autopar.versions.traffic import (
    byteps_bytes,
    byteps_shares,
    factor_broadcast_bytes,
    parameter_server_bytes,
    ring_bytes,
    sends_less,
)

M, N, CLOCKS = 24, 10, 3


def trained(
    sizes: dict[str, int],
    workers: int,
    shards: int,
    servers: Sequence[Server] | None = None,
    layout: Layout | None = None,
) -> VersionedStore:
    """A store after a few clocks in which every worker pulls and pushes everything."""
    places = [jax.devices()[number % 8] for number in range(shards)]
    values = {key: np.zeros(size, np.float32) for key, size in sizes.items()}
    store = VersionedStore(values, workers=workers, shards=places, servers=servers, layout=layout)
    for _ in range(CLOCKS):
        for worker in range(workers):
            pulled = store.pull(worker=worker, to=jax.devices()[worker % 8]).values
            store.push(None, pulled, worker=worker)
        for worker in range(workers):
            store.clock(worker=worker)
    return store


def counted(store: VersionedStore) -> dict[tuple[int | None, int], int]:
    """Bytes of one clock by worker and shard, in both directions."""
    traffic = store.report().traffic
    return {pair: (one.pushed_bytes + one.pulled_bytes) // CLOCKS for pair, one in traffic.items()}


def node_bytes(found: dict[tuple[int | None, int], int], worker: int | None, server: int | None) -> int:
    """Bytes of a node that is this worker and this server; what it exchanges with itself costs nothing, whether the store
    counts it or not."""
    return sum(size for pair, size in found.items() if (pair[0] == worker) != (pair[1] == server))


@pytest.mark.parametrize("workers", [1, 4])
def test_a_centralized_server_exchanges_2mn_with_each_worker(workers: int) -> None:
    found = counted(trained({"w": M * N}, workers, 1))
    formula = parameter_server_bytes([4 * M * N], workers)
    assert found == {(worker, 0): 2 * 4 * M * N for worker in range(workers)}
    assert formula.worker_bytes == 2 * 4 * M * N
    assert formula.server_bytes == (sum(found.values()),)


@pytest.mark.parametrize("sizes", [(60, 60, 60, 60), (100, 20, 30, 50)])
def test_sharded_servers_exchange_what_their_shards_say(sizes: tuple[int, ...]) -> None:
    """Also as nodes that are worker and server at once: with equal shards 2MN(P1 + P2 - 2) / P2."""
    pieces = {f"w{number}": (Piece(number, 0, size),) for number, size in enumerate(sizes)}
    layout = Layout(pieces, (None,) * 4, (Fraction(0),) * 4, Fraction(0), False)
    found = counted(trained({f"w{number}": size for number, size in enumerate(sizes)}, 4, 4, layout=layout))
    formula = parameter_server_bytes([4 * size for size in sizes], 4)
    for node in range(4):
        assert node_bytes(found, node, None) == formula.worker_bytes
        assert node_bytes(found, None, node) == formula.server_bytes[node]
        assert node_bytes(found, node, node) == formula.colocated_bytes[node]
    if len({*sizes}) == 1:
        total = sum(sizes)
        assert formula.colocated_bytes[0] == 4 * Fraction(2 * total * (4 + 4 - 2), 4)
        assert formula.server_bytes[0] == 4 * Fraction(2 * 4 * total, 4)


def messages_of(name: str, workers: int, size: int) -> list[int]:
    """Elements sent and received by each worker of an all-reduce, counted message by message."""
    steps: Any = getattr(all_reduce_steps, name)(list(range(workers)), (0, size))
    return [
        sum(one.size for step in steps for one in step if node in (one.source, one.target)) for node in range(workers)
    ]


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_a_ring_and_a_sharded_server_among_the_workers_send_what_their_messages_do(workers: int) -> None:
    size = 60
    assert messages_of("ring", workers, size) == [ring_bytes(size, workers)] * workers
    shards = [size // workers] * workers
    assert messages_of("sharded_parameter_server", workers, size) == [
        *parameter_server_bytes(shards, workers).colocated_bytes
    ]
    assert ring_bytes(size, workers) == parameter_server_bytes(shards, workers).colocated_bytes[0]


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_a_store_whose_shards_are_with_the_workers_sends_what_a_ring_does(workers: int) -> None:
    """Decentralized: a pull is an all-gather, a push a reduce-scatter; the array is divided by rows."""
    size = 60
    servers = [Server(worker=worker, message_s=0.0) for worker in range(workers)]
    layout = plan_layout({"w": ArraySize(size, 4)}, [Server(message_s=0.0)] * workers, workers)
    layout = replace(layout, workers=tuple(range(workers)))
    for store in (
        trained({"w": size}, workers, workers, layout=layout),
        *([trained({"w": size}, workers, workers, servers)] if workers > 2 else []),
    ):
        found = counted(store)
        assert not any(worker == shard for worker, shard in found)
        for node in range(workers):
            assert node_bytes(found, node, node) == ring_bytes(4 * size, workers)
        assert (
            ring_bytes(4 * size, workers)
            == parameter_server_bytes([4 * size // workers] * workers, workers).colocated_bytes[0]
        )
        assert sum(found.values()) == 2 * 4 * size * (workers - 1)  # of an all-gather and a reduce-scatter


@pytest.mark.parametrize(("n", "k"), [(4, 0), (4, 1), (4, 2), (4, 4), (3, 5)])
def test_the_planned_layout_loads_all_links_as_byteps_does(n: int, k: int) -> None:
    """Workers' machines and idle CPU machines serve rows of one array, in the shares of the formula, counted."""
    own, cpu = byteps_shares(n, k)
    assert n * own + k * cpu == 1
    unit = own.denominator * cpu.denominator * 4
    servers = [Server(worker=number if number < n else None, message_s=0.0) for number in range(n + k)]
    found = counted(trained({"w": unit}, n, n + k, servers))
    worker_bytes, cpu_bytes = byteps_bytes(4 * unit, n, k)
    for node in range(n):
        assert node_bytes(found, node, node) == worker_bytes
    for node in range(n, n + k):
        assert node_bytes(found, -1, node) == cpu_bytes
    if 0 < k < n:
        assert worker_bytes == cpu_bytes == 4 * unit * Fraction(4 * n * (n - 1), n * n + k * n - 2 * k)
    if k == 0:
        assert worker_bytes == ring_bytes(4 * unit, n)


# -- sufficient factors ----------------------------------------------------------------------


def factors(examples: int, seed: int = 0) -> autopar.SufficientFactors:
    rngs = jax.random.split(jax.random.key(seed))
    return autopar.SufficientFactors(
        jax.random.normal(rngs[0], (examples, M)), jax.random.normal(rngs[1], (examples, N))
    )


@pytest.mark.parametrize("update", [None, optax.sgd(-1.0)])
@pytest.mark.parametrize(("examples", "sent"), [(1, 34), (7, 238), (8, 240), (100, 240)])
def test_a_push_sends_factors_or_the_gradient_whichever_is_less(update: Any, examples: int, sent: int) -> None:
    """K(M + N) against MN elements."""
    store = VersionedStore({"w": np.zeros((M, N), np.float32)}, update=update, shards=jax.devices()[1:2])
    given = factors(examples)
    store.push("w", given)
    store.push("w", np.ones((M, N), np.float32))
    store.clock()
    expected = np.einsum("km,kn->mn", given.left, given.right) + 1
    np.testing.assert_allclose(store.pull().values["w"], expected, rtol=1e-5, atol=1e-5)
    assert store.report().traffic[0, 0].pushed_bytes == 4 * (sent + M * N)


def test_replicas_that_broadcast_factors_are_equal_and_send_2k_p_minus_1_m_plus_n() -> None:
    """Decentralized: every worker has a replica, and sends its factors to all others."""
    workers, examples = 4, 3
    replicas = [VersionedStore({"w": np.zeros((M, N), np.float32)}, workers=workers) for _ in range(workers)]
    for clock in range(CLOCKS):
        for worker in range(workers):
            for replica in replicas:
                replica.push("w", factors(examples, 10 * clock + worker), worker=worker)
        for worker in range(workers):
            for replica in replicas:
                replica.clock(worker=worker)
    found = [replica.report().traffic for replica in replicas]
    formula = factor_broadcast_bytes(4 * examples * (M + N), workers)
    assert formula == 4 * 2 * examples * (workers - 1) * (M + N)
    for worker in range(workers):
        others = [other for other in range(workers) if other != worker]
        sent = sum(found[other][worker, 0].pushed_bytes for other in others)
        received = sum(found[worker][other, 0].pushed_bytes for other in others)
        assert sent + received == CLOCKS * formula
    arrays = {np.asarray(replica.pull(worker=None).values["w"]).tobytes() for replica in replicas}
    assert len(arrays) == 1


def test_the_choice_of_a_layer_is_the_smaller_formula() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        m, n, k, p1, p2 = (int(number) for number in rng.integers(1, 60, size=5))
        gradient = Fraction(2 * m * n * (p1 + p2 - 2), p2)
        choice = sends_less(m, n, k, p1, p2)
        assert choice == ("factors" if factor_broadcast_bytes(k * (m + n), p1) < gradient else "gradient")
        seen.add(choice)
    assert seen == {"gradient", "factors"}
    # Poseidon's example: VGG's first fully connected layer, 32 images, 8 nodes
    assert sends_less(25088, 4096, 32, 8, 8) == "factors"


@pytest.mark.parametrize(
    ("keys", "left", "right", "message"),
    [
        (
            "w",
            (3, M),
            (2, N),
            "the right factor for 'w' is float32(2, 10); for a matrix of float32(24, 10) it is float32 of",
        ),
        ("w", (3, N), (3, N), "the left factor for 'w' is float32(3, 10)"),
        ("w", (), (), "the left factor for 'w' is float32()"),
        ("w", (M,), (N,), "the left factor for 'w' is float32(24,)"),
        ("b", (3, M), (3, N), "the update of 'b' is a product of factors, which is for a whole matrix"),
        ({"w": [1]}, (3, M), (3, N), "the update of 'w' is a product of factors, which is for a whole matrix"),
    ],
)
def test_factors_that_do_not_fit_are_refused(keys: Any, left: Any, right: Any, message: str) -> None:
    store = VersionedStore({"w": np.zeros((M, N), np.float32), "b": np.zeros(N, np.float32)})
    given = autopar.SufficientFactors(jnp.ones(left), jnp.ones(right))
    with pytest.raises(StoreError, match=re.escape(message)):
        store.push(keys, dict.fromkeys([keys] if isinstance(keys, str) else keys, given))


def test_the_numbers_of_rows_are_counted() -> None:
    store = VersionedStore({"e": np.zeros((100, 8), np.float32)})
    store.pull({"e": [1, 2, 3]})
    store.push({"e": [4]}, {"e": np.ones((1, 8), np.float32)})
    traffic = store.report().traffic[0, 0]
    assert (traffic.pulled_bytes, traffic.pushed_bytes) == (3 * (4 + 8 * 4), 4 + 8 * 4)
