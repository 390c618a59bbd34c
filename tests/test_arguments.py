"""The arguments of a step: static leaves and arguments, keywords, defaults, none; and the errors for others."""

from __future__ import annotations

import dataclasses
import enum
import gc
import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import errors

SHAPE = (64, 64)
OPTIONS: dict[str, Any] = {"mesh": "8", "hardware": "cpu-host"}


def ones() -> np.ndarray:
    return np.ones(SHAPE, np.float32)


class Kind(enum.Enum):
    DOUBLE = "double"
    TRIPLE = "triple"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


# -- static leaves ---------------------------------------------------------------------------


@pytest.mark.contract
def test_leaves_that_are_no_arrays_are_part_of_the_trace_and_come_back() -> None:
    def step(state: Any, batch: Any) -> Any:
        x = state["f"](state["x"]) * (2 if state["kind"] is Kind.DOUBLE else 3)
        return {**state, "x": x}, (x * batch).mean(), state["name"].upper()

    sharded = autopar.parallelize(**OPTIONS)(step)
    state = {"x": ones(), "f": jnp.sin, "kind": Kind.DOUBLE, "name": "first", "level": Level.HIGH, "none": None}
    expected = step(step(state, 1.0)[0], 1.0)
    state, _, name = sharded(state, 1.0)
    assert (state["f"], state["kind"], state["level"], state["none"], name) == (
        jnp.sin,
        Kind.DOUBLE,
        Level.HIGH,
        None,
        "FIRST",
    )
    state, loss, _ = sharded(state, 1.0)
    np.testing.assert_allclose(float(loss), float(expected[1]), rtol=1e-5)
    x = np.asarray(state["x"])
    other, _, _ = sharded(state | {"kind": Kind.TRIPLE}, 1.0)
    np.testing.assert_allclose(other["x"], 3 * np.sin(x), rtol=1e-5)


def test_static_leaves_leave_the_state_carried() -> None:
    def step(state: Any, x: Any) -> Any:
        return {**state, "w": state["w"] + x.sum()}, x.mean()

    state = {"w": ones(), "f": jnp.sin}
    plan = autopar.plan(step, state, ones(), **OPTIONS)
    assert [plan.inputs[i].path for i, _ in plan.carried] == ["state/w"]
    assert [t.path for t in plan.inputs] == ["state/w", "x"]


def test_one_and_true_are_not_the_same_static_value() -> None:
    step = autopar.parallelize(**OPTIONS, static_argnames="n")(lambda x, n: x.sum() + (100 if n is True else n))
    assert float(step(ones(), n=1)) == 4097
    assert float(step(ones(), n=True)) == 4196


@pytest.mark.parametrize("leaf", [{1, 2}, bytearray(b"x"), np.array(["a", "b"]), np.array([object()])])
def test_a_leaf_that_is_neither_array_nor_hashable(leaf: Any) -> None:
    step = autopar.parallelize(**OPTIONS)(lambda state, batch: batch["x"].sum())
    with pytest.raises(errors.StepSignatureError, match=r"`batch/more/0` is a .*(hashed|NumPy array of numbers)"):
        step({"w": ones()}, {"x": ones(), "more": [leaf]})


def test_an_array_of_another_library() -> None:
    class Tensor:
        dtype, shape = "torch.float32", SHAPE

    with pytest.raises(
        errors.StepSignatureError, match=r"`x` is a .*Tensor of torch\.float32, which JAX does not take"
    ):
        autopar.parallelize(**OPTIONS)(lambda x: x.sum())(Tensor())


def test_an_argument_whose_text_changes_between_calls_is_reported() -> None:
    step = autopar.parallelize(**OPTIONS)(lambda x, batch: (x + len(batch["text"])).sum())
    x = np.ones((2, 2), np.float32)
    for n in range(4):
        step(x, {"text": "a" * n})
    with pytest.warns(UserWarning, match=r"planned for the 5th time with the same shapes, because `batch` has changed"):
        step(x, {"text": "aaaa"})
    assert float(step(x, {"text": "aaaaa"})) == 24


def test_dtypes_and_classes_are_static() -> None:
    step = autopar.parallelize(**OPTIONS)(lambda batch: batch["x"].astype(batch["dtype"]).sum())
    assert step({"x": ones(), "dtype": jnp.bfloat16}).dtype == jnp.bfloat16
    assert step({"x": ones(), "dtype": jnp.float32}).dtype == jnp.float32


# -- static arguments ------------------------------------------------------------------------


@pytest.mark.contract
def test_static_arguments_by_name_however_they_are_given() -> None:
    def step(x: jax.Array, train: bool = True, *, scale: str = "one") -> jax.Array:
        return (x * 2 if train else x).sum() * {"one": 1, "ten": 10}[scale]

    sharded = autopar.parallelize(**OPTIONS, static_argnames=("train", "scale"))(step)
    assert float(sharded(ones())) == 8192
    assert float(sharded(ones(), False)) == 4096
    assert float(sharded(ones(), train=False)) == 4096
    assert float(sharded(x=ones(), train=True, scale="ten")) == 81920
    assert [t.path for t in sharded.plan(ones(), False).inputs] == ["x"]


def test_plan_and_verify_take_them_too() -> None:
    def step(x: Any, *, train: bool) -> jax.Array:
        return (x @ x).sum() if train else x.sum()

    plan = autopar.plan(step, ones(), kwargs={"train": True}, static_argnames="train", **OPTIONS)
    assert plan.program.primitives["dot_general"] == 1
    assert plan.for_step(partial(step, train=True), ones()).in_tree is not None


@pytest.mark.parametrize("names", ["trian", ("train", "trian")])
def test_a_static_argument_that_is_none(names: Any) -> None:
    with pytest.raises(errors.StepSignatureError, match=r"`static_argnames` names 'trian', but .* takes x, train"):
        autopar.parallelize(**OPTIONS, static_argnames=names)(lambda x, train: x)


def test_a_static_argument_that_cannot_be_hashed() -> None:
    step = autopar.parallelize(**OPTIONS, static_argnames="config")(lambda x, config: x.sum())
    with pytest.raises(errors.StepSignatureError, match=r"static argument `config` is a dict, which cannot be hashed"):
        step(ones(), config={"rate": 1})
    with pytest.raises(errors.StepSignatureError, match="if it holds arrays, leave it out of `static_argnames`"):
        step(ones(), config=jnp.ones(3))


def test_a_bool_that_is_branched_on_without_being_static() -> None:
    def step(x: jax.Array, count: int, train: bool) -> jax.Array:
        return x.sum() if train else x.mean()

    with pytest.raises(errors.TraceError) as caught:
        autopar.parallelize(**OPTIONS)(step)(ones(), 3, True)
    assert "`train` is a Python bool (True), which is traced as an array" in str(caught.value)
    assert '`static_argnames=("train",)`' in str(caught.value)


def test_a_number_in_a_tree_that_is_used_as_a_shape() -> None:
    with pytest.raises(errors.TraceError, match=r"`batch/n` is a Python int \(3\).*argument of its own"):
        autopar.parallelize(**OPTIONS)(lambda batch: jnp.zeros(batch["n"]) + batch["x"].sum())({"x": ones(), "n": 3})


# -- keywords, defaults, trees ---------------------------------------------------------------


@pytest.mark.contract
def test_keyword_arguments_of_every_kind() -> None:
    def step(state: Any, /, batch: Any, *, scale: Any = 1.0, **more: Any) -> Any:
        return state + 1, (state * batch).sum() * scale + sum(more.values())

    sharded = autopar.parallelize(**OPTIONS)(step)
    for kwargs in ({}, {"scale": 2.0}, {"scale": 2.0, "extra": 3, "other": np.int32(4)}):
        given = {"batch": ones(), **kwargs}
        np.testing.assert_allclose(float(sharded(ones(), **given)[1]), float(step(ones(), **given)[1]))
        np.testing.assert_allclose(float(sharded(ones(), ones(), **kwargs)[1]), float(step(ones(), **given)[1]))
    plan = sharded.plan(ones(), ones(), extra=3)
    assert [t.path for t in plan.inputs] == ["state", "batch", "extra"]
    assert plan.inputs[plan.carried[0][0]].path == "state"


def test_arguments_that_are_not_taken() -> None:
    step = autopar.parallelize(**OPTIONS)(lambda state, batch: state)
    with pytest.raises(errors.StepSignatureError, match=r"takes \(state, batch\), but .* unexpected keyword .*'bathc'"):
        step(ones(), ones(), bathc=ones())
    with pytest.raises(errors.StepSignatureError, match=r"missing a required argument: 'batch'"):
        step(ones())


@pytest.mark.contract
def test_numbers_bools_keys_none_and_dataclasses() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Batch:
        x: Any
        mask: Any = None
        tag: str = dataclasses.field(default="", metadata={"static": True})

    def step(state: Any, batch: Batch, key: Any, rate: Any, flag: Any, count: Any) -> Any:
        noise = jax.random.uniform(key, SHAPE)
        x = batch.x * rate + noise + jnp.where(flag, 1, 0) + count
        x = x if batch.mask is None else jnp.where(batch.mask, x, 0)
        state = {"w": state["w"] + x, "key": jax.random.split(key)[0], "n": state["n"] + count, "nothing": None}
        return state, {"mean": x.mean(), "sums": (x.sum(0), x.sum(1))}, Batch(x, tag=batch.tag)

    mask = np.arange(SHAPE[0])[:, None] % 2 == 0
    sharded = autopar.parallelize(**OPTIONS)(step)
    for batch in (Batch(ones(), tag="a"), Batch(ones(), mask)):
        state = {"w": ones(), "key": jax.random.key(3), "n": 0, "nothing": None}
        args = (state, batch, jax.random.key(4), np.float32(0.5), True, np.int8(2))
        expected, found = step(*args), sharded(*args)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert found[2].tag == batch.tag
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_an_argument_may_be_none() -> None:
    step = autopar.parallelize(**OPTIONS)(lambda x, mask=None: (x if mask is None else x * mask).sum())
    assert float(step(ones(), None)) == float(step(ones())) == 4096
    assert float(step(ones(), 2 * ones())) == 8192


def test_the_same_array_in_two_places_of_the_state() -> None:
    """An average that begins as the parameters themselves; both are donated."""

    @autopar.parallelize(**OPTIONS)
    def step(state: Any, x: Any) -> Any:
        params = state["params"] - 0.1 * x
        return {"params": params, "average": 0.9 * state["average"] + 0.1 * params}, params.mean()

    weights = jnp.ones(SHAPE)
    for _ in range(3):  # first as the user made it, then as a plan has laid it out
        state, _ = step({"params": weights, "average": weights}, ones())
        state, mean = step(state, ones())
        np.testing.assert_allclose(float(mean), float(weights.mean()) - 0.2, rtol=1e-4)
        weights = state["params"]


@pytest.mark.parametrize("places", ["of the state", "of the arguments"])
def test_an_array_at_two_places_never_reaches_xla_as_one_that_is_donated(places: str) -> None:
    """XLA refuses it, but of eight devices some may have given their parts away by then."""
    step = autopar.parallelize(**OPTIONS)(lambda state, x: ({k: v - x for k, v in state.items()}, x.mean()))
    state, _ = step({"a": ones(), "b": ones()}, ones())
    state, _ = step(state, ones())
    assert step._dispatch.fast is not None, "the next call would take it"
    own = step._dispatch.fast.run.own_arguments
    assert own.flattened((state, ones())) is not None
    a, b = state["a"], state["b"]
    args = ({"a": a, "b": a}, ones()) if places == "of the state" else ({"a": a, "b": b}, a)
    assert own.flattened(args) is None, "it is dispatched as it is"
    state, mean = step(*args)
    expected = -2.0 if places == "of the state" else 0.0
    np.testing.assert_array_equal(state["a"], expected * np.ones(SHAPE))
    assert float(mean) == (1.0 if places == "of the state" else -1.0)
    np.testing.assert_array_equal(a, -np.ones(SHAPE))


def test_a_leaf_that_the_user_put_into_a_returned_state_stays() -> None:
    step = autopar.parallelize(**OPTIONS)(lambda state, x: ({k: v - x for k, v in state.items()}, x.mean()))
    state, _ = step({"a": ones(), "b": ones()}, ones())
    state, _ = step(state, ones())
    before = state["b"]
    mine = state["a"] = jax.device_put(3 * ones(), state["a"].sharding)
    after, _ = step(state, ones())
    assert not mine.is_deleted()
    assert before.is_deleted(), "it is autopar's"
    np.testing.assert_array_equal(after["a"], 2 * np.ones(SHAPE))


def test_a_state_that_the_user_drops_is_not_kept() -> None:
    step = autopar.parallelize(**OPTIONS)(lambda state, x: ({k: v - x for k, v in state.items()}, x.mean()))
    state, _ = step({"a": ones(), "b": ones(), "c": ones()}, ones())
    state, _ = step(state, ones())
    kept, dropped = state["a"], [weakref.ref(state[name]) for name in ("b", "c")]
    del state
    gc.collect()
    assert all(array() is None for array in dropped)
    step({"a": kept, "b": ones(), "c": ones()}, ones())
    assert kept.is_deleted(), "it is still known as autopar's"


def test_a_process_ends_quietly_while_its_state_is_alive() -> None:
    program = """
import jax.numpy as jnp, autopar
step = autopar.parallelize(cache=False)(lambda state, x: ({k: v - x for k, v in state.items()}, x.mean()))
state, _ = step({"a": jnp.ones(4), "b": jnp.ones(4)}, jnp.ones(4))
state, _ = step(state, jnp.ones(4))
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": str(Path(autopar.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "Exception ignored" not in done.stderr


def test_two_steps_that_take_turns_donate_one_state() -> None:
    first = autopar.parallelize(**OPTIONS)(lambda state, x: ({k: 2 * v - x for k, v in state.items()}, x.mean()))
    second = autopar.parallelize(**OPTIONS)(lambda state, x: ({k: 3 * v - x for k, v in state.items()}, x.mean()))
    state, _ = first({"a": ones(), "b": ones()}, ones())
    for _ in range(3):
        for step in (second, first):
            before = state
            state, _ = step(before, ones())
            assert all(array.is_deleted() for array in before.values())


def test_a_state_that_another_plan_has_laid_out() -> None:
    """As the last batch of an epoch, which is smaller: the state is moved from one layout to the other, and back."""
    pins = iter([jax.P("data"), jax.P(None, "data")])
    step = autopar.parallelize(**OPTIONS)(lambda w, x: (w + x.sum(), w.mean()))
    step._plans.options["pin"] = {"w": next(pins)}
    w, _ = step(ones(), np.ones((32, 64), np.float32))
    step._plans.options["pin"] = {"w": next(pins)}
    for rows in (16, 32, 16, 16, 32):
        before = float(w.mean())
        w, mean = step(w, np.ones((rows, 64), np.float32))
        assert float(mean) == before
        assert w.sharding.spec == (jax.P("data") if rows == 32 else jax.P(None, "data"))


def test_an_array_that_lies_on_one_device() -> None:
    step = autopar.parallelize(**OPTIONS, pin={"x": jax.P("data")})(lambda x: x.sum())
    for _ in range(2):
        assert float(step(jax.device_put(ones(), jax.devices()[3]))) == 4096


def test_a_method_and_a_partial_are_steps() -> None:
    class Trainer:
        rate = 0.5

        def step(self, w: Any, x: Any) -> Any:
            return w - self.rate * x, x.sum()

    w, _ = autopar.parallelize(Trainer().step, **OPTIONS)(ones(), ones())
    assert float(w.mean()) == 0.5
    scaled = autopar.parallelize(partial(lambda w, x, scale: w * x * scale, scale=3.0), **OPTIONS)
    assert float(scaled(ones(), ones()).mean()) == 3
