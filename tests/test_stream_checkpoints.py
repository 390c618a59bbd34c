"""Checkpoints of asynchronous pipelines: of a drained state, and of batches in flight. A resumed run has the bits of one without a break."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from several_processes import TOLD
from test_async_pipeline import WIDTH, batches_of, decorated, weights_of

import autopar
from autopar.errors import CheckpointError, StepSignatureError, StoreError

OPTIMIZER = optax.adam(1e-2)


def random_step(state: Any, batch: Any) -> Any:
    """Weights, moments, a key that each step splits, a count, and what no batch reads."""
    key, own = jax.random.split(state["key"])

    def loss_of(weights: Any) -> Any:
        h = batch
        for n, weight in enumerate(weights):
            kept = jax.random.bernoulli(jax.random.fold_in(own, n), 0.9, (1, WIDTH))
            h = jnp.tanh(h @ weight.astype(jnp.bfloat16).astype(h.dtype)) * kept
        return jnp.square(h - batch).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    updates, moments = OPTIMIZER.update(gradients, state["moments"])
    weights: Any = optax.apply_updates(state["weights"], updates)
    new = {"weights": weights, "moments": moments, "key": key, "twice": 2 * jnp.asarray(weights[1])}
    return new, {"loss": loss, "size": jnp.square(gradients[0]).sum()}


def random_state() -> Any:
    weights = weights_of(4)
    return {"weights": weights, "moments": OPTIMIZER.init(weights), "key": jax.random.key(3), "twice": weights[1]}


def random_streamed(consistency: str) -> Any:
    options = {"stages": 2, "num_microbatches": 2, "num_devices": 8, "cache": False}
    return autopar.parallelize(random_step, consistency=consistency, **options)


def figures(results: Any) -> list[tuple[float, float]]:
    return [(float(one["loss"]), float(one["size"])) for one in results]


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        one_raw, other_raw = (np.asarray(jax.random.key_data(x) if is_key else x) for x in (a, b))
        np.testing.assert_array_equal(one_raw, other_raw)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("consistency", ["pipedream", "2bw", "pipemare(12, 0.3)"])
def test_batches_in_flight_are_saved(consistency: str, tmp_path: Path) -> None:
    step, batches = random_streamed(consistency), [x for x, _ in batches_of(9, 8)]
    expected = figures(step.stream(random_state(), batches))
    ended = step.drain()
    first, resumed = random_streamed(consistency), random_streamed(consistency)
    stream = first.stream(random_state(), batches)
    found = figures(itertools.islice(stream, 4))
    with autopar.StoreCheckpoints(tmp_path) as checkpoints:
        checkpoints.save(4, first)
        found += figures(stream)  # saving does not disturb it
        checkpoints.wait()
        assert found == expected
        nothing, number = checkpoints.restore(resumed, random_state(), batches[0])
    assert nothing is None
    assert 4 <= number == resumed.num_updates < 7, "some results are complete only with later batches"
    assert figures(resumed.stream(nothing, batches[number:])) == expected[4:]
    assert_same(resumed.drain(), ended)
    assert resumed.num_updates == len(batches)


def test_a_drained_state_is_saved(tmp_path: Path) -> None:
    step, batches = random_streamed("2bw"), [x for x, _ in batches_of(9, 8)]
    list(step.stream(random_state(), batches[:5]))
    state = step.drain()
    with autopar.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(5, state, extra={"updates": step.num_updates})
    expected = figures(step.stream(state, batches[5:]))
    ended = step.drain()
    fresh = random_streamed("2bw")
    with autopar.Checkpoints(tmp_path, fresh) as checkpoints:
        restored = checkpoints.restore(random_state, batch=batches[0])
        fresh.num_updates = checkpoints.extra()["updates"]
    assert figures(fresh.stream(restored, batches[5:])) == expected
    assert_same(fresh.drain(), ended)
    assert fresh.num_updates == 9


def test_what_cannot_be_saved_or_resumed() -> None:
    step, state, batches = decorated("ampnet")
    with pytest.raises(StepSignatureError, match="has no batches in flight: there is nothing to save but the state"):
        step.snapshot()
    list(step.stream(state, batches[:3]))
    snapshot = step.snapshot()
    with pytest.raises(StepSignatureError, match="was not drained"):
        step.resume(snapshot, state, batches[0])
    step.drain()
    with pytest.raises(StepSignatureError, match="has no batches in flight"):
        step.snapshot()
    other, _, _ = decorated("pipedream")
    with pytest.raises(
        StoreError, match="the snapshot is of a stream through other stages: give `parallelize` the plan"
    ):
        other.resume(snapshot, state, batches[0])
    for damaged in (
        replace(snapshot, about={}),
        replace(snapshot, about={**snapshot.about, "places": []}),
        replace(snapshot, arrays=dict(list(snapshot.arrays.items())[1:])),
        replace(snapshot, about={**snapshot.about, "batches": "many"}),
    ):
        with pytest.raises(StoreError, match="the snapshot of a stream is damaged"):
            step.resume(damaged, state, batches[0])
    assert step.resume(snapshot, state, batches[0]) == (None, 3)
    assert len(list(step.stream(None, batches[3:]))) == 6
    step.drain()


def test_several_processes_save_drained_states(monkeypatch: pytest.MonkeyPatch) -> None:
    step, state, batches = decorated("ampnet")
    next(step.stream(state, batches))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(CheckpointError, match=r"snapshots are of one process: save the state that `drain\(\)` returns"):
        step.snapshot()
    monkeypatch.undo()
    step.drain()


@pytest.mark.slow
def test_a_killed_process_is_resumed(tmp_path: Path) -> None:
    """Killed between two checkpoints, a program goes on from the earlier one with the numbers of a run without a break."""

    def ran(*arguments: str) -> tuple[int, Any]:
        program = Path(__file__).parent / "stream_programs.py"
        done = subprocess.run(
            [sys.executable, program, "saved_streams", *arguments],
            capture_output=True,
            env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            text=True,
            timeout=600,
            check=False,
        )
        told = [line.removeprefix(TOLD) for line in done.stdout.splitlines() if line.startswith(TOLD)]
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
        return done.returncode, json.loads(told[-1]) if told else None

    assert ran(str(tmp_path / "killed"), "7") == (-signal.SIGKILL, None)
    _, resumed = ran(str(tmp_path / "killed"), "0")
    _, expected = ran(str(tmp_path / "whole"), "0")
    assert resumed["first"] == 6
    assert resumed["losses"] == expected["losses"][6:]
    assert resumed["state"] == expected["state"]
