"""Microbatches that are dealt to processes give the results of the step as written, whatever the deal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from several_processes import run

import autopar
from autopar.api.elastic.run import ElasticRun
from autopar.errors import BatchError, MicrobatchError, StepSignatureError
from autopar.membership.records import Place
from benchmarks.faults import fsdp

PROGRAMS = Path(__file__).parent / "dealt_programs.py"


def run_of(*counts: int, rank: int = 0) -> ElasticRun:
    return ElasticRun(Place(1, rank, len(counts), "", None, (), 10, 5.0, microbatches=counts), None)


@pytest.mark.slow
def test_one_member_has_all_microbatches_and_the_losses_of_the_step() -> None:
    """With dropout, a typed key in the state, and FSDP over the devices."""
    run = run_of(4)
    step, create_state, shapes = fsdp.model()
    state = run.restore_or_init(step, create_state, jax.random.key(0), batch=shapes)
    plain, _ = fsdp.as_written()
    expected, jitted = create_state(jax.random.key(0)), jax.jit(plain)
    batch: Any = None
    for batch in run.batches(lambda start: fsdp.batches(start, 3, run.rows(fsdp.BATCH))):
        given = dict(zip("xy", (np.asarray(one.own) for one in batch.values()), strict=True))
        expected, wanted = jitted(expected, given)
        state, loss = step(state, batch)
        assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    for one, other in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(expected["params"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(StepSignatureError, match="dealt to members by their speed"):
        for _ in range(6):
            state, _ = step(state, batch)
        step.report()


def test_rows_are_those_of_the_own_microbatches() -> None:
    rows = [np.asarray(run_of(3, 1, 2, rank=rank).rows(12)).tolist() for rank in range(3)]
    assert rows == [[0, 6, 1, 7, 2, 8], [3, 9], [4, 10, 5, 11]]
    with pytest.raises(BatchError, match=r"16 examples cannot be divided into 6 microbatches .*choose one of 4, 8, 16"):
        run_of(3, 1, 2).rows(16)


def create(rng: jax.Array) -> Any:
    return {"w": jax.random.normal(rng, (8, 4))}


def losses_of(function: Any, counts: tuple[int, ...] = (4,)) -> list[float]:
    """The losses of three steps, dealt; checked against the step as written."""
    run, step = run_of(*counts), autopar.parallelize(function, cache=False)
    x = jax.ShapeDtypeStruct((16, 8), "float32")
    mask = jax.ShapeDtypeStruct((16,), "bool")
    state = run.restore_or_init(step, create, jax.random.key(0), batch={"x": x, "mask": mask})
    expected, found = create(jax.random.key(0)), []

    def batches(start: int) -> Any:
        for number in range(start, 3):
            rng = np.random.default_rng(number)
            yield {"x": rng.normal(size=(16, 8)).astype(np.float32), "mask": rng.random(16) < 0.4}

    for batch, given in zip(run.batches(batches), batches(0), strict=False):
        expected, wanted = jax.jit(function)(expected, given)
        state, loss = step(state, batch)
        found.append(float(loss))
        assert found[-1] == pytest.approx(float(wanted), rel=1e-5)
    return found


def test_a_mean_over_marked_examples() -> None:
    """The number of marked examples is one of the whole batch, before the gradients."""

    def step(state: Any, batch: Any) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            each = jnp.mean((batch["x"] @ w) ** 2, 1) * batch["mask"]
            return jnp.sum(each) / jnp.sum(batch["mask"])

        loss, grad = jax.value_and_grad(loss_of)(state["w"])
        return {"w": state["w"] - 0.1 * grad}, loss

    assert len(losses_of(step)) == 3


def test_a_maximum_and_narrow_sums() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            return jnp.mean((batch["x"] @ w).astype(jnp.bfloat16).astype(jnp.float32) ** 2)

        loss, grad = jax.value_and_grad(loss_of)(state["w"])
        return {"w": state["w"] - 0.1 * grad / jnp.max(jnp.abs(batch["x"]))}, loss

    assert len(losses_of(step)) == 3


def test_what_cannot_be_dealt_is_refused() -> None:
    def each(state: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad}, (loss, jnp.mean((batch["x"] @ state["w"]) ** 2, 1))

    with pytest.raises(MicrobatchError, match="returns a value for each example"):
        losses_of(each)

    def mean(state: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad}, loss

    with pytest.raises(BatchError, match="16 examples cannot be divided into 5 microbatches"):
        losses_of(mean, (5,))
    step = autopar.parallelize(mean, cache=False)
    run = run_of(4)
    state = run.restore_or_init(step, create, jax.random.key(0), batch={"x": jax.ShapeDtypeStruct((16, 8), "float32")})
    assert state["w"].shape == (8, 4)
    with pytest.raises(
        BatchError, match=r"`batch/x` has shape \(12, 8\), and the plan takes \(16, 8\), the rows of this"
    ):
        step.shard_batch({"x": np.zeros((12, 8), np.float32)})
    with pytest.raises(BatchError, match="is int32, and the plan was made for float32"):
        step.shard_batch({"x": np.zeros((16, 8), np.int32)})


@pytest.mark.slow
def test_pipelines_are_not_dealt() -> None:
    step, create_state, shapes = fsdp.in_stages(2)
    with pytest.raises(StepSignatureError, match="planned as a pipeline, whose microbatches go through all stages"):
        run_of(4).restore_or_init(step, create_state, jax.random.key(0), batch=shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "devices"), [((5, 2, 1), 1), ((3, 1), 2)])
def test_several_processes(counts: tuple[int, ...], devices: int) -> None:
    ended = run("dealt", json.dumps(counts), processes=len(counts), devices=devices, programs=PROGRAMS)
    assert [one.code for one in ended] == [0] * len(counts), ended[0].errors[-3000:]
    for one in ended:
        assert one.last["losses"] == pytest.approx(one.last["expected"], rel=1e-5)
        assert one.last["seconds"] > 0


@pytest.mark.slow
def test_processes_with_different_deals_are_refused() -> None:
    ended = run("differently", processes=2, devices=1, programs=PROGRAMS)
    for one in ended:
        assert "are there two keepers?" in one.last


@pytest.mark.slow
def test_microbatches_are_dealt_again_while_a_member_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is slower is also up to what else the machine does; the losses are not. Steps are longer than the stops of the slow one."""
    from benchmarks.faults.stragglers import measured

    for name, value in (("BATCH", 4608), ("WIDTH", 128)):
        monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(fsdp, name, value)
    row = measured(tmp_path, str(fsdp.BATCH), steps=16)
    print(row)
    counts = [int(count) for count in row["dealt"].split(" and ")]
    assert row["equal"] == "6 and 6" and sum(counts) == 12 and counts != [6, 6]
    assert float(row["largest difference of a loss"]) < 1e-5
