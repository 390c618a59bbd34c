"""Workers of a store that leave, fail, end or are interrupted: nobody waits for them without a word."""

from __future__ import annotations

import os
import signal
import threading
import time

import jax
import pytest
from stores import ones, run_workers, zeros

from autopar.errors import StoreError
from autopar.versions import callers
from autopar.versions.store import VersionedStore
from autopar.versions.worker import Worker


def test_a_worker_that_left_is_not_waited_for_and_makes_no_calls() -> None:
    store = VersionedStore(zeros(w=(1,)), workers=2)
    with store.worker(1) as worker:
        worker.pull()
        store.leave(1)
    store.push("w", ones(1), worker=0)
    assert store.clock(worker=0) == 1
    assert store.pull(worker=0).values["w"].tolist() == [1.0]
    with pytest.raises(StoreError, match="worker 1 has left the store: a worker makes no calls after `leave`"):
        store.pull(worker=1)
    store.leave(0)
    assert store.pull(worker=None).values["w"].tolist() == [1.0]
    with pytest.raises(StoreError, match="a reader waits for 9 complete clocks, which the others cannot reach"):
        store.pull("w", 9, worker=None)


def test_a_worker_that_fails_is_named_to_those_that_wait() -> None:
    store = VersionedStore(zeros(w=(1,)), workers=2)
    messages: list[str] = []

    def work(index: int) -> None:
        try:
            with store.worker(index) as worker:
                worker.clock()
                if index:
                    time.sleep(0.3)  # the other one waits already
                    raise KeyError("no data")
                worker.pull()
                worker.clock()
                worker.pull()
        except (StoreError, KeyError) as error:
            messages.append(str(error))

    run_workers(work, 2)
    assert messages[1] == (
        "worker 0, at clock 2, waits for 2 complete clocks, but worker 1, at clock 1, failed (KeyError: 'no data'). Call"
        " `store.leave(1)` to go on without it"
    )
    store.leave(1)
    assert store.pull(worker=0).clock == 2


def test_a_thread_that_ended_is_named_to_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "GRACE_S", 0.3)
    store = VersionedStore(zeros(w=(1,)), workers=3, consistency="ssp(1)")
    ended = threading.Thread(target=lambda: store.pull(worker=2))
    ended.start()
    ended.join()
    store.clock(worker=0)
    store.clock(worker=0)
    started_s = time.monotonic()
    with pytest.raises(StoreError, match="but worker 2, at clock 0, has a thread that ended without `leave`"):
        store.pull(worker=0)
    assert time.monotonic() - started_s < 10


def test_a_thread_that_waits_for_itself_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "GRACE_S", 0.3)
    store = VersionedStore(zeros(w=(1,)), workers=2)
    store.pull(worker=1)
    store.clock(worker=0)
    with pytest.raises(StoreError, match="but worker 1, at clock 0, is driven by this same thread"):
        store.pull(worker=0)


def test_threads_may_take_turns_for_a_worker() -> None:
    """A pool of threads: the end of one is not the end of its worker."""
    store = VersionedStore(zeros(w=(1,)), workers=2)

    def one_clock(worker: int) -> None:
        store.pull(worker=worker)
        store.push("w", ones(1), worker=worker)
        store.clock(worker=worker)

    for _ in range(5):
        run_workers(one_clock, 2)
    assert store.pull().values["w"].tolist() == [10.0]


def test_a_blocked_pull_is_interrupted_by_ctrl_c_and_the_store_goes_on() -> None:
    store = VersionedStore(zeros(w=(1,)), workers=2)
    store.push("w", ones(1), worker=0)
    store.clock(worker=0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        store.pull(worker=0)
    assert time.monotonic() - started_s < 10
    timer.join()
    store.push("w", ones(1), worker=1)
    store.clock(worker=1)
    pulled = store.pull(worker=0)
    assert (pulled.values["w"].tolist(), pulled.clock) == ([2.0], 1)


def test_an_interrupted_update_is_applied_whole_or_not_at_all() -> None:
    """Ctrl-C while the second of two shards is updated: the store has the old version of both."""
    interrupted = []

    def update(weights: dict[str, jax.Array], total: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if "b" in weights and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return {key: weights[key] + total[key] for key in weights}

    store = VersionedStore(zeros(a=(1,), b=(1,)), update=update, shards=jax.devices()[:2])
    store.push(None, {"a": ones(1), "b": ones(1)})
    with pytest.raises(KeyboardInterrupt):
        store.clock()
    assert store.report().versions == (0, 0) and store.report().clocks == (0,)
    store.clock()
    assert store.report().versions == (1, 1)


def test_a_worker_of_a_store_is_a_view() -> None:
    store = VersionedStore(zeros(w=(1,)))
    with store.worker(0, to=jax.devices()[1]) as worker:
        assert isinstance(worker, Worker)
        worker.push("w", ones(1))
        assert worker.clock() == 1
        pulled = worker.pull("w", 1, timeout_s=1.0)
        assert pulled.values["w"].devices() == {jax.devices()[1]}
    assert store.report().clocks == (None,)
