"""Shardings given before planning: by metadata on the arguments, or by the plan of another step."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from front_ends import cross_entropy, linen_partitioned, make_batch, optimizer
from jax.sharding import PartitionSpec as P

import autopar
from autopar import errors
from autopar.frontend.sharding_metadata import Annotation, specs_of

HARDWARE: dict[str, Any] = {"hardware": "cpu-host"}


class Logical(nn.Module):
    """Two layers whose kernels have logical names, as large models have them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        x = nn.Dense(128, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")))(x)
        return nn.Dense(16, kernel_init=nn.with_logical_partitioning(init, ("mlp", "vocab")))(nn.relu(x))


def logical_state() -> TrainState:
    model = Logical()
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer())


def logical_step(state: TrainState, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        return cross_entropy(state.apply_fn({"params": params}, batch["x"]), batch)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def shardings(plan: autopar.Plan) -> dict[str, str]:
    return {t.path: str(t.sharding) for t in plan.inputs}


# -- metadata --------------------------------------------------------------------------------


@pytest.mark.contract
def test_names_of_mesh_axes_pin_parameters_and_their_moments() -> None:
    case = linen_partitioned()
    plan = autopar.plan(case.step, *case.create(), make_batch(0), mesh="2x4", **HARDWARE)
    kernels = {path: s for path, s in shardings(plan).items() if path.endswith("kernel") and "Dense_3" not in path}
    assert len(kernels) == 9 and set(kernels.values()) == {"P(None, 'model')"}
    assert "state/params/Dense_0/kernel" in kernels
    assert any("and 7 more are split as their metadata say" in note for note in plan.notes)
    assert plan.pins == {}


def test_metadata_may_be_ignored_and_a_pin_goes_before_them() -> None:
    case = linen_partitioned()
    args = (*case.create(), make_batch(0))
    free = autopar.plan(case.step, *args, mesh="2x4", metadata="ignore", **HARDWARE)
    assert not any(t.pinned for t in free.inputs)
    pin = {"state/params/Dense_0/kernel": P("data")}
    plan = autopar.plan(case.step, *args, mesh="2x4", pin=pin, **HARDWARE)
    assert shardings(plan)["state/params/Dense_0/kernel"] == "P('data')"
    assert shardings(plan)["state/params/Dense_1/kernel"] == "P(None, 'model')"


def test_a_name_without_an_axis_says_nothing_and_is_told() -> None:
    case = linen_partitioned()
    plan = autopar.plan(case.step, *case.create(), make_batch(0), mesh="8", **HARDWARE)
    assert not any(t.pinned for t in plan.inputs)
    (note,) = (note for note in plan.notes if "'model'" in note)
    assert "leads to no axis of the mesh (data)" in note and 'logical_axis_rules=[("model", "data")]' in note


@pytest.mark.contract
def test_logical_names_go_through_rules() -> None:
    args = (logical_state(), make_batch(0))
    rules = [("embed", None), ("mlp", "model"), ("vocab", "data")]
    expected = {"state/params/Dense_0/kernel": "P(None, 'model')", "state/params/Dense_1/kernel": "P('model', 'data')"}
    plan = autopar.plan(logical_step, *args, mesh="2x4", logical_axis_rules=rules, **HARDWARE)
    assert shardings(plan).items() >= expected.items()
    with nn.logical_axis_rules(rules):
        plan = autopar.plan(logical_step, *args, mesh="2x4", **HARDWARE)
    assert shardings(plan).items() >= expected.items()
    assert not any(t.pinned for t in autopar.plan(logical_step, *args, mesh="2x4", **HARDWARE).inputs)


def test_rules_without_a_mesh_hold_or_are_refused() -> None:
    """Where autopar chooses the mesh, it chooses one that has the axes of the rules; one that it would not choose it asks for."""
    args = (logical_state(), make_batch(0))

    def planned(**options: Any) -> autopar.Plan:
        return autopar.plan(logical_step, *args, **HARDWARE, **options)

    plan = planned(num_devices=8, logical_axis_rules=[("mlp", "model")])
    assert "model" in plan.mesh.axis_names and shardings(plan)["state/params/Dense_1/kernel"] == "P('model')"
    for devices, axis in ((8, "tensor"), (2, "model")):
        rules = [("vocab", None), ("mlp", axis)]
        with pytest.raises(errors.PinError) as error:
            planned(num_devices=devices, logical_axis_rules=rules)
        for words in (
            f"the logical axis rule ('mlp', '{axis}') applies to `state/params/Dense_0/kernel`",
            f"no mesh that autopar would choose for {devices} devices has the axis `{axis}`",
            f'`mesh="{axis}={devices}"`',
        ):
            assert words in str(error.value)
        plan = planned(mesh=f"{axis}={devices}", logical_axis_rules=rules)  # the way out
        assert shardings(plan)["state/params/Dense_1/kernel"] == f"P('{axis}')"
    with (
        nn.logical_axis_rules([("mlp", ("data", "tensor"))]),
        pytest.raises(errors.PinError, match="has the axis `tensor`"),
    ):
        planned(num_devices=8)
    for free in ({"metadata": "ignore"}, {"metadata": "hint"}):
        assert not any(t.pinned for t in planned(num_devices=8, logical_axis_rules=[("mlp", "tensor")], **free).inputs)
    assert planned(num_devices=1, logical_axis_rules=[("mlp", "tensor")]).num_devices == 1
    assert not any(
        t.pinned for t in planned(mesh="8", logical_axis_rules=[("mlp", "model")]).inputs
    )  # for other meshes


def test_a_step_with_logical_names_trains_as_without() -> None:
    rules = [("embed", "data"), ("mlp", "model")]
    step = autopar.parallelize(mesh="2x4", logical_axis_rules=rules, **HARDWARE)(logical_step)
    state = step.init(logical_state, batch=make_batch(0))
    assert state.params["Dense_0"]["kernel"].value.sharding.spec == P("data", "model")
    state, loss = step(state, make_batch(0))
    np.testing.assert_allclose(loss, jax.jit(logical_step)(logical_state(), make_batch(0))[1], rtol=1e-4)


def test_rules_hold_in_their_order_and_each_axis_once() -> None:
    told = {"w": Annotation(("heads", "embed", ("mlp", "kv"))), "b": Annotation((None, "data"))}
    rules = [("embed", ("data", "model")), ("embed", "data"), ("heads", "model"), ("kv", "data"), ("mlp", None)]
    specs, lost = specs_of(told, rules, ["data", "model"])
    assert specs == {"w": P(None, ("data", "model"), None), "b": P(None, "data")}
    assert lost == {}
    assert specs_of(told, [], ["data"])[1] == {"heads": ["w"], "embed": ["w"], "mlp": ["w"], "kv": ["w"]}


@pytest.mark.contract
def test_variables_of_nnx_say_it_too() -> None:
    def create() -> Any:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        model = nnx.Linear(64, 128, kernel_init=init, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model: nnx.Linear, optimizer: nnx.Optimizer, x: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    sharded = autopar.parallelize(mesh="2x4", **HARDWARE)(step)
    x = make_batch(0)["x"]
    model, opt = sharded.init(create, x=x)
    assert model.kernel[...].sharding.spec == P(None, "model")
    first = float(sharded(model, opt, x))
    assert float(sharded(model, opt, x)) < first
    pinned = {t.path for t in sharded.plan(model, opt, x).inputs if t.pinned}
    assert "model/kernel" in pinned and len(pinned) == 3


def test_a_hint_is_followed_where_it_costs_little() -> None:
    case = linen_partitioned()
    args = (*case.create(), make_batch(0))
    free, pinned, hinted = (
        autopar.plan(case.step, *args, mesh="2x4", metadata=how, **HARDWARE) for how in ("ignore", "pin", "hint")
    )
    slower = pinned.prediction.step_time_s / free.prediction.step_time_s - 1
    expected = pinned if slower <= 0.05 else free
    assert shardings(hinted) == shardings(expected)
    assert any("the metadata of the arguments" in note and f"{slower:+.1%}" in note for note in hinted.notes)


def test_metadata_that_cannot_be() -> None:
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return nn.Dense(90, kernel_init=init)(x)

    params = Odd().init(jax.random.key(0), jnp.zeros((1, 64)))

    def step(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.asarray(Odd().apply(params, x)))

    x = np.ones((32, 64), np.float32)
    with pytest.raises(errors.PinError, match=r"params/params/Dense_0/kernel.*does not divide.*metadata=\"ignore\""):
        autopar.plan(step, params, x, mesh="2x4", **HARDWARE)
    hinted = autopar.plan(step, params, x, mesh="2x4", metadata="hint", **HARDWARE)
    assert any("were not followed" in note for note in hinted.notes)
    unknown: Any = "follow"
    with pytest.raises(errors.PinError, match='give "pin", "hint" or "ignore"'):
        autopar.plan(step, params, x, mesh="2x4", metadata=unknown, **HARDWARE)


# -- another step's layout -------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlp() -> programs.Program:
    return programs.mlp(batch=32, width=64, num_layers=2, optimizer="adam")


@pytest.mark.contract
def test_an_evaluation_takes_the_state_as_it_lies(mlp: programs.Program) -> None:
    pin = {"state/params/*/kernel": P("model", "data"), "state/opt_state/*": P()}
    train = autopar.parallelize(mesh="2x4", pin=pin, **HARDWARE)(mlp.step)

    @autopar.parallelize(like=train)
    def evaluate(state: Any, batch: Any) -> jax.Array:
        return state.apply_fn({"params": state.params}, batch["x"]).mean()

    batch = mlp.make_batch(0)
    state = train.init(mlp.create_state, jax.random.key(0), batch=batch)
    state, _ = train(state, batch)
    plan, planned = evaluate.plan(state, batch), train.plan(state, batch)
    assert plan.mesh == planned.mesh
    theirs = {t.path: t.sharding for t in planned.inputs}
    for tensor in plan.inputs:
        if tensor.path.startswith("state/"):
            assert tensor.sharding == theirs[tensor.path], tensor.path
    taken = plan.in_shardings(state.step.sharding.mesh)[0]
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(taken), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert np.isfinite(float(evaluate(state, batch)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_arguments_may_be_named_otherwise(mlp: programs.Program) -> None:
    pin = {"state/params/*/kernel": P("data")}
    train = autopar.plan(mlp.step, *mlp.abstract_args(), mesh="8", pin=pin, **HARDWARE)
    state, batch = mlp.abstract_args()
    plan = autopar.plan(lambda weights, batch: weights["Dense_0"]["kernel"].sum(), state.params, batch, like=train)
    assert shardings(plan)["weights/Dense_0/kernel"] == "P('data')"
    assert any("laid out as by the plan of" in note for note in plan.notes)


def test_mistakes_with_like(mlp: programs.Program) -> None:
    train = autopar.parallelize(mesh="2x4", **HARDWARE)(mlp.step)
    evaluate = autopar.parallelize(lambda state, batch: batch["x"].sum(), like=train)
    with pytest.raises(errors.PlanMismatchError, match=r"has no plan yet: call .* first, or its `init` or `plan`"):
        evaluate(*mlp.args())
    plan = train.plan(*mlp.abstract_args())
    x = np.ones((64, 64), np.float32)
    with pytest.raises(errors.PlanMismatchError, match=r"no argument of .* is part of the state"):
        autopar.plan(lambda x: x.sum(), x, like=plan)
    others: tuple[dict[str, Any], ...] = ({"mesh": "8"}, {"num_devices": 4})
    for other in others:
        with pytest.raises(errors.PlanMismatchError, match=r"planned for mesh 2x4 .*but `(mesh|num_devices)` is"):
            autopar.plan(lambda state: 0, mlp.abstract_args()[0], like=plan, **other)
