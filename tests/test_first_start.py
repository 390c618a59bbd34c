"""A first start compiles each of its two programs once, makes the state of `jax.jit`, and says on a terminal what it waits for."""

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
from autopar import step_plans, waiting

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
