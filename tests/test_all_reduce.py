"""All-reduce algorithms on real buffers: correct sums, and the steps and bytes of their formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost.all_reduce import (
    ALGORITHMS,
    BACKENDS,
    Workers,
    available,
    backend_of,
    cheapest_all_reduce,
)
from autopar.cost.all_reduce_steps import SCHEDULES, Schedule, double_tree, double_tree_parents, run
from autopar.cost.collective_entry import link_of
from autopar.cost.collectives import all_reduce_choice, collective_time, groupings
from autopar.hardware import profile as hardware
from autopar.hardware.profile import LinkProfile
from autopar.ir.mesh import parse_mesh

HOST, NETWORK = LinkProfile(1e11, 1e-6), LinkProfile(1e10, 1e-5)
SIZES = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (1, 2), (1, 6), (2, 2), (2, 3), (4, 2), (3, 5), (4, 4)]
CASES = [(name, *size) for name in ALGORITHMS for size in SIZES]
H100 = hardware.load("h100-sxm")


def workers(num_local: int, num_hosts: int) -> Workers:
    return Workers(num_local, num_hosts, HOST, NETWORK)


def schedule_of(name: str, num_local: int, num_hosts: int, length: int) -> Schedule:
    return SCHEDULES[name](num_local, num_hosts, (0, length))


def sent(schedule: Schedule) -> Counter[int]:
    """Elements sent, by worker."""
    count: Counter[int] = Counter()
    for step in schedule:
        for message in step:
            count[message.source] += message.size
    return count


def test_every_algorithm_has_a_schedule_and_every_back_end_has_known_algorithms() -> None:
    assert SCHEDULES.keys() == ALGORITHMS.keys()
    assert {name for names in BACKENDS.values() for name in names} <= ALGORITHMS.keys()
    assert {backend_of(platform) for platform in ("cpu", "gpu", "other")} <= BACKENDS.keys()


@pytest.mark.parametrize(("name", "num_local", "num_hosts"), CASES)
@pytest.mark.parametrize("length", [240, 17])
def test_the_sum_is_on_every_worker(name: str, num_local: int, num_hosts: int, length: int) -> None:
    """Also where the buffer does not divide by the workers, and for any number of them."""
    random = np.random.default_rng(0)
    buffers = [random.integers(-1000, 1000, length) for _ in range(num_local * num_hosts)]
    for result in run(schedule_of(name, num_local, num_hosts, length), buffers):
        np.testing.assert_array_equal(result, sum(buffers))


@pytest.mark.parametrize(("name", "num_local", "num_hosts"), CASES)
def test_steps_and_bytes_are_those_of_the_formula(name: str, num_local: int, num_hosts: int) -> None:
    length = 2 * 3 * 4 * 5 * 7 * 8  # divides by all numbers of workers and halves
    schedule = schedule_of(name, num_local, num_hosts, length)
    load = ALGORITHMS[name].load(length, workers(num_local, num_hosts))
    count = sent(schedule)
    assert len(schedule) == load.num_steps
    assert sum(count.values()) == pytest.approx(load.total_bytes)
    assert max(count.values(), default=0) == pytest.approx(load.worker_bytes)
    if not ALGORITHMS[name].pipelined:
        longest = sum(max(message.size for message in step) for step in schedule)
        assert longest == pytest.approx(sum(path.num_bytes for path in load.paths))


@pytest.mark.parametrize(("name", "num_local", "num_hosts"), CASES)
def test_a_worker_has_one_port(name: str, num_local: int, num_hosts: int) -> None:
    """In a step it sends to one and receives from one; the trees in pieces serve several, and pay in bytes."""
    if ALGORITHMS[name].pipelined:
        return
    for step in schedule_of(name, num_local, num_hosts, 240):
        assert len({message.source for message in step}) == len({message.target for message in step}) == len(step)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical-tree"])
@pytest.mark.parametrize(("num_local", "num_hosts"), [(2, 2), (4, 2), (3, 5), (4, 4)])
def test_levels_cross_hosts_only_where_they_say(name: str, num_local: int, num_hosts: int) -> None:
    schedule = schedule_of(name, num_local, num_hosts, 240)
    crossing = [{m.source // num_local != m.target // num_local for m in step} for step in schedule]
    assert all(len(kinds) == 1 for kinds in crossing), "no step mixes the two levels"
    paths = ALGORITHMS[name].load(240, workers(num_local, num_hosts)).paths
    steps = {link: sum(p.num_steps for p in paths if p.link == link) for link in (HOST, NETWORK)}
    assert steps == {HOST: crossing.count({False}), NETWORK: crossing.count({True})}


def test_the_fields_numbers() -> None:
    """N (N-1) M in all for naive, 2 M (N-1)/N per worker for ring, written out for 8 workers."""
    group = workers(8, 1)
    assert ALGORITHMS["naive"].load(1.0, group).total_bytes == 56
    assert ALGORITHMS["ring"].load(1.0, group).worker_bytes == 1.75
    assert ALGORITHMS["ring"].load(1.0, group).num_steps == 14
    assert ALGORITHMS["tree"].load(1.0, group).num_steps == 6
    assert ALGORITHMS["halving-doubling"].load(1.0, group).num_steps == 6
    assert ALGORITHMS["halving-doubling"].load(1.0, workers(7, 1)).num_steps == 6
    assert ALGORITHMS["parameter-server"].load(1.0, group).worker_bytes == 7


@pytest.mark.parametrize("n", range(2, 40))
def test_no_worker_is_inside_both_trees(n: int) -> None:
    first, second = double_tree_parents(n)
    children = [Counter(tree.values()) for tree in (first, second)]
    inside = [{i for i, count in c.items() if i in tree} for c, tree in zip(children, (first, second), strict=True)]
    assert not inside[0] & inside[1]
    assert max(count for c in children for count in c.values()) <= 2
    assert max(sent(double_tree(range(n), (0, 600))).values()) == {2: 600, 3: 900}.get(n, 1200)


@pytest.mark.parametrize("num_pieces", [2, 5])
def test_pieces_follow_each_other_one_step_apart(num_pieces: int) -> None:
    whole, pieces = double_tree(range(8), (0, 240)), double_tree(range(8), (0, 240), num_pieces)
    assert len(pieces) == len(whole) + num_pieces - 1
    buffers = [np.arange(240) * i for i in range(8)]
    assert all((result == sum(buffers)).all() for result in run(pieces, buffers))


def test_small_buffers_take_few_steps_and_large_ones_few_bytes() -> None:
    group, mpi = workers(16, 1), BACKENDS["mpi"]
    assert cheapest_all_reduce(1e3, group, ["ring", "tree"])[0] == "tree"
    assert cheapest_all_reduce(1e6, group, ["ring", "tree", "double-tree"])[0] == "double-tree"
    assert cheapest_all_reduce(1e9, group, ["tree", "ring"])[0] == "ring"
    assert cheapest_all_reduce(1e9, workers(7, 1), mpi)[0] == "ring"  # halving-doubling folds three workers in
    assert cheapest_all_reduce(1e9, group, mpi)[0] == "halving-doubling"  # the ring's bytes in fewer steps


def test_levels_are_only_for_several_hosts_of_several_workers() -> None:
    assert "hierarchical" in available(BACKENDS["nccl"], workers(8, 2))
    assert "hierarchical" not in available(BACKENDS["nccl"], workers(8, 1))
    assert "hierarchical" not in available(BACKENDS["nccl"], workers(1, 8))


def test_levels_save_the_network() -> None:
    group = workers(8, 2)
    flat, levels = (ALGORITHMS[name].load(1e9, group) for name in ("ring", "hierarchical"))
    assert levels.transfer_s < flat.transfer_s / 3
    rings = ALGORITHMS["parallel-rings"].load(1e9, group)
    assert rings.transfer_s < levels.transfer_s, "both links are busy at once"
    assert cheapest_all_reduce(1e9, group, BACKENDS["nccl"])[0] == "parallel-rings"
    assert cheapest_all_reduce(1e6, group, BACKENDS["nccl"])[0] == "hierarchical"


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        ("8", ("data",), (8, 1)),
        ("16", ("data",), (8, 2)),
        ("2x8", ("data",), (1, 2)),
        ("2x8", ("model",), (8, 1)),
        ("2x8", ("data", "model"), (8, 2)),
        ("4x4", ("data",), (2, 2)),
        ("4x4", ("model",), (4, 1)),
        ("2x6", ("model",), (1, 6)),  # hosts of 8 cut this axis unevenly: no levels, all on the network
        ("6", ("data",), (6, 1)),
    ],
)
def test_workers_are_counted_by_host(mesh: str, axes: tuple[str, ...], expected: tuple[int, int]) -> None:
    (found,) = groupings(axes, parse_mesh(mesh), H100)
    assert (found.num_local, found.num_hosts) == expected


@pytest.mark.parametrize("text", ["16", "2x8", "4x4", "8x2", "3x4", "2x6", "12x2", "2x2x4", "4x2x2", "16x2", "5x8"])
def test_workers_agree_with_a_count_of_every_group(text: str) -> None:
    mesh = parse_mesh(text)
    devices = np.arange(mesh.num_devices).reshape(mesh.axis_sizes) // H100.devices_per_host
    for axes in [(a,) for a in mesh.axis_names] + [mesh.axis_names[:2], mesh.axis_names]:
        places = [mesh.axis_names.index(axis) for axis in axes]
        groups = np.moveaxis(devices, places, range(len(places))).reshape(mesh.sizes(axes), -1).T
        (found,) = groupings(axes, mesh, H100)
        counts = {tuple(sorted(Counter(group.tolist()).values())) for group in groups}
        if (found.num_local,) * found.num_hosts != (1,) * mesh.sizes(axes):
            assert counts == {(found.num_local,) * found.num_hosts}
        else:  # all on different hosts, or uneven and so on the network
            assert found.slowest_link == link_of(axes, mesh, H100)
        assert found.slowest_link == link_of(axes, mesh, H100) or found.num_workers == 1


def test_the_cost_model_takes_the_cheapest_and_says_which() -> None:
    two_hosts, spread = parse_mesh("16"), parse_mesh("16x8")
    assert all_reduce_choice(1e9, ("data",), two_hosts, H100)[0] == "parallel-rings"
    assert all_reduce_choice(1e9, ("data",), parse_mesh("8"), H100)[0] == "ring"
    assert all_reduce_choice(1e3, ("data",), spread, H100)[0] == "nccl-tree"
    assert all_reduce_choice(1e9, ("data",), spread, H100)[0] == "ring"
    name, load = all_reduce_choice(1e9, ("data",), two_hosts, H100)
    time = collective_time("all-reduce", 1e9, ("data",), two_hosts, H100)
    assert time == pytest.approx(ALGORITHMS[name].load(1e9, groupings(("data",), two_hosts, H100)[0]).seconds + 12e-6)
    assert load.seconds < time


@pytest.mark.parametrize("mesh", ["8", "16", "2x8", "16x8", "4x4", "2x6"])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_an_all_reduce_costs_no_more_than_its_halves(mesh: str, size: float) -> None:
    """Else a plan would be drawn to one of the two for the formula's sake. Measured ones have a launch each."""
    for profile, launch_s in ((H100, 0.0), (replace(H100, xla_estimator=None), 12e-6)):
        for axis in parse_mesh(mesh).axis_names:
            halves, whole = (
                sum(collective_time(kind, size, (axis,), parse_mesh(mesh), profile) - launch_s for kind in kinds)
                for kinds in (("reduce-scatter", "all-gather"), ("all-reduce",))
            )
            assert whole <= halves * (1 + 1e-9)
            if size == 1e9 and launch_s:
                assert whole == pytest.approx(halves)


def test_a_merged_buffer_is_reduced_as_what_it_is_merged_into() -> None:
    """Latency counts by its share, so the choice is the large buffer's, and the time its part of it."""
    spread, size = parse_mesh("16x8"), H100.combine_threshold_bytes
    part = collective_time("all-reduce", size / 8, ("data",), spread, H100, combinable=True)
    whole = collective_time("all-reduce", size, ("data",), spread, H100, combinable=True)
    assert part == pytest.approx(whole / 8)


def test_gloo_has_the_ring_alone() -> None:
    profile = replace(H100, platform="cpu")
    assert all_reduce_choice(1e9, ("data",), parse_mesh("16"), profile)[0] == "ring"
