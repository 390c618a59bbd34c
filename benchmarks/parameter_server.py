"""Measure a versioned store: what a pull and a push cost, and what consistency policies cost with stragglers.

*overhead*: medians of 2,000 calls on two CPU devices, each with its transfer finished, called in turn with `jax.device_put`.
*stragglers*: 4 workers and 200 clocks; one worker, drawn for each clock, takes 5 times as long: simulated with free messages,
and as threads that sleep for 20 and 100 ms.
*digits*: the mean loss of a network of one hidden layer on scikit-learn's digits over simulated time, where 4 workers take a
second for a batch of 32, and one drawn for each iteration 5 seconds. The simulator decides when a worker reads and when
its update arrives; a real store trains. Each policy has the best of one grid of learning rates, by the loss at 200 s. Local SGD and
DiLoCo take 5 iterations of their own per clock; DiLoCo's outer optimizer is SGD with Nesterov momentum 0.9.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar.extend.consistency import simulate
from benchmarks.timing import take_turns

Row = dict[str, str | float | bool]

LIMIT_US, LEAST_SPEEDUP = 30.0, 1.5
WORKERS, CLOCKS = 4, 200
_RNG = random.Random(0)
#: The slow worker of each clock or iteration.
SLOW = [_RNG.randrange(WORKERS) for _ in range(1000)]
HORIZON_S, MARKS_S = 200.0, (25.0, 50.0, 100.0, 200.0)
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def compute_s(worker: int, iteration: int) -> float:
    return 5.0 if SLOW[iteration] == worker else 1.0


def measure(program: str) -> list[Row]:
    """Rows of one of the programs `overhead`, `stragglers`, `digits`."""
    return {"overhead": _overhead, "stragglers": _stragglers, "digits": _digits}[program]()


# -- overhead --------------------------------------------------------------------------------


def _overhead() -> list[Row]:
    rows: list[Row] = []
    here, there = jax.devices()[:2]
    for num_bytes in (16_384, 1_048_576):
        host = np.zeros(num_bytes // 4, np.float32)
        store = autopar.VersionedStore({"w": host}, shards=[here])
        own, others = jax.device_put(host, here), jax.device_put(host, there)
        calls = {
            "device_put to the worker": lambda own=own: jax.device_put(own, there),
            "pull": lambda store=store: store.pull("w", to=there).values["w"],
            "device_put to the shard": lambda others=others: jax.device_put(others, here),
            "push": lambda store=store, others=others: _pushed(store, others),
        }
        times = take_turns({name: _finished(call) for name, call in calls.items()}, 2000, warmup=50)
        for name, base in (("pull", "device_put to the worker"), ("push", "device_put to the shard")):
            median_us, base_us = (1e6 * float(np.median(times[one])) for one in (name, base))
            rows.append(
                {
                    "call": name,
                    "bytes": num_bytes,
                    "device_put_us": round(base_us, 1),
                    "median_us": round(median_us, 1),
                    "over_us": round(median_us - base_us, 1),
                    "limit_us": LIMIT_US,
                    "met": median_us - base_us <= LIMIT_US,
                }
            )
    return rows


def _pushed(store: autopar.VersionedStore, array: jax.Array) -> jax.Array:
    """Push, forgetting what was pushed before: a second push in a clock is added up."""
    store._progress.opened[0] = (0, {})
    store.push("w", array)
    whole = store._progress.opened[0][1]["w"].whole
    assert whole is not None
    return whole


def _finished(call: Callable[[], jax.Array]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        call().block_until_ready()
        return time.perf_counter() - start

    return timed


# -- stragglers ------------------------------------------------------------------------------


def _stragglers() -> list[Row]:
    rows: list[Row] = []
    for policy in ("bsp", "ssp(1)", "ssp(3)", "ssp(10)", "async", "backup(1)"):
        run = simulate(policy, WORKERS, CLOCKS, compute_s)
        rows.append(_straggler_row("simulated", policy, run.seconds, run.num_applied, run.most_stale))
    for policy in ("bsp", "ssp(3)", "async"):
        store = autopar.VersionedStore({"w": np.zeros(1000, np.float32)}, workers=WORKERS, consistency=policy)
        seconds = _run_threads(store)
        report = store.report()
        applied = WORKERS * CLOCKS - report.num_discarded
        most = max(max(counts) for counts in report.staleness)
        rows.append(_straggler_row("threads", policy, seconds, applied, most))
    for row in rows:
        base = next(one for one in rows if one["how"] == row["how"] and one["policy"] == "bsp")
        row["over_bsp"] = round(float(row["updates_per_s"]) / float(base["updates_per_s"]), 2)
        if row["policy"] == "ssp(3)":
            row["met"] = float(row["over_bsp"]) >= LEAST_SPEEDUP
    return rows


def _straggler_row(how: str, policy: str, seconds: float, applied: int, most_stale: int) -> Row:
    return {
        "how": how,
        "policy": policy,
        "seconds": round(seconds, 2),
        "updates_applied": applied,
        "updates_per_s": round(applied / seconds, 3),
        "most_stale": most_stale,
    }


def _run_threads(store: autopar.VersionedStore) -> float:
    def work(index: int) -> None:
        with store.worker(index) as worker:
            for clock in range(CLOCKS):
                worker.pull()
                time.sleep(compute_s(index, clock) / 50)
                worker.push("w", np.ones(1000, np.float32))
                worker.clock()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(WORKERS)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - start


# -- digits ----------------------------------------------------------------------------------


def _digits() -> list[Row]:
    from sklearn.datasets import load_digits

    data, labels = map(np.asarray, load_digits(return_X_y=True))
    images = data.astype(np.float32) / 16
    rows: list[Row] = []
    policies = ("bsp", "ssp(1)", "ssp(3)", "ssp(10)", "async", "discard(6)", "backup(1)", "partial(3)")
    for policy in (*policies, "local SGD", "DiLoCo"):
        runs = [(rate, _trained(policy, rate, images, labels)) for rate in RATES]
        rate, found = min(runs, key=lambda run: run[1][-1][0] if np.isfinite(run[1][-1][0]) else np.inf)
        row: Row = {"policy": policy, "rate": rate, "updates_in_200_s": found[-1][1]}
        rows.append(
            row | {f"loss_at_{mark:.0f}_s": round(loss, 4) for mark, (loss, _) in zip(MARKS_S, found, strict=True)}
        )
    return rows


def _loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ weights["in"] + weights["in/bias"])
    scores = jax.nn.log_softmax(hidden @ weights["out"] + weights["out/bias"])
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))


_loss_of = jax.jit(_loss)
_gradients = jax.jit(jax.grad(_loss))


@jax.jit
def _local_steps(weights: Any, x: jax.Array, y: jax.Array, rate: jax.Array) -> Any:
    """The difference that a step of SGD on each of several batches makes."""

    def step(own: Any, batch: Any) -> tuple[Any, None]:
        return jax.tree.map(lambda w, g: w - rate * g, own, jax.grad(_loss)(own, *batch)), None

    own, _ = jax.lax.scan(step, weights, (x, y))
    return jax.tree.map(jnp.subtract, own, weights)


def _trained(policy: str, rate: float, images: np.ndarray, labels: np.ndarray) -> list[tuple[float, int]]:
    """Loss and number of workers' updates applied at each of `MARKS_S`."""
    rng = np.random.default_rng(0)
    start = {
        "in": rng.normal(size=(64, 64)).astype(np.float32) / 8,
        "in/bias": np.zeros(64, np.float32),
        "out": rng.normal(size=(64, 10)).astype(np.float32) / 8,
        "out/bias": np.zeros(10, np.float32),
    }
    local = policy in ("local SGD", "DiLoCo")
    update = optax.sgd(rate)
    if policy == "local SGD":
        update = optax.scale(1 / WORKERS)
    elif policy == "DiLoCo":
        update = optax.chain(optax.scale(-1 / WORKERS), optax.sgd(0.7, momentum=0.9, nesterov=True))
    store = autopar.VersionedStore(start, update=update, workers=WORKERS, consistency="bsp" if local else policy)
    read: dict[int, Any] = {}
    found: list[tuple[float, int]] = []
    batches = [np.random.default_rng([1, worker]) for worker in range(WORKERS)]

    def mark(now_s: float) -> None:
        while len(found) < len(MARKS_S) and now_s > MARKS_S[len(found)]:
            weights = store.pull(worker=None).values
            found.append((float(_loss_of(weights, images, labels)), applied[0]))

    def on_read(worker: int, now_s: float) -> None:
        mark(now_s)
        if now_s <= HORIZON_S:
            read[worker] = store.pull(worker=worker, timeout_s=0).values

    def on_push(worker: int, now_s: float) -> None:
        mark(now_s)
        if now_s > HORIZON_S:
            return
        chosen = batches[worker].integers(0, len(images), size=(5, 32) if local else 32)
        x, y = images[chosen], labels[chosen]
        push = _local_steps(read[worker], x, y, rate) if local else _gradients(read[worker], x, y)
        store.push(None, push, worker=worker)
        before = store.report().num_discarded
        store.clock(worker=worker)
        applied[0] += 1 - (store.report().num_discarded - before)

    applied = [0]
    clocks = 40 if local else 200
    simulate("every(5, bsp)" if local else policy, WORKERS, clocks, compute_s, on_read=on_read, on_push=on_push)
    mark(HORIZON_S + 1)
    return found
