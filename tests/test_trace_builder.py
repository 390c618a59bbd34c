"""The trace builder: numbering, copies, written equations, loops, dead code, and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.frontend.equations import LiteralOperand, equations_of, items_of
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import LoopBuilder, TraceBuilder, flat_border, renumbered
from autopar.frontend.tracing import trace
from autopar.ir.verifier import check
from autopar.jax_interop import compat as jax_compat

pytestmark = pytest.mark.contract
SHAPE = (4, 8)


def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(carry: jax.Array, one: jax.Array) -> tuple[jax.Array, jax.Array]:
        return carry + one, jnp.tanh(carry)

    carry, stack = lax.scan(body, x[0], y)
    return jnp.where(x > 0, x * 2.0, 0.0) @ y.T, stack + carry


def traced() -> Trace:
    array = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return trace(step, (array, array))


def evaluated(one: Trace, *arrays: Any) -> list[Any]:
    """The results of a trace without loops."""
    values = dict(zip(one.inputs, arrays, strict=True)) | dict(one.constants)
    for equation in one.equations:
        operands = [a.value if isinstance(a, LiteralOperand) else values[a] for a in equation.operands]
        values.update(zip(equation.results, jax_compat.bind(equation.source, operands), strict=True))
    return [values[atom] if isinstance(atom, int) else atom.value for atom in one.outputs]


def simple() -> Trace:
    array = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return trace(lambda x: jnp.sin(x) * 2.0, (array,))


def test_a_trace_that_is_copied_item_by_item_is_the_same() -> None:
    one = traced()
    builder = TraceBuilder(one)
    builder.add(*items_of(one.equations, one.regions))
    assert builder.finish() == one


def test_walking_goes_past_regions_as_a_whole() -> None:
    one = traced()
    spans = [(start, stop) for start, stop, _ in one.walk()]
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert spans[0][0] == 0 and spans[-1][1] == len(one.equations)
    (region,) = [region for _, _, region in one.walk() if region is not None]
    assert region is one.regions[0] and (region.enter[0], region.exit[1]) in spans


def test_producers_and_users_are_those_of_the_graph() -> None:
    one = traced()
    graph = graph_of(one, ())
    assert one.producers == graph.producers
    assert one.users == {value: [n for n, _ in uses] for value, uses in graph.users.items()}


def test_copies_read_other_values_and_make_new_ones() -> None:
    one = traced()
    builder = TraceBuilder(one)
    items = items_of(one.equations, one.regions)
    other = builder.like(one.inputs[0])
    env: dict[int, Any] = {one.inputs[0]: other}
    builder.add(*builder.copies(items, env, times=3.0))
    copied = [equation for item in builder.items for equation in equations_of(item)]
    assert all(one.inputs[0] not in equation.reads for equation in copied)
    assert any(other in equation.reads for equation in copied)
    made = [value for equation in copied for value in equation.results]
    assert min(made) > other and len(set(made)) == len(made)
    for before, after in zip(one.equations, copied, strict=True):
        assert (after.primitive, after.path, after.repeat) == (before.primitive, before.path, 3.0 * before.repeat)
        for old, new in zip(before.results, after.results, strict=True):
            assert env[old] == new and builder.avals[new] == one.avals[old]
    builder.add(*items)
    check(
        graph_of(
            builder.finish(
                [env[atom] if isinstance(atom, int) else atom for atom in one.outputs], inputs=(other, one.inputs[1])
            ),
            (),
        )
    )


def test_written_equations_have_the_name_and_the_place_of_another() -> None:
    one = simple()
    builder = TraceBuilder(one)
    (sine, product) = one.equations
    builder.add(sine)
    (made,) = builder.write(sine, "half", sine.results, lambda values: [jnp.where(values[0] > 0, values[0], 0.0)])
    builder.add(product.reading({sine.results[0]: made}))
    new = builder.finish()
    written = [e for e in new.equations if e not in (sine, product) and e.primitive != "mul"]
    assert {e.source.source_info for e in written} == {sine.source.source_info}
    assert all(e.primitive != "jit" and e.path == sine.path and e.phase == sine.phase for e in written)
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    np.testing.assert_allclose(evaluated(new, x)[0], 2.0 * np.maximum(np.sin(x), 0.0), rtol=1e-6)


def test_dead_code_goes_and_origins_stay() -> None:
    one = simple()
    (sine, product) = one.equations
    builder = TraceBuilder(one)
    builder.origin = "sine"
    builder.add(sine)
    builder.origin = None
    builder.add(builder.copy(sine, {}))  # which nothing reads
    builder.add(product)
    new = builder.finish()
    assert new.equations == (sine, product)
    assert builder.origins_of(new) == ["sine", None]


def test_the_result_of_what_is_written_can_be_an_old_value() -> None:
    one = simple()
    (sine, product) = one.equations
    builder = TraceBuilder(one)
    (made,) = builder.write(sine, "cosine", sine.reads, lambda values: [jnp.cos(values[0])])
    builder.name(made, sine.results[0])
    builder.add(product)
    x = np.ones(SHAPE, np.float32)
    np.testing.assert_allclose(evaluated(builder.finish(), x)[0], 2.0 * np.cos(x), rtol=1e-6)


def test_a_loop_is_written_by_its_pieces() -> None:
    """It counts to five, and stacks what it has counted."""
    one = simple()
    like = one.equations[0]
    builder, loop = TraceBuilder(one), LoopBuilder(jax_compat.scan_of(5))
    scalar, five = (one.avals[one.inputs[0]].update(shape=shape) for shape in ((), (5,)))
    inside, result, stack = builder.new(scalar, 5.0), builder.new(scalar), builder.new(five)
    with builder.at(loop.body):
        (end,) = builder.write(replace(like, repeat=5.0), "add", [inside], lambda values: [values[0] + 1.0])
    loop.carry(like, LiteralOperand(0.0), inside, end, result)
    loop.stack(like, end, stack)
    builder.add(loop.nest())
    new = builder.finish(**flat_border([], [(result, "count"), (stack, "counts")]))
    graph = graph_of(new, ())
    check(graph)
    assert [(e.primitive, e.repeat) for e in new.equations] == [
        ("enter_carry", 1.0),
        ("add", 5.0),
        ("exit_carry", 1.0),
        ("exit_stack", 5.0),
    ]
    assert graph.loops[0].carries == ((0, 2),) and graph.loops[0].stacks == (3,)
    assert len(builder.finish(**flat_border([], [(result, "count")])).equations) == 3


def test_equal_programs_are_equal_once_they_are_renumbered() -> None:
    one = traced()
    builder = TraceBuilder(one)
    for _ in range(3):
        builder.like(one.inputs[0])  # numbers that are not used
    env: dict[int, Any] = {}
    builder.add(*builder.copies(items_of(one.equations, one.regions), env))
    outputs = [env.get(atom, atom) if isinstance(atom, int) else atom for atom in one.outputs]
    assert renumbered(builder.finish(outputs)) == renumbered(one)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("early", "reads what is not made yet"), ("again", "makes a value again"), ("output", "an output is never made")],
)
def test_a_broken_trace_is_not_finished(wrong: str, error: str) -> None:
    one = simple()
    (sine, product) = one.equations
    builder = TraceBuilder(one)
    builder.add(*{"early": (product, sine), "again": (sine, sine, product), "output": ()}[wrong])
    with pytest.raises(AssertionError, match=error):
        builder.finish()
