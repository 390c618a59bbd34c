"""The main promise: a step run by any plan computes what the unsharded step computes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import oracles
import programs
import pytest

import autopar
from autopar.plans.plan import Plan

STEPS = 3
CASES = {
    "mlp": lambda: programs.mlp(),
    "mlp-adamw": lambda: programs.mlp(optimizer="adamw"),
    "cnn_batchnorm": lambda: programs.cnn_batchnorm(),
    "cnn_batchnorm-adamw": lambda: programs.cnn_batchnorm(optimizer="adamw"),
    "gpt": lambda: programs.gpt(),
}


def run(program: programs.Program, step: Any, state: Any) -> tuple[Any, list[float]]:
    losses = []
    for seed in range(STEPS):
        state, loss = step(state, program.make_batch(seed))
        losses.append(float(loss))
    return state, losses


def assert_same(program: programs.Program, sharded: Any, plain: Any) -> None:
    (state, losses), (expected_state, expected_losses) = sharded, plain
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    tolerance = 1e-5 if program.optimizer_kind == "sgd" else 1e-3
    for got, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected_state.params), strict=True):
        expected = np.asarray(expected)
        difference = np.max(np.abs(np.asarray(got) - expected)) / np.max(np.abs(expected))
        assert difference <= tolerance


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[programs.Program, Any]:
    program = CASES[request.param]()
    plain = run(program, jax.jit(program.step), jax.jit(program.create_state)(jax.random.key(0)))
    return program, plain


def run_planned(program: programs.Program, **options: Any) -> tuple[Any, Plan]:
    step = autopar.parallelize(hardware="cpu-host", **options)(program.step)
    batch = program.make_batch(0)
    state = step.init(program.create_state, jax.random.key(0), batch=batch)
    return run(program, step, state), step.plan(jax.eval_shape(program.create_state, jax.random.key(0)), batch)


@pytest.mark.sampled(6)
@pytest.mark.contract
def test_the_chosen_plan_computes_the_same(case: tuple[programs.Program, Any]) -> None:
    program, plain = case
    sharded, _ = run_planned(program, num_devices=8)
    assert_same(program, sharded, plain)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("mesh", "seed"), [("8", 0), ("2x4", 1)])
def test_strategies_forced_at_random_compute_the_same(case: tuple[programs.Program, Any], mesh: str, seed: int) -> None:
    program, plain = case
    sharded, _ = run_planned(program, mesh=mesh, solver=oracles.RandomSolver(seed))
    assert_same(program, sharded, plain)


def sharding_kinds(tensor: Any) -> set[str]:
    """What a matrix is: replicated, split by row (the contracted dim), by column, or both."""
    row, column = tensor.sharding.dims
    kinds = {name for name, axes in (("row", row), ("column", column)) if axes}
    return kinds or {"replicated"}


def test_random_strategies_reach_every_kind_of_matrix_sharding() -> None:
    program = programs.mlp()
    kinds: set[str] = set()
    for seed in range(4):
        step = autopar.parallelize(mesh="2x4", hardware="cpu-host", solver=oracles.RandomSolver(seed))(program.step)
        plan = step.plan(*program.abstract_args())
        kinds |= {kind for tensor in plan.inputs if len(tensor.shape) == 2 for kind in sharding_kinds(tensor)}
    assert kinds == {"replicated", "row", "column"}


def test_state_is_donated_and_never_whole() -> None:
    program = programs.mlp(optimizer="adamw")
    step = autopar.parallelize(mesh="8", hardware="cpu-host", pin={"state/params/*/kernel": ("data",)})(program.step)
    batch = program.make_batch(0)
    state = step.init(program.create_state, jax.random.key(0), batch=batch)
    kernel = state.params["Dense_0"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (kernel.shape[0] // 8, kernel.shape[1])
    new_state, _ = step(state, batch)
    assert kernel.is_deleted()
    assert new_state.params["Dense_0"]["kernel"].sharding == kernel.sharding
