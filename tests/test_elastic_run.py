"""A run without `autopar keep`, and one worker with an agent: positions, checkpoints, rows, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.api.elastic import run as elastic
from autopar.errors import ProcessError
from autopar.membership.records import Place, Restore


def create_state(rng: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(rng, (24, 8)), "steps": jnp.zeros((), jnp.int32)}


def new_step() -> Any:
    def step(state: dict[str, jax.Array], batch: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "steps": state["steps"] + 1}, loss

    return autopar.parallelize(step, cache=False)


def batches(start: int, stop: int = 10**6) -> Iterator[np.ndarray]:
    for number in range(start, stop):
        yield np.random.default_rng(number).normal(size=(16, 24)).astype(np.float32)


SHAPES = {"batch": jax.ShapeDtypeStruct((16, 24), "float32")}


def trained(folder: Path, stop: int) -> tuple[list[float], Any, Any]:
    """Losses, the state and the run: a checkpoint every third step."""
    step, run, losses = new_step(), autopar.join(), []
    with autopar.Checkpoints(folder, step) as checkpoints:
        state = run.restore_or_init(step, create_state, jax.random.key(0), checkpoints=checkpoints, **SHAPES)
        for batch in run.batches(lambda start: batches(start, stop)):
            state, loss = step(state, batch)
            losses.append(float(loss))
            if (run.position + 1) % 3 == 0:
                checkpoints.save(run.position + 1, state)
    return losses, state, run


def test_a_run_without_a_keeper_goes_on_from_checkpoints(tmp_path: Path) -> None:
    whole, state, run = trained(tmp_path / "whole", 8)
    assert run.restored_from == "init" and run.position == 8 and run.place is None and not run.is_rehearsal
    first, _, _ = trained(tmp_path / "parts", 5)
    then, again, run = trained(tmp_path / "parts", 8)
    assert run.restored_from == "checkpoint" and run.position == int(again["steps"]) == 8
    assert len(then) == 5 and first[:3] + then == whole, "from step 3 on"
    np.testing.assert_array_equal(again["w"], state["w"])


def test_the_newer_of_copies_and_checkpoints_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at step 3; copies of step 2 or 4 in the memory of peers."""

    class Channel:
        token = ""

        def at(self, position: int, step_s: float = 0.0) -> None: ...

    trained(tmp_path, 3)
    for step_of_copies, source, position in ((2, "checkpoint", 3), (4, "peers", 4), (3, "peers", 3)):
        place = Place(2, 0, 1, "", Restore(1, step_of_copies, (("a:1",),)), (), 5, 5.0)
        run = elastic.ElasticRun(place, Channel())  # type: ignore[arg-type]

        def from_peers(run: Any, step: Any, target: Any) -> Any:
            run.position, run.restored_from = run.place.restore.step, "peers"
            return step.init(create_state, jax.random.key(0), **SHAPES)

        monkeypatch.setattr(elastic.ElasticRun, "_from_peers", from_peers)
        step = new_step()
        with autopar.Checkpoints(tmp_path, step) as checkpoints:
            run.restore_or_init(step, create_state, jax.random.key(0), checkpoints=checkpoints, **SHAPES)
        assert (run.restored_from, run.position) == (source, position)
        loop = run.batches(batches)
        next(loop)
        with pytest.raises(ProcessError, match=r"the loop over `batches` did not call `.*step`"):
            next(loop)


def test_batches_need_a_state() -> None:
    with pytest.raises(ProcessError, match="`batches` follows `restore_or_init`"):
        next(autopar.join().batches(batches))


@pytest.mark.parametrize(("count", "index", "rows"), [(4, 1, slice(3, 6)), (5, 1, slice(0, 12)), (1, 0, slice(0, 12))])
def test_rows_are_equal_parts_or_all(monkeypatch: pytest.MonkeyPatch, count: int, index: int, rows: slice) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    assert autopar.join().rows(12) == rows


def test_devices_are_used_after_joining_only(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setenv("AUTOPAR_AGENT", "127.0.0.1:1")
    with pytest.raises(ProcessError, match=r"`autopar\.join\(\)` comes before anything that uses JAX's devices"):
        autopar.join()
