"""A first start compiles its two programs once each, makes `jax.jit`'s state, and reports progress on a terminal."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.api import prepared_step as prepared
from autopar.api import step_plans
from autopar.jax_interop import compilation
from autopar.system import progress as waiting

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def compiled() -> Iterator[Counter[str]]:
    """How often XLA compiled each program, by its name."""
    seen = Counter[str]()

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event == BACKEND_COMPILE:
            seen[str(about.get("fun_name"))] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.silu(nn.GroupNorm(4)(nn.Conv(8, (3, 3))(x)))
        return nn.Dense(3)(nn.Conv(16, (3, 3))(x).mean((1, 2)))


def create_net(key: jax.Array) -> Any:
    params = ConvNet().init(key, jnp.zeros((1, 4, 4, 3)))
    return params, optax.adamw(1e-3).init(params)


def train_net(state: Any, x: jax.Array) -> Any:
    params, inner = state
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(ConvNet().apply(p, x) ** 2))(params)  # pyright: ignore
    updates, inner = optax.adamw(1e-3).update(grads, inner, params)
    return (optax.apply_updates(params, updates), inner), loss


def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((8, 4, 4, 3), dtype=np.float32)


def test_a_first_start_compiles_each_program_once(
    compiled: Counter[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(waiting, "AFTER_S", 0.0)
    traces = Counter[str]()

    def create(key: jax.Array) -> Any:
        traces["create"] += 1
        return create_net(key)

    def train(state: Any, x: jax.Array) -> Any:
        traces["train"] += 1
        return train_net(state, x)

    x, key = images(), jax.random.key(3)
    expected = jax.jit(create_net)(key)
    step = autopar.parallelize(train, num_devices=8, hardware="cpu-host", cache=False)
    compiled.clear()
    state = step.init(create, key, x=x)
    made = jax.tree.map(np.asarray, state)
    assert [*compiled.values()] == [1, 1], "the state's and, beside it, the step's"
    state, loss = step(state, x)
    step(state, x)
    assert [*compiled.values()] == [1, 1], "the state's and the step's, and nothing else"
    assert traces["train"] == 1, "planning traces the step; the replay is run by its equations"
    assert traces["create"] == 1, "for its shapes and to be compiled"
    jax.tree.map(np.testing.assert_array_equal, made, expected)
    said = terminal.getvalue().splitlines()
    assert [line.split(" `")[0] for line in said] == [
        "autopar: planning",
        "autopar: making the state of",
        "autopar: compiling",
    ]
    assert np.isfinite(float(loss))


def test_init_compiles_the_step_too_however_its_batch_will_lie(compiled: Counter[str]) -> None:
    x = images()
    step = autopar.parallelize(train_net, num_devices=8, hardware="cpu-host", cache=False)
    state = step.init(create_net, jax.random.key(3), x=jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert compiled["jit(run)"] == 1
    put = step.shard_batch(x)
    compiled.clear()
    losses = []
    for batch in (x, put, x, x, put, put):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert not compiled["jit(run)"], "arrays of the host and those that lie on the mesh are one program's"
    assert step.report().peak_bytes
    expected, plain = jax.jit(create_net)(jax.random.key(3)), jax.jit(train_net)
    for loss in losses:
        expected, other = plain(expected, x)
        np.testing.assert_allclose(loss, other, rtol=1e-5)


def test_after_init_jax_still_names_the_operation_that_makes_a_nan() -> None:
    step = autopar.parallelize(train_net, num_devices=8, hardware="cpu-host", cache=False)
    with jax.debug_nans(True):
        state = step.init(create_net, jax.random.key(3), x=images())
        with pytest.raises(FloatingPointError, match="conv_general_dilated"):
            step(state, np.full_like(images(), np.nan))


@pytest.mark.slow
def test_what_the_compiler_refuses_is_told_by_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise jax.errors.JaxRuntimeError("out of memory")

    step = autopar.parallelize(train_net, num_devices=8, hardware="cpu-host", cache=False)
    key, x = jax.random.key(3), images()
    step.abstract_state(create_net, key, x=x)
    with monkeypatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", refused)
        patched.setattr(prepared, "compiled_to_draw", lambda jitted, args: jitted)
        state = step.init(create_net, key, x=x)
    assert np.isfinite(float(step(state, x)[1])), "compiled then"


@pytest.mark.slow
@pytest.mark.contract
def test_random_numbers_are_jits_whatever_the_key_and_their_bits() -> None:
    def draw(key: jax.Array, old: jax.Array) -> Any:
        one, *few = jax.random.split(key, 4)
        many = jax.vmap(lambda key: jax.random.truncated_normal(key, -2, 2, (33, 5)))(jax.random.split(one, 7))
        looped = jax.lax.map(lambda key: jax.random.uniform(key, (9,)), jax.random.split(few[0], 3))
        words = jax.random.bits(few[1], (65,), "uint8"), jax.random.bits(few[1], (130,), "uint16")
        return (
            many,
            looped,
            words,
            jax.random.permutation(few[2], 70),
            jax.random.normal(old, (300,)),
            jax.random.key_data(one),
        )

    for impl in ("threefry2x32", "rbg"):
        args = (jax.random.key(5, impl=impl), jax.random.PRNGKey(6))
        made = compilation.compiled_to_draw(jax.jit(draw), args)(*args)
        jax.tree.map(np.testing.assert_array_equal, made, jax.jit(draw)(*args))


@pytest.mark.parametrize("shown", [True, False])
def test_only_a_terminal_is_written_to(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal() if not shown else io.StringIO()  # a terminal that is not to be written to; and none
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(waiting, "AFTER_S", 0.0)
    with waiting.announced("compiling", shown=shown):
        pass
    progress = waiting.announced_by_progress("planning")
    assert (progress is None) == shown
    assert not stream.getvalue()


def test_planning_tells_its_stage_once_and_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    quick = waiting.announced_by_progress("planning `f`")
    assert quick is not None
    quick("solve", 0.1)
    assert not terminal.getvalue()
    monkeypatch.setattr(waiting, "AFTER_S", 0.0)
    quick("solve", 0.2)
    quick("compare", 0.4)
    assert terminal.getvalue() == "autopar: planning `f`, solve …\n"
    assert step_plans.announced_by_progress is waiting.announced_by_progress
