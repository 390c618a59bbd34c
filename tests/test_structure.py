"""Loops, branches, rematerialization and manual sharding in a program: expanded, planned, run as before."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_choice import AnyChoice
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autopar
from autopar.errors import PinError
from autopar.formulate.formulation import formulate
from autopar.frontend.trace import Trace
from autopar.frontend.tracing import trace
from autopar.hardware.profile import load
from autopar.ir.mesh import parse_mesh
from autopar.planner.program_groups import program_groups
from autopar.plans.plan import Plan
from autopar.transforms.program import program_of
from autopar.xla_compiler.compiler import Compiler

LAYERS, WIDTH, ROWS = 4, 32, 16


def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jnp.tanh(x @ w) + x
    return y, jnp.sum(y, -1)


def layers(x: jax.Array, ws: jax.Array) -> jax.Array:
    y, sums = lax.scan(block, x, ws)
    return y * jnp.mean(sums)


def layers_again(x: jax.Array, ws: jax.Array) -> jax.Array:
    """Recomputed but for the products, from the last layer to the first."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return lax.scan(jax.checkpoint(block, policy=policy), x, ws, reverse=True)[0]


def nested(x: jax.Array, ws: jax.Array) -> jax.Array:
    def outer(y: jax.Array, pair: jax.Array) -> tuple[jax.Array, None]:
        return lax.scan(block, y * 0.5, pair)[0], None

    return lax.scan(outer, x, ws.reshape(2, LAYERS // 2, WIDTH, WIDTH))[0]


def swapped(x: jax.Array, ws: jax.Array) -> jax.Array:
    """Two values that change places in every trip, one of them transposed, beside a count."""

    def body(i: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a, b = pair
        return b.T @ ws[0] * 0.1 + i, (a.T + b) * 0.5

    square = x.T @ x
    a, b = lax.fori_loop(0, 3, body, (square, square * 2.0))
    return a + b


def until(x: jax.Array, ws: jax.Array) -> jax.Array:
    def small(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.sum(pair[0] ** 2) < 1e4

    start, w = lax.stop_gradient(x), lax.stop_gradient(ws[1, :ROWS])
    grown = lax.while_loop(small, lambda pair: (pair[0] * 1.5 + w * 0, pair[1] + 1.0), (start, jnp.zeros(ROWS)))
    return x @ ws[0] * grown[0] + grown[1][:, None]


def branches(x: jax.Array, ws: jax.Array) -> jax.Array:
    y = lax.cond(jnp.sum(x) > 0, lambda a: a @ ws[0], lambda a: jnp.tanh(a), x)
    which = jnp.int32(jnp.sum(y) * 10) % 3
    return lax.switch(which, [lambda a: a @ ws[1], lambda a: a + 1.0, lambda a: jnp.zeros_like(a)], y)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -1.0, 1.0)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * (jnp.abs(x) < 2.0),))


def derived(x: jax.Array, ws: jax.Array) -> jax.Array:
    return lax.scan(lambda y, w: (clipped(jax.jit(block)(y, w)[0]), None), x, ws)[0]


def accumulated(x: jax.Array, ws: jax.Array) -> jax.Array:
    """A scan over parts of the batch, whose carry starts as zeros."""
    total, _ = lax.scan(
        lambda t, part: (t + jnp.tanh(part @ ws[0]).T @ part, None), jnp.zeros((WIDTH, WIDTH)), x.reshape(4, -1, WIDTH)
    )
    return total


PROGRAMS = [layers, layers_again, nested, swapped, until, branches, derived, accumulated]


def step_of(program: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(ws: jax.Array, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(program(x, w) ** 2))(ws)
        return ws - 0.1 * grads, loss

    return step


def arguments() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    ws = rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    return jnp.asarray(ws, jnp.float32), jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mesh", ["8", "2x4", "2x2x2"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_any_plan_computes_what_the_step_does(program: Callable[..., jax.Array], mesh: str) -> None:
    step, args = step_of(program), arguments()
    expected = jax.jit(step)(*args)
    for seed in range(2):
        run = autopar.parallelize(step, mesh=mesh, hardware="h100-sxm", donate=(), solver=AnyChoice(seed))
        assert any(any(one.sharding.dims) for one in run.plan(*args).inputs) or seed
        for ours, theirs in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


# -- laid open -------------------------------------------------------------------------------


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Trace:
    return trace(function, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])


def pieces(one: Trace) -> Counter[str]:
    return Counter(e.piece for e in one.equations if e.piece)


def test_a_scan_is_its_pieces_and_its_body_once() -> None:
    one = traced(lambda w, x: layers(x, w), (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH))
    assert pieces(one) == {"enter_carry": 1, "enter_slice": 1, "exit_carry": 1, "exit_stack": 1}
    (product,) = [e for e in one.equations if e.primitive == "dot_general"]
    assert product.repeat == LAYERS and one.repeats[product.results[0]] == LAYERS
    (stack,) = [e for e in one.equations if e.piece == "exit_stack"]
    assert one.repeats[stack.results[0]] == 1


def test_what_nothing_reads_is_dropped_from_a_loop() -> None:
    """A stack, a carry that only itself reads, and what they are made from."""

    def body(carry: tuple[jax.Array, jax.Array], w: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        x, idle = carry
        return (x @ w, jnp.sin(idle)), jnp.cos(x)

    one = traced(lambda w, x: lax.scan(body, (x, x), w)[0][0], (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH))
    assert pieces(one) == {"enter_carry": 1, "enter_slice": 1, "exit_carry": 1}
    assert {e.primitive for e in one.equations} & {"sin", "cos"} == set()


def test_a_carry_that_a_live_one_reads_stays() -> None:
    def body(i: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return pair[0] + pair[1], pair[1] * 2.0

    one = traced(lambda x: lax.fori_loop(0, 3, body, (x, x))[0], (ROWS, WIDTH))
    assert pieces(one)["exit_carry"] == pieces(one)["enter_carry"] == 2


def test_a_loop_that_nothing_reads_is_gone_but_for_its_effects() -> None:
    def idle(x: jax.Array) -> jax.Array:
        lax.fori_loop(0, 3, lambda i, y: y * 2.0, x)
        return x + 1.0

    def prints(x: jax.Array) -> jax.Array:
        def body(i: int, y: jax.Array) -> jax.Array:
            jax.debug.print("{}", y[0, 0])
            return y

        lax.fori_loop(0, 3, body, x)
        return x + 1.0

    assert not traced(idle, (ROWS, WIDTH)).regions
    assert "debug_callback" in " ".join(e.primitive for e in traced(prints, (ROWS, WIDTH)).equations) or any(
        e.effects for e in traced(prints, (ROWS, WIDTH)).equations
    )


def test_recomputation_stands_behind_a_barrier() -> None:
    """Else the compiler would find that all of it was computed before, and keep that."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(lambda a, b: jnp.sin(jnp.tanh(a @ b)))(x, w))

    one = traced(jax.value_and_grad(loss), (WIDTH, WIDTH), (ROWS, WIDTH))
    kept = traced(jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(jnp.tanh(x @ w)))), (WIDTH, WIDTH), (ROWS, WIDTH))
    products = [[e.primitive for e in each.equations].count("dot_general") for each in (one, kept)]
    assert pieces(one)["barrier"] >= 2 and products == [3, 2]


# -- planned ---------------------------------------------------------------------------------


def plan_of(length: int, *, mesh: str = "8", again: bool = False, **options: Any) -> Plan:
    def step(ws: jax.Array, x: jax.Array) -> Any:
        body = jax.checkpoint(block) if again else block
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(lax.scan(body, x, w)[0] ** 2))(ws)
        return ws - 0.1 * grads, loss

    shapes = jax.ShapeDtypeStruct((length, 1024, 1024), jnp.float32), jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    return autopar.plan(step, *shapes, mesh=mesh, hardware="h100-sxm", **options)


def test_the_body_is_planned_once_and_costs_as_often_as_it_runs() -> None:
    short, long = plan_of(4), plan_of(16)
    assert short.outcome.num_nodes == long.outcome.num_nodes
    assert long.prediction.compute_s == pytest.approx(4 * short.prediction.compute_s, rel=0.1)
    times = {(use.kind, use.num_times) for use in long.collectives if use.num_bytes > 1e6}
    assert any(count == 16 for _, count in times), times  # each layer's gradient is summed in its trip


def test_memory_is_residuals_times_length_unless_recomputed() -> None:
    short, long, again = plan_of(4), plan_of(16), plan_of(16, again=True)
    residual = 8192 / 8 * 1024 * 4  # one value of a layer, on one device
    grown = long.prediction.temporary_bytes - short.prediction.temporary_bytes
    assert grown >= 12 * 2 * residual
    assert again.prediction.temporary_bytes <= long.prediction.temporary_bytes - 12 * residual
    assert again.prediction.compute_s > long.prediction.compute_s


def test_what_is_carried_goes_in_split_as_it_comes_out() -> None:
    step, args = step_of(swapped), arguments()
    program = program_of(step, args, carry=None, donate=None)
    for seed in range(5):
        plan = autopar.plan(step, *args, mesh="2x4", hardware="h100-sxm", solver=AnyChoice(seed))
        told = {one.value: one.shardings[-1] for one in plan.constraints if one.node is None}
        for loop in program.graph.loops:
            for enter, leave in loop.carries:
                before, after = (program.graph.nodes[n].results[0] for n in (enter, leave))
                assert told.get(before) == told.get(after)


def test_a_loop_of_unknown_length_is_told() -> None:
    plan = autopar.plan(step_of(until), *arguments(), mesh="8", hardware="h100-sxm")
    assert any("8 iterations" in note and "test_structure.py" in note for note in plan.notes)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_xla_compiles_the_loops_that_were_predicted(again: bool, absent_gpus: Compiler) -> None:
    """Collectives in a loop's body as often as it runs, and the peak with all that its trips stack."""

    def step(ws: jax.Array, x: jax.Array) -> Any:
        body = jax.checkpoint(block) if again else block
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(lax.scan(body, x, w)[0] ** 2))(ws)
        return ws - 0.1 * grads, loss

    shapes = jax.ShapeDtypeStruct((12, 1024, 1024), jnp.float32), jax.ShapeDtypeStruct((16384, 1024), jnp.float32)
    told = autopar.verify(step, *shapes, mesh="8", hardware="h100-sxm", compiler=absent_gpus)
    assert not told.unpredicted and not told.matched.missing
    assert all(match.figure.holds for match in told.matched.matches)
    assert any(one.num_times == 12 for one in told.matched.compiled)
    peak = next(figure for figure in told.memory if figure.name == "peak")
    assert peak.holds, peak


# -- split by the program itself -------------------------------------------------------------


def mesh_2x4() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def constrained(w: jax.Array, x: jax.Array) -> jax.Array:
    spec = PartitionSpec(("tp", "dp"), PartitionSpec.UNCONSTRAINED)
    return jnp.sum(lax.with_sharding_constraint(x @ w, NamedSharding(mesh_2x4(), spec)) ** 2)


def mapped(w: jax.Array, x: jax.Array) -> jax.Array:
    def part(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.psum(a @ b, "tp")

    specs = (PartitionSpec("dp", "tp"), PartitionSpec("tp", None))
    run = jax.shard_map(part, mesh=mesh_2x4(), in_specs=specs, out_specs=PartitionSpec("dp", None))
    return jnp.sum(run(jnp.tanh(x), w) ** 2)


def test_a_constraint_of_a_scalar_says_nothing() -> None:
    """As of the gradients of a temperature, and of a parameter that is not used, whose gradient is a literal."""

    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2) * p["temperature"])(params)
        whole = NamedSharding(mesh_2x4(), PartitionSpec())
        return jax.tree.map(lambda p, g: p - 0.1 * lax.with_sharding_constraint(g, whole), params, grads)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=(32, 32)), jnp.float32) for _ in range(2))
    params = {"w": w, "temperature": jnp.float32(0.5), "unused": jnp.float32(2)}
    expected = jax.jit(step)(params, x)
    found = autopar.parallelize(step, mesh=mesh_2x4(), hardware="h100-sxm", donate=())(params, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5), found, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [constrained, mapped], ids=lambda loss: loss.__name__)
def test_what_the_program_splits_itself_stays_so(loss: Callable[..., jax.Array]) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grads, value

    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((64, 64), (32, 64)))
    expected = jax.jit(step)(*args)
    for seed in range(3):
        run = autopar.parallelize(step, mesh=mesh_2x4(), hardware="h100-sxm", donate=(), solver=AnyChoice(seed))
        for ours, theirs in zip(run(*args), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)
    program = program_of(step, args, carry=None, donate=None)
    plan = autopar.plan(step, *args, mesh="dp=2,tp=4", hardware="h100-sxm")
    told = {one.value: one.shardings for one in plan.constraints if one.node is None}
    if loss is constrained:
        pinned = [n.results[0] for n in program.graph.nodes if n.primitive == "sharding_constraint"]
        assert len(pinned) == 2 and all(told[value][-1].dims[0] == ("tp", "dp") for value in pinned)
    else:
        sums = [use for use in plan.collectives if "shard_map" in use.cause]
        assert {use.axes for use in sums} >= {("tp",)} and all(use.kind == "all-reduce" for use in sums)


def test_a_constraint_of_the_program_is_no_kernel() -> None:
    """It is a name for the memory of its operand."""
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    graph = program_of(constrained, shapes, carry=None, donate=None).graph
    groups = program_groups(graph, {}).groups
    f = formulate(graph, groups, parse_mesh("dp=2,tp=4"), load("h100-sxm"), pins={}, memory_budget_bytes=None)
    kinds = [{graph.nodes[n].primitive for n in groups[one.group].nodes} for one in f.decisions if one.kind == "group"]
    seconds = [one for one, decision in zip(f.compute_s, f.decisions, strict=True) if decision.kind == "group"]
    assert {"sharding_constraint"} in kinds
    for kind, prices in zip(kinds, seconds, strict=True):
        assert prices.any() == (kind != {"sharding_constraint"})


@pytest.mark.parametrize(("mesh", "loss"), [("8", constrained), ("2x4", mapped), ("dp=4,tp=2", mapped)])
def test_axes_that_the_mesh_lacks_are_named_with_the_line(mesh: str, loss: Callable[..., jax.Array]) -> None:
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    with pytest.raises(PinError, match=r"shards a value over .*test_structure.py:\d+.*mesh=\"dp=2,tp=4\""):
        autopar.plan(loss, *shapes, mesh=mesh, hardware="h100-sxm")
