"""Programs that tests of served stores run in each process: `python store_programs.py NAME [ARGUMENTS]`.

The first processes are servers, the others workers. Results are printed as JSON, one value per line.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from process_programs import tell

import autopar
from autopar.errors import StoreError
from autopar.extend.layouts import ArraySize, Server, plan_layout

WIDTH, BATCH = 16, 8
OPTIMIZER = optax.adam(1e-2)


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a/kernel": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4,
        "b/bias": np.zeros(WIDTH, np.float32),
        "c/kernel": rng.normal(size=(WIDTH, 1)).astype(np.float32) / 4,
        "d/none": np.zeros((0, 3), np.float32),
    }


@jax.jit
def gradients(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(x @ params["a/kernel"] + params["b/bias"])
        return jnp.mean((hidden @ params["c/kernel"] - jnp.sin(x.sum(1, keepdims=True))) ** 2)

    return jax.grad(loss)(params)


def batch(worker: int, clock: int) -> np.ndarray:
    return np.random.default_rng([worker, clock]).normal(size=(BATCH, WIDTH)).astype(np.float32)


def digest(arrays: dict[str, Any]) -> dict[str, str]:
    return {key: hashlib.sha256(np.asarray(array).tobytes()).hexdigest() for key, array in sorted(arrays.items())}


def synchronous(num_workers: int, num_clocks: int, parts: list[list[str]]) -> dict[str, Any]:
    """Weights after synchronous steps that add up the gradients in the order of the workers, and update the keys of each
    server."""

    @jax.jit
    def update(params: Any, state: Any, total: Any) -> Any:
        changes, state = OPTIMIZER.update(total, state, params)
        return optax.apply_updates(params, changes), state

    params: dict[str, Any] = {key: jnp.asarray(array) for key, array in weights().items()}
    states = [OPTIMIZER.init({key: params[key] for key in keys}) for keys in parts]
    for clock in range(num_clocks):
        total = gradients(params, batch(0, clock))
        for worker in range(1, num_workers):
            total = jax.tree.map(jnp.add, total, gradients(params, batch(worker, clock)))
        for number, keys in enumerate(parts):
            before, terms = ({key: tree[key] for key in keys} for tree in (params, total))
            after, states[number] = update(before, states[number], terms)
            params = params | after
    return params


def keys_of_servers(num_servers: int) -> list[list[str]]:
    return [sorted(weights())[number::num_servers] for number in range(num_servers)]


def serve(policy: str, num_servers: int) -> autopar.VersionedStore:
    """The store of this server's keys, after all workers have left."""
    process = jax.process_index()
    own = {key: weights()[key] for key in keys_of_servers(num_servers)[process]}
    num_workers = jax.process_count() - num_servers
    store = autopar.VersionedStore(own, update=OPTIMIZER, workers=num_workers, consistency=policy)
    store.serve(server=process)
    return store


def served(policy: str, clocks: str, servers: str, slow: str) -> None:
    """Training by a served store.

    Args:
        slow: whether the last worker sleeps 50 ms in each clock.
    """
    process, num_servers, num_clocks = jax.process_index(), int(servers), int(clocks)
    num_workers = jax.process_count() - num_servers
    parts = keys_of_servers(num_servers)
    if process < num_servers:
        store = serve(policy, num_servers)
        report, final = store.report(), store.pull(worker=None)
        expected = synchronous(num_workers, num_clocks, parts)
        tell(
            {
                "versions": report.versions,
                "staleness": [dict(counts) for counts in report.staleness],
                "traffic": [
                    [worker, one.pushed_bytes, one.pulled_bytes] for (worker, _), one in report.traffic.items()
                ],
                "bytes": sum(weights()[key].nbytes for key in parts[process]),
                "final": digest(final.values),
                "synchronous": digest({key: expected[key] for key in parts[process]}),
            }
        )
        return
    index = process - num_servers
    pulled = None
    with autopar.StoreClient(index, servers=num_servers) as worker:
        for clock in range(num_clocks):
            pulled = worker.pull()
            if slow == "slow" and index == num_workers - 1:
                time.sleep(0.05)
            worker.push(None, gradients(pulled.values, batch(index, clock)))
            assert worker.clock() == clock + 1
        assert pulled is not None
        tell({"versions": pulled.versions, "clock": pulled.clock, "keys": [*pulled.values]})


def held_back(policy: str, clocks: str, servers: str) -> None:
    """Training under a policy by which workers hold back what they push, served and in one process."""
    process, num_servers, num_iterations = jax.process_index(), int(servers), int(clocks)
    num_workers = jax.process_count() - num_servers
    if process < num_servers:
        store = serve(policy, num_servers)
        tell({"final": digest(store.pull(worker=None).values), "versions": store.report().versions})
        return
    index = process - num_servers
    with autopar.StoreClient(index, servers=num_servers) as worker:
        for iteration in range(num_iterations):
            worker.push(None, gradients(worker.pull().values, batch(index, iteration)))
            worker.clock()
    local = autopar.VersionedStore(weights(), update=OPTIMIZER, workers=num_workers, consistency=policy)
    for iteration in range(num_iterations):
        pulled = [local.pull(worker=each).values for each in range(num_workers)]
        for each in range(num_workers):
            local.push(None, gradients(pulled[each], batch(each, iteration)), worker=each)
            local.clock(worker=each)
    for each in range(num_workers):
        local.leave(each)
    tell({"final": digest(local.pull(worker=None).values), "versions": local.report().versions})


def decentralized(policy: str, clocks: str) -> None:
    """Every process is a worker, and the server of the rows and keys that the layout gives it."""
    index, count, num_clocks = jax.process_index(), jax.process_count(), int(clocks)
    sizes = {key: ArraySize(array.shape[0], array.nbytes // max(1, array.shape[0])) for key, array in weights().items()}
    servers = [Server(worker=worker, message_s=0.0) for worker in range(count)]
    layout = plan_layout(sizes, servers, count, tolerance=0.0)
    own = layout.part(weights(), index)
    # one of them keeps its part in host memory
    host = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    shards = [host] if index == 1 else None
    store = autopar.VersionedStore(own, update=OPTIMIZER, workers=count, consistency=policy, shards=shards)
    wrong = ""
    try:
        autopar.StoreClient(
            index, servers=count, own=autopar.VersionedStore({"x": np.zeros(1)}), layout=layout, name="wrong"
        )
    except StoreError as error:
        wrong = str(error)
    with autopar.StoreClient(index, servers=count, own=store, layout=layout) as worker:
        for clock in range(num_clocks):
            pulled = worker.pull().values
            rows = worker.pull({"a/kernel": [15, 0, 7]}).values["a/kernel"]
            assert (np.asarray(rows) == np.asarray(pulled["a/kernel"])[[15, 0, 7]]).all()
            worker.push(None, gradients(pulled, batch(index, clock)))
            worker.clock()
    report = store.report()
    tell(
        {
            "own": {key: np.asarray(array).tolist() for key, array in store.pull(worker=None).values.items()},
            "expected": {
                key: np.asarray(array).tolist()
                for key, array in layout.part(synchronous(count, num_clocks, [sorted(weights())]), index).items()
            },
            "traffic": [[pair[0], one.pushed_bytes, one.pulled_bytes] for pair, one in report.traffic.items()],
            "own_bytes": sum(array.nbytes for array in own.values()),
            "own_rows": sum(
                row in range(piece.first_row, piece.first_row + piece.num_rows)
                for piece in [layout.keys_of(index).get("a/kernel")]
                if piece
                for row in (15, 0, 7)
            ),
            "staleness": max(max(counts) for counts in report.staleness),
            "wrong": wrong,
        }
    )


def calls() -> None:
    """One worker makes every kind of call, and mistakes."""
    if jax.process_index() == 0:
        store = autopar.VersionedStore({"e": np.zeros((6, 2), np.float32), "w": np.zeros((40, 30), np.float32)})
        store.serve("calls")
        tell({"bytes": [[one.pushed_bytes, one.pulled_bytes] for one in store.report().traffic.values()]})
        return
    messages: dict[str, str] = {}
    with autopar.StoreClient(0, name="calls") as worker:
        worker.push({"e": [1, 3, 1]}, {"e": np.ones((3, 2), np.float32)})
        worker.push("w", autopar.SufficientFactors(jnp.ones((2, 40)), jnp.ones((2, 30))))
        worker.push("w", np.ones((40, 30), np.float32))
        worker.clock()
        rows = worker.pull({"e": np.array([3, 1])}).values["e"]
        whole = worker.pull(slice("e", "f")).values
        nothing = worker.pull({"e": []}).values["e"]
        for name, call in {
            "key": lambda: worker.pull("x"),
            "shape": lambda: worker.push("e", np.ones(3, np.float32)),
            "clock": lambda: worker.pull("e", 5),
            "row": lambda: worker.pull({"e": [6]}),
            "again": lambda: autopar.StoreClient(0, name="calls"),
            "other": lambda: autopar.StoreClient(1, name="calls"),
        }.items():
            try:
                call()
            except StoreError as error:
                messages[name] = str(error)
        after = worker.pull("w").values["w"]
        tell(
            {
                "rows": np.asarray(rows).tolist(),
                "whole": np.asarray(whole["e"]).tolist(),
                "nothing": nothing.shape,
                "w": [float(after.min()), float(after.max())],
                "messages": messages,
            }
        )


def killed() -> None:
    """The last worker dies in its fourth clock; the others find out."""
    store = None
    try:
        if jax.process_index() == 0:
            store = autopar.VersionedStore({"w": np.zeros(4, np.float32)}, workers=2, consistency="ssp(1)")
            store.serve()
        else:
            index = jax.process_index() - 1
            with autopar.StoreClient(index) as worker:
                for clock in range(100):
                    worker.pull()
                    if index == 1 and clock == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
                    worker.push("w", np.ones(4, np.float32))
                    worker.clock()
    except StoreError as error:
        tell({"error": str(error), "versions": None if store is None else store.report().versions})
        time.sleep(3)  # the others still need process 0
        os._exit(3)  # JAX would wait for the dead process


def server_killed() -> None:
    """The second of two servers dies, and the worker waits for it."""
    process = jax.process_index()
    if process < 2:
        store = autopar.VersionedStore({f"w{process}": np.zeros(4, np.float32)})

        def die() -> None:
            while (store.report().clocks[0] or 0) < 3:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

        if process:
            threading.Thread(target=die, daemon=True).start()
        try:
            store.serve(server=process)
        except StoreError:
            time.sleep(3)
            os._exit(3)
    try:
        with autopar.StoreClient(0, servers=2) as worker:
            while True:
                worker.pull()
                worker.clock()
    except StoreError as error:
        tell({"error": str(error)})
        os._exit(3)


def update_fails() -> None:
    """The server's function fails once; the worker goes on."""
    if jax.process_index() == 0:
        failures = [ZeroDivisionError("of the user")]

        def update(weights: Any, total: Any) -> Any:
            if failures:
                raise failures.pop()
            return {"w": weights["w"] + total["w"]}

        store = autopar.VersionedStore({"w": np.zeros(4, np.float32)}, update=update)
        store.serve()
        tell({"versions": store.report().versions})
        return
    with autopar.StoreClient(0) as worker:
        worker.push("w", np.ones(4, np.float32))
        try:
            worker.clock()
        except StoreError as error:
            tell({"error": str(error), "clock": worker.clock()})


def gossip() -> None:
    """Each process is a worker, and computes what the same workers compute in one process; then mistakes."""
    index, count = jax.process_index(), jax.process_count()
    start = weights()
    local = autopar.GossipStore(start, "ring", update=OPTIMIZER, workers=count, places=jax.local_devices() * count)
    with autopar.GossipClient(start, "ring", update=OPTIMIZER) as worker:
        for clock in range(8):
            worker.push(None, gradients(worker.pull().values, batch(index, clock)))
            assert worker.clock() == clock + 1
            each = [gradients(local.pull(worker=one).values, batch(one, clock)) for one in range(count)]
            for one in range(count):
                local.push(None, each[one], worker=one)
                local.clock(worker=one)
    traffic = worker.traffic()
    result = {
        "weights": digest(worker.pull().values),
        "expected": digest(local.pull(worker=index).values),
        "num_bytes": sum(array.nbytes for array in start.values()),
        "sent": traffic.sent_bytes,
        "received": traffic.received_bytes,
    }
    try:
        worker.clock()
    except StoreError as error:
        result["after"] = str(error)
    mixing = "ring" if index else np.full((3, 3), 1 / 3) * 0.5 + np.eye(3) * 0.5
    try:
        with autopar.GossipClient(start, mixing, name="others") as worker:
            worker.pull()
            worker.clock()
            worker.clock()
    except StoreError as error:
        result["mixing"] = str(error)
    try:
        with autopar.GossipClient(start, name="left") as worker:
            for _ in range(1 if index == 2 else 2):
                worker.pull()
                worker.clock()
    except StoreError as error:
        result["left"] = str(error)
    tell(result)


def gossip_killed() -> None:
    """The last of three workers dies in its third clock."""
    try:
        with autopar.GossipClient({"w": np.zeros(4, np.float32)}) as worker:
            for clock in range(100):
                worker.pull()
                if jax.process_index() == 2 and clock == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                worker.clock()
    except StoreError as error:
        tell({"error": str(error)})
        time.sleep(8)  # the other still needs process 0
        os._exit(3)


def main() -> None:
    name, *arguments = sys.argv[1:]
    jax.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]))
    globals()[name](*arguments)


if __name__ == "__main__":
    main()
