"""Scans that gather the weights of the next layer during this one: when planned, what is predicted, what XLA compiles."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_absent_gpus import compiled

import autopar
from autopar.hardware.profile import load
from autopar.jax_interop.compat import PIPELINED_ALL_GATHERS
from autopar.planner import overlap_search
from autopar.planner.candidate import Candidate
from autopar.plans.plan import Plan
from autopar.report.explain_program import program_json
from autopar.runtime.xla_options import compiler_options
from autopar.transforms.program import Program, program_of
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_model.collective_pipeliner import gathered_bytes
from tests.planned import plan_and_candidate

LAYERS, WIDTH, ROWS = 8, 2048, 16_384
OPTIONS: dict[str, Any] = {"mesh": "8", "hardware": "h100-sxm"}
Step = Callable[..., Any]


def mlp(x: jax.Array, w: Any) -> jax.Array:
    half = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
    return x + jax.nn.gelu(x @ half["up"]) @ half["down"]


def gated(x: jax.Array, w: Any) -> jax.Array:
    half = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
    return x + (jax.nn.silu(x @ half["gate"]) * jnp.tanh(x @ half["in"]) * (x @ half["up"])) @ half["down"]


#: Blocks with the number of their weights.
BLOCKS: dict[str, tuple[Step, tuple[str, ...]]] = {
    "mlp": (mlp, ("down", "up")),
    "gated": (gated, ("down", "gate", "in", "up")),
}


def step_of(block: Step, *, rematerialized: bool = True) -> Step:
    run = block
    if rematerialized:
        run = jax.checkpoint(block, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            out, _ = jax.lax.scan(lambda carry, w: (run(carry, w), None), x, params)
            return (out.astype(jnp.float32) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


STEPS = {name: step_of(block) for name, (block, _) in BLOCKS.items()}


def arguments(name: str, width: int = WIDTH, rows: int = ROWS) -> tuple[Any, Any]:
    def shape(weight: str) -> tuple[int, ...]:
        return (LAYERS, 4 * width, width) if weight == "down" else (LAYERS, width, 4 * width)

    params = {weight: jax.ShapeDtypeStruct(shape(weight), jnp.float32) for weight in BLOCKS[name][1]}
    return params, jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)


def layer_bytes(name: str) -> int:
    """Bytes of the gathered weights of a layer."""
    return len(BLOCKS[name][1]) * 4 * WIDTH * WIDTH * 2


def program_named(name: str) -> Program:
    return program_of(STEPS[name], arguments(name), carry=None, donate=None)


@pytest.fixture(scope="module", params=BLOCKS)
def both(request: pytest.FixtureRequest) -> tuple[str, Plan, Plan]:
    """A step's name, its plan, and its plan without prefetch."""
    name = request.param
    plan = autopar.plan(STEPS[name], *arguments(name), **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_search, "_with_prefetched_gathers", lambda candidate, *_: candidate)
        plain = autopar.plan(STEPS[name], *arguments(name), **OPTIONS)
    return name, plan, plain


def test_weights_of_the_next_layer_are_gathered_during_this_one(both: tuple[str, Plan, Plan]) -> None:
    name, plan, plain = both
    assert (
        plan.prefetched_gathers == 4
    )  # two weights in either loop; four in the backward loop, the other is tensor parallel
    assert not plain.prefetched_gathers
    before, after = plain.prediction, plan.prediction
    assert after.step_time_s < 0.98 * before.step_time_s
    assert after.exposed_s["all-gather"] < 0.5 * before.exposed_s["all-gather"]
    assert 0 < after.peak_bytes - before.peak_bytes <= 2 * layer_bytes(name)  # one is read, one is gathered


def test_weights_of_a_layer_may_share_a_gather() -> None:
    """Of many gathers in turn, XLA starts the first too late; of two it does not."""
    thresholds = [autopar.plan(STEPS[n], *arguments(n), **OPTIONS).combine_threshold_bytes for n in BLOCKS]
    assert thresholds == [None, layer_bytes("gated")]


def test_scans_without_prefetch_have_the_best_threshold(both: tuple[str, Plan, Plan]) -> None:
    """The plan without prefetch merges its collectives by a threshold that is predicted to be faster, or by XLA's own."""
    _, _, plain = both
    profile = load("h100-sxm")
    allowed = {None, *(round(share * profile.combine_threshold_bytes) for share in (1 / 4, 1 / 2, 2, 4))}
    assert plain.combine_threshold_bytes in allowed


def test_the_plan_says_so(both: tuple[str, Plan, Plan]) -> None:
    _, plan, plain = both
    number = plan.prefetched_gathers
    text = f"{number} all-gathers run one iteration of a scan ahead: weights of the next layer are gathered during this one"
    assert text in " ".join(str(autopar.explain(plan)).split())
    assert "of a scan ahead" not in " ".join(str(autopar.explain(plain)).split())
    assert program_json(plan)["prefetched_gathers"] == number


def test_files_of_plans_without_prefetch_do_not_have_the_field(both: tuple[str, Plan, Plan]) -> None:
    _, plan, plain = both
    assert Plan.from_json(plan.to_json()) == plan
    written = plain.to_json()
    assert "prefetched_gathers" not in written
    assert Plan.from_json(written).prefetched_gathers == 0
    assert compiler_options(replace(plan, combine_threshold_bytes=None)) == PIPELINED_ALL_GATHERS
    assert compiler_options(replace(plain, combine_threshold_bytes=None)) == {}


def test_no_memory_for_the_next_layer(both: tuple[str, Plan, Plan]) -> None:
    name, plan, plain = both
    share_that_stays_free = 0.05
    budget = (0.5 * plan.prediction.peak_bytes + 0.5 * plain.prediction.peak_bytes) / (1 - share_that_stays_free)
    limited = autopar.plan(STEPS[name], *arguments(name), **OPTIONS, memory_budget_bytes=budget)
    assert not limited.prefetched_gathers
    assert limited.prediction.step_time_s <= plain.prediction.step_time_s


@pytest.mark.parametrize("options", [{"mesh": "1", "hardware": "h100-sxm"}, {"mesh": "8", "hardware": "cpu-host"}])
def test_only_several_gpus_prefetch(options: dict[str, Any]) -> None:
    assert not autopar.plan(STEPS["mlp"], *arguments("mlp"), **options).prefetched_gathers


def candidate(name: str, **options: Any) -> Candidate:
    return plan_and_candidate(program_named(name), **OPTIONS, **options)[1]


def test_nothing_of_an_iteration_reads_what_it_gathers() -> None:
    made = candidate("mlp")
    device = made.parts.device
    assert made.parts.prefetched_gathers == 4
    for loop in device.loops:
        body = [op for op in device.ops if loop.start <= op.node < loop.stop]
        for gathered, state in loop.prefetched:
            (gather,) = (op for op in body if gathered in op.writes)
            assert gather.pipelined
            assert [op.writes for op in body if gathered in op.reads] == [(state,)]  # the copy into the loop's state
            assert any(state in op.reads for op in body)
            assert any(state in op.writes and op.collective for op in loop.first)
            assert device.buffers[gathered].num_bytes == device.buffers[state].num_bytes
    assert gathered_bytes(device) == layer_bytes("mlp")


def test_gathers_of_activations_stay() -> None:
    """The forward loop of the gated block is tensor parallel: it gathers what the iteration computes."""
    device = candidate("gated").parts.device
    forward, backward = device.loops
    gathers = [op for op in device.ops if op.collective == "all-gather"]
    assert [op.pipelined for op in gathers if forward.start <= op.node < forward.stop] == [False]
    assert [op.pipelined for op in gathers if backward.start <= op.node < backward.stop].count(True) == 4
    assert not forward.first
    assert not forward.prefetched


def test_the_inner_of_two_loops_prefetches() -> None:
    def groups(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def group(y: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return jax.lax.scan(lambda y, w: (jax.checkpoint(mlp, prevent_cse=False)(y, w), None), y, w)[0], None

        def loss_fn(params: Any) -> jax.Array:
            return (jax.lax.scan(group, x, params)[0].astype(jnp.float32) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params, x = arguments("mlp")
    stacks = jax.tree.map(lambda one: jax.ShapeDtypeStruct((2, 4, *one.shape[1:]), one.dtype), params)
    program = program_of(groups, (stacks, x), carry=None, donate=None)
    _, made = plan_and_candidate(program, **OPTIONS)
    assert [len(loop.prefetched) for loop in made.parts.device.loops] == [2, 0, 2, 0]


def test_results_are_those_of_plain_jit() -> None:
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 8, s.dtype), arguments("mlp", 32, 64))
    plan = autopar.plan(STEPS["mlp"], *args, **OPTIONS, pin={"params/*": P(None, "data"), "x": P("data")})
    run = autopar.parallelize(STEPS["mlp"], plan=replace(plan, prefetched_gathers=4))
    expected, found = jax.jit(STEPS["mlp"])(*args), run(*jax.tree.map(jnp.copy, args))
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(two), np.asarray(one), rtol=1e-4, atol=1e-6)


def test_an_exported_file_passes_the_option() -> None:
    step, args = step_of(mlp, rematerialized=False), arguments("mlp")
    plan = replace(autopar.plan(step, *args, **OPTIONS), prefetched_gathers=4)
    text = autopar.export(plan, step, *args)
    for name, value in PIPELINED_ALL_GATHERS.items():
        assert f'"{name}": {value},' in text


def loop_bodies(text: str) -> list[str]:
    """The computations that loops run, as text."""
    names = re.findall(r" while\(.*body=%?([\w.\-]+)", text)
    return [text.split(f"\n%{name} (")[1].split("\n}\n")[0] for name in names]


@pytest.mark.contract
def test_xla_gathers_one_iteration_ahead(absent_gpus: Compiler, both: tuple[str, Plan, Plan]) -> None:
    name, *plans = both
    ahead, usual = (compiled(absent_gpus, plan, program_named(name), *arguments(name)) for plan in plans)
    weight = rf"bf16\[(?:{WIDTH},{4 * WIDTH}|{4 * WIDTH},{WIDTH})\]"
    for step, plan in zip((ahead, usual), plans, strict=True):
        states = [body[body.index("ROOT") :].split(" tuple(")[0] for body in loop_bodies(step.hlo_text)]
        assert len(states) == 2
        assert sum(len(re.findall(weight, state)) for state in states) == plan.prefetched_gathers
    times = [autopar.replay(one.hlo_text, hardware="h100-sxm") for one in (ahead, usual)]
    assert times[0].exposed_s["all-gather"] < 0.8 * times[1].exposed_s["all-gather"]
    assert times[0].step_time_s < 0.99 * times[1].step_time_s
    predicted = plans[0].prediction
    assert predicted.step_time_s == pytest.approx(times[0].step_time_s, rel=0.1)
    assert 0 < ahead.peak_bytes - usual.peak_bytes <= predicted.peak_bytes - plans[1].prediction.peak_bytes
