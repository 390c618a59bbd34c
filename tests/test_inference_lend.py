"""Test that a train step runs in the gaps of an engine, and changes neither its tokens nor its own numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import is_idle, opened, write_model

import autopar
from autopar.api.microbatched_step import MicrobatchedStep
from autopar.errors import InferenceError, MicrobatchError, OptionError
from autopar.inference import Engine
from autopar.inference.schedule.requests import Shape, Update
from autopar.inference.schedule.slack import Slack
from autopar.inference.serve.runner import Runner

OPTIMIZER = optax.adam(0.01)


def step(state: Any, batch: jax.Array) -> Any:
    """A step whose loss, largest error and error of each example are results."""
    params, moments = state

    def loss_of(params: Any) -> Any:
        errors = ((jnp.tanh(batch @ params["w"]) @ params["v"]) ** 2).mean(1)
        return errors.mean(), errors

    (loss, errors), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), (loss, errors.max(), errors)


def first_state() -> Any:
    keys = jax.random.split(jax.random.key(0))
    params = {"w": jax.random.normal(keys[0], (8, 16)), "v": jax.random.normal(keys[1], (16, 4))}
    return params, OPTIMIZER.init(params)


def batches(num: int) -> list[np.ndarray]:
    return [np.random.default_rng(number).normal(size=(16, 8)).astype(np.float32) for number in range(num)]


def trained(num: int) -> tuple[Any, list[Any]]:
    state, results, plain = first_state(), list[Any](), jax.jit(step)
    for batch in batches(num):
        state, rest = plain(state, batch)
        results.append(rest)
    return state, results


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6), found, expected)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return opened(write_model(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture
def engine(compiled: Engine) -> Engine:
    return Engine(Runner(compiled.runner.served, compiled.runner.layout, compiled.runner._params), compiled.tokenizer)


@pytest.fixture(scope="module")
def in_four() -> MicrobatchedStep:
    return MicrobatchedStep(step, 4, num_devices=1, hardware="cpu-host", cache=False)


# -- microbatches ------------------------------------------------------------------------------


def test_a_step_in_microbatches_gives_what_the_step_gives(in_four: MicrobatchedStep) -> None:
    state, kinds = first_state(), list[Any]()
    expected, results = trained(3)
    for batch, result in zip(batches(3), results, strict=True):
        running = in_four.begin(state, batch)
        while running.next_kind is not None:
            kinds.append(running.next_kind)
            running.run()
        state, rest = running.result
        assert_close(rest, result)
    assert kinds == (["microbatch"] * 4 + ["update"]) * 3
    assert_close(state, expected)


@pytest.mark.slow
def test_a_step_in_microbatches_equals_gradient_accumulation_to_the_bit() -> None:
    """Also on several devices, and in a narrow dtype."""
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    accumulated = autopar.parallelize(step, num_microbatches=4, mesh=one, hardware="cpu-host")
    divided = MicrobatchedStep(step, 4, num_devices=1, hardware="cpu-host")
    on_four = MicrobatchedStep(step, 2, mesh="data=4", hardware="cpu-host")
    state = first_state()
    for made in (divided, on_four):
        running = made.begin(state, batches(1)[0])
        while running.next_kind is not None:
            running.run()
        if made is divided:
            jax.tree.map(np.testing.assert_array_equal, running.result, accumulated(first_state(), batches(1)[0]))
        else:
            assert_close(running.result, jax.jit(step)(state, batches(1)[0]))


def test_steps_that_cannot_be_cut_are_refused(in_four: MicrobatchedStep) -> None:
    with pytest.raises(MicrobatchError):
        in_four.begin(first_state(), np.zeros((6, 8), np.float32))
    with pytest.raises(OptionError, match="`num_microbatches` is 0"):
        MicrobatchedStep(step, 0)
    with pytest.raises(OptionError, match="`stages` is no option of a step in microbatches"):
        MicrobatchedStep(step, 2, stages=2)


# -- slack -------------------------------------------------------------------------------------


def update(ended: bool = False, **num_new: int) -> Update:
    names, slots = list(num_new), np.arange(len(num_new), dtype=np.int32)
    num = np.array(list(num_new.values()), np.int32)
    return Update(
        slots, slots, np.ones((len(names), 8), np.int32), num, names, dict.fromkeys([0], "stop") if ended else {}
    )


def test_work_runs_where_no_request_exceeds_its_guard() -> None:
    """Steps take 1 s, the guard is 1.5 s: after n tokens there is room for n / 2 s."""
    slack = Slack(1.5)
    assert slack.may_run("work", (), 0, 0.0), "nobody is there"
    assert not slack.may_run("work", (), 1, 0.0), "a request waits"
    slack.note_time(Shape(), 1.0)
    slack.note_time("work", 2.0)
    for second in range(1, 9):
        slack.note_update(update(a=1), float(second))
        assert slack.may_run("work", ("a",), 0, float(second)) == (second >= 4)
        assert not slack.may_run("unknown", ("a",), 0, float(second))
        assert not slack.may_run("work", ("a", "prompt"), 0, float(second)), "it has no token yet"
        assert not slack.may_run("work", ("a",), 1, float(second))
    slack.note_time("work", 9.0)
    assert not slack.may_run("work", ("a",), 0, 8.0), "the largest of the last times counts"
    slack.note_update(update(ended=True, a=1), 9.0)
    slack.note_update(update(a=1), 20.0)
    assert not slack.may_run("work", ("a",), 0, 20.0), "another request of that name"


# -- lend --------------------------------------------------------------------------------------


def test_a_step_trains_while_an_engine_serves(engine: Engine, in_four: MicrobatchedStep) -> None:
    """It runs between requests and, under a generous guard, beside them; the tokens are those without."""
    prompts = [[number, 5, 6] for number in range(6)]
    alone = [each.tokens for each in engine.generate(prompts, max_tokens=30)]
    training = engine.lend(in_four, first_state(), batches(3), tpot_s=60.0)
    asked = [engine.submit(prompt, max_tokens=30) for prompt in prompts]
    assert [each.result().tokens for each in asked] == alone
    assert training.num_microbatches
    while engine.step():
        pass
    expected, results = trained(3)
    assert (training.num_steps, training.num_microbatches) == (3, 12)
    assert_close(training.results, results)
    assert_close(training.stop(), expected)
    assert is_idle(engine)


def test_without_room_a_step_waits_until_it_is_finished(engine: Engine, in_four: MicrobatchedStep) -> None:
    training = engine.lend(in_four, first_state(), batches(2), tpot_s=1e-9)
    asked = engine.submit([1, 2, 3], max_tokens=30)
    while engine.stats.num_iterations < 5:
        engine.step()
    assert not training.num_microbatches
    with pytest.raises(InferenceError, match="the devices are lent already"):
        engine.lend(in_four, first_state(), batches(1))
    assert_close(training.finish(), trained(2)[0])
    assert len(asked.result().tokens) == 30
    assert not engine.step()


def test_a_training_that_stops_or_fails_leaves_the_engine_alone(engine: Engine, in_four: MicrobatchedStep) -> None:
    training = engine.lend(in_four, first_state(), batches(9))
    for _ in range(7):
        assert engine.step()
    assert_close(training.stop(), trained(1)[0])
    assert not engine.step()

    def broken() -> Iterator[np.ndarray]:
        yield from batches(1)
        raise OSError("the disk is gone")

    training = engine.lend(in_four, first_state(), broken())
    for _ in range(5):
        assert engine.step()
    assert len(engine.submit([1], max_tokens=4).result().tokens) == 4
    with pytest.raises(OSError, match="the disk is gone"):
        training.finish()
    assert_close(training.state, trained(1)[0])
    with pytest.raises(InferenceError, match="tpot_s is 0: give a positive number"):
        engine.lend(in_four, first_state(), batches(1), tpot_s=0)
    assert engine.lend(in_four, first_state(), []).finish() is not None
    engine.sleep()
    with pytest.raises(InferenceError, match="the engine sleeps"):
        engine.lend(in_four, first_state(), batches(1))


@pytest.mark.slow
def test_a_plain_function_is_lent_on_the_engines_mesh(engine: Engine, tmp_path: Path) -> None:
    training = engine.lend(step, first_state(), batches(1), num_microbatches=2, hardware="cpu-host")
    assert_close(training.finish(), trained(1)[0])
