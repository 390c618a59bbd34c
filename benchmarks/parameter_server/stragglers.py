"""Measure updates per second with stragglers, simulated and in threads."""

from __future__ import annotations

import threading
import time

import numpy as np

import autopar
from autopar.extend.consistency import simulate
from benchmarks.parameter_server.convergence import WORKERS, Row, compute_s

CLOCKS, LEAST_SPEEDUP = 200, 1.5


def rows() -> list[Row]:
    found: list[Row] = []
    for policy in ("bsp", "ssp(1)", "ssp(3)", "ssp(10)", "async", "backup(1)"):
        run = simulate(policy, WORKERS, CLOCKS, compute_s)
        found.append(_straggler_row("simulated", policy, run.seconds, run.num_applied, run.most_stale))
    for policy in ("bsp", "ssp(3)", "async"):
        store = autopar.VersionedStore({"w": np.zeros(1000, np.float32)}, workers=WORKERS, consistency=policy)
        seconds = _run_threads(store)
        report = store.report()
        applied = WORKERS * CLOCKS - report.num_discarded
        most = max(max(counts) for counts in report.staleness)
        found.append(_straggler_row("threads", policy, seconds, applied, most))
    for row in found:
        base = next(one for one in found if one["how"] == row["how"] and one["policy"] == "bsp")
        row["over_bsp"] = round(float(row["updates_per_s"]) / float(base["updates_per_s"]), 2)
        if row["policy"] == "ssp(3)":
            row["met"] = float(row["over_bsp"]) >= LEAST_SPEEDUP
    return found


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
