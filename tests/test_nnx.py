"""Flax NNX objects as arguments: updated in place, with shared objects kept shared, created sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from front_ends import BATCH, CLASSES, WIDTH, NnxClassifier, cross_entropy, make_batch, nnx_step, nnx_values, optimizer

import autopar
from autopar import errors

OPTIONS: dict[str, Any] = {"mesh": "8", "hardware": "cpu-host"}


def create() -> tuple[Any, Any, Any]:
    model = NnxClassifier(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param), nnx.metrics.Average()


def close(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.contract
def test_paths_are_readable_and_state_is_carried() -> None:
    plan = autopar.plan(nnx_step, *create(), make_batch(0), **OPTIONS)
    paths = {t.path for t in plan.inputs}
    assert {"model/layers/0/kernel", "model/norm/mean", "model/dropout/rngs/count", "metric/total"} <= paths
    assert any(p.startswith("optimizer/opt_state/") and p.endswith("mu/layers/0/kernel") for p in paths)
    carried = {plan.inputs[i].path for i, _ in plan.carried}
    assert carried == {p for p in paths if not p.startswith("batch/")}
    assert all(plan.inputs[i].path == plan.outputs[o].path for i, o in plan.carried)
    assert sorted(plan.donated) == [i for i, t in enumerate(plan.inputs) if not t.path.startswith("batch/")]
    roles = {t.path: t.role for t in plan.inputs}
    assert roles["model/layers/0/kernel"] == "parameter"


@pytest.mark.contract
def test_a_state_is_built_sharded_and_trains() -> None:
    step = autopar.parallelize(**OPTIONS, pin={"model/layers/*/kernel": jax.P("data")})(nnx_step)
    batch = make_batch(0)
    built: Any = step.init(create, batch=batch)
    model, opt, metric = built
    assert type(model) is NnxClassifier
    kernel: Any = model.layers[0].kernel
    assert kernel[...].sharding.spec == jax.P("data")
    plain = create()
    expected = nnx.jit(nnx_step)(*plain, batch)
    np.testing.assert_allclose(step(model, opt, metric, batch), expected, rtol=2e-4)
    close(nnx_values([model, opt, metric]), nnx_values(plain))
    assert kernel[...].sharding.spec == jax.P("data")
    assert len(step.plans) == 1, "the state that was built is the state that was planned"


def test_init_takes_random_numbers_and_moves_them_on() -> None:
    step = autopar.parallelize(**OPTIONS)(nnx_step)

    def build(rngs: nnx.Rngs) -> dict[str, Any]:
        model = NnxClassifier(rngs)
        return {
            "optimizer": nnx.Optimizer(model, optimizer(), wrt=nnx.Param),
            "model": model,
            "metric": nnx.metrics.Average(),
        }

    rngs, plain = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
    made, expected = step.init(build, rngs, batch=make_batch(0)), build(plain)
    assert rngs.params.count[...] == plain.params.count[...] > 0
    close(nnx_values([made["model"]]), nnx_values([expected["model"]]))


@pytest.mark.contract
def test_what_is_one_object_stays_one() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.again = self.embed

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.again(nnx.relu(self.embed(x)))[:, :CLASSES]

    @autopar.parallelize(**OPTIONS)
    def step(first: Tied, parts: dict[str, Any], batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch["x"]), batch))(first)
        parts["optimizer"].update(first, grads)
        return first, parts["layer"].kernel[...].sum(), loss

    model = Tied(nnx.Rngs(0))
    parts = {"optimizer": nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), "layer": model.embed}
    before = np.asarray(model.embed.kernel[...])
    returned, total, _ = step(model, parts, make_batch(0))
    assert returned is model and model.again is model.embed and parts["layer"] is model.embed
    assert not np.array_equal(before, model.embed.kernel[...])
    np.testing.assert_allclose(total, model.embed.kernel[...].sum(), rtol=1e-4)
    assert sum("kernel" in t.path for t in step.plan(model, parts, make_batch(0)).inputs) == 1


def test_new_objects_and_attributes_come_out() -> None:
    @autopar.parallelize(**OPTIONS)
    def step(model: Any, x: Any) -> Any:
        y = model(x)
        model.calls = getattr(model, "calls", 0) + 1
        model.last = nnx.Intermediate(y.mean(0))
        return nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), y.sum()

    model: Any = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    x = make_batch(0)["x"]
    norm, _ = step(model, x)
    assert isinstance(norm, nnx.BatchNorm) and norm.mean[...].shape == (WIDTH,)
    assert model.calls == 1
    np.testing.assert_allclose(model.last[...], model(x).mean(0), rtol=1e-4, atol=1e-6)
    step(model, x)
    assert model.calls == 2


def test_an_evaluation_neither_changes_nor_gives_away_the_model() -> None:
    model = create()[0]
    evaluate = autopar.parallelize(**OPTIONS)(lambda model, batch: cross_entropy(model(batch["x"]), batch))
    model.eval()
    kernel = model.layers[0].kernel[...]
    plan = evaluate.plan(model, make_batch(0))
    assert plan.carried == plan.donated == ()
    assert np.isfinite(float(evaluate(model, make_batch(0))))
    assert model.layers[0].kernel[...] is kernel


@pytest.mark.slow
def test_modes_are_planned_apart_and_the_train_step_goes_on() -> None:
    step = autopar.parallelize(**OPTIONS)(nnx_step)
    objects, plain = create(), create()
    for seed in range(2):
        for model in (objects[0], plain[0]):
            model.train() if seed == 0 else model.eval()
        loss = step(*objects, make_batch(seed))
        np.testing.assert_allclose(loss, nnx.jit(nnx_step)(*plain, make_batch(seed)), rtol=2e-4)
    close(nnx_values(objects), nnx_values(plain))


def test_frozen_parameters_are_carried_as_they_are() -> None:
    """Only what the optimizer is for is trained: the head."""
    model = NnxClassifier(nnx.Rngs(0, dropout=1))
    wrt = nnx.All(nnx.Param, nnx.PathContains("head"))
    opt = nnx.Optimizer(model, optimizer(), wrt=wrt)

    @autopar.parallelize(**OPTIONS)
    def step(model: Any, opt: Any, batch: Any) -> Any:
        diff = nnx.DiffState(0, wrt)
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch["x"]), batch), argnums=diff)(model)
        opt.update(model, grads)
        return loss

    frozen, head = np.asarray(model.layers[0].kernel[...]), np.asarray(model.head.kernel[...])
    for seed in range(2):
        step(model, opt, make_batch(seed))
    np.testing.assert_array_equal(model.layers[0].kernel[...], frozen)
    assert not np.array_equal(model.head.kernel[...], head)


def test_states_and_definitions_are_plain_pytrees() -> None:
    """The functional way: split outside, merge inside, the state returned."""
    model = NnxClassifier(nnx.Rngs(0, dropout=1))
    definition, params, rest = nnx.split(model, nnx.Param, ...)

    @autopar.parallelize(**OPTIONS)
    def step(definition: Any, params: Any, rest: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            merged = nnx.merge(definition, params, rest, copy=True)
            return cross_entropy(merged(batch["x"]), batch), nnx.state(merged, nnx.Not(nnx.Param))

        (loss, rest_after), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest_after, loss

    params, rest, loss = step(definition, params, rest, make_batch(0))
    assert isinstance(params, nnx.State) and np.isfinite(float(loss))
    plan = step.latest_plan
    assert plan is not None and "params/layers/0/kernel" in {t.path for t in plan.inputs}


def test_a_plan_is_saved_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "nnx.plan.json"
    autopar.plan(nnx_step, *create(), make_batch(0), **OPTIONS).save(path)
    assert "Plan of `nnx_step`" in str(autopar.explain(autopar.load_plan(path)))
    objects, plain = create(), create()
    loss = autopar.parallelize(plan=path)(nnx_step)(*objects, make_batch(0))
    np.testing.assert_allclose(loss, nnx.jit(nnx_step)(*plain, make_batch(0)), rtol=2e-4)


def test_a_state_that_has_too_few_parts() -> None:
    step = autopar.parallelize(**OPTIONS)(nnx_step)
    with pytest.raises(errors.StepSignatureError, match="let `create_state` return them as a tuple"):
        step.init(lambda: create()[:2], batch=make_batch(0))


def test_an_attribute_that_cannot_be_hashed() -> None:
    class Settings:
        __hash__ = None  # type: ignore[assignment]

    model: Any = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    model.settings = nnx.static(Settings())
    with pytest.raises(errors.StepSignatureError, match=r"an attribute of the modules given \(Linear\)"):
        autopar.parallelize(**OPTIONS)(lambda model, x: model(x).sum())(model, np.ones((BATCH, WIDTH), np.float32))


def test_an_error_in_the_step_leaves_the_model_as_it_was() -> None:
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def step(model: nnx.Linear, x: Any) -> Any:
        model.kernel[...] += 1
        raise ValueError("broken")

    with pytest.raises(errors.TraceError, match="broken"):
        autopar.parallelize(**OPTIONS)(step)(model, jnp.ones((BATCH, WIDTH)))
    assert float(model(jnp.zeros((1, WIDTH))).sum()) == 0
