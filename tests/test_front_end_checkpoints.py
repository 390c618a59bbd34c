"""Every front end's state is saved and restored on other devices, and training continues with the same results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import front_ends
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from test_front_ends import NEEDS, TOLERANCE

import autopar


def on(case: front_ends.Case, num_devices: int) -> autopar.ParallelStep:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    return autopar.parallelize(**({"mesh": mesh, "hardware": "cpu-host"} | (case.options or {})))(case.step)


def arrays(case: front_ends.Case, state: tuple[Any, ...]) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(case.values(state))]


@pytest.mark.sampled(18)
@pytest.mark.contract
@pytest.mark.parametrize("name", front_ends.FRONT_ENDS)
def test_a_front_ends_state_is_restored_on_other_devices(name: str, tmp_path: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not here: it does not support JAX {jax.__version__}")
    case = front_ends.FRONT_ENDS[name]()
    step, state = on(case, 8), case.create()
    state = case.following(state, step(*state, front_ends.make_batch(0)))
    with autopar.Checkpoints(tmp_path / "run", step) as checkpoints:
        checkpoints.save(1, state[0] if len(state) == 1 else state)
    before = arrays(case, state)

    resumed, fresh = on(case, 4), case.create()
    names = resumed.called.parameters
    checkpoints = autopar.Checkpoints(tmp_path / "run", resumed)
    batch: dict[str, Any] = {names[-1]: front_ends.make_batch(1)}
    restored = checkpoints.restore(fresh[0] if len(fresh) == 1 else fresh, **batch)
    restored = (restored,) if len(fresh) == 1 else restored
    for found, expected in zip(arrays(case, restored), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    there = float(case.loss(step(*state, front_ends.make_batch(1))))
    here = float(case.loss(resumed(*restored, front_ends.make_batch(1))))
    assert here == pytest.approx(there, rel=TOLERANCE)


class Tied(nnx.Module):
    """Two parts that hold one variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(front_ends.WIDTH, front_ends.WIDTH, rngs=rngs)
        self.second = nnx.Linear(front_ends.WIDTH, front_ends.WIDTH, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jax.nn.relu(self.first(x)))


def tied_step(model: Tied, batch: Any) -> jax.Array:
    def loss(model: Tied) -> jax.Array:
        return (model(batch["x"]) ** 2).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
    return value


def test_what_two_modules_share_stays_shared(tmp_path: Path) -> None:
    step = autopar.parallelize(mesh="8", hardware="cpu-host")(tied_step)
    model = Tied(nnx.Rngs(0))
    step(model, front_ends.make_batch(0))
    with autopar.Checkpoints(tmp_path / "run", step) as checkpoints:
        checkpoints.save(1, model)
        restored = checkpoints.restore(lambda: Tied(nnx.Rngs(1)), batch=front_ends.make_batch(1))
    assert restored.second.kernel is restored.first.kernel
    np.testing.assert_array_equal(np.asarray(restored.first.kernel[...]), np.asarray(model.first.kernel[...]))
    expected = float(step(model, front_ends.make_batch(1)))
    assert float(step(restored, front_ends.make_batch(1))) == pytest.approx(expected, rel=TOLERANCE)
