"""Rematerialization: unchanged results, in less memory."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import errors
from autopar.formulate.explicit import explicit_program
from autopar.formulate.formulation import Formulation, formulate
from autopar.hardware.profile import load
from autopar.ir.mesh import parse_mesh
from autopar.ir.verifier import check
from autopar.planner.remat.candidates import remat_levels
from autopar.planner.remat.min_cut import Step, cheapest
from autopar.plans.plan import Plan
from autopar.plans.records import Rematerialization, RematSegment
from autopar.report.explain import explain_json
from autopar.rules.grouping import form_groups
from autopar.rules.table import rules_of
from autopar.runtime import jit as execute
from autopar.solve.ilp import Ilp
from autopar.transforms.program import Program, program_of, recomputing
from autopar.transforms.remat.sites import sites_of
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_model.buffer_assignment import device_program
from tests.planned import plan_program

HARDWARE = "h100-sxm"
#: Activations are many times the parameters.
BATCH, WIDTH = 2048, 64
#: One device: no sharding saves any memory, and what does is computed again.
MESH = "1"


def deep(
    num_layers: int = 4, batch: int = BATCH, width: int = WIDTH, *, scanned: bool = False, checkpointed: bool = False
) -> tuple[Any, Any, Any]:
    """A deep residual net with dropout: the step, a state, a batch."""

    def layer(x: jax.Array, given: Any) -> jax.Array:
        weights, key = given
        y = x - x.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
        y = jax.nn.gelu(y @ weights["up"])
        y = jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0.0)
        return x + jnp.tanh(y @ weights["down"])

    if checkpointed:
        layer = jax.checkpoint(layer)

    def loss_of(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        x, keys = batch["x"] @ params["in"], jax.random.split(key, num_layers)
        if scanned:
            x, _ = jax.lax.scan(lambda x, given: (layer(x, given), None), x, (params["layers"], keys))
        else:
            for i in range(num_layers):
                x = layer(x, (jax.tree.map(lambda a, i=i: a[i], params["layers"]), keys[i]))
        return ((x @ params["out"] - batch["y"]) ** 2).mean()

    tx = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, moments, key = state
        key, now = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_of)(params, batch, now)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, key), loss

    def array(seed: int, *shape: int) -> Any:
        return jnp.asarray(np.random.default_rng(seed).normal(size=shape, scale=shape[-2] ** -0.5), jnp.float32)

    layers = {"up": array(0, num_layers, width, 4 * width), "down": array(1, num_layers, 4 * width, width)}
    params = {"in": array(2, 16, width), "layers": layers, "out": array(3, width, 8)}
    state = (params, tx.init(params), jax.random.key(7))
    return step, state, {"x": array(4, batch, 16), "y": array(5, batch, 8)}


@functools.cache
def traced(scanned: bool) -> tuple[Program, Any, Any]:
    step, state, batch = deep(scanned=scanned)
    return program_of(step, (state, batch), carry=None, donate=[]), (state, batch), jax.jit(step)(state, batch)


@functools.cache
def free_plan(scanned: bool) -> Plan:
    return plan_program(traced(scanned)[0], mesh=MESH, hardware=HARDWARE, memory_budget_bytes=1e15)


@functools.cache
def planned_within(scanned: bool, part: float) -> Plan:
    budget = part * free_plan(scanned).prediction.peak_bytes / 0.95
    return plan_program(traced(scanned)[0], mesh=MESH, hardware=HARDWARE, memory_budget_bytes=budget)


def solved(program: Program) -> tuple[Formulation, tuple[int, ...]]:
    """Its problem without a budget, and the optimum."""
    graph = program.graph
    groups = form_groups(graph, rules_of(graph)[0], frozenset())
    f = formulate(graph, groups, parse_mesh(MESH), load(HARDWARE), pins={}, memory_budget_bytes=None)
    return f, Ilp().solve(f.problem).choices


def levels_of(program: Program) -> list[tuple[Any, ...]]:
    f, choices = solved(program)
    return [
        level.recomputed
        for level in remat_levels(program.trace, f, choices, device_program(f, explicit_program(f, choices)))
    ]


def run_of(program: Program, plan: Plan, level: tuple[Any, ...]) -> Any:
    """The step on one device, with what a level computes again in place of what its plan does."""
    bare = replace(plan, constraints=(), regions=(), rematerialized=level)
    return execute.jit_plan(bare, program.of(bare).trace, execute.make_mesh(plan.mesh, jax.devices()[:1]))


def same(result: Any, expected: Any) -> None:
    def numbers(tree: Any) -> list[np.ndarray]:
        keys = jnp.issubdtype
        return [
            np.asarray(jax.random.key_data(leaf) if keys(leaf.dtype, jax.dtypes.prng_key) else leaf)
            for leaf in jax.tree.leaves(tree)
        ]

    for got, wanted in zip(numbers(result), numbers(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


# -- the rewritten step --------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("scanned", [False, True])
def test_every_rung_computes_the_same(scanned: bool, prompt: bool) -> None:
    """Loss, updated parameters and dropout's key, whenever gradients are summed; a few of the levels are run."""
    program, args, expected = traced(scanned)
    levels = levels_of(program)
    assert len(levels) >= 3
    for level in levels[:: max(1, len(levels) // 4)]:
        level = tuple(replace(one, segment=replace(one.segment, prompt=prompt)) for one in level)
        rewritten = recomputing(program, [one.segment for one in level])
        check(rewritten.graph)
        same(run_of(program, free_plan(scanned), level)(*args), expected)
        num_barriers = sum(region.kind == "barrier" for region in rewritten.trace.regions)
        assert 1 <= num_barriers <= len(level) + sum(bool(one.segment.kept) for one in level)


def test_a_barrier_is_one_operation() -> None:
    """Nothing behind it runs before all that is in front, wherever its pieces stood."""
    program, _, _ = traced(False)
    again = recomputing(program, [one.segment for one in levels_of(program)[-1]])
    f, choices = solved(again)
    ops = device_program(f, explicit_program(f, choices)).ops
    barriers = [op for op in ops if again.graph.nodes[op.node].primitive == "barrier"]
    assert len(barriers) == sum(region.kind == "barrier" for region in again.trace.regions) > 1


def test_what_is_kept_of_what_runs_again_is_made_before_the_forward_pass_goes_on() -> None:
    """Else XLA would hold all that a softmax's sum is made of until the backward pass reads the sum."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss_of(w: jax.Array) -> jax.Array:
            grown = jnp.exp((x @ w) @ x.T)
            return (((grown / grown.sum(-1, keepdims=True)) @ x) ** 2).mean()

        loss, gradient = jax.value_and_grad(loss_of)(w)
        return w - 0.1 * gradient, loss

    args = (0.1 * jnp.ones((8, 8)), jnp.linspace(-1, 1, 512).reshape(64, 8))
    program = program_of(step, args, carry=None, donate=[])
    names = [equation.primitive for equation in program.trace.equations]
    grown = names.index("exp")
    kept, onward = (program.trace.equations[n].results[0] for n in (names.index("div") - 1, names.index("div") + 2))
    before = sites_of(program.trace)[0].read[kept]
    again = RematSegment(nodes=(grown - 1, grown), before=before, kept=(kept,), onward=onward)
    trace = recomputing(program, [again]).trace
    barriers = [region for region in trace.regions if region.kind == "barrier"]
    held = [{piece.operands[0] for piece in trace.equations[slice(*region.enter)]} for region in barriers]
    assert held[0] == {kept, onward}
    alone = recomputing(program, [replace(again, onward=None)]).trace
    assert sum(region.kind == "barrier" for region in alone.regions) == len(barriers) - 1
    plan = plan_program(program, mesh=MESH, hardware=HARDWARE, memory_budget_bytes=1e15)
    level = (Rematerialization(segment=again, path="", saved_bytes=0.0, time_s=0.0),)
    same(run_of(program, plan, level)(*args), jax.jit(step)(*args))


def test_a_loop_is_not_given_what_it_has_no_room_for() -> None:
    """Stacked weights that are split over both axes of a mesh are gathered in each trip, not all before the first."""
    layers, width = 24, 512

    def step(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss_of(weights: Any) -> jax.Array:
            def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
                return x + jnp.tanh(x @ w["up"]) @ w["down"], None

            return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    shapes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    program = program_of(step, (weights, jax.ShapeDtypeStruct((2048, width), jnp.float32)), carry=None, donate=None)
    weight_bytes = sum(4 * math.prod(shape) for shape in shapes.values())
    budget = 0.58 * weight_bytes  # what one axis alone splits, and its gradient, take half of it
    plan = plan_program(program, mesh="2x4", hardware=HARDWARE, memory_budget_bytes=budget)
    assert plan.prediction.peak_bytes <= budget


@pytest.mark.parametrize("scanned", [False, True])
def test_what_is_computed_again_is_not_held(scanned: bool) -> None:
    """Nothing big of a layer but what the layer is given passes from the forward to the backward pass."""
    program, _, _ = traced(scanned)
    site = sites_of(program.trace)[-1]
    size = 4 * BATCH * 4 * WIDTH
    given = set(program.graph.inputs)
    held = {v for v in site.read if program.graph.values[v].num_bytes >= size} - given
    again = recomputing(program, [one.segment for one in levels_of(program)[-1]])
    left = {v for v in sites_of(again.trace)[-1].read if again.graph.values[v].num_bytes >= size} - given
    assert held and not left


def test_a_value_that_a_rung_reads_is_there() -> None:
    """The rewriting refuses nothing silently: an operand of what runs again is made before it, in each level."""
    for scanned in (False, True):
        program, _, _ = traced(scanned)
        for level in levels_of(program):
            graph = recomputing(program, [one.segment for one in level]).graph
            known = {*graph.inputs, *graph.constants}
            for node in graph.nodes:
                assert all(v is None or v in known for v in node.operands)
                known.update(node.results)


def test_a_checkpoint_of_the_users_is_kept() -> None:
    step, state, batch = deep(checkpointed=True)
    program = program_of(step, (state, batch), carry=None, donate=[])
    own = sum(region.kind == "barrier" for region in program.trace.regions)
    level = levels_of(program)[0]
    again = recomputing(program, [one.segment for one in level])
    assert own == 4
    assert sum(region.kind == "barrier" for region in again.trace.regions) > own


# -- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_best_of_all_choices(seed: int) -> None:
    """Keep, compute again, or neither: all 3^n choices of small random segments."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    steps = {}
    for key in range(count):
        reads = tuple(sorted(rng.sample(range(key), min(key, rng.randint(0, 2)))))
        seconds = math.inf if rng.random() < 0.2 else float(rng.randint(0, 9))
        steps[key] = Step(float(rng.randint(0, 9)), seconds, reads)
    needed = [key for key in steps if rng.random() < 0.5] or [count - 1]

    def price(again: set[int], kept: set[int]) -> float:
        there = again | kept
        if not set(needed) <= there or any(not set(steps[key].reads) <= there for key in again):
            return math.inf
        return sum(steps[key].seconds for key in again) + sum(0.7 * steps[key].num_bytes for key in kept)

    best = min(
        price({k for k in steps if states[k] == "again"}, {k for k in steps if states[k] == "kept"})
        for states in itertools.product(("again", "kept", "neither"), repeat=count)
    )
    found = cheapest(steps, needed, 0.7)
    assert price(set(found.again), set(found.kept)) == pytest.approx(best, abs=1e-6)


# -- within a budget ------------------------------------------------------------------------------


@pytest.mark.parametrize("scanned", [False, True])
def test_smaller_budgets_take_longer_and_are_kept(scanned: bool) -> None:
    free = free_plan(scanned)
    assert free.rematerialized == ()
    times = [0.0]
    for part in (0.8, 0.6):
        plan = planned_within(scanned, part)
        assert plan.prediction.peak_bytes <= part * free.prediction.peak_bytes * (1 + 1e-9)
        assert plan.rematerialized and sum(one.saved_bytes for one in plan.rematerialized) > 0
        times.append(plan.prediction.step_time_s)
    assert times == sorted(times)


@pytest.mark.parametrize("scanned", [False, True])
def test_the_planned_step_computes_the_same(scanned: bool, tmp_path: Any) -> None:
    """From a plan file too."""
    program, args, expected = traced(scanned)
    plan = planned_within(scanned, 0.6)
    plan.save(tmp_path / "plan.json")
    saved = autopar.load_plan(tmp_path / "plan.json")
    assert isinstance(saved, autopar.Plan)
    assert saved.rematerialized == plan.rematerialized
    mesh = execute.make_mesh(plan.mesh, jax.devices()[:1])
    of_plan = replace(saved, in_tree=program.trace.in_tree, out_tree=program.trace.out_tree)
    same(execute.jit_plan(of_plan, program.of(of_plan).trace, mesh)(*args), expected)


@pytest.mark.slow
def test_computed_again_and_split_it_computes_the_same() -> None:
    """On eight devices, some of it computed again, whatever is split."""
    program, args, expected = traced(False)
    level = levels_of(program)[-1]
    rewritten = recomputing(program, [one.segment for one in level])
    plan = plan_program(replace(rewritten, before=None), mesh="2x4", hardware=HARDWARE, memory_budget_bytes=1e15)
    run = execute.jit_plan(plan, rewritten.trace, execute.make_mesh(plan.mesh))
    same(run(*args), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scanned", [False, True])
def test_in_microbatches_it_computes_the_same(scanned: bool) -> None:
    """Each microbatch has a backward pass of its own, and what is accumulated over them may still stay pending."""
    program, args, expected = traced(scanned)
    split = program.in_microbatches(2)
    level = levels_of(split)[-1]
    over = next(region for region in split.trace.regions if region.source is split.trace.microbatches)
    assert all(n in range(*over.sections[0]) for one in level for n in (*one.segment.nodes, one.segment.before))
    rewritten = recomputing(split, [one.segment for one in level])
    check(rewritten.graph)
    sums = [sum(len(loop.sums) for loop in one.graph.loops) for one in (split, rewritten)]
    assert sums[0] == sums[1] > 0
    bare = plan_program(program, mesh=MESH, hardware=HARDWARE, memory_budget_bytes=1e15, num_microbatches=2)
    plan = replace(bare, constraints=(), regions=(), rematerialized=level)
    assert program.of(plan).recomputed == rewritten.recomputed
    mesh = execute.make_mesh(plan.mesh, jax.devices()[:1])
    same(execute.jit_plan(plan, program.of(plan).trace, mesh)(*args), expected)


@pytest.mark.slow
def test_microbatches_and_recomputation_are_weighed() -> None:
    """A budget that neither keeps to by itself as fast."""
    budget = 0.35 * free_plan(False).prediction.peak_bytes / 0.95
    given: dict[str, Any] = {"mesh": MESH, "hardware": HARDWARE, "memory_budget_bytes": budget}
    best = plan_program(traced(False)[0], num_microbatches="auto", **given)
    split = plan_program(traced(False)[0], num_microbatches="auto", rematerialize=False, **given)
    assert not split.rematerialized and split.microbatches is not None
    assert best.prediction.peak_bytes <= budget
    assert best.prediction.step_time_s <= split.prediction.step_time_s
    tried = () if best.microbatches is None else best.microbatches.tried
    assert all(one.step_time_s >= best.prediction.step_time_s for one in tried)


def test_the_program_of_a_plan_is_the_one_it_was_made_of() -> None:
    program, _, _ = traced(False)
    plan = planned_within(False, 0.6)
    of_plan = program.of(plan)
    assert of_plan.recomputed == tuple(one.segment for one in plan.rematerialized)
    assert of_plan.of(plan) is of_plan
    assert of_plan.of(free_plan(False)).recomputed == ()
    assert max(c.value for c in plan.constraints) < len(of_plan.trace.avals)


def test_it_is_told() -> None:
    plan = planned_within(False, 0.6)
    text = str(autopar.explain(plan))
    assert "are rematerialized in the backward pass" in " ".join(text.split())
    assert len(explain_json(plan)["rematerialized"]) == len(plan.rematerialized)


def test_forbidden_it_is_a_way_out_with_its_price() -> None:
    budget = 0.6 * free_plan(False).prediction.peak_bytes / 0.95
    with pytest.raises(errors.BudgetError, match=r"Ways out: allow rematerialization .*; \+\d+ %") as error:
        plan_program(traced(False)[0], mesh=MESH, hardware=HARDWARE, memory_budget_bytes=budget, rematerialize=False)
    assert "in the " in str(error.value) and "results" in str(error.value)


@pytest.mark.slow
def test_impossible_even_so() -> None:
    budget = 0.05 * free_plan(False).prediction.peak_bytes
    with pytest.raises(
        errors.BudgetError, match=r"no plan on mesh 1 fits.*short\. Ways out: give `memory_budget_bytes="
    ):
        plan_program(traced(False)[0], mesh=MESH, hardware=HARDWARE, memory_budget_bytes=budget)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_xla_keeps_to_the_budget(scanned: bool, absent_gpus: Compiler) -> None:
    step, state, batch = deep(num_layers=6, batch=8192, width=256, scanned=scanned)
    args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, batch))
    free = autopar.plan(step, *args, mesh=MESH, hardware=HARDWARE, memory_budget_bytes=1e15)
    budget = 0.6 * free.prediction.peak_bytes / 0.95
    told = autopar.verify(step, *args, mesh=MESH, hardware=HARDWARE, memory_budget_bytes=budget, compiler=absent_gpus)
    assert told.plan.rematerialized
    assert told.compiled.peak_bytes <= budget
    assert len(told.attempts) == 1


def test_an_again_of_nothing_changes_nothing() -> None:
    program, _, _ = traced(False)
    assert recomputing(program, []) is program
    assert RematSegment(nodes=(), before=0).regathered == ()
