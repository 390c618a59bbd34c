"""Consistency policies on the clocks of workers: what they promise holds in a simulator over thousands of delays."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter

import pytest

from autopar.errors import StoreError
from autopar.versions.consistency.board import board_of
from autopar.versions.consistency.clocks import Clocks
from autopar.versions.consistency.policy import Decision, Part, Pending, Policy
from autopar.versions.consistency.simulate import SimulatedRun, simulate
from autopar.versions.consistency.table import POLICIES, find

#: A name for each entry of the table.
NAMES = {
    "bsp": "bsp",
    "ssp": "ssp(3)",
    "async": "async",
    "every": "every(4, ssp(2))",
    "discard": "discard(6)",
    "backup": "backup(1)",
    "partial": "partial(2, 5)",
    "largest": "largest(100, 2, ssp(1))",
}


def random_delays(seed: int, num_workers: int) -> dict[int, random.Random]:
    return {worker: random.Random(f"{seed} {worker}") for worker in range(num_workers)}


def run_random(policy: str | Policy, seed: int, num_workers: int = 4, num_clocks: int = 25) -> SimulatedRun:
    rngs = random_delays(seed, num_workers)
    return simulate(policy, num_workers, num_clocks, lambda worker, _: rngs[worker].expovariate(1.0))


# -- the table -------------------------------------------------------------------------------


def test_every_policy_has_a_name_here() -> None:
    assert set(NAMES) == set(POLICIES)


@pytest.mark.parametrize("entry", POLICIES)
def test_a_policy_is_found_by_its_own_name(entry: str) -> None:
    assert find(NAMES[entry]).name == find(find(NAMES[entry]).name).name
    assert (POLICIES[entry].__doc__ or "").endswith(".") or POLICIES[entry].__doc__


@pytest.mark.parametrize("entry", POLICIES)
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_every_policy_runs_to_its_end(entry: str, num_workers: int) -> None:
    """No worker waits forever, no update is applied twice, and none is lost but by the policy."""
    policy = find(NAMES[entry])
    if policy.unmet(num_workers):
        with pytest.raises(StoreError, match="workers"):
            run_random(policy, 0, num_workers)
        return
    run = run_random(policy, 0, num_workers)
    reads = sum(counts.total() for counts in run.staleness)
    assert run.num_applied + run.num_discarded <= reads <= num_workers * 25
    assert run.num_applied > 0
    if entry not in ("discard", "backup", "partial"):
        assert (run.num_applied, run.num_discarded) == (num_workers * 25, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bps", "there is no policy 'bps'. Did you mean 'bsp'? The policies are 'bsp', 'ssp', 'async'"),
        ("ssp", "the policy 'ssp' gives 'ssp' 0 numbers, but it takes (s)"),
        ("bsp(1)", "the policy 'bsp(1)' gives 'bsp' 1 numbers, but it takes no numbers"),
        ("ssp(-1)", "the policy 'ssp' needs a whole number `s` of at least 0; got -1"),
        ("ssp(1.5)", "the policy 'ssp' needs a whole number `s` of at least 0; got 1.5"),
        ("ssp(True)", "the policy 'ssp' needs a whole number `s` of at least 0; got True"),
        ("ssp('3')", "the policy 'ssp' needs a whole number `s` of at least 0; got '3'"),
        ("every(0)", "the policy 'every' needs a whole number `n` of at least 1; got 0"),
        ("every(2, 3)", '`consistency` is 3: give the name of a policy, as "bsp" or "ssp(3)", or a `Policy`'),
        ("every(2, ssp)", "the policy 'every(2, ssp)' gives"),
        ("ssp(3", "the policy 'ssp(3' cannot be read: give a name and its numbers"),
        ("", "the policy '' cannot be read"),
        ("ssp\x00(3)", "cannot be read"),
        ("ssp(s=3)", "cannot be read"),
        ("__import__('os').system('true')", "cannot be read"),
        ("a" * 300, "`consistency` is 'aaaa"),
        ("(" * 199, "cannot be read"),
    ],
)
def test_a_policy_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        find(name)


@pytest.mark.parametrize("value", [None, 3, 2.0, ["bsp"], b"bsp"])
def test_what_is_no_name_is_refused(value: object) -> None:
    with pytest.raises(StoreError, match="give the name of a policy"):
        find(value)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("name", "workers"), [("backup(2)", 2), ("partial(3)", 2), ("backup(1)", 1)])
def test_a_policy_for_more_workers_is_refused(name: str, workers: int) -> None:
    with pytest.raises(StoreError, match=rf"the policy '{re.escape(name)}' needs .* workers, not {workers}"):
        board_of(find(name), workers)


@pytest.mark.parametrize("workers", [0, -1, True, 1.0, "2"])
def test_a_number_of_workers_that_is_none_is_refused(workers: int) -> None:
    with pytest.raises(StoreError, match="a store needs a whole number of workers, at least 1"):
        board_of(find("bsp"), workers)


# -- clocks ----------------------------------------------------------------------------------


def test_a_clock_does_not_go_back() -> None:
    clocks = Clocks((3, 5))
    assert clocks.advanced(0, 4).vector == (4, 5)
    assert clocks.staleness(1) == 2
    with pytest.raises(StoreError, match="the clock of worker 1 is 5 and cannot go back to 4"):
        clocks.advanced(1, 4)


@pytest.mark.parametrize("worker", [-1, 2, True, "0", None])
def test_an_unknown_worker_is_refused(worker: int) -> None:
    with pytest.raises(StoreError, match=r"there is no worker .*: the store was made for workers 0 to 1"):
        Clocks((0, 0)).of(worker)


def test_a_worker_that_left_is_not_waited_for() -> None:
    board = board_of(find("bsp"), 2).read(0)
    board, decision = board.pushed(0)
    assert decision == Decision() and board.must_wait(0) and board.slowest() == [1]
    board, decision = board.left(1)
    assert [len(group) for group in decision.groups] == [1]
    assert not board.must_wait(0)
    with pytest.raises(StoreError, match="worker 1 has left the store"):
        board.pushed(1)
    board, _ = board.left(0)
    assert board.reached == 1 and board.clocks.members == ()


# -- promises --------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [0, 1, 3, 10])
def test_staleness_is_at_most_s_over_ten_thousand_delays_and_reaches_it(s: int) -> None:
    """Ho et al. 2013: no worker reads while another is more than s clocks behind."""
    counts = Counter[int]()
    for seed in range(100):
        for one in run_random(f"ssp({s})", seed).staleness:
            counts.update(one)
    assert counts.total() == 10_000
    assert max(counts) == s


def test_ssp_0_is_bsp() -> None:
    for seed in range(5):
        assert run_random("ssp(0)", seed) == run_random("bsp", seed)


def test_bsp_applies_one_sum_per_clock_in_the_order_of_the_workers() -> None:
    board = board_of(find("bsp"), 3)
    for clock in range(3):
        for worker in (2, 0):
            board, decision = board.read(worker).pushed(worker)
            assert decision == Decision()
        board, decision = board.read(1).pushed(1)
        ((first, second, third),) = decision.groups
        assert [first.worker, second.worker, third.worker] == [0, 1, 2]
        assert board.clocks.version == clock + 1


def test_ssp_applies_more_updates_than_bsp_with_a_straggler_in_each_clock() -> None:
    """Four workers, one of which, drawn for each clock, takes five times as long; messages are free."""
    rng = random.Random(0)
    slow = [rng.randrange(4) for _ in range(200)]

    def compute_s(worker: int, clock: int) -> float:
        return 5.0 if slow[clock] == worker else 1.0

    ssp, bsp = (simulate(name, 4, 200, compute_s) for name in ("ssp(3)", "bsp"))
    assert ssp.num_applied == bsp.num_applied == 800
    assert bsp.seconds == 1000.0
    assert ssp.updates_per_s >= 1.5 * bsp.updates_per_s
    assert ssp.updates_per_s == pytest.approx(2.05 * bsp.updates_per_s, rel=0.03)
    priced_ssp, priced_bsp = (simulate(name, 4, 200, compute_s, lambda _: 0.25) for name in ("ssp(3)", "bsp"))
    assert priced_bsp.seconds == 1100.0
    assert 1.5 < priced_ssp.updates_per_s / priced_bsp.updates_per_s < ssp.updates_per_s / bsp.updates_per_s


def test_no_worker_waits_without_consistency() -> None:
    run = run_random("async", 0)
    assert run.waits_s == (0.0,) * 4
    assert find("async").bound == math.inf


def test_a_period_pulls_and_pushes_once_in_n_iterations() -> None:
    run = simulate("every(5, bsp)", 2, 4, lambda worker, iteration: float(iteration))
    assert run.seconds == sum(range(20))
    assert run.num_applied == 8 and run.num_versions == 4


def test_old_updates_are_discarded() -> None:
    """A worker that takes ten times as long as three others has seen none of their last thirty updates."""
    run = simulate("discard(29)", 4, 20, lambda worker, _: 1.0 if worker else 10.0)
    assert run.num_discarded > 0
    assert run.num_applied + run.num_discarded == 80
    assert simulate("discard(1000)", 4, 20, lambda worker, _: 1.0 if worker else 10.0).num_discarded == 0


def test_the_first_updates_of_a_clock_are_applied_and_the_late_ones_are_not() -> None:
    """Three workers and one backup: the time of a clock is that of the third fastest."""
    run = simulate("backup(1)", 4, 50, lambda worker, _: 5.0 if worker == 3 else 1.0)
    assert run.seconds == 50.0
    assert (run.num_applied, run.num_versions) == (150, 50)
    assert run.num_discarded == 11  # a late one every five clocks; after the tenth the worker still reads clock 49
    all_wait = simulate("backup(0)", 4, 50, lambda worker, _: 5.0 if worker == 3 else 1.0)
    assert (all_wait.seconds, all_wait.num_applied, all_wait.num_discarded) == (250.0, 200, 0)


def test_a_part_of_the_workers_takes_part_in_each_clock() -> None:
    seen = Counter[int]()
    board = board_of(find("partial(2, 7)"), 5)
    for clock in range(200):
        group: list[int] = []
        for worker in [worker for worker in range(5) if board.clocks.of(worker) == clock]:
            assert not board.must_wait(worker)
            board, decision = board.read(worker).pushed(worker)
            group += [update.worker for one in decision.groups for update in one]
        assert len(group) == 2 and group == sorted(group)
        seen.update(group)
    assert board.clocks.version == 200
    assert set(seen) == set(range(5)) and min(seen.values()) > 40


def test_the_largest_updates_are_sent_first_within_the_budget() -> None:
    send = find("largest(100, 2)").send
    assert send is not None
    small, large = Part("small", 60, 0.1, 0), Part("large", 60, 9.0, 1)
    assert [part.key for part in send([small, large])] == ["large"]
    assert [part.key for part in send([dataclasses.replace(small, held=2), large])] == ["small"]
    assert [part.key for part in send([dataclasses.replace(small, held=2), Part("x", 40, 5.0, 0)])] == ["x", "small"]
    assert list(send([])) == []
    assert find("largest(100, 2, ssp(3))").bound == 5


@pytest.mark.parametrize("entry", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_updates_are_applied_or_discarded_once_whoever_leaves(entry: str, seed: int) -> None:
    """Workers read, push and leave in a random order; while there are any, one of them can go on."""
    rng = random.Random(seed)
    num_workers = rng.randint(2, 5)
    board = board_of(find(NAMES[entry]), num_workers)
    members, computing = set(range(num_workers)), set[int]()
    pushed, over = list[tuple[int, int]](), list[tuple[int, int]]()
    for _ in range(300):
        ready = [worker for worker in members if worker in computing or not board.must_wait(worker)]
        assert ready or not members
        if not members:
            break
        worker = rng.choice(ready)
        reached, decision = board.reached, Decision()
        if rng.random() < 0.01:
            board, decision = board.left(worker)
            members.remove(worker)
        elif worker in computing:
            pushed.append((worker, board.clocks.of(worker)))
            board, decision = board.pushed(worker)
            computing.remove(worker)
        else:
            board = board.read(worker)
            computing.add(worker)
        over += [(one.worker, one.clock) for group in (*decision.groups, decision.discarded) for one in group]
        assert board.reached >= reached
        assert sorted(over + [(one.worker, one.clock) for one in board.pending]) == sorted(pushed)


def test_a_policy_that_applies_nothing_and_never_completes_a_clock_is_named() -> None:
    policy = Policy("never", 0, complete=lambda clocks: 0)
    with pytest.raises(StoreError, match="under the policy 'never' workers 0, 1 wait forever after 1 s: 0 clocks are"):
        simulate(policy, 2, 3, lambda worker, iteration: 1.0)


def test_a_policy_of_ones_own_is_a_function_of_the_clocks() -> None:
    """Updates are applied in pairs, and nobody waits."""

    def pairs(clocks: Clocks, pending: tuple[Pending, ...]) -> Decision:
        return Decision((tuple(pending),) if len(pending) == 2 else ())

    run = run_random(Policy("pairs", math.inf, decide=pairs), 0)  # pyright: ignore[reportArgumentType]
    assert (run.num_applied, run.num_versions) == (100, 50)
