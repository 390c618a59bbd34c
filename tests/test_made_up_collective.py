"""A collective that autopar does not know is priced, chosen, reported, simulated, exported and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autopar
from autopar.extend.collectives import LinkProfile, register_collective
from autopar.extend.hardware import load

HARDWARE = str(Path(__file__).parent / "profiles" / "slow_gpu.toml")


def ring_gather(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    """Parts go around a ring; each device puts what it gets where it belongs."""
    n, here, size = lax.axis_size(axes), lax.axis_index(axes), x.shape[dim]
    whole = jnp.zeros((*x.shape[:dim], n * size, *x.shape[dim + 1 :]), x.dtype)
    for step in range(n):
        whole = lax.dynamic_update_slice_in_dim(whole, x, (here - step) % n * size, dim)
        x = lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])
    return whole


def ring_time(num_bytes: float, num_devices: int, link: LinkProfile) -> float:
    return (num_devices - 1) / num_devices * num_bytes / (4 * link.bytes_per_s)


def step(weight: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weight)
    return weight - 0.1 * gradient, loss


@pytest.mark.contract
def test_it_works_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cost.user_collectives._registered", {})
    register_collective("ring-gather", like="all-gather", time_s=ring_time, run=ring_gather)
    args = jax.random.normal(jax.random.key(0), (64, 128)), jax.random.normal(jax.random.key(1), (512, 64))
    plan = autopar.plan(step, *args, mesh="x=8", hardware=HARDWARE, pin={"weight": P("x"), "x": P("x")})
    (use,) = (one for one in plan.collectives if one.kind == "ring-gather")
    profile = load(HARDWARE)
    assert use.time_s == ring_time(64 * 128 * 4, 8, profile.host_link) + profile.collective_launch_s  # priced, chosen
    assert "ring-gather" in str(autopar.explain(plan))  # reported
    assert plan.trace is not None and ("ring-gather", ("x",)) in plan.trace.kinds  # simulated
    assert plan.prediction.exposed_s["ring-gather"] > 0
    file: dict[str, Any] = {"__name__": __name__}
    exec(autopar.export(plan, step, *args), file)  # exported
    for run in (autopar.parallelize(step, plan=plan), file["shard"](step, file["make_mesh"](), *args)):  # run
        assert "all-gather" not in str(run.lower(*args).compile().as_text())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), run(*args), jax.jit(step)(*args))
