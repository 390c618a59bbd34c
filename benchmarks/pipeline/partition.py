"""Compare the partition with Alpa's optima, and with every size, cut and place of the stages.

*Tables*: 200 random problems of up to 8 layers on up to 8 devices, on eight clusters, some with hosts of several sizes or two
kinds of device; 1F1B or GPipe; some with a memory limit that binds, runs that no submesh can do, transfers, a fixed number of
stages, or no idle devices. Every partition is looked at, by a search that shares nothing with the package's. *Equal*: the package's
optimum is the least of all, or there is none and it says so. *Out of order*: tables where every partition in the order of
the devices costs more, and by how much at most.

*Alpa's tables*: 48 problems and the optima of Alpa's dynamic program; there, all devices must be used. *Idle devices help*: tables
where the optimum without this rule is lower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, Submesh, SubmeshShape
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.problem import PartitionProblem, Stage, StageCost
from autopar.pipeline.schedule.one_forward_one_backward import ONE_F_ONE_B
from autopar.pipeline.schedule.table import find, objective_of

NUM_TABLES = 200


def measure() -> list[dict[str, Any]]:
    """A row for the tables of each cluster, and one for Alpa's."""
    return [*(_row(first) for first in range(len(SMALL))), _alpa_row()]


def _row(first: int) -> dict[str, Any]:
    equal = feasible = out_of_order = 0
    most = 0.0
    seeds = range(first, NUM_TABLES, len(SMALL))
    for seed in seeds:
        problem = table(seed)
        found = ExactPartitioner().partition(problem)
        least = in_line = math.inf
        for stages in every_partition(problem):
            cost = evaluate(problem, stages)
            least = min(least, cost)
            in_line = min(in_line, cost if is_in_line(stages) else math.inf)
        equal += math.isclose(found.cost_s, least, rel_tol=1e-9)
        feasible += math.isfinite(least)
        if in_line > least * (1 + 1e-9):
            out_of_order += 1
            most = max(most, in_line / least - 1)
    name = str(SMALL[first])
    return _counts(f"tables on {name}", len(seeds), feasible, equal, f"{out_of_order}, by up to {most:.1%}", "")


def _alpa_row() -> dict[str, Any]:
    equal = tables = lower = 0
    for _, problem, optimum in alpa_problems():
        found = ExactPartitioner().partition(replace(problem, all_devices=True))
        tables += 1
        equal += math.isclose(found.cost_s, optimum, rel_tol=5e-6)  # six decimals are known
        lower += bool(ExactPartitioner().partition(problem).cost_s < found.cost_s * (1 - 1e-9))
    return _counts("Alpa's tables", tables, tables, equal, "", lower)


def _counts(name: str, tables: int, feasible: int, equal: int, out_of_order: str, lower: int | str) -> dict[str, Any]:
    return {
        "problems": name,
        "tables": tables,
        "feasible": feasible,
        "equal": equal,
        "out of order": out_of_order,
        "idle devices help": lower,
    }


# -- random tables -----------------------------------------------------------------------------


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
        objective=objective_of(find(("1f1b", "gpipe")[int(rng.integers(2))]), int(rng.choice([1, 2, 8, 64])), 1),
        budget_bytes={"a": float(rng.choice([6, 12, 100])), "b": float(rng.choice([12, 1000]))},
        num_stages=int(rng.integers(1, most + 1)) if rng.random() < 0.3 else None,
        all_devices=bool(rng.random() < 0.15),
    )


# -- looking at everything ---------------------------------------------------------------------


def every_partition(problem: PartitionProblem) -> Iterator[tuple[Stage, ...]]:
    """All of them, in any order of the devices, with devices left idle anywhere, written without anything of what is
    tested. Of hosts that are alike, a stage takes the first."""
    hosts = [
        (g, group.devices_per_host) for g, group in enumerate(problem.cluster.groups) for _ in range(group.num_hosts)
    ]
    begins = [sum(size for _, size in hosts[:host]) for host in range(len(hosts))]
    yield from _from(problem, hosts, begins, [0] * len(hosts), 0, None)


def _from(
    problem: PartitionProblem,
    hosts: list[tuple[int, int]],
    begins: list[int],
    taken: list[int],
    first: int,
    previous: int | None,
) -> Iterator[tuple[Stage, ...]]:
    """All stages from a layer on, after devices of each host are taken; `previous` is the last stage's host."""
    if first == problem.num_layers:
        yield ()
        return
    seen: set[tuple[int, int, bool]] = set()
    for host, (g, size) in enumerate(hosts):
        alike = g, taken[host], host == previous
        if alike in seen:
            continue
        seen.add(alike)
        kind = problem.cluster.groups[g].kind
        shapes = [SubmeshShape(kind, 1, n) for n in range(1, size - taken[host] + 1)]
        empty = 0
        while (
            taken[host] == 0 and host + empty < len(hosts) and hosts[host + empty][0] == g and not taken[host + empty]
        ):
            empty += 1
        shapes += [SubmeshShape(kind, n, size) for n in range(2, empty + 1)]
        for shape in shapes:
            if problem.shapes and shape not in problem.shapes:
                continue
            mesh = Submesh(shape, begins[host] + taken[host], host)
            after = [
                used + shape.devices_per_host * (host <= other < host + shape.num_hosts)
                for other, used in enumerate(taken)
            ]
            for last in range(first, problem.num_layers):
                for rest in _from(problem, hosts, begins, after, last + 1, host):
                    yield (Stage(first, last, mesh), *rest)


def evaluate(problem: PartitionProblem, stages: tuple[Stage, ...]) -> float:
    """The objective, by its definition."""
    objective, once, repeated = problem.objective, 0.0, 0.0
    if len(stages) > (problem.max_stages or len(stages)) or len(stages) != (problem.num_stages or len(stages)):
        return math.inf
    used = sum(stage.submesh.shape.num_devices for stage in stages)
    if problem.all_devices and used < problem.cluster.num_devices:
        return math.inf
    for number, stage in enumerate(stages):
        mesh, after = stage.submesh, len(stages) - 1 - number
        cost = problem.cost(stage.first, stage.last, mesh.shape)
        if cost is None:
            return math.inf
        needed = cost.bytes_with(objective.in_flight(after, len(stages)))
        if needed > problem.budget_bytes[mesh.shape.kind]:
            return math.inf
        sent = 0.0
        if after:
            then = stages[number + 1].submesh
            together = len({d_host(problem.cluster, d) for d in (*mesh.devices, *then.devices)}) == 1
            sent = problem.transfer_s(stage.last + 1, mesh.shape, then.shape, together)
        once += objective.once_s(cost) + objective.transfer_once * sent
        repeated = max(repeated, objective.repeated_s(cost) + objective.transfer_repeated * sent)
    return once + repeated


def d_host(cluster: Cluster, device: int) -> int:
    host = 0
    for group in cluster.groups:
        if device < group.num_devices:
            return host + device // group.devices_per_host
        device, host = device - group.num_devices, host + group.num_hosts
    raise AssertionError(device)


def check_sound(problem: PartitionProblem, stages: tuple[Stage, ...]) -> None:
    """Every layer once, in order; no device twice."""
    assert [layer for s in stages for layer in range(s.first, s.last + 1)] == list(range(problem.num_layers))
    used = [device for s in stages for device in s.submesh.devices]
    assert len(used) == len(set(used))
    assert set(used) <= set(range(problem.cluster.num_devices))


def is_in_line(stages: tuple[Stage, ...]) -> bool:
    """Whether no stage returns to a host after one on another host."""
    hosts = [stage.submesh.first_host for stage in stages]
    return all(one == other or other not in hosts[:n] for n, (one, other) in enumerate(itertools.pairwise(hosts)))


# -- Alpa ----------------------------------------------------------------------------------------

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
            objective = replace(objective_of(ONE_F_ONE_B, num_microbatches, 1), in_flight=lambda after, _: after + 1)
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
