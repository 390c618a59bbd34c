"""What stages send to each other, over links that serve one transfer at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import QUICKLY, pipelined
from test_schedules import built, shapes

from autopar.hardware.profile import load
from autopar.pipeline.cut.exchanges import Passing, crossing_bytes, exchanges_of, exchanges_of_layers
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, Submesh, SubmeshShape
from autopar.pipeline.partition.problem import Stage, StageCost
from autopar.pipeline.partition.sends import Exchange, Send, edges_between, links_of
from autopar.pipeline.partition.step_time import staged_timeline, task_seconds
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.instructions import Call, Move
from autopar.pipeline.run.transfers import Crossing
from autopar.pipeline.schedule.simulate import Links, Seconds, TransferSeconds, simulate
from autopar.pipeline.schedule.table import SCHEDULES, build
from autopar.pipeline.schedule.tasks import Schedule, Task, chain_with
from autopar.pipeline.search import stage_search, transfer_prices
from autopar.pipeline.search.stage_search import StageSearch
from autopar.pipeline.search.transfer_prices import sends_of
from benchmarks.pipeline.critical_path import longest_path

V100 = load("v100-sxm-16")


# -- links in the simulator --------------------------------------------------------------------


def by_the_clock(
    schedule: Schedule, seconds: Seconds, transfer_s: TransferSeconds, links: Links
) -> dict[Task, tuple[int, int]]:
    """Start and end of each task, tick by tick. Each link has a queue; a transfer runs while it heads all of its own.
    Tasks take at least one tick."""
    submesh_of = schedule.submesh_of()
    todo = [list(order) for order in schedule.orders]
    found: dict[Task, tuple[int, int]] = {}
    here: set[tuple[Task, Task]] = set()
    queues: dict[Any, list[tuple[Task, Task]]] = {}
    runs_until: dict[tuple[Task, Task], int] = {}
    waiting: list[tuple[Task, Task]] = []
    now = 0
    while any(todo) or any(end > now for _, end in found.values()):
        for task in sorted((t for t, (_, end) in found.items() if end == now), key=submesh_of.__getitem__):
            users = [user for user in schedule.tasks if task in schedule.needs[user]]
            for user in sorted(users, key=lambda user: (abs(user.stage - task.stage), user.stage)):
                if submesh_of[user] == submesh_of[task]:
                    here.add((task, user))
                    continue
                waiting.append((task, user))
                for link in links(task, user):
                    queues.setdefault(link, []).append((task, user))
        changed = True
        while changed:
            changed = False
            for one in list(waiting):
                queued = [queues[link] for link in links(*one)]
                if one not in runs_until and all(queue[0] == one for queue in queued):
                    runs_until[one] = now + int(transfer_s(*one))
                if runs_until.get(one) == now:
                    for queue in queued:
                        queue.pop(0)
                    waiting.remove(one)
                    here.add(one)
                    changed = True
        for submesh, order in enumerate(todo):
            busy = any(submesh_of[task] == submesh and end > now for task, (_, end) in found.items())
            if order and not busy and all((need, order[0]) in here for need in schedule.needs[order[0]]):
                task = order.pop(0)
                found[task] = now, now + int(seconds(task))
        now += 1
    return found


def skipping(schedule: Schedule) -> list[tuple[int, int]]:
    last = schedule.num_stages - 1
    return [(stage, stage + 1) for stage in range(last)] + ([(0, last)] if last > 1 else [])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_transfers_of_a_link_run_one_after_another(data: st.DataObject) -> None:
    """As an independent simulation by the clock says; and no transfer makes a step shorter."""
    kind = data.draw(st.sampled_from(list(SCHEDULES.values())))
    shape = data.draw(st.sampled_from([one for one in shapes(kind) if one.num_microbatches <= 6]))
    schedule = built(kind, shape)
    edges = skipping(schedule)
    schedule = build(kind, shape.num_submeshes, shape.num_microbatches, virtual=shape.virtual, edges=edges)
    draw = data.draw(st.randoms(use_true_random=False))
    seconds = {task: draw.randrange(1, 6) for task in schedule.tasks}
    pairs = [(need, task) for task in schedule.tasks for need in schedule.needs[task]]
    delays = {pair: draw.randrange(4) for pair in pairs}
    names = {pair: tuple(draw.sample("abcd", draw.randrange(3))) for pair in pairs}

    def transfer_s(source: Task, target: Task) -> int:
        return delays[source, target]

    def links(source: Task, target: Task) -> tuple[str, ...]:
        return names[source, target]

    timeline = simulate(schedule, seconds.__getitem__, transfer_s, links)
    assert {span.task: (span.start_s, span.end_s) for span in timeline.spans} == by_the_clock(
        schedule, seconds.__getitem__, transfer_s, links
    )
    length, _ = longest_path(schedule, seconds.__getitem__, transfer_s)
    assert timeline.makespan_s >= length
    apart = simulate(schedule, seconds.__getitem__, transfer_s, lambda source, target: ((source, target),))
    assert apart.makespan_s == length, "where no transfers share a link, none waits"


def test_a_step_begins_with_what_its_stages_need_once() -> None:
    schedule = build("inference", 2, 1)
    first = [Task(stage, 0, "forward") for stage in (0, 1)]
    timeline = simulate(
        schedule, lambda task: 1, lambda a, b: 2, lambda a, b: ("link",), [(first[1], 5, ("link",)), (first[0], 1, ())]
    )
    assert {span.task: span.start_s for span in timeline.spans} == {first[0]: 1, first[1]: 7}  # 5, then 2 more


# -- transfers between stages ------------------------------------------------------------------


def on_hosts(*places: tuple[int, int], per_host: int = 2) -> list[Submesh]:
    """Submeshes of one device each: host and device in it."""
    return [Submesh(SubmeshShape(V100.name, 1, 1), host * per_host + n, host) for host, n in places]


def as_stages(submeshes: Sequence[Submesh]) -> list[Stage]:
    """A layer on each."""
    return [Stage(n, n, submesh) for n, submesh in enumerate(submeshes)]


def test_stages_of_a_host_share_its_network_card() -> None:
    submeshes = on_hosts((0, 0), (0, 1), (1, 0), (1, 1))
    cluster = Cluster((DeviceGroup(V100.name, 2, 2),))
    exchanges = [Exchange(0, 1, 1e6), Exchange(0, 2, 1e6), Exchange(1, 3, 1e6), Exchange(3, 1, 1e6, 2)]
    inside, one, other, back = sends_of(exchanges, as_stages(submeshes), cluster, {V100.name: V100})
    assert (inside.over_network, one.over_network, other.over_network) == (False, True, True)
    links = {send: set(links_of(send, submeshes[send.source], submeshes[send.target])) for send in (inside, one, back)}
    assert links[one] == set(links_of(other, submeshes[1], submeshes[3])), "one card out, one card in"
    assert links[inside].isdisjoint(links[one]) and links[one].isdisjoint(links[back]), "full duplex"
    assert back.seconds == pytest.approx(other.seconds + V100.network_link.latency_s), "two values, two latencies"
    assert links_of(inside, submeshes[0], submeshes[0]) == ()


def test_a_domain_of_several_hosts_has_no_network_inside() -> None:
    domain = replace(V100, nvlink_domain_devices=4)
    submeshes, cluster = on_hosts((0, 0), (1, 0)), Cluster((DeviceGroup(V100.name, 2, 2),))
    (send,) = sends_of([Exchange(0, 1, 1e6)], as_stages(submeshes), cluster, {V100.name: domain})
    assert not send.over_network
    assert send.seconds == 1e6 / domain.host_link.bytes_per_s + domain.host_link.latency_s


def test_what_a_stage_sends_to_two_others_arrives_one_after_the_other() -> None:
    submeshes = on_hosts((0, 0), (0, 1), (0, 2), per_host=3)
    costs = [StageCost(forward_s=1.0, backward_s=2.0, update_s=1.0)] * 3
    sends = [Send(0, 1, 1.0, 0.5), Send(0, 2, 1.0, 5.0), Send(1, 2, 1.0, 0.25), Send(2, 1, 1.0, 0.5)]
    edges = [(0, 1), (0, 2), (1, 2)]
    timeline = staged_timeline(build("1f1b", 3, 1, edges=edges), costs, sends, submeshes)
    at = {(span.task.stage, span.task.phase): (span.start_s, span.end_s) for span in timeline.spans}
    # 0 sends to 1 until 1.5, then to 2 until 6.5; what 1 sends at 2.5 waits for the link into 2.
    assert at[1, "forward"] == (1.5, 2.5) and at[2, "forward"] == (6.75, 7.75)
    assert at[1, "backward"] == (10.25, 12.25) and at[0, "backward"] == (12.25, 14.25)
    once = [*sends, Send(2, 0, 1.0, 9.0, when="end"), Send(0, 2, 1.0, 0.75, when="start")]
    again = staged_timeline(build("1f1b", 3, 1, edges=edges), costs, once, submeshes)
    at = {(span.task.stage, span.task.phase): (span.start_s, span.end_s) for span in again.spans}
    # The gradient for 1 is ready first and goes first; the value for 0's update follows at 10.25.
    assert at[2, "forward"] == (6.75, 7.75) and at[0, "update"][0] == 9.75 + 0.5 + 9.0


def test_values_are_priced_by_pairs_of_stages() -> None:
    """A value counts once for each stage that reads it; relayed values count once in all when the search goes on."""
    passing = [Passing(0, (1, 2), 3.0), Passing(0, (5,), 8.0), Passing(3, (4, 5), 2.0)]
    stages = [Stage(first, first + 1, on_hosts((0, 0))[0]) for first in (0, 2, 4)]
    exchanges = exchanges_of_layers(passing, [0, 0, 1, 1, 2, 2], trains=True)
    found = {(one.source, one.target): (one.num_bytes, one.num_values) for one in exchanges}
    assert found == {(0, 1): (3.0, 1), (0, 2): (8.0, 1), (1, 2): (2.0, 1)} | {
        (1, 0): (3.0, 1),
        (2, 0): (8.0, 1),
        (2, 1): (2.0, 1),
    }
    forward_only = exchanges_of_layers(passing, [0, 0, 1, 1, 2, 2], trains=False)
    assert {(one.source, one.target) for one in forward_only} == {(0, 1), (0, 2), (1, 2)}
    search = StageSearch(
        cost=lambda *_: None,
        keys=range(6),
        passing=passing,
        cluster=Cluster((DeviceGroup(V100.name, 1, 3),)),
        profiles={V100.name: V100},
        budget_bytes={V100.name: 1.0},
        shapes=(),
        num_microbatches=1,
    )
    direct = transfer_prices.direct_bytes(search.passing, len(search.keys), stages)
    assert direct[2] + direct[4] == 3.0 + 8.0 + 2.0, "the boundaries of these stages"
    assert (direct[2], direct[4]) == (3.0 + 4.0, 4.0 + 2.0)
    assert direct[1] == 3.0 + 4.0


def test_a_skip_connection_is_searched_as_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that all stages would relay is a reason for fewer stages; sent once, it is none."""
    num_bytes = 1.0 * V100.host_link.bytes_per_s  # 1 s
    search = StageSearch(
        cost=lambda first, last, shape: StageCost(forward_s=0.5 * (last - first + 1), backward_s=last - first + 1.0),
        keys=range(6),
        passing=[*(Passing(layer, (layer + 1,), 1e3) for layer in range(5)), Passing(0, (5,), num_bytes)],
        cluster=Cluster((DeviceGroup(V100.name, 1, 6),)),
        profiles={V100.name: V100},
        budget_bytes={V100.name: 1.0},
        shapes=(SubmeshShape(V100.name, 1, 1),),
        num_microbatches=8,
        relative_gap=0.0,
    )
    found = search.best(("1f1b",))
    assert found is not None
    cuts = [[0, *cut, 6] for count in range(6) for cut in itertools.combinations(range(1, 6), count)]
    submeshes = on_hosts(*((0, n) for n in range(6)), per_host=6)
    times = []
    for cut in cuts:
        stages = [Stage(a, b - 1, submeshes[n]) for n, (a, b) in enumerate(itertools.pairwise(cut))]
        costs = [search.cost(one.first, one.last, one.submesh.shape) for one in stages]
        sends = sends_of(search.exchanges(stages), stages, search.cluster, search.profiles)
        schedule = build("1f1b", len(stages), 8, edges=chain_with(len(stages), edges_between(sends)))
        times.append(staged_timeline(schedule, [c for c in costs if c], sends, submeshes).makespan_s)
    assert found.step_time_s == min(times), "the best of all cuts"
    monkeypatch.setattr(
        stage_search, "direct_bytes", lambda passing, count, _: [crossing_bytes(passing, n) for n in range(count)]
    )
    relayed = search.best(("1f1b",))
    assert relayed is not None and found.step_time_s < 0.75 * relayed.step_time_s


# -- what the executor sends -------------------------------------------------------------------


def unet_step(params: Any, x: jax.Array) -> Any:
    """Skip connections that cross several stages, and a kernel that the first layer shares with the last."""

    def loss(params: Any) -> jax.Array:
        h, skips = jnp.tanh(x @ params["tied"]), []
        for kernel in params["down"]:
            h = jnp.tanh(h @ kernel)
            skips.append(h)
        for kernel, mix in params["up"]:
            h = jnp.tanh(h @ kernel + skips.pop() @ mix)
        return jnp.mean((h @ params["tied"].T - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def unet_args() -> tuple[Any, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def kernel() -> jax.Array:
        return 0.2 * jax.random.normal(next(keys), (32, 32))

    params = {"tied": kernel(), "down": [kernel() for _ in range(3)], "up": [(kernel(), kernel()) for _ in range(3)]}
    return params, jax.random.normal(next(keys), (16, 32))


def unet_in_stages(**options: Any) -> tuple[Callable[..., Any], Pipeline]:
    return pipelined(unet_step, unet_args(), num_stages=4, num_microbatches=4, mesh="2", **options)


def test_the_plan_prices_what_the_executor_sends() -> None:
    """For each pair of stages, the values and bytes of each microbatch, in both directions, and once per step."""
    run, pipeline = unet_in_stages()
    moves: Counter[tuple[int, int, bool]] = Counter()
    sizes: Counter[tuple[int, int, bool]] = Counter()
    stage_of = pipeline.instructions.stage_of
    for one in pipeline.instructions.steps:
        if isinstance(one, Move):
            way = stage_of[one.reads[0]], stage_of[one.writes[0]], one.task is not None
            moves[way] += 1
            assert isinstance(one.crossing, Crossing)
            sizes[way] += one.crossing.dtype.itemsize * int(np.prod(one.crossing.shape))
    exchanges = exchanges_of([stage.program for stage in pipeline.stages])
    each = [one for one in exchanges if one.when == "microbatch"]
    assert any(one.target - one.source > 1 for one in each) and any(one.source - one.target > 1 for one in each)
    assert {(one.source, one.target): (4 * one.num_values, 4 * one.num_bytes) for one in each} == {
        way[:2]: (count, sizes[way]) for way, count in moves.items() if way[2]
    }
    ends = {(one.source, one.target): (one.num_values, one.num_bytes) for one in exchanges if one.when == "end"}
    assert ends == {way[:2]: (count, sizes[way]) for way, count in moves.items() if not way[2]}
    assert any(num_bytes >= 32 * 32 * 4 for _, num_bytes in ends.values()), "a term of the shared kernel's gradient"
    starts = [one for one in exchanges if one.when == "start"]
    assert [one.num_bytes for one in starts] == [32 * 32 * 4], "and the shared kernel itself"
    here, plain = run(*unet_args()), jax.jit(unet_step)(*unet_args())
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def called(pipeline: Pipeline) -> list[Task]:
    return [one.task for one in pipeline.instructions.steps if isinstance(one, Call) and one.task is not None]


def priced(pipeline: Pipeline, forward_s: Sequence[float]) -> Pipeline:
    """The same stages, dispatched by other prices."""
    seconds = task_seconds([StageCost(forward_s=one, backward_s=2 * one) for one in forward_s])
    timeline = simulate(pipeline.schedule, seconds)
    stages, count, literals = pipeline.stages, pipeline.num_outputs, pipeline.literals
    return Pipeline(stages, pipeline.schedule, count, literals, timeline=timeline, compiler_options=QUICKLY)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_tasks_are_dispatched_in_the_order_of_the_planned_timeline(schedule: str) -> None:
    """Other prices give another order and the same numbers; a stage's own order stays that of the schedule."""
    run, even = unet_in_stages(schedule=schedule)
    first_slow, last_slow = (priced(even, seconds) for seconds in ((8.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 8.0)))
    orders = [called(one) for one in (even, first_slow, last_slow)]
    assert orders[1] != orders[0] != orders[2] != orders[1]
    assert orders[1] == called(priced(even, (8.0, 1.0, 1.0, 1.0))), "the same in every process"
    ready = Task(0, 1, "forward"), Task(3, 0, "forward")
    assert orders[2].index(ready[0]) < orders[2].index(ready[1]) and orders[1].index(ready[0]) > 0
    for order in orders:
        assert Counter(order) == Counter(orders[0])
        for stage, own in enumerate(even.schedule.orders):
            assert [task for task in order if task.stage == stage] == [task for task in own if task in orders[0]]
    expected = run(*unet_args())
    for one in (first_slow, last_slow):
        for a, b in zip(one.run(jax.tree.leaves(unet_args())), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
