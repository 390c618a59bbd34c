"""Pipelines over nodes that fail: every failure leaves a cover, its state is on survivors, and the batch is divided exactly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import BudgetError, ClusterError, MicrobatchError, OptionError
from autopar.pipeline.templates.batch import best_sizes, divided
from autopar.pipeline.templates.cover import cover, template_sizes
from autopar.pipeline.templates.state import Cells
from autopar.pipeline.templates.templates import PipelineTemplates, Setting, Template, assembled, sizes_needed

NUM_LAYERS = 12


def uniform(num_nodes: int, fewest: int, survive: int) -> PipelineTemplates:
    """Pipelines of equal layers: node i of n holds layers i L / n to (i + 1) L / n."""
    templates: dict[int, Template] = {}
    for size in sizes_needed(fewest, num_nodes, survive):
        held = np.zeros((size, NUM_LAYERS), bool)
        for node in range(size):
            held[node, node * NUM_LAYERS // size : -(-(node + 1) * NUM_LAYERS // size)] = True
        templates[size] = Template(
            held=held, seconds=lambda m, size=size: (m + size - 1) / size, stages=tuple((n,) for n in range(size))
        )
    cells = Cells(
        num_bytes=np.arange(1.0, NUM_LAYERS + 1),
        array=np.arange(NUM_LAYERS),
        paths=tuple(f"layer{n}" for n in range(NUM_LAYERS)),
        synced=np.ones(NUM_LAYERS, bool),
    )
    setting = Setting(
        program="uniform",
        hardware="none",
        devices_per_node=1,
        requested=survive,
        fewest=fewest,
        num_microbatches=64,
        network_bytes_per_s=1e3,
    )
    return assembled(setting, templates, cells, range(num_nodes))


def failures(nodes: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(nodes, k) for k in range(1, most + 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("survive", [1, 2, 3])
@pytest.mark.parametrize("fewest", [1, 2, 3, 4, 5, 6])
def test_every_failure_leaves_a_cover_without_an_idle_node(survive: int, fewest: int) -> None:
    for num_nodes in range((survive + 1) * fewest, 33):
        sizes = template_sizes(fewest, num_nodes, survive)
        whole, rest = divmod(num_nodes, survive + 1)  # as few and as equal pipelines as may be
        nodes = iter(range(num_nodes))
        pipelines = [tuple(next(nodes) for _ in range(whole + (n < rest))) for n in range(survive + 1)]
        assert {len(one) for one in pipelines} <= {*sizes}
        for failed in failures(range(num_nodes), survive):
            found = cover(pipelines, failed, fewest)
            kept = [node for one in found.pipelines for node in one]
            assert sorted(kept) == sorted({*range(num_nodes)} - {*failed})
            assert all(len(one) in sizes for one in found.pipelines)
            if any(change.kind == "merge" for change in found.changes):
                assert len(found.pipelines) == len(kept) // fewest, "no more pipelines than needed are given up"


@pytest.mark.parametrize(("num_nodes", "fewest", "survive"), [(7, 2, 2), (8, 3, 1), (9, 2, 3), (6, 1, 3), (11, 4, 1)])
def test_survivors_hold_what_new_pipelines_copy(num_nodes: int, fewest: int, survive: int) -> None:
    plan = uniform(num_nodes, fewest, survive)
    assert plan.survives >= survive
    assert len(plan.pipelines) > survive
    before = {node: plan.held[len(one)][n] for one in plan.pipelines for n, node in enumerate(one)}
    for failed in failures(range(num_nodes), survive):
        after = plan.after(failed)
        assert sum(after.microbatches) == plan.setting.num_microbatches
        now = {node: cells.copy() for node, cells in before.items() if node not in failed}
        for copy in after.copies:
            assert copy.source in now
            layers = [int(path.removeprefix("layer")) for path in copy.paths]
            assert before[copy.source][layers].all()
            assert not now[copy.target][layers].any()
            assert copy.num_bytes == sum(layer + 1 for layer in layers)
            now[copy.target][layers] = True
        for one in after.pipelines:
            for place, node in enumerate(one):
                assert (now[node] >= after.held[len(one)][place]).all()


@pytest.mark.parametrize(("num_nodes", "fewest"), [(2, 1), (3, 2), (5, 2), (7, 3), (8, 2)])
def test_the_number_of_failures_that_are_survived_is_exact(num_nodes: int, fewest: int) -> None:
    plan = uniform(num_nodes, fewest, 3)  # more than some can
    has = {node: plan.held[len(one)][n] for one in plan.pipelines for n, node in enumerate(one)}

    def survived(failed: tuple[int, ...]) -> bool:
        left = [cells for node, cells in has.items() if node not in failed]
        return len(left) >= fewest and bool(np.any(left, axis=0).all())

    most = next(k for k in range(num_nodes) if not all(map(survived, itertools.combinations(range(num_nodes), k + 1))))
    assert plan.survives == most
    assert "failure" in str(autopar.explain(plan))
    if most < 3:
        assert f"not 3: that takes 4 pipelines, {4 * fewest} nodes" in str(autopar.explain(plan))


def test_failures_one_after_another() -> None:
    plan = uniform(9, 2, 2)
    for node in (4, 0, 7, 8):
        plan = plan.after([node])
        assert len({n for one in plan.pipelines for n in one}) == plan.num_nodes
    assert plan.failed == (4, 0, 7, 8)
    assert plan.num_nodes == 5


def test_state_that_nobody_has_is_read_from_a_checkpoint() -> None:
    plan = uniform(4, 2, 0)
    after = plan.after([one[0] for one in plan.pipelines])
    assert {copy.source for copy in after.copies} >= {None}
    assert "a checkpoint" in str(autopar.explain(after))


def partitions(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All sums of sizes."""
    if total == 0:
        yield ()
    for n, size in enumerate(sizes):
        if size <= total:
            yield from ((size, *rest) for rest in partitions(total - size, sizes[n:]))


def tables(rng: random.Random, sizes: Sequence[int], most: int) -> dict[int, list[float]]:
    """Seconds of each size by microbatches, which do not fall."""
    return {size: list(itertools.accumulate(rng.random() for _ in range(most + 1))) for size in sizes}


def shares(num_microbatches: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (num_microbatches,)
    for own in range(1, num_microbatches - count + 2 if count > 1 else 0):
        yield from ((own, *rest) for rest in shares(num_microbatches - own, count - 1))


def test_division_of_the_batch_is_the_best() -> None:
    rng = random.Random(1)
    for _ in range(100):
        count, most = rng.randint(1, 4), rng.randint(4, 9)
        table = tables(rng, range(count), most)
        own: list[Callable[[int], float]] = [table[n].__getitem__ for n in range(count)]
        found = divided(most, own)
        assert sum(found) == most
        assert min(found) > 0
        best = min(max(table[n][m] for n, m in enumerate(one)) for one in shares(most, count))
        assert max(table[n][m] for n, m in enumerate(found)) == best
    with pytest.raises(MicrobatchError, match="3 pipelines need a microbatch each, and the batch has 2"):
        divided(2, [float, float, float])


def test_sizes_are_the_fastest_of_all_sums() -> None:
    rng = random.Random(2)
    for _ in range(60):
        fewest, num_nodes, at_least, most = rng.randint(1, 3), rng.randint(6, 11), rng.randint(1, 2), rng.randint(4, 8)
        sizes = range(fewest, num_nodes - (at_least - 1) * fewest + 1)
        table = tables(rng, sizes, most)
        sync = [0.3 * rng.random() * n for n in range(num_nodes + 1)]

        def total(one: tuple[int, ...], *, table=table, sync=sync, most=most) -> float:
            counts = divided(most, [lambda m, size=size: table[size][m] for size in one])
            return max(table[size][m] for size, m in zip(one, counts, strict=True)) + sync[len(one)]

        possible = [one for one in partitions(num_nodes, sizes) if at_least <= len(one) <= most]
        found = best_sizes(num_nodes, sizes, most, lambda size, m: table[size][m], at_least, sync.__getitem__)  # noqa: B023
        assert sum(found.sizes) == num_nodes
        assert total(found.sizes) == pytest.approx(min(map(total, possible)), rel=1e-8)


def test_too_few_nodes_and_unknown_ones_are_refused() -> None:
    plan = uniform(4, 3, 1)
    with pytest.raises(ClusterError, match="2 of 4 nodes are left, and the model needs 3"):
        plan.after([0, 1])
    with pytest.raises(ClusterError, match="node 9 is in no pipeline; the nodes are 0, 1, 2, 3"):
        plan.after([9])
    with pytest.raises(ClusterError, match="no 3 or more pipelines of 2 to 3 nodes have 5 nodes together"):
        best_sizes(5, (2, 3), 8, lambda size, m: m / size, 3)


def layered_step(weights: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss_of(weights: list[jax.Array]) -> jax.Array:
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.square(x - batch).mean()

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


SHAPES = ([jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 6, jax.ShapeDtypeStruct((64, 512), jnp.float32))
ON_SMALL_NODES = {"devices_per_node": 1, "hardware": "v100-sxm-16", "num_microbatches": 16, "cache": False}


def test_templates_of_a_planned_step() -> None:
    plan = autopar.plan_templates(
        layered_step, *SHAPES, num_nodes=5, survive=1, memory_budget_bytes=11e6, **ON_SMALL_NODES
    )
    assert plan.setting.fewest == 2, "weights and gradients are 12.6 MB"
    assert sorted(plan.templates) == [2, 3]
    assert (plan.survives, sum(plan.microbatches), sorted(map(len, plan.pipelines))) == (1, 16, [2, 3])
    assert plan.cells.num_bytes.sum() == 6 * 512 * 512 * 4
    times = [
        max(plan.templates[len(one)].seconds(m) for one, m in zip(plan.pipelines, counts, strict=True))
        for counts in shares(16, 2)
    ]
    assert max(plan.pipeline_s) == min(times)
    for failed in range(5):
        after = plan.after([failed])
        assert sorted(map(len, after.pipelines)) == [2, 2]
        text = str(autopar.explain(after))
        assert f"after the failure of node {failed}" in text
        assert all(copy.source is not None for copy in after.copies)


def test_options_that_templates_decide_are_refused() -> None:
    with pytest.raises(OptionError, match="`num_devices` is decided by the templates"):
        autopar.plan_templates(layered_step, *SHAPES, num_nodes=2, num_devices=4, **ON_SMALL_NODES)
    with pytest.raises(ClusterError, match="`survive` is -1: give a whole number of at least 0"):
        autopar.plan_templates(layered_step, *SHAPES, num_nodes=2, survive=-1, **ON_SMALL_NODES)
    with pytest.raises(BudgetError) as caught:
        autopar.plan_templates(layered_step, *SHAPES, num_nodes=2, memory_budget_bytes=1e6, **ON_SMALL_NODES)
    assert any("on 2 nodes, all that there are" in note for note in caught.value.__notes__)
