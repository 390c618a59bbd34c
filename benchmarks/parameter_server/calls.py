"""Measure what a pull and a push of one shard cost over `jax.device_put`."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np

import autopar
from benchmarks.parameter_server.convergence import Row
from benchmarks.timing import take_turns

LIMIT_US = 30.0


def rows() -> list[Row]:
    found: list[Row] = []
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
            found.append(
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
    return found


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
