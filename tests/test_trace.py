"""The trace: flat, without dead code, renumbered, with the origin of every equation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import autopar
from autopar.frontend.flat_jaxpr import module_path, phase_of
from autopar.frontend.tracing import trace


@pytest.mark.sampled(2)
@pytest.mark.contract
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_calls_are_inlined_and_nothing_dead_is_left(name: str) -> None:
    program = programs.PROGRAMS[name]()
    traced = trace(program.step, program.abstract_args())
    assert not {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"} & {
        e.primitive for e in traced.equations
    }
    read = {v for e in traced.equations for v in e.operands if isinstance(v, int)}
    read |= {v for v in traced.outputs if isinstance(v, int)}
    assert all(any(r in read for r in e.results) for e in traced.equations)


def test_paths_phases_and_sources_are_kept() -> None:
    program = programs.gpt()
    traced = trace(program.step, program.abstract_args())
    assert "state/params/block_0/mlp_in/kernel" in traced.input_paths
    assert traced.output_paths[-1] == "out/1"
    assert {e.phase for e in traced.equations} == {"forward", "backward", "update"}
    dots = [e for e in traced.equations if e.primitive == "dot_general"]
    assert any(e.path == "GPT/block_0/mlp_in" and e.phase == "forward" for e in dots)
    assert any(e.path == "GPT/block_0/mlp_in" and e.phase == "backward" for e in dots)


def test_two_calls_of_one_cached_function_do_not_share_values() -> None:
    inner = jax.jit(lambda x: jnp.sin(x) + 1)
    traced = trace(lambda x: inner(x) * inner(x + 1), [jax.ShapeDtypeStruct((128,), jnp.float32)])
    results = [r for e in traced.equations for r in e.results]
    assert len(results) == len(set(results))
    assert [e.primitive for e in traced.equations].count("sin") == 2


def test_custom_derivatives_and_batching_are_inlined() -> None:
    batched = jax.custom_batching.custom_vmap(jnp.sin)
    batched.def_vmap(lambda size, is_batched, x: (jnp.sin(x), True))
    derived = jax.custom_vjp(jnp.cos)
    derived.defvjp(lambda x: (jnp.cos(x), x), lambda x, given: (given * x,), optimize_remat=True)
    traced = trace(lambda x: batched(x) * derived(x), (jnp.ones(4),))
    assert [equation.primitive for equation in traced.equations] == ["sin", "cos", "mul"]
    gradient = trace(jax.grad(lambda x: derived(x).sum() ** 2), (jnp.ones(4),))
    assert "cos" in [equation.primitive for equation in gradient.equations]


def test_closed_over_arrays_are_constants() -> None:
    table = jnp.arange(128.0)
    traced = trace(lambda x: x + table, [jax.ShapeDtypeStruct((128,), jnp.float32)])
    assert len(traced.constants) <= 1  # JAX may write it as a literal constant or as an argument


@pytest.mark.contract
def test_a_look_up_that_fills_is_a_look_up_and_a_mask() -> None:
    """Else XLA sums a table's parts whole, before it masks, where a reduce-scatter would do."""

    def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.take(table, ids, axis=0) * 2

    table, ids = np.arange(320, dtype=np.float32).reshape(40, 8), np.array([0, 39, -1, -40, 40, -41] * 12, np.int32)
    traced = trace(look_up, [table, ids])
    (gather,) = (e for e in traced.equations if e.primitive == "gather")
    assert gather.source.params["mode"] == jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    (mask,) = (e for e in traced.equations if gather.results[0] in e.operands)
    assert mask.primitive == "select_n"
    pin = {"table": jax.sharding.PartitionSpec("data")}
    split = autopar.parallelize(mesh="8", hardware="cpu-host", pin=pin, carry=[])(look_up)
    np.testing.assert_array_equal(split(table, ids), look_up(jnp.asarray(table), jnp.asarray(ids)))


@pytest.mark.parametrize(
    ("stack", "phase", "path"),
    [
        ("jvp(GPT2)/transformer/h/0", "forward", "GPT2/transformer/h/0"),
        ("transpose(jvp(GPT2))/transformer", "backward", "GPT2/transformer"),
        ("", "update", ""),
        ("jvp()/vmap(attn)", "forward", "attn"),
    ],
)
def test_name_stacks(stack: str, phase: str, path: str) -> None:
    assert (phase_of(stack), module_path(stack)) == (phase, path)
