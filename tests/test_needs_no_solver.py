"""A saved plan runs without a solver: JAX, Flax, optax and NumPy suffice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import pytest

import autopar
from autopar.version import versions_of
from examples import train_gpt

_RUN = """
import sys
for missing in ("ortools", "numba", "llvmlite", "tokenizers", "transformers"):
    sys.modules[missing] = None  # as if it were not installed
import jax
import autopar
from examples import train_gpt
batch = train_gpt.sample_batch(train_gpt.standard_library(), 0)
step = autopar.parallelize(train_gpt.train_step, plan=sys.argv[1])
state = step.init(train_gpt.create_state, jax.random.key(0), batch=batch)
print(float(step(state, batch)[1]))
"""


@pytest.mark.slow
@pytest.mark.contract
def test_a_saved_plan_runs_without_or_tools_and_numba(tmp_path: Path) -> None:
    """The demo's: its queries, keys and values are one tensor, whose dims are found again by a minimum cut."""
    root = Path(__file__).parents[1]
    path = tmp_path / "plan.json"
    batch = train_gpt.sample_batch(train_gpt.standard_library(), 0)
    shapes = jax.eval_shape(train_gpt.create_state, jax.random.key(0))
    autopar.plan(train_gpt.train_step, shapes, batch, mesh="8", hardware="cpu-host").save(path)
    ran = subprocess.run([sys.executable, "-c", _RUN, str(path)], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert 1 < float(ran.stdout) < 10


def test_versions_are_of_what_is_installed() -> None:
    found = versions_of(("jax", "no-such-package"))
    assert list(found) == ["autopar", "jax"]
