"""The benchmark of consistency policies: each at its best rate, at the same times, as a table and a picture."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.parameter_server import page
from benchmarks.parameter_server.convergence import HORIZON_S, Task, converged

POLICIES = ("bsp", "ssp(3)", "async", "local SGD", "DiLoCo")


def loss(weights: dict[str, jax.Array], target: jax.Array) -> jax.Array:
    return jnp.mean((weights["w"] - target) ** 2)


@pytest.mark.slow
def test_every_policy_is_trained_at_the_best_rate_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    start, ones = {"w": np.zeros(2, np.float32)}, np.ones(2, np.float32)
    # with the rate 1e30 everything diverges
    task = Task(start, loss, lambda rng: (ones,), (ones,), optax.identity(), (0.01, 1e30))
    rows = converged("made up", task, POLICIES)
    assert list(dict.fromkeys(row["policy"] for row in rows)) == [*POLICIES]
    for policy in POLICIES:
        own = [row for row in rows if row["policy"] == policy]
        assert [row["simulated_s"] for row in own] == [10.0 * number for number in range(21)]
        assert {row["rate"] for row in own} == {0.01}
        assert own[0]["loss"] == 1 and float(own[-1]["loss"]) < 0.5
        assert own[0]["updates"] == 0 and [float(row["updates"]) for row in own] == sorted(
            float(row["updates"]) for row in own
        )
    last = {row["policy"]: float(row["updates"]) for row in rows if row["simulated_s"] == HORIZON_S}
    assert last["async"] >= last["ssp(3)"] > last["bsp"] > last["local SGD"] == last["DiLoCo"]
    table = page.page_table(rows).splitlines()
    assert (
        table[0] == "| policy | rate | updates in 200 s | loss at 20 s | loss at 50 s | loss at 100 s | loss at 200 s |"
    )
    assert len(table) == 2 + len(POLICIES) and table[2].startswith("| bsp | 0.01 | 160 | ")
    for name in ("one.svg", "two.svg"):
        page.draw(rows, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert page.page_table([{"call": "pull", "met": True}]).splitlines()[-1] == "| pull | yes |"
