"""Stages whose sizes are chosen before their places: equal to Alpa's optima, and to all sizes, cuts and places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from partitions import check_sound, evaluate, every_partition

from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.objectives import gpipe, one_f_one_b
from autopar.pipeline.partition.problem import PartitionProblem, StageCost
from autopar.solve.problem import Status

#: Optima by Alpa's dynamic program on the tables of `alpa_table`. A row: layers, hosts, devices of each; then, for 1,
#: 16 and 512 microbatches, the optimum of two tables.
ALPA = """
4 1 1   4.125272  1.652731  57.790198 48.556134 1644.949713 1054.388715
4 1 4   0.292283  3.593839  13.760639 17.806669  613.919981  680.835464
4 4 1   0.761809  2.051777  17.447250 13.751575  442.207580  410.218531
4 4 4   2.905827  0.150740 102.573646 75.403996  488.897819 4160.485481
8 1 1   6.666613  3.974039  76.276306 90.657285 3009.148259 3564.280519
8 1 4   3.551388  4.727147  30.516424 28.477558  869.697322  854.840591
8 4 1   4.416593  0.581210   6.376956  8.208095  370.679285  461.959873
8 4 4   6.524819 15.331192  17.337220  3.290063   12.260609   29.961474
"""


def alpa_table(
    rng: np.random.RandomState, num_layers: int, num_hosts: int, per_host: int, shapes: list[tuple[int, int]]
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], int], int]:
    """Seconds of each run on each submesh and option, the most stages that may follow it, and the number of options,
    in the order in which the tables of the reference were drawn."""
    exponent, memory, num_options = rng.rand() * 4 - 2, rng.rand() * 4, rng.randint(1, 5)
    seconds, held = rng.rand(num_layers), rng.rand(num_layers)
    cost: dict[tuple[int, ...], float] = {}
    later: dict[tuple[int, ...], int] = {}
    for i in range(num_layers):
        for j in range(i, num_layers):
            for s, (hosts, devices) in enumerate(shapes):
                for option in range(num_options):
                    factor = rng.rand() + 1
                    share = hosts * devices / (num_hosts * per_host) / (held[i : j + 1].sum() / held.sum())
                    cost[i, j, s, option] = seconds[i : j + 1].sum() * factor * float(hosts * devices) ** exponent
                    later[i, j, s, option] = int(memory * num_layers * share / factor)
    return cost, later, num_options


def alpa_problems() -> Iterator[tuple[str, PartitionProblem, float]]:
    """The 48 tables, with Alpa's optimum."""
    rng = np.random.RandomState(0)
    for row in ALPA.split("\n")[1:-1]:
        num_layers, num_hosts, per_host = map(int, row.split()[:3])
        shapes = [
            (1, 1),
            *([(1, 2), (1, 4)] if per_host == 4 else []),
            *((h, per_host) for h in range(2, num_hosts + 1)),
        ]
        for at, optimum in enumerate(map(float, row.split()[3:])):
            cost, later, num_options = alpa_table(rng, num_layers, num_hosts, per_host, shapes)

            def cost_of(
                first: int,
                last: int,
                shape: SubmeshShape,
                cost: dict[tuple[int, ...], float] = cost,
                later: dict[tuple[int, ...], int] = later,
                shapes: list[tuple[int, int]] = shapes,
            ) -> StageCost:
                key = first, last, shapes.index((shape.num_hosts, shape.devices_per_host)), shape.option
                return StageCost(forward_s=cost[key], flight_bytes=1 / (later[key] + 1))

            num_microbatches = (1, 16, 512)[at // 2]
            objective = replace(one_f_one_b(num_microbatches), in_flight=lambda after, _: after + 1)
            problem = PartitionProblem(
                num_layers=num_layers,
                cluster=Cluster((DeviceGroup("a", num_hosts, per_host),)),
                cost=cost_of,
                transfer_s=lambda *_: 0.0,
                objective=objective,  # Alpa counts the stages that follow, however few the microbatches
                budget_bytes={"a": 1.0},
                shapes=tuple(SubmeshShape("a", *s, option=n) for s in shapes for n in range(num_options)),
            )
            yield f"{row[:5]} {num_microbatches} {at % 2}", problem, optimum


def test_the_optimum_is_alpas() -> None:
    """With all devices in use, as Alpa demands, all 48 are equal; without that rule none is worse."""
    num_lower = 0
    for name, problem, optimum in alpa_problems():
        found = ExactPartitioner().partition(replace(problem, all_devices=True))
        assert found.status is Status.OPTIMAL, name
        assert found.cost_s == pytest.approx(optimum, rel=5e-6), name  # six decimals are known
        assert sum(stage.submesh.shape.num_devices for stage in found.stages) == problem.cluster.num_devices, name
        idle = ExactPartitioner().partition(problem)
        assert idle.cost_s <= found.cost_s * (1 + 1e-9), name
        num_lower += idle.cost_s < found.cost_s * (1 - 1e-9)
    assert num_lower == 16  # tables where idle devices help


# -- looking at everything ---------------------------------------------------------------------

SMALL = (
    Cluster((DeviceGroup("a", 1, 8),)),
    Cluster((DeviceGroup("a", 2, 4),)),
    Cluster((DeviceGroup("a", 4, 2),)),
    Cluster((DeviceGroup("a", 7, 1),)),
    Cluster((DeviceGroup("a", 2, 3),)),
    Cluster((DeviceGroup("a", 1, 4), DeviceGroup("a", 1, 3))),
    Cluster((DeviceGroup("a", 2, 2), DeviceGroup("b", 1, 4))),
    Cluster((DeviceGroup("b", 1, 1), DeviceGroup("a", 2, 2), DeviceGroup("a", 1, 3))),
)


def table(seed: int) -> PartitionProblem:
    """A random problem of up to 8 layers on up to 8 devices; a run takes about the time of its layers."""
    rng = np.random.default_rng(seed)
    num_layers, cluster = int(rng.integers(1, 9)), SMALL[seed % len(SMALL)]
    seconds, held = rng.integers(1, 9, num_layers), rng.integers(1, 9, num_layers)
    speedup, forbidden = float(rng.choice([0.0, 0.4, 0.9])), float(rng.choice([0.0, 0.1, 0.3]))
    cost: dict[tuple[int, int, SubmeshShape], StageCost | None] = {}
    for first, last in itertools.combinations_with_replacement(range(num_layers), 2):
        for shape in cluster.shapes():
            run, size = slice(first, last + 1), shape.num_devices
            factor = (1 + rng.random(3)) / size**speedup
            cost[first, last, shape] = StageCost(
                forward_s=seconds[run].sum() * factor[0],
                backward_s=2 * seconds[run].sum() * factor[1],
                update_s=factor[2],
                state_bytes=held[run].sum() / size,
                flight_bytes=held[run].sum() * rng.random() / size,
                working_bytes=rng.random(),
            )
            if rng.random() < forbidden:
                cost[first, last, shape] = None
    every = rng.random((num_layers, 2, 9, 9)) * rng.choice([0.0, 0.3, 3.0])

    def transfer_s(boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
        return float(every[boundary, int(same_host), source.num_devices, target.num_devices]) / (5 if same_host else 1)

    most = min(num_layers, cluster.num_devices)
    return PartitionProblem(
        num_layers=num_layers,
        cluster=cluster,
        cost=lambda *key: cost[key],
        transfer_s=transfer_s,
        objective=(one_f_one_b, gpipe)[int(rng.integers(2))](int(rng.choice([1, 2, 8, 64]))),
        budget_bytes={"a": float(rng.choice([6, 12, 100])), "b": float(rng.choice([12, 1000]))},
        num_stages=int(rng.integers(1, most + 1)) if rng.random() < 0.3 else None,
        all_devices=bool(rng.random() < 0.15),
    )


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(200))
def test_a_table_equals_looking_at_every_size_cut_and_place(seed: int) -> None:
    problem = table(seed)
    found = ExactPartitioner().partition(problem)
    every = ((evaluate(problem, stages), stages) for stages in every_partition(problem))
    least, best = min(every, key=lambda pair: pair[0], default=(math.inf, ()))
    if math.isinf(least):
        assert found.status is Status.INFEASIBLE, seed
        assert found.reason
        return
    assert found.status is Status.OPTIMAL, (seed, best)
    check_sound(problem, found.stages)
    assert evaluate(problem, found.stages) == pytest.approx(found.cost_s, rel=1e-9)
    assert found.cost_s == pytest.approx(least, rel=1e-9), (seed, best, found.stages)
    assert found.lower_bound_s <= least * (1 + 1e-9)
