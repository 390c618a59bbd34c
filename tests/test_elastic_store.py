"""Stores whose workers and servers die, join and leave: every update of every share is applied once, in the bits of an undisturbed run."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import StoreError
from autopar.membership.wire import Connection, WireError, split
from autopar.versions.elastic import arrays
from autopar.versions.elastic.members import Members
from autopar.versions.elastic.replica_state import Entry, applied, committed, is_new, pushed
from autopar.versions.elastic.server import Replica
from autopar.versions.elastic.view import View, with_copy, with_replica, with_worker, without
from autopar.versions.server_update import Pushed
from autopar.versions.store_state import StoreState

NUM_SHARES, NUM_CLOCKS = 4, 12
SHAPES = {"bias": (4,), "first": (8, 4), "second": (4, 1)}


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in SHAPES.items()}


@jax.jit
def gradients(weights: Mapping[str, jax.Array], clock: int, share: int) -> Any:
    x = jax.random.normal(jax.random.fold_in(jax.random.key(clock), share), (16, 8))

    def loss(weights: Mapping[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(x @ weights["first"] + weights["bias"])
        return jnp.mean((hidden @ weights["second"] - x.sum(1, keepdims=True)) ** 2)

    return jax.grad(loss)(dict(weights))


def store_of(
    server: int = 0, servers: int = 1, policy: str = "bsp", shares: int = NUM_SHARES
) -> autopar.VersionedStore:
    own = {key: array for n, (key, array) in enumerate(sorted(weights().items())) if n % servers == server}
    return autopar.VersionedStore(own, update=optax.adam(0.01), workers=shares, consistency=policy)


def undisturbed(policy: str = "bsp", servers: int = 1) -> dict[str, np.ndarray]:
    stores = [store_of(n, servers, policy) for n in range(servers)]
    for clock in range(NUM_CLOCKS):
        for share in range(NUM_SHARES):
            pulled = {key: one for store in stores for key, one in store.pull(worker=share).values.items()}
            found = gradients(pulled, clock, share)
            for store in stores:
                store.push(None, {key: found[key] for key in store.keys}, worker=share)
                store.clock(worker=share)
    return {key: np.asarray(one) for store in stores for key, one in store.pull(worker=None).values.items()}


# -- who does what ---------------------------------------------------------------------------------


def test_shares_and_chains_follow_who_is_alive() -> None:
    rng = random.Random(0)
    view, alive, number = View.of(2, 7), dict[str, str](), 0
    for _ in range(2000):
        before = view
        if alive and rng.random() < 0.5:
            name = rng.choice(sorted(alive))
            view = without(view, name)
            del alive[name]
        else:
            number += 1
            name, role = f"member {number}", rng.choice(["worker", "0", "1"])
            if role == "worker":
                view = with_worker(view, name)
            else:
                view = with_replica(view, int(role), name, f"host:{number}", has_state=False)
                if view.lost[int(role)]:
                    view = with_replica(view, int(role), name, f"host:{number}", has_state=True)
            alive[name] = role
        assert view.epoch == before.epoch + (view != before)
        workers = sorted(name for name, role in alive.items() if role == "worker")
        counts = [len(view.shares_of(worker)) for worker in workers]
        assert sum(counts) == (7 if workers else 0)
        assert max(counts, default=0) - min(counts, default=0) <= 1
        moved = sum(old != new and old in alive for old, new in zip(before.shares, view.shares, strict=True))
        assert moved <= -(-7 // max(1, len(workers))), "a share whose worker lives moves only to one that has just come"
        for server in (0, 1):
            own = {name for name, role in alive.items() if role == str(server)}
            assert {*view.chains[server], *view.waiting[server]} == own
            if view.waiting[server] and rng.random() < 0.7 and view.chains[server]:
                view = with_copy(view, server, view.waiting[server][0])
        assert View.from_json(json.loads(json.dumps(view.to_json()))) == view


def test_a_server_without_replicas_is_not_replaced_by_a_new_one() -> None:
    view = with_replica(View.of(1, 1), 0, "first", "host:1", has_state=False)
    view = without(view, "first")
    assert view.lost == (True,)
    view = with_replica(view, 0, "new", "host:2", has_state=False)
    assert (view.chains, view.lost) == (((),), (True,))
    view = with_replica(view, 0, "restored", "host:3", has_state=True)
    assert (view.chains, view.waiting, view.lost) == ((("restored",),), (("new",),), (False,))


# -- what is replicated ----------------------------------------------------------------------------


def as_sent(entry: Entry) -> Entry:
    message, arrays = entry.packed()
    return Entry.unpacked(json.loads(json.dumps(message)), [np.asarray(one) for one in arrays])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bsp", "ssp(2)", "async", "backup(1)", "discard(3)", "partial(2)"])
def test_replicas_follow_and_nothing_is_lost_or_applied_twice(policy: str) -> None:
    rng = random.Random(1)
    head, replica = store_of(policy=policy)._state, store_of(policy=policy)._state
    position, log = 0, list[tuple[int, int]]()
    kept: dict[tuple[int, int], tuple[int, dict[str, Pushed]]] = {}

    def push(state: StoreState, share: int, clock: int) -> StoreState:
        nonlocal replica, position
        version, update = kept[share, clock]
        if not is_new(state, share, clock):
            return state
        state, entry = pushed(state, share, clock, version, update, position)
        if entry is not None:
            replica = applied(replica, as_sent(entry))
            position += 1
            log.extend(member for group in entry.groups for member in group)
        return state

    for _ in range(4000):
        board = head.board
        ready = [n for n in range(NUM_SHARES) if not board.must_wait(n) and board.clocks.of(n) < NUM_CLOCKS]
        if not ready:
            break
        share = rng.choice(ready)
        read = board.read(share)
        head = StoreState(read, head.shards, head.pending, head.iterations, head.held)
        clock = read.clocks.of(share)
        if clock >= NUM_CLOCKS:
            continue
        found = gradients(head.shards[0].weights, clock, share)
        kept[share, clock] = (read.clocks.version, {key: Pushed(one) for key, one in found.items()})
        head = push(head, share, clock)
        if rng.random() < 0.3:  # a push whose answer was lost is sent again
            head = push(head, share, clock)
        kept = {key: one for key, one in kept.items() if key[1] >= committed(head.board)[key[0]]}
        if rng.random() < 0.1:  # the head dies: the replica leads, and workers push again what they kept
            head = replica
            for again, at in sorted(kept):
                if is_new(head, again, at):
                    head = push(head, again, at)
    assert len(log) == len({*log}), "no update is applied twice"
    if policy in ("bsp", "ssp(2)", "async"):
        assert {*log} == {(share, clock) for share in range(NUM_SHARES) for clock in range(NUM_CLOCKS)}
    assert head.board.clocks.version == replica.board.clocks.version > 0
    expected = undisturbed(policy) if policy == "bsp" else head.shards[0].weights
    for key, array in replica.shards[0].weights.items():
        np.testing.assert_array_equal(array, expected[key])
        np.testing.assert_array_equal(array, head.shards[0].weights[key])


# -- in one process, by threads --------------------------------------------------------------------


class Job:
    """Replicas and workers in threads."""

    def __init__(self, keeper: autopar.StoreKeeper, folder: Path | None = None) -> None:
        self.keeper, self.folder = keeper, folder
        self.threads: list[threading.Thread] = []
        self.stores: list[tuple[int, autopar.VersionedStore]] = []
        self.replicas: list[Replica] = []
        self.workers: list[autopar.ElasticWorker] = []
        self.computed: list[tuple[int, int]] = []
        self.failures: list[BaseException] = []

    def run(self, function: Callable[..., None], *args: Any) -> None:
        def guarded() -> None:
            try:
                function(*args)
            except BaseException as error:
                self.failures.append(error)

        self.threads.append(threading.Thread(target=guarded, daemon=True))
        self.threads[-1].start()

    def serve(self, server: int, servers: int, store: autopar.VersionedStore | None = None) -> None:
        own = store_of(server, servers) if store is None else store
        log = None if self.folder is None else self.folder / f"{server}-{len(self.stores)}"
        self.stores.append((server, own))
        replica = Replica(own, self.keeper.address, server, self.keeper.token, None, log)
        self.replicas.append(replica)
        self.run(replica.run)

    def work(self, delay_s: float = 0.0, dies_after: int | None = None) -> None:
        def run() -> None:
            with autopar.ElasticWorker(self.keeper.address, token=self.keeper.token) as worker:
                self.workers.append(worker)
                for count, task in enumerate(worker.tasks(NUM_CLOCKS)):
                    if count == dies_after:
                        vanish(worker._members)
                        return
                    time.sleep(delay_s)
                    self.computed.append((task.clock, task.share))
                    worker.push(task, gradients(task.values, task.clock, task.share))

        self.run(run)

    def end(self, dead: int = 0) -> None:
        """Wait for all threads but those of dead processes, which know nothing of it."""
        until_s = time.monotonic() + 300
        while sum(thread.is_alive() for thread in self.threads) > dead:
            assert time.monotonic() < until_s, self.keeper.events
            time.sleep(0.05)


def vanish(members: Any) -> None:
    """End a membership as the death of its process does."""
    members._link.is_last = True
    members.say()
    members.leave = lambda: None


def check_weights(job: Job, servers: int) -> None:
    expected = undisturbed(servers=servers)
    for _, store in job.stores:
        for key, array in store.pull(worker=None).values.items():
            np.testing.assert_array_equal(array, expected[key])


def test_a_job_has_the_bits_of_one_process(tmp_path: Path) -> None:
    with autopar.StoreKeeper(servers=2, shares=NUM_SHARES) as keeper:
        job = Job(keeper, tmp_path)
        for server in (0, 1, 0, 1):
            job.serve(server, 2)
        for _ in range(3):
            job.work()
        job.end()
        assert not job.failures
        assert keeper.wait(0)
    check_weights(job, 2)
    for path in tmp_path.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [tuple(one) for line in lines for one in line["applied"]][:NUM_SHARES] == [
            (n, 0) for n in range(NUM_SHARES)
        ]
        assert lines[-1]["position"] == NUM_CLOCKS - 1


def test_shares_of_a_dead_worker_are_computed_by_others_and_a_new_one() -> None:
    with autopar.StoreKeeper(servers=2, shares=NUM_SHARES) as keeper:
        job = Job(keeper)
        job.serve(0, 2)
        job.serve(1, 2)
        job.work(dies_after=5)
        job.work(0.05)
        while not any("gone" in event for _, event in keeper.events):
            time.sleep(0.05)
        job.work()
        job.end()
        assert not job.failures
        assert len(job.workers) == 3
    check_weights(job, 2)


def test_the_next_replica_leads_and_the_old_head_answers_nobody() -> None:
    with autopar.StoreKeeper(shares=NUM_SHARES) as keeper:
        job = Job(keeper)
        for _ in range(3):
            job.serve(0, 1)
        while len(keeper.view.chains[0]) < 3:
            time.sleep(0.02)
        job.work(0.05)
        while len(job.computed) < 6:
            time.sleep(0.02)
        head = next(one for one in job.replicas if one.name == keeper.view.head(0))
        vanish(head.members)  # it goes on, without knowing that it counts as dead
        job.serve(0, 1)
        job.end(dead=1)
        assert not job.failures
    job.stores.pop(job.replicas.index(head))
    check_weights(job, 1)


def test_a_new_keeper_takes_over() -> None:
    first = autopar.StoreKeeper(shares=NUM_SHARES)
    job = Job(first)
    job.serve(0, 1)
    job.serve(0, 1)
    job.work(0.05)
    while not job.computed:
        time.sleep(0.02)
    first.close()
    count = len(job.computed)
    while len(job.computed) < count + 3:  # nobody needs the keeper while all is well
        time.sleep(0.02)
    epoch = first.view.epoch
    with autopar.StoreKeeper(first.address, shares=NUM_SHARES, token=first.token) as keeper:
        job.work(0.05)
        job.end()
        assert not job.failures
        assert keeper.view.epoch > epoch
    check_weights(job, 1)


def test_a_server_whose_replicas_all_died_is_restored() -> None:
    with autopar.StoreKeeper(shares=NUM_SHARES) as keeper:
        job = Job(keeper)
        job.serve(0, 1)
        job.work(0.05)
        while len(job.computed) < 9:
            time.sleep(0.02)
        snapshot = job.stores[0][1].snapshot()
        while len(job.computed) < 14:
            time.sleep(0.02)
        vanish(job.replicas[0].members)
        job.replicas[0]._socket.close()
        while not keeper.view.lost[0]:
            time.sleep(0.02)
        with pytest.raises(StoreError, match="all replicas of server 0 have died: restore it from a checkpoint"):
            autopar.serve_replica(store_of(), keeper.address, token=keeper.token)
        restored = store_of()
        restored.load(snapshot)
        job.serve(0, 1, restored)
        job.end(dead=1)
    job.stores.pop(0)
    check_weights(job, 1)


def test_what_cannot_be_is_refused() -> None:
    with autopar.StoreKeeper(shares=NUM_SHARES) as keeper:
        with pytest.raises(StoreError, match="refuses this process: it does not give this job's token"):
            autopar.ElasticWorker(keeper.address, token="guess")
        with pytest.raises(StoreError, match="server 3: the store has servers 0 to 0"):
            autopar.serve_replica(store_of(), keeper.address, server=3, token=keeper.token)
        with pytest.raises(StoreError, match="holds updates back in a worker, which may die with them"):
            autopar.serve_replica(store_of(policy="every(2, bsp)"), keeper.address, token=keeper.token)
        with pytest.raises(StoreError, match=r"the store has 5 shares of the batch .* and the keeper 4"):
            autopar.serve_replica(store_of(shares=5), keeper.address, token=keeper.token)
        with pytest.raises(StoreError, match="cannot listen on"):
            autopar.StoreKeeper(keeper.address)
    with pytest.raises(StoreError, match="`shares` is 0: give a whole number of at least 1"):
        autopar.StoreKeeper(shares=0)


def test_a_newcomer_does_not_lead_where_an_earlier_keeper_knew_a_chain() -> None:
    members = Members(1, NUM_SHARES, 5.0, 0.0)
    report = {"server": 0, "address": "host:1", "shares": NUM_SHARES, "has_state": False}
    members.heard("new", report, 0.0)
    assert members.view.chains == (("new",),)
    earlier = with_replica(View.of(1, NUM_SHARES), 0, "old", "host:2", has_state=True)
    earlier = with_worker(replace(earlier, epoch=20), "worker")
    members.heard("old", {**report, "has_state": True, "view": earlier.to_json()}, 0.1)
    assert members.view.chains == (("old",),)
    assert members.view.waiting == (("new",),)
    assert members.view.epoch > 20
    members.tick(5.0)
    assert members.view.workers == ("worker",)
    members.heard("new", report, 5.0)
    members.tick(5.2)
    assert members.view.workers == () and members.view.lost == (True,), "none came back"


def test_reports_that_cannot_be_read_are_refused() -> None:
    members = Members(1, NUM_SHARES, 5.0, 0.0)
    for report in ({"server": "x"}, {"server": 0}, {"view": 3}, {"view": {"epoch": 1}}, {"shares": None}):
        with pytest.raises(WireError, match="a report that cannot be read"):
            members.heard("one", report, 0.0)
    assert members.view.epoch == 0


def test_messages_carry_arrays_of_any_kind() -> None:
    sent = [
        np.arange(3_000_000, dtype=np.float32).reshape(3, -1),
        np.zeros((0, 4), np.int8),
        np.array(1.5),
        jnp.arange(5, dtype=jnp.bfloat16),
        np.asarray([True, False]),
    ]
    ours, theirs = map(Connection, pair_of_sockets())
    with closing(ours), closing(theirs):
        thread = threading.Thread(target=arrays.send, args=(ours, {"a": [1, None]}, sent))
        thread.start()
        message, found = arrays.receive(theirs)
        thread.join()
        assert message == {"a": [1, None]}
        for one, other in zip(found, sent, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, np.asarray(other))

        def check() -> None:
            raise TimeoutError("it does not read")

        with pytest.raises(TimeoutError, match="does not read"):
            arrays.send(ours, {}, sent, check)


def pair_of_sockets() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection, whose buffers are too small for the arrays of a message, however the kernel tunes them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        ours = socket.create_connection(server.getsockname())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        return ours, server.accept()[0]


@pytest.mark.parametrize("kinds", [3, [[[-1], "int8"]], [[[2], "object"]], [[[8], "float32"]], [[["x"], "int8"]], None])
def test_arrays_that_are_not_what_a_message_says_are_refused(kinds: Any) -> None:
    ours, theirs = map(Connection, pair_of_sockets())
    with closing(ours), closing(theirs):
        ours.send({"arrays": kinds} if kinds is not None else {}, [b"12345678"])
        with pytest.raises(WireError, match="no arrays that can be read"):
            arrays.receive(theirs)


def test_hostile_bytes_end_a_connection_and_nothing_else() -> None:
    with autopar.StoreKeeper(shares=NUM_SHARES) as keeper:
        job = Job(keeper)
        job.serve(0, 1)
        replica = job.replicas[0]._address
        head = struct.Struct("!4sIQ")
        for address in (keeper.address, replica):
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"\xff" * 64,
                head.pack(b"apm1", 2, 0) + b"[]",
                head.pack(b"apm1", 60_000, 0) + b"[" * 60_000,
                head.pack(b"apm1", 1 << 31, 1 << 60),
                head.pack(b"apm1", 2, 1 << 40) + b"{}",
            ):
                with socket.create_connection(split(address)) as connection:
                    connection.sendall(data)
        connection = Connection.to(replica, {"token": "guess"})
        with closing(connection), pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
            arrays.send(connection, {"call": "hello"})
            arrays.receive(connection)
        job.work()
        job.end()
        assert not job.failures
    check_weights(job, 1)


@pytest.mark.slow
def test_killed_processes() -> None:
    from benchmarks.faults.stores import Run

    run = Run("bsp", 3, 4, clocks=150)
    try:
        row = run.row()
    finally:
        run.close()
    assert row["ended"] == "yes"
    assert row["log"] == "1800: 0 gaps, 0 repeats"
    assert row["weights"] == "4 of 4 replicas bit-equal"
