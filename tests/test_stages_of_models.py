"""Models that nobody wrote for stages train in them as without (`benchmarks/pipeline/models.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from several_processes import run

import autopar
from benchmarks.pipeline.models import MODELS, WIDE, Case, Model, apart, by_sgd, errors, trained, unsharded
from benchmarks.zoo.patches_and_branches import mlp_mixer

TOLERANCE = 1e-5
#: Of a small mixer, whose float32 sums are 1.6e-5 off on a CPU without AVX-512.
OF_SMALL = 2e-5
#: Of a U-Net in float32, which is compared in float64 too. A bias before a normalization has no gradient but rounding: 1e-8 of
#: all changes, of which a thousandth counts.
ROUNDING = 3e-5


def tiny() -> Model:
    """One block of MLP-Mixer."""
    return Model(by_sgd(mlp_mixer(width=8, tokens=4, blocks=1, patch=4, batch=4, size=8, classes=3)))


def test_a_small_mixer_and_its_saved_plan(tmp_path: Path) -> None:
    """On four devices each, which divide none of its microbatches."""
    model, case = tiny(), Case(2, 2, "1f1b", 8)
    losses, parameters, step = errors(model, case)
    assert max(losses, parameters) < OF_SMALL
    assert len(step.latest_plan.stages) == 2
    step.latest_plan.save(tmp_path / "mixer.plan.json")
    state, found = trained(model, autopar.parallelize(model.of.step, plan=tmp_path / "mixer.plan.json"))
    there, expected = trained(model, unsharded(model.of.step, case))
    assert max(apart(found, state, expected, there, model.state())) < OF_SMALL


@pytest.fixture
def in_float64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def check(name: str, case: Case, tolerance: float) -> None:
    losses, parameters, step = errors(MODELS[name](), case)
    assert len(step.latest_plan.stages) == case.stages and step.latest_plan.schedule == case.schedule
    assert losses < tolerance and parameters < tolerance


def cases(*, wide: bool) -> list[tuple[str, Case]]:
    return [(name, case) for name, of in MODELS.items() if (name in WIDE) == wide for case in of().cases]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), cases(wide=False))
def test_models(name: str, case: Case) -> None:
    check(name, case, ROUNDING if f"{name} in float64" in MODELS else TOLERANCE)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("name", "case"), cases(wide=True))
def test_models_in_float64(name: str, case: Case) -> None:
    check(name, case, TOLERANCE)


@pytest.mark.slow
def test_a_mixer_in_two_processes() -> None:
    ended = run("mixer_in_stages", processes=2, devices=1)
    assert [one.code for one in ended] == [0, 0], ended[-1].errors[-3000:]
    for one in ended:
        assert one.last["losses"] == pytest.approx(one.last["expected"], rel=1e-5)
        assert one.last["off"] < 1e-5
    assert {name for one in ended for name in one.last["held"]} == set(ended[0].last["all"])
    assert all(one.last["held"] for one in ended)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("microbatches", "own"), [(1, False), (4, True)])
def test_normalized_layers_run_by_the_plan_that_was_made(microbatches: int, own: bool) -> None:
    """What is rematerialized together crosses the layers of the plan: both give one program."""

    def step(params: list[jax.Array], batch: dict[str, jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            h = batch["x"]
            for kernel in params:
                h = h @ kernel
                h = jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-2))
            return jnp.mean((h - batch["x"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value

    params = [0.4 * jax.random.normal(key, (8, 8)) for key in jax.random.split(jax.random.key(0), 4)]
    batch = {"x": jax.random.normal(jax.random.key(1), (8, 8))}
    case = Case(2, microbatches, "1f1b", 2, own)
    _, expected = unsharded(step, case)(params, batch)
    _, loss = autopar.parallelize(step, **case.options())(params, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
