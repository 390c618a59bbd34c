"""Workers in several processes: `parallelize(step, consistency=...)` under `jax.distributed` trains as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
import worker_programs as programs
from several_processes import run

import autopar


def told(policy: str, outer: str = "") -> list[Any]:
    path = Path(__file__).parent / "worker_programs.py"
    ended = run("trained", policy, outer, processes=programs.WORKERS, devices=1, programs=path)
    assert [one.code for one in ended] == [0] * len(ended), "\n---\n".join(one.errors[-3000:] for one in ended)
    return [one.last for one in ended]


def alone(policy: str, **options: Any) -> tuple[list[float], Any]:
    """The same training in this process."""
    count = programs.WORKERS
    step = autopar.parallelize(
        programs.train_step, consistency=policy, workers=count, num_devices=count, cache=False, **options
    )
    losses = [float(loss) for loss in step.stream(programs.new_state(), programs.batches(None))]
    return losses, step.drain()


def test_bsp_in_processes_has_the_bits_of_one_process() -> None:
    losses, state = alone("bsp")
    for one in told("bsp"):
        assert one["losses"] == losses
        assert one["state"] == programs.digest(state)
        assert "there are several processes, so there is no state after each batch" in one["refused"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "outer"), [("every(2, bsp)", ""), ("every(2, bsp)", "outer")])
def test_periods_in_processes_are_those_of_one_process(policy: str, outer: str) -> None:
    options = {"outer": optax.sgd(0.7, momentum=0.9)} if outer else {}
    losses, state = alone(policy, **options)
    first, second = told(policy, outer)
    assert first["weights"] == second["weights"] == programs.digest(state["weights"])
    if outer:
        np.testing.assert_allclose(np.mean([first["losses"], second["losses"]], 0), losses, rtol=1e-6)


@pytest.mark.slow
def test_a_worker_that_dies_is_named() -> None:
    path = Path(__file__).parent / "worker_programs.py"
    ended = run("broken", "2", processes=programs.WORKERS, devices=1, programs=path)
    assert [one.code for one in ended] == [3, 7]
    assert "worker 1" in ended[0].last["error"]


@pytest.mark.slow
def test_ssp_in_processes_trains() -> None:
    first, second = told("ssp(1)")
    assert first["state"] == second["state"] and len(first["losses"]) == programs.BATCHES
    assert "2 under ssp(1)" in first["refused"][1]
    assert "process 0 has the store" in second["refused"][1]
