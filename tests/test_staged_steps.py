"""Random train steps in stages give the results of plain `jax.jit` (`staged_steps`)."""

from __future__ import annotations

import os
import secrets
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import pipelined
from staged_steps import StagedStep, staged_step

import autopar
from autopar.errors import AutoparError
from autopar.pipeline.run.instructions import Call
from autopar.pipeline.run.same_program import is_same_program

TOLERANCE = 1e-5


def first_seed() -> int:
    """`AUTOPAR_SEED`, or a fresh one."""
    return int(os.environ.get("AUTOPAR_SEED") or secrets.randbelow(10**6))


def planned_step(drawn: StagedStep) -> Any:
    """The step, planned.

    Raises:
        AutoparError: autopar refuses it.
    """
    step = autopar.parallelize(drawn.step, hardware="cpu-host", cache=False, **drawn.options)
    step.plan(drawn.create(), drawn.batches[0])
    return step


def assert_as_jit(drawn: StagedStep, planned: Any) -> None:
    """Two calls in stages, the second of what the first gives, are two calls of the plain step."""
    plain = jax.jit(drawn.step)
    here, there = drawn.create(), drawn.create()
    for batch in drawn.batches:
        given = here
        here, found = planned(here, batch)
        there, expected = plain(there, batch)
        assert jax.tree.structure((here, found)) == jax.tree.structure((there, expected))
        expected_leaves, _ = jax.tree.flatten_with_path((there, expected))
        for (path, other), one in zip(expected_leaves, jax.tree.leaves((here, found)), strict=True):
            assert_close(jax.tree_util.keystr(path), one, other)
        if batch is drawn.batches[0]:
            deleted = [leaf for leaf in jax.tree.leaves(given) if leaf.is_deleted()]
            assert not deleted, "the first call has deleted arrays that the user made"


def assert_close(path: str, one: Any, other: Any) -> None:
    assert (one.shape, one.dtype) == (other.shape, other.dtype), path
    if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    one, other = np.asarray(one), np.asarray(other)
    if not jnp.issubdtype(other.dtype, jnp.floating):
        np.testing.assert_array_equal(one, other, path)
        return
    scale = float(np.abs(other).max(initial=0.1))
    np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=path)


def check(first: int, count: int, at_least: int) -> None:
    """See to `count` steps from a seed on, of which autopar may refuse some."""
    print(f"AUTOPAR_SEED={first}")
    failed: list[str] = []
    refused: list[str] = []
    for seed in range(first, first + count):
        drawn = staged_step(seed)
        try:
            try:
                planned = planned_step(drawn)
            except AutoparError as error:
                refused.append(f"{seed}: {drawn.text}: {type(error).__name__}: {error}")
            else:
                assert_as_jit(drawn, planned)
        except Exception:
            again = f"AUTOPAR_SEED={seed} pytest tests/test_staged_steps.py -m 'not slow'"
            failed.append(f"{again}\n{drawn.text}\n{traceback.format_exc(limit=-6)}")
    assert not failed, "\n\n".join([f"{len(failed)} of {count} steps from {first} on:", *failed])
    assert count - len(refused) >= at_least, "\n".join([f"AUTOPAR_SEED={first}", *refused])


def counted(state: Any, x: Any) -> Any:
    """Every layer reads one counter."""

    def loss(layers: Any) -> Any:
        h = x
        for w in layers:
            h = h + jnp.tanh(h @ w) * (1 + 0.1 * state["count"])
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(state["layers"])
    layers = [w - 0.1 * g for w, g in zip(state["layers"], gradients, strict=True)]
    return {"layers": layers, "count": state["count"] + 1}, (value, True)


def counted_state() -> Any:
    return {"layers": [jnp.eye(8) * 0.1 * n for n in range(1, 5)], "count": jnp.int32(0)}


def is_deleted(tree: Any) -> list[bool]:
    return [leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


def test_what_stages_of_one_submesh_read_is_not_donated_before_the_last_has() -> None:
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    options: dict[str, Any] = {"stages": 4, "num_microbatches": 2, "schedule": "interleaved"}
    planned = autopar.parallelize(counted, hardware="cpu-host", cache=False, **options)
    here, there = counted_state(), counted_state()
    for _ in range(3):
        here, (value, constant) = planned(here, x)
        there, expected = jax.jit(counted)(there, x)
        assert_close("loss", value, expected[0])
        assert constant.dtype == bool
    assert int(here["count"]) == 3
    plan: Any = planned.plans[-1]
    by_submesh = [tuple(stage.devices) for stage in plan.stages]
    assert len(set(by_submesh)) < len(by_submesh), "stages share a submesh"


def test_stages_delete_no_arrays_that_the_user_made_and_donate_their_own() -> None:
    x = np.ones((8, 8), np.float32)
    options: dict[str, Any] = {"stages": 2, "num_microbatches": 1, "hardware": "cpu-host", "cache": False}
    planned = autopar.parallelize(counted, **options)
    by_user = counted_state()
    first, _ = planned(by_user, x)
    placed = jax.tree.map(lambda leaf: leaf * 1, first)  # as the stages want it, and the user's
    for _ in range(2):
        planned(placed, x)
    assert not any(is_deleted((by_user, placed, first)))
    second, _ = planned(first, x)
    assert all(is_deleted(first["layers"])) and not any(is_deleted(second))
    given_away = autopar.parallelize(counted, **options, donate=["state"])
    given_away(placed, x)
    assert all(is_deleted(placed["layers"]))


def test_equal_pieces_on_one_submesh_are_compiled_once() -> None:
    state = {"layers": [jnp.eye(8) * 0.1 * n for n in range(1, 9)], "count": jnp.int32(0)}
    x = np.ones((8, 8), np.float32)
    run, pipeline = pipelined(
        counted, (state, x), num_stages=2, num_microbatches=2, schedule="interleaved", virtual=4, mesh="4"
    )
    for one, other in zip(jax.tree.leaves(run(state, x)), jax.tree.leaves(jax.jit(counted)(state, x)), strict=True):
        assert_close("result", one, other)
    calls = [one for one in pipeline.instructions.steps if isinstance(one, Call)]
    jitted = {(one.stage, one.key): one.program.jitted for one in calls}
    assert len(jitted) == 8 * 4 and all(one._cache_size() == 1 for one in jitted.values() if one is not None)
    for first, other in ((2, 4), (2, 6), (1, 3), (1, 5)):  # all but the first stage and the last
        assert [jitted[first, key] for s, key in jitted if s == first] == [
            jitted[other, key] for s, key in jitted if s == other
        ]
    assert not {id(jitted[s, key]) for s, key in jitted if s % 2} & {
        id(jitted[s, key]) for s, key in jitted if not s % 2
    }
    assert len(set(map(id, jitted.values()))) <= 16


def pure(scale: float) -> Any:
    return lambda h: jax.pure_callback(lambda h: np.float32(scale) * h, jax.ShapeDtypeStruct(h.shape, h.dtype), h)


def test_pieces_that_call_python_or_have_other_constants_are_not_taken_for_equal() -> None:
    x = np.ones(5, np.float32)
    other = np.arange(5, dtype=np.float32)
    functions = (pure(1), pure(2), lambda h: h + x, lambda h: h + other, lambda h: h * 2)
    traced = [jax.jit(function).trace(x) for function in functions]
    same = [[is_same_program(one, other) for other in traced] for one in traced]
    assert same == [[n == m and n > 1 for m in range(5)] for n in range(5)]


@pytest.mark.parametrize("meshes", [("4", "2x2"), ("2x2", "4")])
def test_a_host_callback_between_submeshes_with_other_axes(meshes: tuple[str, str]) -> None:
    """JAX lowers a program with a callback for one mesh only, and a transfer may use the other stage's."""

    def step(layers: Any, x: Any) -> Any:
        def loss(layers: Any) -> Any:
            h = x
            for w in layers:
                h = jnp.tanh(h @ w) + pure(0.5)(jax.lax.stop_gradient(h))
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), value

    layers, x = [jnp.eye(8) * 0.1 * n for n in range(1, 5)], np.ones((8, 8), np.float32)
    run, _ = pipelined(step, (layers, x), num_stages=2, num_microbatches=1, mesh=meshes)
    for _ in range(2):
        for one, other in zip(jax.tree.leaves(run(layers, x)), jax.tree.leaves(jax.jit(step)(layers, x)), strict=True):
            assert_close("result", one, other)


def test_random_steps_in_stages() -> None:
    check(first_seed(), 10, at_least=7)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_many_random_steps_in_stages(part: int) -> None:
    check(first_seed() + 1000 + 50 * part, 50, at_least=40)
