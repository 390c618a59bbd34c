"""Steps run by data-parallel workers under a consistency policy: `parallelize(step, consistency=...)`."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import AutoparError, MeshError, MicrobatchError, OptionError, StepSignatureError, StoreError
from autopar.versions.consistency.table import POLICIES
from autopar.versions.traffic import parameter_server_bytes

BATCH, FEATURES, HIDDEN = 8, 6, 5


def new_state(optimizer: optax.GradientTransformation) -> dict[str, Any]:
    one, two = jax.random.split(jax.random.key(0))
    weights = {
        "first": jax.random.normal(one, (FEATURES, HIDDEN)) / 3,
        "second": jax.random.normal(two, (HIDDEN,)) / 3,
    }
    return {"weights": weights, "optimizer": optimizer.init(weights), "count": jnp.zeros((), jnp.int32)}


def step_with(
    optimizer: optax.GradientTransformation, loss_of: Callable[..., Any] | None = None
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A train step as users write them."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(weights: Any) -> Any:
            predicted = jnp.tanh(batch["x"] @ weights["first"]) @ weights["second"]
            return jnp.mean((predicted - batch["y"]) ** 2) if loss_of is None else loss_of(predicted, batch)

        value, gradients = jax.value_and_grad(loss)(state["weights"])
        changes, optimizer_state = optimizer.update(gradients, state["optimizer"], state["weights"])
        weights = optax.apply_updates(state["weights"], changes)
        return {"weights": weights, "optimizer": optimizer_state, "count": state["count"] + 1}, value

    return step


def batch_of(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    return map(batch_of, range(count))


def workers(step: Callable[..., Any], consistency: Any, **options: Any) -> Any:
    return autopar.parallelize(step, consistency=consistency, cache=False, **{"workers": 4, "num_devices": 4} | options)


def assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


# -- BSP is the synchronous step -----------------------------------------------------------------


def test_bsp_has_the_bits_of_gradient_accumulation() -> None:
    step = step_with(CLIPPED)
    by_workers, plain = workers(step, "bsp"), jax.jit(step)
    mesh = jax.make_mesh((1,), ("data",))
    accumulated = autopar.parallelize(step, mesh=mesh, num_microbatches=4, cache=False)
    one = two = three = new_state(CLIPPED)
    for batch in batches(4):
        one, loss = by_workers(one, batch)
        two, loss_accumulated = accumulated(two, batch)
        three, loss_plain = plain(three, batch)
        assert loss == loss_accumulated
        np.testing.assert_allclose(loss, loss_plain, rtol=1e-6)
    assert_same(one, two)
    assert_same(one, three, 1e-6)


def test_bsp_has_the_bits_of_a_sum_in_the_order_of_workers() -> None:
    optimizer = optax.sgd(0.1, momentum=0.9)
    by_workers = workers(step_with(optimizer), "bsp", workers=2, num_devices=2)

    @jax.jit
    def gradient(weights: Any, batch: Any) -> Any:
        def share(weights: Any) -> Any:
            predicted = jnp.tanh(batch["x"] @ weights["first"]) @ weights["second"]
            return jnp.sum((predicted - batch["y"]) ** 2) / BATCH

        return jax.grad(share)(weights)

    @jax.jit
    def update(state: Any, total: Any) -> Any:
        changes, optimizer_state = optimizer.update(total, state["optimizer"], state["weights"])
        weights = optax.apply_updates(state["weights"], changes)
        return {"weights": weights, "optimizer": optimizer_state, "count": state["count"] + 1}

    add = jax.jit(functools.partial(jax.tree.map, operator.add))
    mine = expected = new_state(optimizer)
    for batch in batches(5):
        mine, _ = by_workers(mine, batch)
        shares = [{name: array[worker::2] for name, array in batch.items()} for worker in range(2)]
        expected = update(expected, add(*(gradient(expected["weights"], share) for share in shares)))
    assert_same(mine, expected)


def test_a_stream_under_bsp_is_its_calls() -> None:
    step = step_with(CLIPPED)
    called, streamed = workers(step, "bsp", num_devices=2, workers=2), workers(step, "bsp", num_devices=2, workers=2)
    state, losses = new_state(CLIPPED), []
    for batch in batches(3):
        state, loss = called(state, batch)
        losses.append(float(loss))
    assert [float(loss) for loss in streamed.stream(new_state(CLIPPED), batches(3))] == losses
    assert_same(streamed.drain(), state)


def test_a_mean_over_marked_examples_is_that_of_the_whole_batch() -> None:
    def marked(predicted: Any, batch: Any) -> Any:
        return jnp.sum((predicted - batch["y"]) ** 2 * batch["marks"]) / jnp.sum(batch["marks"])

    optimizer = optax.adam(1e-2)
    step = step_with(optimizer, marked)
    by_workers, plain = workers(step, "bsp", workers=2, num_devices=2), jax.jit(step)
    one = two = new_state(optimizer)
    marks = np.array([1, 0, 1, 1, 0, 1, 0, 1], np.float32)
    for batch in batches(3):
        one, loss = by_workers(one, batch | {"marks": marks})
        two, expected = plain(two, batch | {"marks": marks})
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_same(one, two, 1e-5)


def test_values_of_examples_are_in_the_order_of_the_batch() -> None:
    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
        return weights - 0.1 * gradient, x @ weights

    weights, x = jnp.ones(3), np.arange(12, dtype=np.float32).reshape(4, 3)
    new, predicted = workers(step, "bsp", workers=2, num_devices=2)(weights, x)
    assert_same((new, predicted), jax.jit(step)(weights, x), 1e-6)
    with pytest.raises(MicrobatchError, match=r"a value for each example \(`dot_general`.*use \"bsp\""):
        next(workers(step, "async", workers=2, num_devices=2).stream(weights, [x]))


def test_workers_of_several_devices_are_planned_like_any_step() -> None:
    step = step_with(CLIPPED)
    by_workers, plain = workers(step, "bsp", mesh="2x2", workers=2, num_devices=None), jax.jit(step)
    one = two = new_state(CLIPPED)
    for batch in batches(2):
        one, _ = by_workers(one, batch)
        two, _ = plain(two, batch)
    assert_same(one, two, 1e-6)


# -- all policies --------------------------------------------------------------------------------

#: For each entry of the table, a policy and the number of results of 6 batches; None if it depends on who is faster.
NAMES = {
    "bsp": ("bsp", 6),
    "ssp": ("ssp(1)", 12),
    "async": ("async", 12),
    "every": ("every(2, ssp(1))", 6),
    "discard": ("discard(0)", None),
    "backup": ("backup(1)", 6),
    "partial": ("partial(1, 3)", 6),
    "largest": ("largest(40)", 6),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_trains(name: str) -> None:
    policy, count = NAMES[name]
    step = workers(step_with(optax.sgd(0.05)), policy, workers=2, num_devices=2)
    losses = [float(loss) for loss in step.stream(new_state(optax.sgd(0.05)), batches(6))]
    state = step.drain()
    assert np.all(np.isfinite(losses)) and losses
    assert count is None or len(losses) == count
    assert int(state["count"]) == len(losses)
    report = step.report()
    assert report.num_versions == len(losses) and report.policy == step.policy.name
    assert report.bound is None or report.most_stale <= report.bound
    assert f"2 under {step.policy.name}" in str(report) and report.to_json()["workers"][1]["pushed_bytes"] > 0


def test_several_iterations_are_the_step_on_their_examples() -> None:
    optimizer = optax.sgd(0.1)
    step = workers(step_with(optimizer), "every(2, bsp)", workers=2, num_devices=2)
    losses = list(step.stream(new_state(optimizer), batches(4)))
    both = [jax.tree.map(lambda *parts: np.concatenate(parts), batch_of(n), batch_of(n + 1)) for n in (0, 2)]
    expected = new_state(optimizer)
    for batch, loss in zip(both, losses, strict=True):
        expected, value = jax.jit(step_with(optimizer))(expected, batch)
        np.testing.assert_allclose(loss, value, rtol=1e-6)
    assert_same(step.drain()["weights"], expected["weights"], 1e-6)


def test_bytes_are_those_of_a_parameter_server() -> None:
    step = workers(step_with(optax.sgd(0.1)), "ssp(2)", workers=2, num_devices=2)
    list(step.stream(new_state(optax.sgd(0.1)), batches(5)))
    num_bytes = 4 * (FEATURES * HIDDEN + HIDDEN)
    expected = parameter_server_bytes([num_bytes], 2).worker_bytes // 2
    for row in step.report().workers:
        assert row.pulled_bytes == 5 * expected
        assert row.pushed_bytes == 5 * (expected + 4 + 4)  # the loss, and the number of shares


# -- the whole step on workers -------------------------------------------------------------------


@pytest.mark.parametrize(
    "outer",
    [
        pytest.param(optax.sgd(1.0), id="sgd", marks=pytest.mark.slow),
        pytest.param(optax.sgd(0.7, momentum=0.9, nesterov=True), id="diloco"),
    ],
)
def test_local_steps_average_weights(outer: optax.GradientTransformation) -> None:
    inner = optax.adam(1e-2)
    step = workers(step_with(inner), "every(2, bsp)", outer=outer, workers=2, num_devices=2)
    losses = list(step.stream(new_state(inner), batches(6)))
    assert len(losses) == 6
    plain = jax.jit(step_with(inner))
    weights = new_state(inner)["weights"]
    states, outer_state = [new_state(inner), new_state(inner)], outer.init(weights)
    for first in (0, 2, 4):
        states = [{**state, "weights": weights} for state in states]
        for number in (first, first + 1):
            made = [
                plain(state, {name: array[worker::2] for name, array in batch_of(number).items()})
                for worker, state in enumerate(states)
            ]
            states = [state for state, _ in made]
            np.testing.assert_allclose(losses[number], sum(loss for _, loss in made) / 2, rtol=1e-5)
        gradients = jax.tree.map(lambda old, *new: old - sum(new) / 2, weights, *(state["weights"] for state in states))
        changes, outer_state = outer.update(gradients, outer_state, weights)
        weights = optax.apply_updates(weights, changes)
    state = step.drain()
    assert_same(state["weights"], weights, 1e-5)
    assert_same(state["optimizer"], states[0]["optimizer"], 1e-5)
    assert int(state["count"]) == 6


def test_unfinished_periods_are_pushed() -> None:
    inner = optax.sgd(0.1)
    step = workers(step_with(inner), "every(4, async)", outer=optax.sgd(1.0), workers=2, num_devices=2)
    assert len(list(step.stream(new_state(inner), batches(1)))) == 2
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (step.drain(), new_state(inner))), strict=True))


# -- what a policy costs --------------------------------------------------------------------------


def test_the_plan_says_what_the_policy_costs(tmp_path: Path) -> None:
    step = workers(step_with(optax.sgd(0.1)), "ssp(3)", hardware="h100-sxm")
    plan = step.plan(new_state(optax.sgd(0.1)), batch_of(0))
    num_bytes = 4 * (FEATURES * HIDDEN + HIDDEN)
    assert (plan.pulled_bytes, plan.pushed_bytes) == (num_bytes, num_bytes + 8)
    assert plan.server_bytes == 4 * (2 * num_bytes + 8)
    cost = {(one.policy, one.straggler): one for one in plan.costs}
    assert cost["ssp(3)", 5.0].batches_per_s > 1.5 * cost["bsp", 5.0].batches_per_s
    assert cost["ssp(3)", 5.0].waiting < cost["bsp", 5.0].waiting and cost["async", 5.0].waiting == 0
    assert cost["ssp(3)", 5.0].most_stale == 3
    assert "4 workers on 1 x h100-sxm each, under ssp(3)" in str(autopar.explain(plan))
    autopar.write_report(plan, tmp_path / "plan.html")
    assert "What the policy costs, predicted" in (tmp_path / "plan.html").read_text()
    with pytest.raises(OptionError, match=r"plan\.parts"):
        autopar.write_report(plan, tmp_path / "plan.html", verification="file.json")


def test_the_page_of_a_run_has_a_histogram_for_each_worker(tmp_path: Path) -> None:
    step = workers(step_with(optax.sgd(0.1)), "ssp(1)", workers=2, num_devices=2)
    list(step.stream(new_state(optax.sgd(0.1)), batches(4)))
    report = step.report()
    assert report.plan.policy == "ssp(1)" and report.to_json()["costs"][0]["policy"] == "ssp(1)"
    autopar.write_report(report, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    for worker, row in enumerate(report.workers):
        assert f"Staleness of worker {worker}: mean {row.mean_staleness:.1f} clocks" in text
        for value, count in row.staleness.items():
            assert f"{count} of 4 reads with the slowest worker {value} clocks behind" in text


# -- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bsp", "async"])
def test_a_stream_that_is_left_is_drained(policy: str) -> None:
    step, others = workers(step_with(optax.sgd(0.1)), policy, workers=2, num_devices=2), set(threading.enumerate())
    for _ in step.stream(new_state(optax.sgd(0.1)), batches(100)):
        break
    with pytest.raises(StepSignatureError, match=r"was not drained: take its state from `.*drain\(\)`"):
        step.stream(new_state(optax.sgd(0.1)), batches(1))
    first = int(step.drain()["count"])
    assert 1 <= first <= 4
    with pytest.raises(StepSignatureError, match="nothing to drain"):
        step.drain()
    assert not [thread for thread in {*threading.enumerate()} - others if thread.name.startswith("worker ")]


@pytest.mark.parametrize("policy", ["bsp", "ssp(1)"])
def test_errors_of_batches_reach_the_caller(policy: str) -> None:
    def broken() -> Iterator[Any]:
        yield batch_of(0)
        raise OSError("the disk is gone")

    step = workers(step_with(optax.sgd(0.1)), policy, workers=2, num_devices=2)
    with pytest.raises(OSError, match="the disk is gone"):
        list(step.stream(new_state(optax.sgd(0.1)), broken()))
    assert int(step.drain()["count"]) >= 1


@pytest.mark.parametrize("policy", ["bsp", "async"])
def test_batches_of_other_shapes_are_refused(policy: str) -> None:
    step = workers(step_with(optax.sgd(0.1)), policy, workers=2, num_devices=2)
    smaller = {name: array[:4] for name, array in batch_of(1).items()}
    with pytest.raises(StepSignatureError, match="batch 1 of the stream has other shapes than the first"):
        list(step.stream(new_state(optax.sgd(0.1)), [batch_of(0), smaller]))
    assert int(step.drain()["count"]) >= 1


def test_a_call_with_another_state_begins_anew() -> None:
    step = workers(step_with(optax.sgd(0.1)), "bsp", workers=2, num_devices=2)
    first, _ = step(new_state(optax.sgd(0.1)), batch_of(0))
    step(first, batch_of(1))
    again, _ = step(new_state(optax.sgd(0.1)), batch_of(0))
    assert_same(again, first)
    assert list(step.stream(again, iter(()))) == []


def test_a_stream_without_batches_returns_its_state() -> None:
    step = workers(step_with(optax.sgd(0.1)), "async", workers=2, num_devices=2)
    state = new_state(optax.sgd(0.1))
    assert list(step.stream(state, iter(()))) == []
    assert step.drain() is state


# -- refusals ------------------------------------------------------------------------------------


def centered(state: Any, batch: Any) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w - jnp.mean(batch @ w)) ** 2))(state)
    return state - gradient, loss


REFUSED: dict[str, tuple[Callable[[], Any], type[AutoparError], str]] = {
    "stages": (
        lambda: workers(centered, "bsp", stages=2),
        OptionError,
        "`stages`=2: pipelines have 'pipedream', 'vertical'",
    ),
    "plan": (lambda: workers(centered, "bsp", plan="plan.json"), OptionError, "leave `plan` out"),
    "option": (lambda: workers(centered, "bsp", pin={}), OptionError, "`pin` does not go with `consistency`"),
    "policy": (lambda: workers(centered, "bps"), StoreError, "Did you mean 'bsp'"),
    "outer": (lambda: workers(centered, "bsp", outer=0.7), OptionError, "`outer` is a float"),
    "number": (lambda: workers(centered, "bsp", workers=0).division, OptionError, "`workers` is 0"),
    "devices": (lambda: workers(centered, "bsp", workers=3).division, MeshError, "cannot be divided among 3 workers"),
    "too few": (lambda: workers(centered, "backup(4)").division, StoreError, "needs more than 4 workers, not 4"),
    "call": (
        lambda: workers(centered, "ssp(1)")(jnp.ones(3), jnp.ones((4, 3))),
        StepSignatureError,
        r"no state after each batch.*centered.stream\(state, batches\)",
    ),
    "batch": (
        lambda: workers(centered, "bsp")(jnp.ones(3), jnp.ones((6, 3))),
        MicrobatchError,
        "6 examples .* cannot be split into 4 equal shares of workers: choose one of 2, 3, 6",
    ),
    "statistics": (
        lambda: workers(centered, "bsp")(jnp.ones(3), jnp.ones((4, 3))),
        MicrobatchError,
        "a reduction over all 4 examples, back to single examples",
    ),
    "no state": (
        lambda: workers(lambda w, x: jnp.sum(x @ w), "bsp")(jnp.ones(3), jnp.ones((4, 3))),
        StepSignatureError,
        "returns none of its arguments updated",
    ),
    "no report": (lambda: workers(centered, "bsp").report(), StepSignatureError, "has not run yet"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_is_refused(name: str) -> None:
    make, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        make()
