"""`parallelize` and `plan` as a user calls them: options, replays, re-planning, and every error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar import errors
from autopar.solve.problem import Problem, Solution, Status


@pytest.fixture(scope="module")
def mlp() -> programs.Program:
    return programs.mlp(batch=32, width=64, num_layers=2, optimizer="adam")


def plan_of(program: programs.Program, **options: Any) -> autopar.Plan:
    options = {"hardware": "cpu-host"} | options
    return autopar.plan(program.step, *program.abstract_args(), **options)


# -- planning --------------------------------------------------------------------------------


def test_a_device_count_plans_every_mesh_and_keeps_the_cheapest(mlp: programs.Program) -> None:
    plan = plan_of(mlp, num_devices=8, all_devices=True, hardware="h100-sxm")
    meshes = {str(plan.mesh)} | {str(r.mesh) for r in plan.rejected}
    assert meshes == {"8", "2x4", "4x2"}
    assert all(r.step_time_s >= plan.prediction.step_time_s for r in plan.rejected)


def test_it_plans_for_more_devices_than_there_are(mlp: programs.Program) -> None:
    plan = plan_of(mlp, mesh="16x4", hardware="h100-sxm")
    assert plan.mesh.num_devices == 64


@pytest.mark.contract
def test_state_is_carried_donated_and_keeps_its_sharding(mlp: programs.Program) -> None:
    plan = plan_of(mlp, mesh="8")
    state = [i for i, t in enumerate(plan.inputs) if t.path.startswith("state/")]
    assert [i for i, _ in plan.carried] == state
    assert list(plan.donated) == state
    assert all(plan.inputs[i].sharding == plan.outputs[o].sharding for i, o in plan.carried)


def test_carry_and_donate_can_be_overridden(mlp: programs.Program) -> None:
    plan = plan_of(mlp, mesh="8", carry=["state"], donate=[])
    assert plan.donated == () and plan.carried
    assert plan_of(mlp, mesh="8", carry=[]).carried == ()


def test_pins_hold_by_path_and_by_glob(mlp: programs.Program) -> None:
    pin = {
        "state/params/*/kernel": PartitionSpec(None, "model"),
        "state/params/Dense_0/bias": PartitionSpec("model"),
        "state/opt_state/*": PartitionSpec(),
    }
    plan = plan_of(mlp, mesh="2x4", pin=pin)
    by_path = {t.path: t for t in plan.inputs}
    assert str(by_path["state/params/Dense_1/kernel"].sharding) == "P(None, 'model')"
    assert str(by_path["state/params/Dense_0/bias"].sharding) == "P('model')"
    assert all(t.sharding.is_replicated for t in plan.inputs if "opt_state" in t.path)
    assert by_path["state/params/Dense_1/kernel"].pinned


def test_a_pinned_split_of_a_small_value_goes_no_further(mlp: programs.Program) -> None:
    """64 elements are too few to plan for; unless they are whole where they are used, XLA splits what they meet."""
    pin = {"state/params/Dense_0/bias": PartitionSpec("model")}
    plan = plan_of(mlp, mesh="2x4", pin=pin)
    position = next(i for i, t in enumerate(plan.inputs) if t.pinned)
    assert plan.inputs[position].shape == (64,)
    assert plan.outputs[dict(plan.carried)[position]].sharding == plan.inputs[position].sharding
    without = plan_of(mlp, mesh="2x4")
    added = [c for c in plan.constraints if c not in without.constraints and all(s.is_replicated for s in c.shardings)]
    assert {c.value for c in added if c.node is not None} >= {position}
    assert len({c.value for c in added}) == 2  # the bias where it is read, and the new one before it leaves


def test_in_and_out_shardings_are_what_jit_takes(mlp: programs.Program) -> None:
    step = autopar.parallelize(mesh="8", hardware="cpu-host")(mlp.step)
    plan = step.plan(*mlp.abstract_args())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    jitted = jax.jit(mlp.step, in_shardings=plan.in_shardings(mesh), out_shardings=plan.out_shardings(mesh))
    assert jitted.lower(*mlp.abstract_args()) is not None


def test_a_memory_budget_is_kept(mlp: programs.Program) -> None:
    program = programs.mlp(batch=32, width=256, num_layers=4, optimizer="adam")
    replicated = plan_of(program, mesh="8", pin={"state/*": PartitionSpec()})
    budget = 0.4 * replicated.prediction.peak_bytes
    plan = plan_of(program, mesh="8", memory_budget_bytes=budget)
    assert plan.prediction.peak_bytes <= budget


def test_an_unknown_primitive_runs_replicated_and_is_named() -> None:
    def step(x: Any) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ x.T) + 1

    plan = autopar.plan(step, jax.ShapeDtypeStruct((64, 64), jnp.float32), mesh="8", hardware="cpu-host", carry=[])
    assert any("`pure_callback` has no sharding rule" in note for note in plan.notes)
    x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    sharded = autopar.parallelize(mesh="8", hardware="cpu-host", carry=[])(step)
    np.testing.assert_allclose(sharded(x), step(x), rtol=1e-4, atol=1e-4)


# -- running ---------------------------------------------------------------------------------


def test_other_shapes_are_planned_anew(mlp: programs.Program) -> None:
    step = autopar.parallelize(mesh="8", hardware="cpu-host")(lambda x: (x * 2).sum())
    assert float(step(np.ones((16, 8), np.float32))) == 256
    assert float(step(np.ones((32, 8), np.float32))) == 512
    assert float(step(np.ones((16, 8), np.float32))) == 256


def test_keyword_arguments(mlp: programs.Program) -> None:
    step = autopar.parallelize(mesh="8", hardware="cpu-host")(mlp.step)
    batch = mlp.make_batch(0)
    state = step.init(mlp.create_state, jax.random.key(0), batch=batch)
    _, loss = step(state, batch=batch)
    assert np.isfinite(float(loss))


@pytest.mark.contract
def test_a_saved_plan_is_replayed(mlp: programs.Program, tmp_path: Path) -> None:
    path = tmp_path / "mlp.plan.json"
    plan = plan_of(mlp, mesh="2x4", pin={"state/params/*/kernel": PartitionSpec("model")})
    plan.save(path)
    step = autopar.parallelize(plan=path)(mlp.step)
    state = step.init(mlp.create_state, jax.random.key(0), batch=mlp.make_batch(0))
    assert state.params["Dense_0"]["kernel"].sharding.spec == PartitionSpec("model")
    _, loss = step(state, mlp.make_batch(0))
    expected = jax.jit(mlp.step)(jax.jit(mlp.create_state)(jax.random.key(0)), mlp.make_batch(0))[1]
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5)


def test_a_plan_is_found_and_replayed_for_arrays_that_are_already_sharded(mlp: programs.Program) -> None:
    batch = mlp.make_batch(0)
    first = autopar.parallelize(mesh="8", hardware="cpu-host")(mlp.step)
    state = first.init(mlp.create_state, jax.random.key(0), batch=batch)
    assert (
        autopar.plan(mlp.step, state, batch, mesh="8", hardware="cpu-host").program == first.plan(state, batch).program
    )
    again = autopar.parallelize(mlp.step, plan=first.plan(state, batch))
    assert np.isfinite(float(again(state, batch)[1]))


@pytest.mark.parametrize("shape", [(), (8,), (0, 8)])
def test_small_and_empty_values_leave_nothing_to_decide(shape: tuple[int, ...]) -> None:
    step = autopar.parallelize(mesh="8", hardware="cpu-host")(lambda x: x.sum() + 1)
    x = np.ones(shape, np.float32)
    assert float(step(x)) == x.sum() + 1
    assert step.plan(x).outcome.gap == 0


def test_arguments_may_have_defaults_and_be_left_out(mlp: programs.Program) -> None:
    def step(state: Any, batch: Any, scale: float = 1.0) -> Any:
        new_state, loss = mlp.step(state, batch)
        return new_state, loss * scale

    sharded = autopar.parallelize(mesh="8", hardware="cpu-host")(step)
    state = sharded.init(mlp.create_state, jax.random.key(0), batch=mlp.make_batch(0))
    state, loss = sharded(state, mlp.make_batch(0))
    _, doubled = sharded(state, batch=mlp.make_batch(0), scale=2.0)
    assert float(doubled) > float(loss)


def test_a_step_without_arguments() -> None:
    assert float(autopar.parallelize(mesh="8", hardware="cpu-host")(lambda: jnp.ones((64, 64)).sum())()) == 4096


def test_debug_print_runs_once_per_step(capfd: pytest.CaptureFixture[str]) -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.print("seen {}", x.sum())
        return (x * 2).mean()

    sharded = autopar.parallelize(mesh="8", hardware="cpu-host")(step)
    for _ in range(2):
        sharded(np.ones((16, 16), np.float32)).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen 256.0") == 2


def test_a_pure_callback_computes_the_same() -> None:
    def step(x: jax.Array) -> jax.Array:
        y = jax.pure_callback(lambda v: np.asarray(v) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return (y * 2).sum()

    sharded = autopar.parallelize(mesh="8", hardware="cpu-host")(step)
    assert float(sharded(np.ones((16, 16), np.float32))) == 1024


# -- mistakes --------------------------------------------------------------------------------


def test_a_mesh_that_does_not_match_the_devices(mlp: programs.Program) -> None:
    step = autopar.parallelize(mesh="2x2", hardware="cpu-host")(mlp.step)
    with pytest.raises(
        errors.MeshError, match=r"mesh 2x2 \(data=2, model=2\) needs 4 devices, but 8 \(cpu\) are visible"
    ):
        step(*mlp.args())


@pytest.mark.parametrize("text", ["banana", "2x", "0x8", ""])
def test_a_mesh_that_cannot_be_read(mlp: programs.Program, text: str) -> None:
    with pytest.raises(errors.MeshError, match="mesh"):
        plan_of(mlp, mesh=text)


def test_a_mesh_and_a_device_count_that_disagree(mlp: programs.Program) -> None:
    with pytest.raises(errors.MeshError, match="has 8 devices, but `num_devices` is 4"):
        plan_of(mlp, mesh="2x4", num_devices=4)


def test_an_unknown_hardware_name(mlp: programs.Program) -> None:
    with pytest.raises(errors.HardwareError, match="h100-sxm"):
        plan_of(mlp, mesh="8", hardware="h100")


def test_a_batch_no_axis_divides_is_not_split_and_said_so() -> None:
    program = programs.mlp(batch=30, width=64, num_layers=2)
    plan = plan_of(program, mesh="8")
    assert any("is 30, which no mesh axis (data=8) divides" in note for note in plan.notes)
    with pytest.raises(errors.PinError, match=r"splits a dim of 30 over data=8, which does not divide it"):
        plan_of(program, mesh="8", pin={"batch/x": PartitionSpec("data")})


def test_a_pin_that_names_no_input(mlp: programs.Program) -> None:
    with pytest.raises(errors.PinError, match=r"names no input. Paths look like 'state/params/Dense_0/kernel'"):
        plan_of(mlp, mesh="8", pin={"params/Dense_0/kernel": PartitionSpec("data")})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (PartitionSpec("modle"), "names the mesh axis modle, but the mesh has data"),
        (PartitionSpec("data", "data"), "twice"),
        (PartitionSpec(None, None, "data"), "2 dims"),
        ("data", "not the string 'data': give one entry for each dim"),
    ],
)
def test_a_pin_that_cannot_be(mlp: programs.Program, spec: Any, words: str) -> None:
    with pytest.raises(errors.PinError, match=words):
        plan_of(mlp, mesh="8", pin={"state/params/Dense_0/kernel": spec})


def test_a_memory_budget_nothing_fits(mlp: programs.Program) -> None:
    with pytest.raises(
        errors.BudgetError, match=r"no plan on mesh 8 fits.*short\. Ways out: give `memory_budget_bytes="
    ):
        plan_of(mlp, mesh="8", memory_budget_bytes=1000)


def test_a_solver_that_finds_nothing_in_time(mlp: programs.Program) -> None:
    class Idle:
        def solve(self, problem: Problem) -> Solution:
            return Solution((), math.inf, 0.0, Status.NOT_FOUND)

    with pytest.raises(errors.TimeLimitError, match="raise `time_limit_s`"):
        plan_of(mlp, mesh="8", solver=Idle())


def test_a_function_jax_cannot_trace() -> None:
    def step(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(
        errors.TraceError, match=r"JAX could not trace.*test_api\.py:\d+(.|\n)*TracerBoolConversionError"
    ):
        autopar.plan(step, jnp.ones(128), mesh="8", hardware="cpu-host")


def test_an_ordered_effect_is_refused() -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum(), ordered=True)
        return x * 2

    with pytest.raises(errors.EffectError, match=r"test_api\.py:\d+.*ordered side effect"):
        autopar.plan(step, jnp.ones(128), mesh="8", hardware="cpu-host")


def test_a_plan_for_another_program_names_what_differs(mlp: programs.Program, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(mlp, mesh="8").save(path)
    wider = programs.mlp(batch=32, width=128, num_layers=2, optimizer="adam")
    with pytest.raises(errors.PlanMismatchError, match="state/params/Dense_0/bias"):
        autopar.parallelize(plan=path)(wider.step)(*wider.args())


def test_a_fixed_plan_refuses_other_shapes(mlp: programs.Program) -> None:
    plan = plan_of(mlp, mesh="8")
    step = autopar.parallelize(plan=plan)(mlp.step)
    larger = programs.mlp(batch=64, width=64, num_layers=2, optimizer="adam")
    state, batch = mlp.args()
    step(state, batch)
    with pytest.raises(errors.PlanMismatchError, match=r"batch/x"):
        step(jax.jit(mlp.create_state)(jax.random.key(0)), larger.make_batch(0))


def test_a_damaged_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(errors.PlanFileError, match=r"plan\.json"):
        autopar.parallelize(plan=path)(lambda x: x)


def test_a_plan_file_of_another_version(mlp: programs.Program, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(mlp, mesh="8").save(path)
    data = json.loads(path.read_text())
    data["version"] = 999
    path.write_text(json.dumps(data))
    with pytest.raises(errors.PlanFileError, match="999"):
        autopar.load_plan(path)


def test_an_unknown_option() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'mehs'; the options are plan, pipelines, mesh, .*give `mesh`"):
        autopar.parallelize(mehs="8")
    with pytest.raises(TypeError, match=r"unknown option 'pipeline'; .*give `pipelines`"):
        autopar.parallelize(pipeline=2)


def test_a_step_that_is_no_function() -> None:
    not_a_step: Any = "2x4"
    with pytest.raises(errors.StepSignatureError, match="'2x4' is a str, which cannot be called"):
        autopar.parallelize(not_a_step)
    with pytest.raises(errors.StepSignatureError, match=r"a dict, which cannot be called.*mesh=\"2x4\""):
        autopar.plan({"w": 1}, 2)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_init_with_the_state_itself(mlp: programs.Program) -> None:
    step = autopar.parallelize(mesh="8", hardware="cpu-host")(mlp.step)
    state: Any = {"w": jnp.ones(2)}
    with pytest.raises(errors.StepSignatureError, match="not the state itself: it got a dict"):
        step.init(state, batch=jnp.ones(2))


def test_init_without_the_batch(mlp: programs.Program) -> None:
    step = autopar.parallelize(mesh="8", hardware="cpu-host")(mlp.step)
    with pytest.raises(errors.StepSignatureError, match=r"It takes state, batch.*init\(create_state, rng, batch=…\)"):
        step.init(mlp.create_state, jax.random.key(0))


def test_carry_names_no_argument(mlp: programs.Program) -> None:
    with pytest.raises(errors.StepSignatureError, match="'stat', but the step's arguments are state, batch"):
        plan_of(mlp, mesh="8", carry=["stat"])
