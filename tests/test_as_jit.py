"""Programs of plain `jit` run here with the same results: loops over rows, callbacks, collectives of `vmap`."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
import autopar.errors

OPTIONS: dict[str, Any] = {"mesh": "8", "hardware": "cpu-host", "cache": False}
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def assert_as_jit(step: Any, *args: Any, **options: Any) -> None:
    expected = jax.jit(step)(*args)
    got = autopar.parallelize(step, **OPTIONS, **options)(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


def by_row(x: Any, num: Any) -> Any:
    return jax.vmap(lambda r, t: lax.while_loop(lambda s: s[0] < t, lambda s: (s[0] + 1, s[1] * 0.9 + 0.1), (0, r))[1])(
        x, num
    )


@pytest.mark.contract
def test_a_while_loop_with_a_condition_for_each_row() -> None:
    assert_as_jit(lambda w, x, num: (by_row(x, num) @ w).sum(1), W, X, np.arange(16, dtype=np.int32) % 5)


def test_numpys_64_bit_arrays_are_narrowed_without_a_warning() -> None:
    def step(w: Any, batch: Any) -> Any:
        return jnp.take_along_axis(batch["x"] @ w, batch["label"][:, None], 1).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_jit(step, W.astype(np.float64), {"x": X.astype(np.float64), "label": np.arange(16) % 8})


def test_a_callback_with_a_scalar_result() -> None:
    def step(w: Any, x: Any) -> Any:
        told = jax.pure_callback(lambda a: np.float32(a.sum()), jax.ShapeDtypeStruct((), jnp.float32), x)
        return (x @ w).mean() + told

    assert_as_jit(step, W, X)


def test_collectives_over_the_rows_of_a_vmap_are_reductions() -> None:
    def row(x: Any, w: Any) -> Any:
        h = x @ w
        low, high = lax.pmin(h, "rows"), lax.pmax(h, "rows")
        return (h - lax.pmean(h, "rows")) / (high - low)

    def step(w: Any, x: Any) -> Any:
        return jax.vmap(row, in_axes=(0, None), axis_name="rows")(x, w)

    assert_as_jit(step, W, X)
    plan = autopar.plan(step, W, X, **OPTIONS)
    assert not {"psum", "pmax", "pmin", "psum_invariant"} & set(plan.program.primitives)


@pytest.mark.parametrize("shape", [(0, 8), (16, 0)])
def test_an_empty_batch(shape: tuple[int, int]) -> None:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    assert_as_jit(step, jnp.ones((shape[1], 4)), np.ones(shape, np.float32))


# -- inside other transformations, and as a method ---------------------------------------------


def train(w: Any, x: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


@pytest.mark.contract
def test_a_planned_step_inside_jit_scan_grad_vmap_eval_shape_and_another_step() -> None:
    planned = autopar.parallelize(train, **OPTIONS)
    planned(W, X)  # its quick way is open
    inside = {
        "jit": lambda f: jax.jit(f)(jnp.array(W), X),
        "grad": lambda f: jax.grad(lambda w: f(w, X)[1])(jnp.array(W)),
        "vmap": lambda f: jax.vmap(f, in_axes=(0, None))(jnp.stack([W, W]), X),
        "scan": lambda f: lax.scan(f, jnp.array(W), jnp.stack([X, X])),
        "step": lambda f: autopar.parallelize(lambda w, x: f(f(w, x)[0], x), **OPTIONS)(W, X),
    }
    for name, run in inside.items():
        for a, b in zip(jax.tree.leaves(run(train)), jax.tree.leaves(run(planned)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
    assert jax.eval_shape(planned, W, X) == jax.eval_shape(train, W, X)


def test_a_method_is_a_step() -> None:
    class Trainer:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        @autopar.parallelize(**OPTIONS)
        def step(self, w: Any, x: Any) -> Any:
            return w - self.rate * x.mean(), x.sum()

    one, two = Trainer(1.0), Trainer(2.0)
    np.testing.assert_allclose(one.step(W, X)[0], W - X.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(two.step(W, x=X)[0], W - 2 * X.mean(), rtol=1e-5, atol=1e-6)
    assert one.step.plan(W, X).program.name.endswith("step")
    w = one.step.init(lambda: jnp.ones((8, 8)), x=X)
    np.testing.assert_allclose(one.step(w, X)[0], 1 - np.full((8, 8), X.mean()), rtol=1e-5, atol=1e-6)


@pytest.mark.contract
def test_a_mesh_with_explicit_axes_and_arrays_on_it() -> None:
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Explicit,))
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    planned = autopar.parallelize(train, **{**OPTIONS, "mesh": mesh})
    w, x = jax.device_put(W, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())), jax.device_put(X, at)
    for _ in range(2):
        np.testing.assert_allclose(planned(w, x)[1], train(W, X)[1], rtol=1e-5)


# -- the caller's arrays -----------------------------------------------------------------------


@pytest.mark.contract
def test_no_call_deletes_arrays_that_the_user_made_and_later_ones_donate_as_a_whole() -> None:
    def step(s: Any, x: Any) -> Any:
        return {**s, "w": s["w"] + x.mean(), "n": s["n"] + 1}, x.sum()

    planned = autopar.parallelize(step, **OPTIONS)
    made = {"w": jnp.ones((64, 8)), "n": jnp.int32(0), "key": jax.random.key(0), "same": jnp.ones(3)}
    other = autopar.parallelize(step, **{**OPTIONS, "mesh": "2x4"})
    state = made
    for run in (planned, other, planned):
        state, _ = run(made, X)
        assert not any(leaf.is_deleted() for leaf in made.values())
    after, _ = planned(state, X)
    assert all(leaf.is_deleted() for leaf in state.values())
    assert int(after["n"]) == 2
    with pytest.raises(autopar.errors.StepSignatureError, match=r"`s/.*` was donated to an earlier call"):
        planned(state, X)
    by_user = jax.tree.map(lambda leaf: leaf, after) | {"w": after["w"] * 1}
    planned(by_user, X)
    assert not by_user["w"].is_deleted()


# -- natural arguments -------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(2, 4), {"data": 2, "model": 4}, [2, 4], "2x4"])
def test_a_mesh_as_sizes_or_by_name(mesh: Any) -> None:
    plan = autopar.plan(train, W, X, mesh=mesh, hardware="cpu-host", memory_budget_bytes="40 GB")
    assert plan.mesh.describe() == "2x4 (data=2, model=4)"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"memory_budget_bytes": -1}, "BudgetError", "`memory_budget_bytes` is -1: give"),
        ({"memory_budget_bytes": "forty"}, "BudgetError", "`memory_budget_bytes` is 'forty': give"),
        ({"pin": ["w"]}, "PinError", "`pin` is a list: give a dict"),
        ({"devices": 8}, "OptionError", "`num_devices=8`"),
        ({"static_argnums": (1,)}, "OptionError", "`static_argnames`"),
        ({"mesh": 2.5}, "MeshError", "`mesh` is 2.5: give sizes"),
        ({"mesh": {"a b": 8}}, "MeshError", "an axis 'a b'"),
    ],
)
def test_natural_mistakes_are_told_the_way_out(options: Any, kind: str, text: str) -> None:
    with pytest.raises(getattr(autopar.errors, kind)) as raised:
        autopar.plan(train, W, X, hardware="cpu-host", **options)
    assert text in str(raised.value)


def test_explain_of_a_path() -> None:
    with pytest.raises(autopar.errors.OptionError, match="load_plan"):
        autopar.explain("x.json")  # pyright: ignore[reportCallIssue, reportArgumentType]
