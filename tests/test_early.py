"""Early gradient reductions: the values and places chosen, XLA's program, and unchanged results of the step."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar.hardware.profile import load
from autopar.ir.device_program import DeviceProgram
from autopar.ir.graph import Graph
from autopar.ir.mesh import parse_mesh
from autopar.jax_interop.compilation import module_bytes
from autopar.planner.candidate import Candidate
from autopar.planner.early_reductions import EarlyStart
from autopar.plans.plan import Plan
from autopar.plans.records import EarlyReduction
from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for
from autopar.runtime.xla_options import compiler_options
from autopar.transforms.program import Program, program_of
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_model.buffer_assignment import device_program
from autopar.xla_model.collective_combiner import predecessors
from autopar.xla_model.simulation import simulate
from tests.planned import plan_and_candidate

H100 = load("h100-sxm")
NUM_LAYERS = 8
State = dict[str, jax.Array]


def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """One step of a deep network, written as anyone would."""

    def loss(state: State) -> jax.Array:
        h = x
        for n in range(NUM_LAYERS):
            h = jnp.tanh(h @ state[f"w{n}"])
        return (h.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def arguments(width: int, batch: int) -> tuple[State, jax.Array]:
    rng = np.random.default_rng(0)
    state = {f"w{n}": jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32) for n in range(NUM_LAYERS)}
    return state, jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)


def pins(mesh: str) -> dict[str, PartitionSpec]:
    axes = parse_mesh(mesh).axis_names
    return {f"state/w{n}": PartitionSpec(axes[-1]) for n in range(NUM_LAYERS)} | {"x": PartitionSpec(axes)}


@cache
def made(mesh: str, width: int = 2048, batch: int = 65536) -> tuple[Program, Plan, Candidate]:
    """ZeRO over the last axis, the batch over all: gradients are summed in two steps where there are two axes."""
    program = program_of(step, jax.eval_shape(lambda: arguments(width, batch)), carry=None, donate=None)
    plan, made = plan_and_candidate(program.as_traced.in_microbatches(1), mesh=mesh, hardware=H100, pin=pins(mesh))
    return program, plan, made


@cache
def plain(mesh: str) -> DeviceProgram:
    """The program of one device, in which nothing waits for what it does not read."""
    one = made(mesh)[2]
    return device_program(one.formulation, one.parts.explicit)


def ties(
    mesh: str, combine_threshold_bytes: float, slack: float = 0.0
) -> tuple[Any, tuple[EarlyReduction, ...], Graph]:
    _, plan, one = made(mesh)
    graph = one.formulation.graph
    device, awaited = EarlyStart(plain(mesh), graph, plan.mesh, H100).with_barriers(combine_threshold_bytes, slack)
    return device, awaited, graph


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "slack"), [("8", 0.5), ("2x4", 0.5), ("2x8", 0.0)])
def test_what_waits_comes_after_what_it_waits_for(mesh: str, slack: float) -> None:
    """In the traced step and in the device's program: so no circle is made."""
    device, awaited, graph = ties(mesh, 9e6, slack)
    assert awaited
    maker = {value: n for n, node in enumerate(graph.nodes) for value in node.results}
    for one in awaited:
        assert graph.nodes[one.node].primitive == "dot_general"
        assert graph.nodes[one.node].operands[one.operand] is not None
        assert all(maker[value] < one.node for value in one.values)
    before = plain(mesh)
    for i, (op, was) in enumerate(zip(device.ops, before.ops, strict=True)):
        more = op.reads[len(was.reads) :]
        writers = [max(j for j in range(i) if buffer in device.ops[j].writes) for buffer in more]
        assert all(device.ops[j].collective in ("all-reduce", "reduce-scatter") for j in writers)


@pytest.mark.slow
def test_no_more_is_awaited_at_once_than_is_merged() -> None:
    _, awaited, graph = ties("2x4", 9e6)
    assert all(sum(graph.values[v].size for v in one.values) <= 9e6 for one in awaited)
    assert len(awaited) > len(ties("2x4", 1.8e7)[1])


@pytest.mark.slow
def test_what_is_awaited_is_read_by_nothing_before() -> None:
    """Else nothing would be gained: what the next operation reads is there in time by itself."""
    device, awaited, _ = ties("2x8", 9e6)
    was_so = plain("2x8")
    first: dict[int, int] = {}
    for i, before in enumerate(predecessors(was_so.ops)):
        for j in before:
            first.setdefault(j, i)
    for i, (op, was) in enumerate(zip(device.ops, was_so.ops, strict=True)):
        for buffer in op.reads[len(was.reads) :]:
            (writer,) = (j for j in range(i) if buffer in was_so.ops[j].writes)
            assert first[writer] > i
    assert awaited


def test_a_step_with_a_loop_waits_for_nothing() -> None:
    """XLA runs nothing beside a loop."""

    def looped(state: State, x: jax.Array) -> tuple[State, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0].mean()

        value, grad = jax.value_and_grad(loss)(state["w"])
        return {"w": state["w"] - grad}, value

    args = jax.eval_shape(lambda: ({"w": jnp.zeros((4, 64, 64))}, jnp.zeros((64, 64))))
    program = program_of(looped, args, carry=None, donate=None)
    plan, one = plan_and_candidate(program.as_traced.in_microbatches(1), mesh="2x4", hardware=H100)
    device, awaited = EarlyStart(one.parts.device, one.formulation.graph, plan.mesh, H100).with_barriers(1e4, 0.0)
    assert not awaited
    assert device is one.parts.device


def test_the_numbers_are_the_steps(tmp_path: Path) -> None:
    """On devices, from a plan that has been in a file."""
    awaited = ties("2x4", 9e6)[1]
    args = arguments(64, 64)
    plan = replace(autopar.plan(step, *args, mesh="2x4", hardware=H100, pin=pins("2x4")), early_reductions=awaited)
    plan.save(tmp_path / "plan.json")
    read = autopar.load_plan(tmp_path / "plan.json")
    assert isinstance(read, Plan)
    assert read.early_reductions == awaited
    wanted = jax.jit(step)(*args)
    got = autopar.parallelize(step, plan=read)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), wanted, got)


@pytest.mark.slow
def test_one_product_waits_for_all_that_it_is_told_to() -> None:
    """Where several reductions should be over at the same time, each is awaited there by itself."""
    program, plan, _ = made("2x4")
    first, second = ties("2x4", 9e6)[1][:2]
    first = replace(first, node=second.node, operand=second.operand)
    args = jax.eval_shape(lambda: arguments(2048, 65536))

    def barriers(*awaited: EarlyReduction) -> int:
        one = replace(plan, early_reductions=awaited)
        jitted = jit_plan(one, program.of(one).trace, abstract_mesh(one.mesh))
        return lower_for("cuda", jitted, args).as_text().count("optimization_barrier")

    assert barriers(first) == barriers(second) == barriers() + 1
    assert barriers(first, second) == barriers() + 2


def test_the_report_says_so() -> None:
    plan = replace(made("2x4")[1], early_reductions=(EarlyReduction(node=9, operand=0, values=(3, 4)),))
    text = re.sub(r"\s+", " ", str(autopar.explain(plan)))
    assert "2 gradient reductions start during the backward pass, by 1 barrier" in text


@pytest.mark.slow
def test_xla_ends_them_before_what_waits(absent_gpus: Compiler) -> None:
    """By XLA's compiler for two hosts of 8 GPUs: more reductions end before the last product, and less is exposed."""

    def compiled(awaited: tuple[EarlyReduction, ...]) -> tuple[int, float]:
        program, plan, _ = made("2x8")
        plan = replace(plan, early_reductions=awaited, combine_threshold_bytes=round(20e6))
        jitted = jit_plan(plan, program.of(plan).trace, abstract_mesh(plan.mesh))
        args = jax.eval_shape(lambda: arguments(2048, 65536))
        made_by_xla = absent_gpus.compile(
            module_bytes(lower_for("cuda", jitted, args)), H100, 16, 2, options=compiler_options(plan)
        )
        main = made_by_xla.hlo_text.split("\nENTRY")[1]
        products = [m.start() for m in re.finditer(r"custom_call_target=\"__cublas|kind=kCustom", main)]
        ends = [m.start() for m in re.finditer(r"(?:all-reduce|reduce-scatter)-done[.\d]* = ", main)]
        return sum(end < products[-1] for end in ends), sum(made_by_xla.exposed_s.values())

    device, awaited, _ = ties("2x8", 20e6)
    assert awaited
    late, early = compiled(()), compiled(awaited)
    assert early[0] > late[0]
    assert early[1] < late[1]
    own = plain("2x8")
    mesh = parse_mesh("2x8")
    assert simulate(device, mesh, H100).step_time_s < simulate(own, mesh, H100).step_time_s
