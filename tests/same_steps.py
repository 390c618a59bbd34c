"""Run train steps with and without a plan, and measure how far their results differ.

In: a `Training` of the zoo and options of `autopar.plan`. Out: `Trained`: losses, the first step's gradients, and the
plan. The gradients are read from AdamW's first moments, so the step is the user's, unchanged. XLA compiles without its
backend's optimizations, which take most of the time here and do not change the sharding.

An equal program on equal inputs runs once, and its results are shared (`once_a_session`). So several test files may use
the same model's unsharded step, and meshes whose plans are the same program (often 8, 1x8 and 8x1) run once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from once_a_session import once_a_session

import autopar
from autopar.plans.plan import Plan
from benchmarks.zoo.training import Training

STEPS = 2
#: Of losses, and of each gradient's norm, for float32.
TOLERANCE = 1e-4
#: Of the norm of all gradients together: a gradient that is nothing but rounding, as that of a key's bias, has no
#: relative error.
ROUNDING = 1e-7
QUICKLY = {"xla_backend_optimization_level": 0}
FIRST_MOMENT_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class Trained:
    """What some steps came to.

    Args:
        losses: one for each step. gradients: of the first, by path.
        plan: None without one.
    """

    losses: list[float]
    gradients: dict[str, np.ndarray]
    plan: Plan | None = None


def train(training: Training, **options: Any) -> Trained:
    """Some steps by a plan; without options, by no plan.

    Args:
        options: those of `autopar.plan`.
    """
    args = (_initial(training), training.make_batch(0))
    if not options:
        return _run(training, args, jax.jit(training.step).lower(*args))
    step = autopar.parallelize(**({"hardware": "cpu-host"} | options))(training.step)
    plan = step.plan(*args)
    mesh = options.get("mesh")
    lowered = step.lower(*args, mesh=mesh if isinstance(mesh, Mesh) else None)
    return _run(training, args, lowered, plan)


def assert_same(sharded: Trained, plain: Trained) -> None:
    """Losses and gradients are those of the unsharded step."""
    np.testing.assert_allclose(sharded.losses, plain.losses, rtol=TOLERANCE)
    assert np.isfinite(plain.losses).all()
    whole = np.sqrt(sum(np.square(g).sum() for g in plain.gradients.values()))
    assert sharded.gradients.keys() == plain.gradients.keys()
    for path, expected in plain.gradients.items():
        difference = np.linalg.norm(sharded.gradients[path] - expected)
        assert difference <= TOLERANCE * np.linalg.norm(expected) + ROUNDING * whole, path


def splits(plan: Plan | None) -> bool:
    """Whether a plan splits any input or any value between."""
    assert plan is not None
    shardings = [t.sharding for t in plan.inputs] + [d.sharding for d in plan.decisions]
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    return any(sizes[axis] > 1 for sharding in shardings for axis in sharding.axes)


def _run(training: Training, args: tuple[Any, Any], lowered: jax.stages.Lowered, plan: Plan | None = None) -> Trained:
    state, batches = args[0], [args[1], *map(training.make_batch, range(1, STEPS))]

    def run() -> tuple[list[float], dict[str, np.ndarray]]:
        nonlocal state
        compiled = lowered.compile(QUICKLY)
        losses: list[float] = []
        gradients: dict[str, np.ndarray] = {}
        for batch in batches:
            state, loss = compiled(*jax.device_put((state, batch), compiled.input_shardings[0]))
            losses.append(float(loss))
            gradients = gradients or _gradients(state)
        return losses, gradients

    given = [np.asarray(leaf) for leaf in jax.tree.leaves((state, batches))]
    return Trained(*once_a_session(name_of(lowered, given), run), plan)


def name_of(lowered: jax.stages.Lowered, given: Sequence[np.ndarray]) -> str:
    """Of a program and the numbers it is given."""
    told = hashlib.sha256(but_for_names(lowered.as_text()).encode())
    for leaf in given:
        told.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    return told.hexdigest()


def but_for_names(program: str) -> str:
    """A program as XLA is given it, without what its mesh's axes are called, and without axes of size 1, over which
    nothing can be split."""
    mesh = re.search(r"sdy\.mesh @mesh = <\[(.*?)\]>.*", program)
    if mesh is None:
        return program
    axes = re.findall(r'"(\w+)"=(\d+)', mesh[1])
    split = [(name, size) for name, size in axes if int(size) > 1]
    program = program.replace(mesh[0], f"mesh {[size for _, size in split]}")
    whole = [name for name, size in axes if int(size) == 1]
    assert not any(f'"{name}"' in program for name in whole), "an axis of size 1 splits nothing"
    for number, (name, _) in enumerate(split):
        program = program.replace(f'"{name}"', f'"axis {number}"')
    return program


def _gradients(state: Any) -> dict[str, np.ndarray]:
    """After one step from nothing, the first moments are a tenth of the gradients."""
    found = jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    (adam,) = (node for node in found if isinstance(node, optax.ScaleByAdamState))
    leaves = jax.tree_util.tree_flatten_with_path(adam.mu)[0]
    return {jax.tree_util.keystr(path): np.asarray(mu) / (1 - FIRST_MOMENT_DECAY) for path, mu in leaves}


@cache
def _initial(training: Training) -> Any:
    """The state before the first step, on the host."""
    key = jax.random.key(0)
    lowered = jax.jit(training.create_state).lower(key)
    name = name_of(lowered, [np.asarray(jax.random.key_data(key))])
    leaves = once_a_session(name, lambda: jax.tree.leaves(jax.device_get(lowered.compile(QUICKLY)(key))))
    return jax.tree.unflatten(lowered.out_tree, leaves)
