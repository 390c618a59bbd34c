"""TeraPipe, from the decorator, the command line and saved plans: steps in slices of tokens equal the steps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from several_processes import run
from test_token_programs import TOKENS, WORDS, _params, bidirectional, causal

import autopar
from autopar.cli.main import main
from autopar.errors import MicrobatchError, PlanFileError, ScheduleError
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedule.table import build, find
from autopar.pipeline.schedule.token_slices import TERAPIPE, terapipe
from benchmarks.pipeline.models import MODELS

EXAMPLES = 4


def _two_layers(params: Any, tokens: jax.Array, mix: Any = causal) -> Any:
    def loss_of(params: Any) -> jax.Array:
        x = params["words"][tokens[:, :-1]] + params["places"]
        for _ in range(2):
            x = jnp.tanh(mix(params, x))
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ params["out"]), tokens[:, 1:, None], axis=-1).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def _batch(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, WORDS, (EXAMPLES, TOKENS + 1), dtype=np.int32)


def make() -> Any:
    """A target of the command line."""
    return _two_layers, (jax.eval_shape(_params), jax.ShapeDtypeStruct((EXAMPLES, TOKENS + 1), "int32"))


def _planned(schedule: Any, **options: Any) -> PipelinePlan:
    options = {"num_devices": 2, "hardware": "cpu-host", "num_microbatches": 2, "stages": 2, "cache": False, **options}
    plan = autopar.plan(_two_layers, *make()[1], schedule=schedule, **options)
    assert isinstance(plan, PipelinePlan)
    return plan


def _alike(step: Any, plain: Any, state: Any, batches: Any, tolerance: float = 1e-5) -> None:
    here = there = state
    for seed in range(2):
        here, loss = step(here, batches(seed))
        there, expected = plain(there, batches(seed))
        for one, other in zip(jax.tree.leaves((here, loss)), jax.tree.leaves((there, expected)), strict=True):
            other = np.asarray(other)
            scale = float(np.abs(other).max(initial=0.1))
            np.testing.assert_allclose(np.asarray(one), other, rtol=tolerance, atol=tolerance * scale)


def test_a_plan_is_saved_and_runs(tmp_path: Path) -> None:
    plan = _planned("terapipe(4, 1, 2)", num_devices=len(jax.devices()))
    assert (plan.schedule, plan.token_slices, plan.num_microbatches) == ("terapipe", (4, 1, 2), 2)
    assert len(plan.slice_shares) == 3
    assert np.min(plan.slice_shares) > 0
    assert plan.tasks().num_microbatches == 6
    plan.save(tmp_path / "it.plan.json")
    loaded = PipelinePlan.from_json(plan.to_json())
    assert loaded == plan and loaded.timeline().makespan_s == plan.prediction.step_time_s
    step = autopar.parallelize(plan=tmp_path / "it.plan.json")(_two_layers)
    _alike(step, jax.jit(_two_layers), jax.device_get(_params()), _batch)
    assert isinstance(step.latest_plan, PipelinePlan) and step.latest_plan.token_slices == (4, 1, 2)


@pytest.mark.slow
def test_slices_are_chosen_with_microbatches() -> None:
    plan = _planned("terapipe", num_microbatches="auto")
    assert sum(plan.token_slices) == TOKENS and EXAMPLES % plan.num_microbatches == 0
    assert _planned("terapipe").num_microbatches == 2


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "it.plan.json")
    options = ["--devices", "2", "--hardware", "cpu-host", "--stages", "2", "--num-microbatches", "2", "--no-cache"]
    target = f"{Path(__file__).with_suffix('.py')}:make"
    assert main(["plan", target, *options, "--schedule", "terapipe(5,2)", "-o", file]) == 0
    assert main(["explain", file]) == 0
    assert "terapipe" in capsys.readouterr().out
    loaded = autopar.load_plan(file)
    assert isinstance(loaded, PipelinePlan) and loaded.token_slices == (5, 2)


def test_refusals() -> None:
    def ahead(params: Any, tokens: jax.Array) -> Any:
        return _two_layers(params, tokens, bidirectional)

    with pytest.raises(MicrobatchError, match=r"`dot_general` .*test_token_programs\.py:\d+ .*looks ahead"):
        autopar.plan(ahead, *make()[1], schedule="terapipe", stages=2, num_devices=2, hardware="cpu-host", cache=False)
    with pytest.raises(MicrobatchError, match=r"slices of \[4, 4\] tokens make 8 tokens, but the model has 7"):
        _planned("terapipe(4, 4)")
    with pytest.raises(ScheduleError, match=r"slices of \[4, 0\] tokens"):
        _planned("terapipe(4, 0)")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"token_slices": [4, 3]}, "slice_shares"),
        ({"token_slices": [4, 1, 0]}, "token_slices"),
        ({"schedule": "gpipe"}, "token_slices"),
        ({"slice_shares": [[0.5, 0.5], [0.5, 0.5], [0.0, -1.0]]}, "slice_shares"),
    ],
)
def test_inconsistent_files(change: dict[str, Any], text: str) -> None:
    body = _planned("terapipe(4, 1, 2)").to_json() | change
    with pytest.raises(PlanFileError, match=text):
        PipelinePlan.from_json(body)


def test_names() -> None:
    assert find("terapipe(3, 4)") is terapipe((3, 4)) and find("terapipe") is TERAPIPE
    assert find(terapipe((3, 4))) is terapipe((3, 4))
    with pytest.raises(ScheduleError, match="there is no schedule 'terapipe\\(\\)'"):
        find("terapipe()")
    assert build("terapipe(3, 4)", 2, 2).num_microbatches == 4


def _of(model: str, stages: int, schedule: str) -> None:
    training = MODELS[model]().of
    options = {"stages": stages, "num_microbatches": 2, "schedule": schedule}
    step = autopar.parallelize(**options)(training.step)
    state = jax.device_get(jax.jit(training.create_state)(jax.random.key(0)))
    _alike(step, jax.jit(training.step), state, training.make_batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stages", "schedule"),
    itertools.product(("GPT-2", "GPT-2 scanned"), (2, 4), ("terapipe(9, 6)", "terapipe(6, 4, 3, 2)")),
)
def test_gpt(model: str, stages: int, schedule: str) -> None:
    _of(model, stages, schedule)


def test_an_encoder_is_refused() -> None:
    training = MODELS["BART"]().of
    with pytest.raises(MicrobatchError, match=r"`dot_general` in `\S*encoder\S*` at \S*language\.py:\d+ .*looks ahead"):
        autopar.plan(
            *training.target[:1],
            *training.target[1],
            schedule="terapipe(6, 6)",
            stages=2,
            num_devices=2,
            hardware="cpu-host",
            cache=False,
        )


@pytest.mark.slow
def test_two_processes() -> None:
    """A stage in each."""
    ended = run("gpt_in_token_slices", processes=2, devices=1)
    assert [one.code for one in ended] == [0, 0], ended[-1].errors[-3000:]
    for one in ended:
        assert one.last["losses"] == pytest.approx(one.last["expected"], rel=1e-5)
        assert one.last["held"] and one.last["off"] <= 1e-5
