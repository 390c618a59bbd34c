"""Registered collectives: validation of their arguments, and equal results of steps that use one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from any_choice import AnyChoice
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_explicit_program import SLOW
from test_made_up_collective import HARDWARE, ring_gather, step

import autopar
from autopar.cli.main import main
from autopar.cost import user_collectives
from autopar.cost.resharding_matrix import EACH_S
from autopar.errors import CollectiveError, ExportError, PlanFileError
from autopar.extend.collectives import register_collective
from autopar.formulate.explicit import explicit_program
from autopar.formulate.formulation import formulate
from autopar.ir.mesh import parse_mesh
from autopar.ir.sharding import TensorSharding
from autopar.ir.sharding_changes import moved
from autopar.ir.verifier import check_explicit
from autopar.planner.cache.function_text import function_text
from autopar.planner.cache.key import planner_digest
from autopar.planner.program_groups import program_groups
from autopar.plans.plan import Plan
from autopar.report.html.document import write_report
from autopar.solve.ilp import Ilp
from autopar.transforms.program import program_of

PINNED = {"weight": P("x"), "x": P("x")}
ARGS = jax.random.normal(jax.random.key(0), (64, 128)), jax.random.normal(jax.random.key(1), (512, 64))
#: A name that HTML, Python, JSON and regular expressions would each read otherwise.
STRANGE = "ring \"o'gather\\ <b>{0}*</b>"


def free(num_bytes: float, num_devices: int, link: Any) -> float:
    return 0.0


def exchange(x: Any, axes: tuple[str, ...], dim: int, to: int) -> Any:
    return lax.all_to_all(x, axes, to, dim, tiled=True)


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_collectives, "_registered", {})


def register(name: str = "ring-gather", **options: Any) -> None:
    register_collective(name, **{"like": "all-gather", "time_s": free, "run": ring_gather, **options})


def plan_of(function: Callable[..., Any] = step, args: Any = ARGS, **options: Any) -> Plan:
    plan = autopar.plan(
        function, *args, **{"mesh": "x=8", "hardware": HARDWARE, "pin": PINNED, "cache": False, **options}
    )
    assert isinstance(plan, Plan)
    return plan


def assert_computes_the_same(run: Callable[..., Any], function: Callable[..., Any], args: Any) -> None:
    expected = jax.tree.leaves(jax.jit(function)(*args))
    for ours, plain in zip(jax.tree.leaves(run(*args)), expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=2e-6)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all-gather", "cut", "compute", "", "  ", "two\nlines", None, 3])
def test_a_name_is_a_text_of_its_own(name: Any) -> None:
    with pytest.raises(CollectiveError, match=r"is taken|is named by a text"):
        register(name)


@pytest.mark.parametrize(
    ("like", "why"),
    [
        ("all-reduce", "XLA's SPMD partitioner inserts reductions"),
        ("reduce-scatter", "XLA's SPMD partitioner inserts reductions"),
        ("collective-permute", "a function of one device's part"),
        ("cut", "a function of one device's part"),
        ("ring-gather", "no built-in collective"),
        (["all-gather"], "no built-in collective"),
    ],
)
def test_only_gathers_and_exchanges_are_open(like: Any, why: str) -> None:
    with pytest.raises(CollectiveError, match=rf"{why}.*Register one like all-gather or all-to-all"):
        register(like=like)


def test_the_function_takes_what_it_is_called_with() -> None:
    with pytest.raises(CollectiveError, match=r"must accept the call `run\(x, axes, dim=..., to=...\)`"):
        register(like="all-to-all")
    with pytest.raises(CollectiveError, match=r"must accept the call `run\(x, axes, dim=...\)`"):
        register(run=exchange)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1e-9, "fast", None, [1.0]])
def test_a_formula_gives_seconds(seconds: Any) -> None:
    with pytest.raises(
        CollectiveError, match=r"`time_s` of the collective 'ring-gather' gives .*zero or more, and finite"
    ):
        register(time_s=lambda num_bytes, num_devices, link: seconds)


def test_a_formula_that_fails_only_for_some_payloads_is_named_when_it_does() -> None:
    register(time_s=lambda num_bytes, num_devices, link: math.nan if num_devices == 8 else 0.0)
    with pytest.raises(CollectiveError, match=r"gives nan for .* bytes on 8 devices"):
        plan_of()


def test_a_result_of_another_type_is_refused() -> None:
    register(run=lambda x, axes, dim: x)
    run = autopar.parallelize(step, plan=plan_of())
    with pytest.raises(CollectiveError, match=r"returns a .* of shape \(8, 128\) .* needs one of shape \(64, 128\)"):
        run(*ARGS)


def test_a_name_registered_again_is_replaced() -> None:
    register(time_s=lambda num_bytes, num_devices, link: 1e3)
    assert "ring-gather" not in {use.kind for use in plan_of().collectives}
    register()
    assert "ring-gather" in {use.kind for use in plan_of().collectives}


# -- plans and their files -------------------------------------------------------------------------


def test_a_plan_is_refused_where_its_collective_is_not_registered(tmp_path: Path) -> None:
    register(STRANGE)
    plan_of().save(tmp_path / "plan.json")
    plan = autopar.load_plan(tmp_path / "plan.json")
    assert isinstance(plan, Plan) and STRANGE in {use.kind for use in plan.collectives}
    assert_computes_the_same(autopar.parallelize(step, plan=plan), step, ARGS)
    user_collectives._registered.clear()
    assert STRANGE in str(autopar.explain(plan)).replace("\n", "")
    for use_it in (lambda: autopar.parallelize(step, plan=plan)(*ARGS), lambda: autopar.export(plan, step, *ARGS)):
        with pytest.raises(
            CollectiveError, match=r"not registered in this process: call `autopar\.extend\.collectives\.reg"
        ):
            use_it()
    register(STRANGE, like="all-to-all", run=exchange)
    with pytest.raises(CollectiveError, match="as one like all-gather, and here it is registered like all-to-all"):
        autopar.parallelize(step, plan=plan)(*ARGS)


def test_a_plan_without_one_is_the_same_file() -> None:
    before = plan_of().to_json()
    register(time_s=lambda num_bytes, num_devices, link: 1e3)
    assert json.dumps(plan_of().to_json()) == json.dumps(before)
    assert '"by"' not in json.dumps(before)


@pytest.mark.parametrize(
    "by",
    [["ring-gather"], ["ring-gather", "ring-gather"], ["", "", ""], ["", 3], [None, ""]],
)
def test_a_damaged_file_is_refused(by: Any) -> None:
    register()
    document = plan_of().to_json()
    one = next(one for one in document["constraints"] if "by" in one)
    one["by"] = by
    with pytest.raises(PlanFileError, match="by"):
        Plan.from_json(document)


def test_a_file_whose_collective_leads_nowhere_is_refused() -> None:
    register()
    document = plan_of().to_json()
    one = next(one for one in document["constraints"] if "by" in one)
    one["shardings"].reverse()
    with pytest.raises(PlanFileError, match=r"has 'ring-gather' lead from P\(\) to P\('x'\)"):
        Plan.from_json(document)


def test_the_key_of_kept_plans_follows_what_is_registered() -> None:
    def times(factor: float) -> Callable[..., float]:
        return lambda num_bytes, num_devices, link: factor * num_bytes

    keys = [planner_digest()[0]]
    changes: list[dict[str, Any]] = [
        {},
        {"time_s": times(1.0)},
        {"time_s": times(2.0)},
        {"run": lambda x, axes, dim: x},
    ]
    for options in changes:
        register(**options)
        keys.append(planner_digest()[0])
    register("another")
    keys.append(planner_digest()[0])
    assert len(set(keys)) == len(keys)
    register("another")
    assert planner_digest()[0] == keys[-1]


def test_the_text_of_a_function_has_no_address() -> None:
    for function in (ring_gather, step, jax.jit(ring_gather), plan_of, AnyChoice(0).solve):
        assert " at 0x" not in function_text(function) and function_text(function) == function_text(function)


# -- that it computes the same ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [STRANGE, "swap"])
def test_reports_show_any_name(name: str, tmp_path: Path) -> None:
    register(name)
    plan = plan_of()
    write_report(plan, tmp_path / "report.html")
    assert "<b>{0}" not in (tmp_path / "report.html").read_text()


def test_on_one_device_none_is_used() -> None:
    register()
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    run = autopar.parallelize(step, mesh=mesh, hardware=HARDWARE, pin=PINNED)
    assert_computes_the_same(run, step, ARGS)
    plan = run.plan(*ARGS)
    assert isinstance(plan, Plan) and "ring-gather" not in {use.kind for use in plan.collectives}


def test_gradients_pass_through_it() -> None:
    def loss(weight: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ weight) ** 2)

    register()
    plan = plan_of(loss)
    assert "ring-gather" in {use.kind for use in plan.collectives}
    run = autopar.parallelize(loss, plan=plan)
    assert_computes_the_same(jax.jit(jax.grad(lambda w, x: run(w, x))), jax.grad(loss), ARGS)


def test_where_a_dim_does_not_divide_it_is_not_used() -> None:
    def odd(weight: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x[:509] @ weight) @ weight.T)

    register()
    register("swap", like="all-to-all", run=exchange)
    assert_computes_the_same(autopar.parallelize(odd, plan=plan_of(odd)), odd, ARGS)


def test_an_exchange_between_dims_runs() -> None:
    def turned(x: Any) -> Any:
        return jnp.cumsum(jnp.tanh(x), 0) * 2.0

    register("swap", like="all-to-all", run=exchange)
    args = (jax.random.normal(jax.random.key(0), (256, 512)),)
    plan = plan_of(turned, args, pin={"x": P("x")})
    assert "swap" in {use.kind for use in plan.collectives}
    assert_computes_the_same(autopar.parallelize(turned, plan=plan), turned, args)


def test_it_runs_in_loops() -> None:
    def layers(weights: Any, x: Any) -> Any:
        return lax.scan(lambda y, w: (jnp.tanh(y @ w) + y, None), x, weights)[0]

    register()
    args = jax.random.normal(jax.random.key(0), (4, 64, 64)), jax.random.normal(jax.random.key(1), (512, 64))
    plan = plan_of(layers, args, pin={"weights": P(None, "x"), "x": P("x")})
    assert "ring-gather" in {use.kind for use in plan.collectives}
    assert_computes_the_same(autopar.parallelize(layers, plan=plan), layers, args)


@pytest.mark.parametrize("name", ["mlp_adam", "pure_function"])
def test_whole_steps_compute_the_same(name: str) -> None:
    register(STRANGE)
    register("swap", like="all-to-all", run=exchange)
    program = programs.PROGRAMS[name]()
    plan = plan_of(program.step, program.args(), mesh="2x4", pin={})
    assert STRANGE in {use.kind for use in plan.collectives}
    assert_computes_the_same(autopar.parallelize(program.step, plan=plan), program.step, program.args())


@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("name", ["mlp", "pure_function"])
def test_its_cost_is_the_one_in_the_problem(name: str, mesh: str) -> None:
    register(time_s=lambda num_bytes, num_devices, link: num_bytes / link.bytes_per_s / 3)
    register("swap", like="all-to-all", time_s=lambda num_bytes, num_devices, link: num_bytes * 1e-15, run=exchange)
    program = programs.PROGRAMS[name]()
    graph = program_of(program.step, program.args(), carry=None, donate=None).graph
    f = formulate(graph, program_groups(graph).groups, parse_mesh(mesh), SLOW, pins={}, memory_budget_bytes=None)
    choices = Ilp().solve(f.problem).choices
    explicit = explicit_program(f, choices)
    assert any(op.by for op in explicit.communications)
    sent = sum(float(seconds[choice]) for seconds, choice in zip(f.compute_s, choices, strict=True))
    for op in (op for op in explicit.communications if op.kind != "cut"):
        seconds = f.time(op.collective, op.axes, op.num_bytes, combinable=op.combinable)
        turned = 2 * op.num_bytes / SLOW.hbm_bytes_per_s if op.is_inner else 0.0
        sent += op.num_times * (seconds + (EACH_S + turned) * (op.cause == "reshard")) * max(len(op.flows), 1)
    assert sent == pytest.approx(f.problem.evaluate(choices), rel=1e-9)
    check_explicit(explicit_program(f, AnyChoice(0).solve(f.problem).choices), graph)


# -- export ----------------------------------------------------------------------------------------


def exported(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    exec(text, names)
    return names


@pytest.mark.slow
def test_an_output_that_is_gathered_is_exported_too() -> None:
    register(STRANGE)
    program = programs.PROGRAMS["mlp_adam"]()
    plan = plan_of(program.step, program.args(), mesh="2x4", pin={})
    assert any(
        one.by and one.node == len(program_of(program.step, program.args(), carry=None, donate=None).graph.nodes)
        for one in plan.constraints
    )
    made = exported(autopar.export(plan, program.step, *program.args()))
    run = made["shard"](program.step, made["make_mesh"](), *program.args())
    assert_computes_the_same(run, program.step, program.args())


def test_a_function_that_cannot_be_imported_is_not_exported() -> None:
    register(run=lambda x, axes, dim: ring_gather(x, axes, dim))
    with pytest.raises(ExportError, match="which an exported file cannot import: register a function that a module on"):
        autopar.export(plan_of(), step, *ARGS)


TARGET = """
import jax, jax.numpy as jnp
from jax import lax
from autopar.extend.collectives import register_collective

def gather(x, axes, dim):
    return lax.all_gather(x, axes, axis=dim, tiled=True)

register_collective("my-gather", like="all-gather", time_s=lambda num_bytes, num_devices, link: 0.0, run=gather)

def target():
    shapes = jax.ShapeDtypeStruct((64, 128), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    return (lambda weight, x: jnp.mean(jnp.tanh(x @ weight) ** 2)), shapes
"""


def test_the_command_line_exports_a_target_that_registers_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_step.py").write_text(TARGET)
    pins = [part for name in PINNED for part in ("--pin", f"{name}=P('x')")]
    options = ["--mesh", "x=8", "--hardware", HARDWARE, *pins, "-o", "plan.json"]
    assert main(["plan", "own_step.py:target", *options]) == 0
    assert main(["export", "plan.json", "own_step.py:target", "-o", "sharded.py"]) == 0
    text = (tmp_path / "sharded.py").read_text()
    assert "from own_step import gather as collective_0\n" in text
    assert '(collective_0, P("x"), P(), ("x",), {"dim": 0})' in text


# -- changes of a sharding -------------------------------------------------------------------------


def test_what_moves_between_dims() -> None:
    def of(*dims: str) -> TensorSharding:
        return TensorSharding(tuple(tuple(dim) for dim in dims))

    known = {(of("xy", "z"), of("x", "z")): ("y", 0, None), (of("xy", ""), of("x", "y")): ("y", 0, 1)}
    for (before, after), (axes, dim, to) in known.items():
        found = moved(before, after)
        assert found is not None and (found.axes, found.dim, found.to) == (tuple(axes), dim, to)
    for before, after in pairwise([of("xy", ""), of("y", ""), of("", ""), of("x", "")]):
        assert moved(before, after) is None or after == of("", "")
    assert moved(replace(of("x"), unreduced=("y",)), of("")) is None
