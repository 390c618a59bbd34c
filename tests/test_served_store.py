"""A store served to worker processes: the same bits, the same promises, and a dead process by name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several_processes import Ended, run

import autopar
from autopar.errors import StoreError
from autopar.versions.consistency.policy import Policy
from autopar.versions.remote.served_keys import held_back_by, served_keys

PROGRAMS = Path(__file__).parent / "store_programs.py"


def ran(program: str, *arguments: str, processes: int = 3) -> list[Ended]:
    return run(program, *arguments, processes=processes, devices=1, programs=PROGRAMS)


def all_told(ended: list[Ended]) -> list[Any]:
    assert [one.code for one in ended] == [0] * len(ended), "\n---\n".join(one.errors[-2000:] for one in ended)
    return [one.last for one in ended]


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bsp_over_processes_is_the_synchronous_step_bit_for_bit(servers: int) -> None:
    clocks = 15
    told = all_told(ran("served", "bsp", str(clocks), str(servers), "even", processes=servers + 2))
    for server in told[:servers]:
        assert server["final"] == server["synchronous"]
        assert server["versions"] == [clocks]
        assert server["staleness"] == [{"0": clocks}] * 2
        exchanged = sorted(row for row in server["traffic"] if row[0] is not None)
        assert exchanged == [[worker, clocks * server["bytes"], clocks * server["bytes"]] for worker in (0, 1)]
    for worker in told[servers:]:
        assert worker["keys"] == ["a/kernel", "b/bias", "c/kernel", "d/none"]
        assert worker["versions"] == {str(server): clocks - 1 for server in range(servers)}


@pytest.mark.slow
def test_processes_that_are_workers_and_servers_share_the_rows() -> None:
    """Decentralized: each has a third of the bytes, calls its own store directly, and trains as one store does."""
    clocks = 6
    told = all_told(ran("decentralized", "bsp", str(clocks)))
    total = sum(one["own_bytes"] for one in told)
    for index, one in enumerate(told):
        assert one["own"].keys() == one["expected"].keys() and one["own"]
        for key, array in one["own"].items():
            np.testing.assert_allclose(array, one["expected"][key], rtol=1e-5, atol=1e-6)
        assert one["staleness"] == 0
        rows = one["own_rows"] * (4 + 4 * 16)  # each clock pulls three rows again, and sends their numbers
        others = [worker for worker in range(3) if worker != index]
        assert sorted(one["traffic"])[-2:] == [
            [w, clocks * one["own_bytes"], clocks * (one["own_bytes"] + rows)] for w in others
        ]
        assert abs(one["own_bytes"] - total / 3) <= 64  # a row
        assert (
            one["wrong"]
            == f"the layout gives server {index} other keys or rows than its store has: make the store of `layout.part(values, {index})`"
        )


def test_what_servers_announce_must_be_every_row_once() -> None:
    first = {"w": ([2, 3], "float32", 0, 5), "b": ([], "float32", 0, 1)}
    assert served_keys([first, {"w": ([3, 3], "float32", 2, 5)}]).kinds == {
        "b": ((), np.float32),
        "w": ((5, 3), np.float32),
    }
    with pytest.raises(StoreError, match="servers 0 and 1 both have the key 'w'"):
        served_keys([first, first])
    with pytest.raises(StoreError, match=re.escape("no server has row 2 of 'w': start all servers of the layout")):
        served_keys([first])


@pytest.mark.slow
def test_ssp_over_processes_is_at_most_s_clocks_stale_and_reaches_it() -> None:
    (server, *_) = all_told(ran("served", "ssp(2)", "30", "1", "slow"))
    seen = {int(staleness) for counts in server["staleness"] for staleness in counts}
    assert max(seen) == 2
    assert server["versions"] == [60]


def test_every_call_goes_through_processes() -> None:
    server, worker = all_told(ran("calls", processes=2))
    assert worker["rows"] == [[1.0, 1.0], [2.0, 2.0]]
    assert worker["whole"] == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0], [0, 0]]
    assert worker["nothing"] == [0, 2]
    assert worker["w"] == [3.0, 3.0]
    again = worker["messages"].pop("again")
    assert again.startswith("worker 0 of the store 'calls' has, or had, a client already")
    assert worker["messages"] == {
        "other": "there is no worker 1: the store is served to workers 0 to 0",
        "key": "the store has no key 'x'. Its keys are 'e', 'w'",
        "shape": "the update of 'e' is float32(3,), and the store takes float32(6, 2)",
        "clock": "worker 0, at clock 1, waits for 5 complete clocks, which the others cannot reach alone: 1 are complete."
        " Finish its own clocks first, or lower `at_least_clock`",
        "row": "'e' has rows 0 to 5; got row 6",
    }
    rows, factors, whole = 3 * 4 + 3 * 8, 4 * 2 * (40 + 30), 4 * 40 * 30
    assert server["bytes"] == [[rows + factors + whole, 2 * 4 + 2 * 8 + 6 * 8 + whole]]


@pytest.mark.slow
def test_a_worker_that_dies_is_named_to_the_others() -> None:
    server, other, dead = ran("killed")
    assert dead.code == -9
    assert (server.code, other.code) == (3, 3), other.errors[-2000:]
    assert "worker 1 of the store has given no sign of life for 10 s: its process died or hangs" in server.last["error"]
    assert (
        "but worker 1, at clock 3, failed (StoreError: worker 1 of the store has given no sign" in other.last["error"]
    )
    assert other.after_s < 100


@pytest.mark.slow
def test_a_server_that_dies_is_named_to_the_workers() -> None:
    (_, dead, worker) = ran("server_killed")
    assert dead.code == -9
    assert worker.told, worker.errors[-2000:]
    found = "server 1 of the store (has given no sign of life for 10 s|ended before its arrays were fetched)"
    assert re.match(found, worker.last["error"])


def test_an_update_function_that_fails_on_the_server_is_an_error_in_the_worker() -> None:
    server, worker = ran("update_fails", processes=2)
    assert worker.last == {"error": "server 0 of the store: ZeroDivisionError: of the user", "clock": 1}
    assert server.last == {"versions": [1]}


def test_a_store_is_not_served_in_one_process() -> None:
    store = autopar.VersionedStore({"w": np.zeros(1, np.float32)})
    with pytest.raises(StoreError, match="a store is served to other processes: call `jax"):
        store.serve()
    with pytest.raises(StoreError, match="a store is served to other processes"):
        autopar.StoreClient(0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["every(2, bsp)", "largest(600, 2)"])
def test_workers_hold_back_what_they_push_as_in_one_process(policy: str) -> None:
    server, *workers = all_told(ran("held_back", policy, "7", "1"))
    assert workers[0] == workers[1] == server


def test_a_policy_of_ones_own_that_works_in_the_worker_is_not_served() -> None:
    own = Policy("pairs", math.inf, period=2)
    store = autopar.VersionedStore({"w": np.zeros(1, np.float32)}, consistency=own)
    with pytest.raises(
        StoreError, match="'pairs' holds updates back in the worker's process, which knows only policies"
    ):
        store.serve()
    with pytest.raises(StoreError, match=r"the servers have different policies: 'every\(2, bsp\)', ''"):
        held_back_by(["every(2, bsp)", ""])
