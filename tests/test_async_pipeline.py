"""Asynchronous pipelines run: batches stream through stages whose tasks read versions of the weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from async_reference import numpy_stream, reads_of, sequential
from pipelines import pipelined
from several_processes import run as run_processes

import autopar
from autopar.errors import OptionError, PlanFileError, ScheduleError, StepSignatureError
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.run.calls_and_moves import Call
from autopar.pipeline.run.stream import Stream, StreamedPipeline
from autopar.pipeline.run.stream_listing import dispatched
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.corrections import find_consistency
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.versions import alive_during, versions_read
from autopar.report.explain_stages import explain_stages

RULES = ("pipedream", "vertical", "2bw", "ampnet", "pipemare")
WIDTH = 8
Step = Callable[[Any, Any], Any]


def layered_step(optimizer: optax.GradientTransformation, dtype: Any = None) -> Step:
    """A chain of tanh layers, one weight each, whose matmuls run in `dtype`."""

    def step(state: Any, batch: Any) -> Any:
        weights, moments = state
        x, y = batch

        def loss_of(weights: Any) -> Any:
            h = x
            for weight in weights:
                h = jnp.tanh(h.astype(dtype or h.dtype) @ weight.astype(dtype or h.dtype)).astype(x.dtype)
            return jnp.square(h - y).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    return step


def weights_of(num_layers: int, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [0.5 * rng.normal(size=(WIDTH, WIDTH)).astype(dtype) for _ in range(num_layers)]


def batches_of(count: int, size: int, dtype: Any = np.float32) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    each = (rng.normal(size=(size, WIDTH)).astype(dtype) for _ in range(count))
    return [(x, np.tanh(0.3 * x[:, ::-1])) for x in each]


def streamed(
    step: Step, state: Any, batch: Any, consistency: str, p: int, m: int, **options: Any
) -> tuple[StreamedPipeline, Callable[[Any], list[Any]]]:
    """The step in p stages, and the leaves of its arguments for a batch."""
    _, pipeline = pipelined(step, (state, batch), num_stages=p, num_microbatches=m, **options)
    num_state = len(jax.tree.leaves(state))
    leaves = lambda batch: jax.tree.leaves((state, batch))  # noqa: E731
    positions = range(num_state, len(leaves(batch)))
    names = [str(n) for n in range(len(leaves(batch)))]
    found, quickly = find_consistency(consistency), {"xla_backend_optimization_level": 0}
    whole = StreamedPipeline(pipeline, found.kind, m, positions, names, quickly, found.corrections)
    return whole, leaves


def run(stream: Stream, each: list[list[Any]]) -> tuple[list[Any], list[Any]]:
    losses = [stream.push(leaves) for leaves in each]
    _, state = stream.drain()
    return [next(one for one in loss if one is not None) for loss in losses if loss is not None], state


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("m", [1, 2, 8])
def test_weights_are_those_of_numpy(rule: str, p: int, m: int) -> None:
    if rule == "2bw" and m < p:
        m = 8
    with jax.enable_x64(True):
        weights, batches = weights_of(p, np.float64), batches_of(30, 8, np.float64)
        step = layered_step(optax.sgd(0.1))
        state = (weights, optax.sgd(0.1).init(weights))
        whole, leaves = streamed(step, state, batches[0], rule, p, m)
        losses, found = run(whole.start(leaves(batches[0])), [leaves(batch) for batch in batches])
        numbers = (1000, 0.135) if rule == "pipemare" else (0, None)
        expected, expected_losses = numpy_stream(weights, batches, reads_of(rule, p, m), m, 0.1, *numbers)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
        for one, other in zip(found[:p], expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("p", range(2, 9))
def test_weights_are_bit_for_bit_those_of_the_pieces_run_in_sequence(rule: str, p: int) -> None:
    """200 updates by Adam with a schedule of the learning rate."""
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, 150))
    step, weights, m = layered_step(optimizer), weights_of(p), 8 if rule == "2bw" else 1
    state, batches = (weights, optimizer.init(weights)), batches_of(200, 8)
    whole, leaves = streamed(step, state, batches[0], rule, p, m)
    each = [leaves(batch) for batch in batches]
    losses, found = run(whole.start(each[0]), each)
    expected_losses, expected = sequential(whole, reads_of(rule, p, m), each)
    assert losses[-1] < 0.9 * losses[0]
    assert [float(one) for one in losses] == [float(one) for (one,) in expected_losses]
    assert len(expected) == len(jax.tree.leaves(state))
    for (position, _), value in expected.items():
        np.testing.assert_array_equal(found[position], value, strict=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rule", "options", "dtype"),
    [
        ("pipedream", {"mesh": "2"}, None),
        ("ampnet", {"mesh": "2", "option": 1}, None),
        ("vertical", {}, jnp.bfloat16),
        ("2bw", {"mesh": "2"}, jnp.bfloat16),
        ("pipemare(10, 0.3)", {"mesh": "2", "option": 1}, jnp.bfloat16),
    ],
)
def test_stages_may_be_sharded_rematerialized_or_in_low_precision(rule: str, options: Any, dtype: Any) -> None:
    """Clipping by the norm of each gradient and weight decay included."""
    optimizer = optax.chain(optax.clip_by_block_rms(0.01), optax.adamw(1e-2))
    step, weights, p, m = layered_step(optimizer, dtype), weights_of(6), 3, 4
    state, batches = (weights, optimizer.init(weights)), batches_of(12, 16)
    whole, leaves = streamed(step, state, batches[0], rule, p, m, **options)
    each = [leaves(batch) for batch in batches]
    losses, found = run(whole.start(each[0]), each)
    expected_losses, expected = sequential(whole, reads_of(rule.split("(")[0], p, m), each)
    assert [float(one) for one in losses] == [float(one) for (one,) in expected_losses]
    for (position, _), value in expected.items():
        np.testing.assert_array_equal(found[position], value, strict=True)


# -- versions and registers --------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_registers_hold_the_versions_of_the_table(rule: str) -> None:
    """At every task, the registers of a stage's weights are the versions that are alive, and each has its bytes."""
    p, m = 4, 4 if rule == "2bw" else 2
    optimizer, weights = optax.adam(1e-2), weights_of(2 * p)
    state, batches = (weights, optimizer.init(weights)), batches_of(1, 8)
    whole, _ = streamed(layered_step(optimizer), state, batches[0], rule, p, m)
    listed, count = whole.program.horizon, len(whole.program.horizon.batches)
    schedule = build(rule, p, m, num_updates=count + 2 * p)
    alive = alive_during(schedule, versions_read(schedule, ASYNCHRONOUS[rule].reads, m))
    # The second weight of each stage; no backward pass reads the first one of the first stage.
    slots = {s: whole.streamed.stages[s].arguments[2 * s + 1, None] for s in range(p)}
    moments = {s: whole.streamed.stages[s].arguments[2 * p + 1 + 2 * s + 1, None] for s in range(p)}
    held = set(listed.names[: whole.streamed.arguments.num_registers])
    compared = 0
    for n, steps in enumerate(listed.batches[: whole.program.filled + 1]):
        for one in steps:
            if isinstance(one, Call) and one.task is not None:
                s = one.stage
                found = {version for (base, version) in held if base == (s, slots[s], None)}
                assert found == set(alive[one.task]), one.task
                assert sum(base == (s, moments[s], None) for base, _ in held) == 1
                compared += n == whole.program.filled
            held |= {listed.names[register] for register in one.writes}
            held -= {listed.names[register] for register in one.frees}
    assert compared == p * (2 * m + 1)


def test_the_store_stays_as_large_as_the_pipeline() -> None:
    optimizer, weights = optax.sgd(0.1), weights_of(4)
    state, batches = (weights, optimizer.init(weights)), batches_of(40, 8)
    whole, leaves = streamed(layered_step(optimizer), state, batches[0], "pipedream", 4, 1)
    stream, sizes = whole.start(leaves(batches[0])), []
    for batch in batches:
        stream.push(leaves(batch))
        sizes.append(len(stream.store))
    assert len(set(sizes[whole.program.filled :])) == 1
    stream.drain()
    assert not stream.store


def test_tasks_are_dispatched_in_the_order_of_the_schedule() -> None:
    for p, m, count in ((2, 1, 5), (4, 3, 4), (5, 8, 2)):
        tasks = [task for batch in dispatched(p, m, count) for task in batch]
        orders = build("pipedream", p, m, num_updates=count).orders
        assert tuple(tuple(task for task in tasks if task.stage == s) for s in range(p)) == orders
        ended: set[Any] = set()
        needs = build("pipedream", p, m, num_updates=count).needs
        for task in tasks:
            assert ended.issuperset(needs[task])
            ended.add(task)


# -- the decorator -----------------------------------------------------------------------------


def decorated(rule: str = "pipedream", optimizer: Any = None, **options: Any) -> tuple[Any, Any, list[Any]]:
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    weights = weights_of(4)
    step = autopar.parallelize(
        layered_step(optimizer),
        **{"stages": 2, "num_microbatches": 2, "num_devices": 8, "cache": False, "consistency": rule, **options},
    )
    return step, (weights, optimizer.init(weights)), batches_of(9, 16)


def test_a_stream_from_the_decorator() -> None:
    """A stream that is continued equals one that is not; a new one after `drain` begins with the state; the plan says what is
    kept; a saved plan runs."""
    step, state, batches = decorated()
    losses = [float(loss) for loss in step.stream(state, batches[:4])]
    losses += [float(loss) for loss in step.stream(None, iter(batches[4:]))]
    ended = step.drain()
    assert int(ended[1][0].count) == len(batches) == len(losses)
    again, state, _ = decorated()
    assert [float(loss) for loss in again.stream(state, batches)] == losses
    jax.tree.map(np.testing.assert_array_equal, again.drain(), ended)
    plan = step.plans[-1]
    assert [one.copies for one in plan.weight_versions] == [2, 1]
    assert [(one.least_delay, one.most_delay) for one in plan.weight_versions] == [(0, 1), (0, 0)]
    weights = list(zip(plan.inputs[:4], plan.input_parts[:4], strict=True))
    held = [sum(tensor.num_bytes for tensor, (part,) in weights if part.stage == n) for n in (0, 1)]
    assert [one.num_bytes for one in plan.weight_versions] == held
    assert "by stage, 2, 1 copies of the weights" in str(autopar.explain(plan)).replace("\n             ", " ")


def test_a_saved_plan_streams(tmp_path: Any) -> None:
    step, state, batches = decorated("2bw")
    losses = [float(loss) for loss in step.stream(state, batches)]
    ended = step.drain()
    step.plans[-1].save(tmp_path / "plan.json")
    assert PipelinePlan.from_json(step.plans[-1].to_json()) == step.plans[-1]
    optimizer = optax.adam(1e-2)
    by_plan = autopar.parallelize(layered_step(optimizer), plan=str(tmp_path / "plan.json"), consistency="2bw")
    assert [float(loss) for loss in by_plan.stream(state, batches)] == losses
    jax.tree.map(np.testing.assert_array_equal, by_plan.drain(), ended)
    other = autopar.parallelize(layered_step(optimizer), plan=str(tmp_path / "plan.json"), consistency="vertical")
    with pytest.raises(OptionError, match=re.escape("`consistency` is 'vertical', but the given plan is for '2bw'")):
        next(other.stream(state, batches))


def test_resuming_from_a_drained_state_is_exact() -> None:
    """A run that drains, saves and goes on equals one that is started from what was saved."""
    step, state, batches = decorated("vertical")
    list(step.stream(state, batches[:5]))
    saved = jax.tree.map(np.asarray, step.drain())
    losses = [float(loss) for loss in step.stream(saved, batches[5:])]
    ended = step.drain()
    fresh, _, _ = decorated("vertical")
    assert [float(loss) for loss in fresh.stream(saved, batches[5:])] == losses
    jax.tree.map(np.testing.assert_array_equal, fresh.drain(), ended)


@pytest.mark.parametrize(
    ("field", "value"),
    [("copies", 0), ("kept_bytes", -1.0), ("least_delay", 9), ("most_delay", "many"), ("velocity_bytes", None)],
)
def test_a_damaged_plan_is_refused(field: str, value: Any, saved_plan: dict[str, Any]) -> None:
    data = copy.deepcopy(saved_plan)
    data["weight_versions"][0][field] = value
    with pytest.raises(PlanFileError, match="weight_versions"):
        PipelinePlan.from_json(data)
    del data["weight_versions"]
    with pytest.raises(PlanFileError, match="weight_versions"):
        PipelinePlan.from_json(data)


@pytest.fixture(scope="module")
def saved_plan() -> dict[str, Any]:
    step, state, batches = decorated("pipemare")
    return step.plan(state, batches[0]).to_json()


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one() -> None:
    programs, rules = Path(__file__).parent / "stream_programs.py", ("pipedream", "2bw", "pipemare(12, 0.3)")
    (alone,) = run_processes("streams", *rules, processes=1, devices=2, programs=programs)
    ended = run_processes("streams", *rules, processes=2, devices=1, programs=programs)
    assert [one.code for one in ended] == [0, 0], ended[-1].errors[-3000:]
    for rule in rules:
        assert all(one.last[rule]["losses"] == alone.last[rule]["losses"] for one in ended)
        parts = [one.last[rule]["here"] for one in ended]
        assert all(parts), "each process has a stage"
        assert {**parts[0], **parts[1]} == alone.last[rule]["here"]


def test_a_report_is_of_batches_of_streams() -> None:
    step, state, _ = decorated("2bw")
    filling = next(iter(batches_of(1, 16)))
    list(step.stream(state, [filling] * 4))
    with pytest.raises(StepSignatureError, match=r"has streamed too few batches to report on: stream at least 9 of"):
        step.report()
    list(step.stream(None, [filling] * 8))
    report = step.report()
    assert report.num_steps == 12 - 5 - 1
    assert report.step_time_s > 0
    assert report.versions == step.plans[-1].weight_versions
    assert "6 batches of a stream, after filling" in str(report)
    assert "by stage, 2, 2 copies of the weights" in str(report)
    assert report.to_json()["versions"][0]["copies"] == 2
    step.drain()
    list(step.stream(state, [filling] * 3))
    assert step.report().num_steps == report.num_steps, "a stream that is not filled keeps the last measurement"
    step.drain()


def test_the_page_of_a_plan_has_its_versions(tmp_path: Any) -> None:
    step, state, batches = decorated("pipemare")
    plan = step.plan(state, batches[0])
    explained = explain_stages(plan)
    autopar.write_report(plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    for text in ("Versions of the weights", "updates late", "all versions", "velocities", "corrected weights"):
        assert text in page
    assert all(sum(s for _, s in use.phases) + use.idle_s <= explained.shown_s * 1.001 for use in explained.submeshes)


def test_one_batch_alone_is_a_synchronous_step() -> None:
    step, state, batches = decorated()
    ended, loss = step(state, batches[0])
    expected, expected_loss = jax.jit(layered_step(optax.adam(1e-2)))(state, batches[0])
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), ended, expected)
    # A step that was called, or planned, before streams like another.
    losses = [float(one) for one in step.stream(state, batches)]
    step.drain()
    other, _, _ = decorated()
    assert [float(one) for one in other.stream(state, batches)] == losses


def test_an_iterator_of_batches_that_fails_loses_nothing() -> None:
    step, state, batches = decorated()
    expected = [float(loss) for loss in step.stream(state, batches)]
    ended = step.drain()

    def failing() -> Iterator[Any]:
        yield from batches[:3]
        raise OSError("the file is gone")

    losses: list[float] = []
    with pytest.raises(OSError, match="the file is gone"):
        losses.extend(float(loss) for loss in step.stream(state, failing()))
    losses = expected[:3] + [float(loss) for loss in step.stream(None, batches[3:])]
    assert losses == expected
    jax.tree.map(np.testing.assert_array_equal, step.drain(), ended)


def test_a_stream_without_batches_leaves_the_state() -> None:
    step, state, batches = decorated()
    assert not list(step.stream(state, []))
    assert step.drain() is state
    with pytest.raises(StepSignatureError, match="has nothing to drain"):
        step.drain()
    assert not list(step.stream(state, []))
    assert len(list(step.stream(state, batches))) == len(batches)
    assert step.drain() is not state


def test_a_stream_that_was_made_and_not_begun_is_refused_after_another() -> None:
    step, state, batches = decorated()
    first, second = step.stream(state, batches), step.stream(state, batches)
    next(first)
    with pytest.raises(StepSignatureError, match=r"the last stream of .* was not drained"):
        next(second)
    step.drain()
    with pytest.raises(StepSignatureError, match="was drained during the iteration"):
        next(first)


def test_state_without_gradients_belongs_to_the_batch() -> None:
    """A key that each step splits, and a count: every pass of a batch reads the same, on every stage, however late."""

    def step(state: Any, batch: Any) -> Any:
        weights, key, count = state
        key, own = jax.random.split(key)

        def loss_of(weights: Any) -> Any:
            h = batch
            for n, weight in enumerate(weights):
                h = jnp.tanh(h @ weight) * jax.random.bernoulli(jax.random.fold_in(own, n), 0.9, (1, WIDTH))
            return jnp.square(h - batch).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        rate = 0.1 / (1 + count)
        return ([w - rate * g for w, g in zip(weights, gradients, strict=True)], key, count + 1), {
            "loss": loss,
            "rate": rate,
        }

    state = (weights_of(4), jax.random.key(3), jnp.int32(0))
    batches = [x for x, _ in batches_of(8, 8)]
    run = autopar.parallelize(step, stages=2, num_microbatches=1, num_devices=8, consistency="pipedream", cache=False)
    found = list(run.stream(state, batches))
    weights, key, count = run.drain()
    assert int(count) == 8
    np.testing.assert_allclose([float(one["rate"]) for one in found], [0.1 / n for n in range(1, 9)], rtol=1e-6)
    expected = jax.random.key(3)
    for _ in batches:
        expected = jax.random.split(expected)[0]
    assert (jax.random.key_data(key) == jax.random.key_data(expected)).all()
    assert len(weights) == 4


@pytest.mark.slow
def test_the_rule_is_chosen_within_a_bound() -> None:
    step, state, batches = decorated("auto", max_delay=1, stages=4, num_microbatches=4)
    losses = [float(loss) for loss in step.stream(state, batches)]
    step.drain()
    (plan,) = step.plans
    assert max(one.most_delay for one in plan.weight_versions) <= 1
    notes = "\n".join(plan.notes)
    assert f"consistency='auto' took {plan.schedule}" in notes
    assert re.search(r"2bw, 4 microbatches: .* a step, .*, 1 updates late", notes)
    named, _, _ = decorated(plan.schedule, stages=4, num_microbatches=4)
    assert [float(loss) for loss in named.stream(state, batches)] == losses
    with pytest.raises(
        ScheduleError, match=r"has gradients at most 1 updates late: pipedream, 1 microbatches: .* 3 updates late"
    ):
        alone, state, batches = decorated("auto", max_delay=1, stages=4, num_microbatches=1)
        next(alone.stream(state, batches))


def masked_loss(weights: Any, batch: Any) -> Any:
    """A scan over layers; the mean over examples that count."""
    h, _ = jax.lax.scan(lambda h, weight: (h + jnp.tanh(h @ weight), None), batch["x"], weights)
    return (jnp.square(h - batch["x"][:, ::-1]).mean(-1) * batch["counts"]).sum() / batch["counts"].sum()


def updated(state: Any, loss: Any, gradients: Any) -> Any:
    """Adam, an average of the weights, the best loss, and what never changes."""
    updates, moments = optax.adam(1e-2).update(gradients, state["moments"], state["weights"])
    weights = optax.apply_updates(state["weights"], updates)
    average = 0.9 * state["average"] + 0.1 * jnp.asarray(weights)
    best = jnp.minimum(state["best"], loss)
    return {"weights": weights, "moments": moments, "average": average, "best": best, "fixed": state["fixed"]}


@pytest.mark.slow
def test_2bw_is_a_step_whose_gradients_are_one_update_late() -> None:
    """However it is cut: layers of a scan on several stages, a denominator from the batch, state of other kinds, an
    argument that nothing reads, and results of several stages."""

    def step(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(masked_loss)(state["weights"], batch)
        norms = jnp.sqrt(jnp.square(gradients).sum(axis=(1, 2)))
        return updated(state, loss, gradients), {"loss": loss, "norms": norms}

    weights = np.stack(weights_of(8)) / 4
    state = {"weights": weights, "moments": optax.adam(1e-2).init(weights), "average": weights}
    state |= {"best": np.float32(9.0), "fixed": np.arange(5, dtype=np.float32)}
    counts = np.arange(16) % 3 > 0
    batches = [
        {"x": x, "counts": np.roll(counts, n), "unread": np.float32(n)} for n, (x, _) in enumerate(batches_of(9, 16))
    ]
    run = autopar.parallelize(step, stages=2, num_microbatches=4, consistency="2bw", num_devices=8, cache=False)
    found = list(run.stream(state, batches))
    ended = run.drain()
    late, now = state, state
    for batch, one in zip(batches, found, strict=True):
        loss, gradients = jax.value_and_grad(masked_loss)(late["weights"], batch)
        late, now = now, updated(now, loss, gradients)
        np.testing.assert_allclose(one["loss"], loss, rtol=1e-4)
        np.testing.assert_allclose(one["norms"], jnp.sqrt(jnp.square(gradients).sum(axis=(1, 2))), rtol=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, atol=1e-4), ended, now)


# -- what is refused ---------------------------------------------------------------------------


def shared_step(state: Any, batch: Any) -> Any:
    def loss_of(state: Any) -> Any:
        h = batch
        for weight in (state[0], *state[1:], state[0]):
            h = jnp.tanh(h @ weight)
        return jnp.square(h - batch).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return [w - 0.1 * g for w, g in zip(state, gradients, strict=True)], loss


def refused_global_norm() -> Any:
    step, state, batches = decorated(optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    return next(step.stream(state, batches))


def refused_shared() -> Any:
    step = autopar.parallelize(shared_step, stages=2, num_devices=8, consistency="ampnet", cache=False)
    return next(step.stream(weights_of(4), [x for x, _ in batches_of(1, 16)]))


def undrained() -> Iterator[Any]:
    step, state, batches = decorated()
    next(step.stream(state, batches))
    return step.stream(state, batches)


def other_shape() -> Any:
    step, state, batches = decorated()
    return list(step.stream(state, [*batches, *batches_of(1, 8)]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (refused_global_norm, ScheduleError, "to another stage once per step, as for clipping by the global norm"),
        (refused_shared, ScheduleError, "do not share parameters between stages"),
        (undrained, StepSignatureError, ".step` was not drained"),
        (other_shape, StepSignatureError, "batch 9 of the stream has other shapes than the first"),
        (lambda: decorated()[0].drain(), StepSignatureError, ".step` has nothing to drain"),
        (lambda: decorated()[0].stream(None, []), StepSignatureError, "continues a stream, and nothing is in flight"),
        (lambda: decorated(schedule="gpipe"), OptionError, "an asynchronous pipeline has a schedule of its own"),
        (lambda: decorated(stages=1), OptionError, "an asynchronous pipeline: give the number of `stages` too"),
        (lambda: decorated("bsp"), OptionError, "pipelines have 'pipedream', 'vertical', '2bw', 'ampnet'"),
        (lambda: decorated(stage=2), OptionError, "stage"),
        (
            lambda: decorated("auto"),
            OptionError,
            "`max_delay` is None: with `consistency='auto'`, give the most updates",
        ),
    ],
)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_an_interrupted_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state, batches = decorated()
    stream = step.stream(state, batches)
    next(stream)
    monkeypatch.setattr(Call, "run", lambda self, values: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.undo()
    with pytest.raises(StepSignatureError, match="the batches in flight are lost"):
        step.drain()
    assert len([float(loss) for loss in step.stream(state, batches)]) == len(batches)


@pytest.mark.slow
def test_the_pictures_of_the_guide_are_those_of_plans() -> None:
    from scripts.draw_asynchronous import FOLDER, pictures

    drawn = pictures()
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(drawn) == set(ASYNCHRONOUS)
    for name, svg in drawn.items():
        assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == svg, "run scripts/draw_asynchronous.py"
        assert ", reads version 2, submesh 3" in svg
