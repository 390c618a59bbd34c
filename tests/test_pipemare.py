"""PipeMare: updates by a scaled step size, and backward passes that read weights moved back along their velocity."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from async_reference import numpy_stream, reads_of
from test_async_pipeline import WIDTH, batches_of, decorated, layered_step, run, streamed, weights_of

import autopar
from autopar.errors import OptionError, ScheduleError, StepSignatureError
from autopar.pipeline.partition.streamed_time import lateness
from autopar.pipeline.schedule.asynchronous import PIPEMARE
from autopar.pipeline.schedule.corrections import Corrections, find_consistency


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("p", "m", "annealing", "decay"), [(4, 1, 20, 0.3), (3, 2, 0, 0.5), (5, 1, 1000, None), (5, 2, 12, 0.1)]
)
def test_weights_are_those_of_numpy(p: int, m: int, annealing: int, decay: float | None) -> None:
    with jax.enable_x64(True):
        weights, batches = weights_of(p, np.float64), batches_of(16, 8, np.float64)
        state = (weights, optax.sgd(0.1).init(weights))
        consistency = f"pipemare({annealing}, {decay})"
        whole, leaves = streamed(layered_step(optax.sgd(0.1)), state, batches[0], consistency, p, m)
        losses, found = run(whole.start(leaves(batches[0])), [leaves(batch) for batch in batches])
        reads = reads_of("pipemare", p, m)
        expected, expected_losses = numpy_stream(weights, batches, reads, m, 0.1, annealing, decay)
        plain, _ = numpy_stream(weights, batches, reads, m, 0.1)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
    for one, other in zip(found[:p], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert np.abs(expected[0] - plain[0]).max() > 1e-6, "the corrections have an effect"


def test_the_factor_of_step_sizes_is_the_published_one() -> None:
    """tau^-p with p = 1 - min(k / K, 1); delays are p - 1 - s for one microbatch per update, and means for more."""
    assert [late for late, _ in lateness(PIPEMARE, 4, 1)] == [3, 2, 1, 0]
    assert lateness(PIPEMARE, 3, 2)[0] == (1, 1)
    corrections = Corrections(annealing=100)
    assert [corrections.scale(4, k) for k in (0, 50, 100, 200)] == [0.25, 0.5, 1, 1]
    assert [corrections.scale(delay, 0) for delay in (0, 0.5, 1)] == [1, 1, 1]
    assert corrections.kept(2) == pytest.approx(0.135**0.5)
    assert corrections.kept(0) is None
    assert Corrections(annealing=0).scale(4, 0) == 1


def test_a_whole_step_has_the_numbers_of_one_that_is_not_scaled() -> None:
    """After annealing, and without the second correction, PipeMare is AMPNet, bit for bit."""
    step, state, batches = decorated("ampnet", stages=4, num_microbatches=1)
    losses = [float(loss) for loss in step.stream(state, batches)]
    ended = step.drain()
    annealed, state, _ = decorated("pipemare(5, None)", stages=4, num_microbatches=1)
    annealed.num_updates = 5
    assert [float(loss) for loss in annealed.stream(state, batches)] == losses
    jax.tree.map(np.testing.assert_array_equal, annealed.drain(), ended)
    assert annealed.num_updates == 5 + len(batches)
    assert annealed.plans[-1].schedule == "ampnet"


@pytest.mark.slow
def test_annealing_goes_on_after_draining() -> None:
    """A run that drains, and one that is resumed from what was saved with its number of updates, have the same numbers."""
    step, state, batches = decorated("pipemare(12, 0.3)", stages=4, num_microbatches=1)
    list(step.stream(state, batches[:5]))
    saved = jax.tree.map(np.asarray, step.drain())
    losses = [float(loss) for loss in step.stream(saved, batches[5:])]
    ended = step.drain()
    resumed, _, _ = decorated("pipemare(12, 0.3)", stages=4, num_microbatches=1)
    resumed.num_updates = 5
    assert [float(loss) for loss in resumed.stream(saved, batches[5:])] == losses
    with pytest.raises(StepSignatureError, match="was set while batches are in flight"):
        resumed.num_updates = 0
    jax.tree.map(np.testing.assert_array_equal, resumed.drain(), ended)
    with pytest.raises(StepSignatureError, match="was set to -1: give a number of updates"):
        resumed.num_updates = -1
    again, _, _ = decorated("pipemare(12, 0.3)", stages=4, num_microbatches=1)
    assert [float(loss) for loss in again.stream(saved, batches[5:])] != losses


def with_other_state(state: Any, batch: Any) -> Any:
    """Weights, twice the weights, a teacher and a factor that the loss reads; gradients decide about the factor."""

    def loss_of(weights: Any) -> Any:
        h = batch
        for weight in weights:
            h = jnp.tanh(h @ weight)
        return jnp.square(h - batch).mean() + 1e-3 * state["factor"] * jnp.square(h @ state["teacher"]).mean()

    weights = state["weights"]
    loss, gradients = jax.value_and_grad(loss_of)(weights)
    is_finite = jnp.isfinite(gradients[-1]).all()
    weights = [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]
    factor = jnp.where(is_finite, state["factor"] * 2, state["factor"] / 2)
    teacher = 0.5 * state["teacher"] + 0.5 * weights[-1]
    return {"weights": weights, "twice": [2 * w for w in weights], "teacher": teacher, "factor": factor}, loss


def test_only_weights_are_corrected() -> None:
    """What is computed from corrected weights sees them; a factor that is doubled at each update is doubled."""
    weights = weights_of(4)
    state = {"weights": weights, "twice": weights, "teacher": weights[0], "factor": np.float32(1)}
    step = autopar.parallelize(
        with_other_state, stages=2, num_microbatches=1, num_devices=8, consistency="pipemare(50)", cache=False
    )
    for _ in step.stream(state, [x for x, _ in batches_of(6, 8)]):
        pass
    ended = step.drain()
    assert float(ended["factor"]) == 2**6
    for one, twice in zip(ended["weights"], ended["twice"], strict=True):
        np.testing.assert_array_equal(2 * np.asarray(one), twice)


def with_copies(state: Any, batch: Any) -> Any:
    """Weights in bfloat16, computed from copies in float32."""
    weights, copies = state

    def loss_of(weights: Any) -> Any:
        h = batch
        for weight in weights:
            h = jnp.tanh(h.astype(weight.dtype) @ weight)
        return jnp.square(h.astype(jnp.float32) - batch).mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    copies = [w - 0.1 * g.astype(jnp.float32) for w, g in zip(copies, gradients, strict=True)]
    return ([w.astype(jnp.bfloat16) for w in copies], copies), loss


def test_weights_with_a_copy_in_a_higher_precision_are_refused() -> None:
    state = [w.astype(jnp.bfloat16) for w in weights_of(4)], weights_of(4)
    for consistency in ("pipemare", "pipemare(10, None)"):
        step = autopar.parallelize(
            with_copies, stages=2, num_microbatches=1, num_devices=8, consistency=consistency, cache=False
        )
        with pytest.raises(
            ScheduleError, match=r"the weights .* are computed at .*test_pipemare.py.* from other state"
        ):
            next(step.stream(state, [x for x, _ in batches_of(1, 8)]))


def test_the_plan_has_velocities_and_corrected_weights() -> None:
    """Of the weights that backward passes read: not of the first layer's, nor on the last stage, which is never late."""
    step, state, batches = decorated("pipemare", stages=4, num_microbatches=1)
    next(step.stream(state, batches))
    kept, size = step.plans[-1].weight_versions, 4 * WIDTH * WIDTH
    assert [one.velocity_bytes for one in kept] == [0, size, size, 0]
    assert [one.corrected_bytes for one in kept] == [0, size, size, 0]
    assert [one.copies for one in kept] == [1, 1, 1, 1]
    text = str(autopar.explain(step.plans[-1])).replace("\n             ", " ")
    assert (
        "velocities of the weights take 0 B, 256 B, 256 B, 0 B, and weights corrected for backward passes 0 B" in text
    )


@pytest.mark.parametrize(
    ("consistency", "message"),
    [
        ("pipemare(10, 2.0)", "its decay 2.0: give a number between 0 and 1, or None"),
        ("pipemare(-1)", "its annealing -1: give a number of updates, 0 for none"),
        ("pipemare(1, 0.1, 3)", "cannot be read: give"),
        ("pipemare(a)", "cannot be read: give"),
        ("pipemare(1", "cannot be read: give"),
        ("2bw(3)", "'2bw' takes no numbers"),
    ],
)
def test_what_is_refused(consistency: str, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        decorated(consistency)
    assert find_consistency("pipemare()") == find_consistency("pipemare(1000, 0.135)")
