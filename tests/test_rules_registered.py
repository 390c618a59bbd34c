"""Rules that users give in one line: their parsing, their errors, and a plan that uses them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive  # noqa: TID251
from jax.interpreters import mlir  # noqa: TID251
from rich.console import Console
from test_rules import Shapes, text

import autopar
from autopar.errors import MicrobatchError, RuleError
from autopar.report.explain import render_summary
from autopar.rules.node_view import NodeView
from autopar.rules.table import rule_for, traits_of
from autopar.rules.traits import Traits
from autopar.rules.user_rules import registered_texts, template
from autopar.xla_compiler import hlo_collectives as hlo


@pytest.mark.contract
@pytest.mark.parametrize(
    ("rule", "operands", "results", "expected"),
    [
        ("b s d, d f -> b s f", ((2, 4, 8), (8, 6)), ((2, 4, 6),), "a b c, c d -> a b d; c max"),
        ("a b, -> a b", ((4, 8), ()), ((4, 8),), "a b,  -> a b"),
        ("b (h d) -> b h d", ((2, 12),), ((2, 3, 4),), "a (b c) -> a b c"),
        ("b (h d), h -> b h", ((2, 12), (3,)), ((2, 3),), "a (b c), b -> a b; c max"),
        ("batch . -> batch", ((4, 8),), ((4,),), "a . -> a"),
        (" -> new", (), ((4,),), " -> a"),
        ("a b -> a, b, ", ((4, 8),), ((4,), (8,), ()), "a b -> a, b, "),
        ("one a -> a", ((1, 8),), ((8,),), ". a -> a"),
    ],
)
def test_a_rule_says(rule: str, operands: Shapes, results: Shapes, expected: str) -> None:
    autopar.register_rule("told", rule, reduction="max")
    found = rule_for(NodeView("told", {}, operands, results))
    assert found is not None
    assert text(found) == expected


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("a b", "this one has 0"),
        ("a -> b -> c", "at '->': a rule has one `->`, between operands and results; this one has 2"),
        ("a a -> a", "at 'a': the name occurs twice in one tensor"),
        ("(a a) -> a", "at 'a': the name occurs twice"),
        ("(a -> a", "at '->': parentheses may hold names only"),
        ("a -> (a", "at '(': it is never closed"),
        ("a) -> a", "at ')': it closes no parenthesis"),
        ("() -> a", "at ')': it closes no parenthesis with a name"),
        ("(a .) -> a", "at '.': parentheses may hold"),
        ("a* b -> a", "at '*': it is not a name"),
        ("2 -> a", "at '2': it is not a name"),
    ],
)
def test_a_text_that_cannot_be_read_names_the_token(rule: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        autopar.register_rule("refused", rule)
    assert message in str(error.value) and "`refused`" in str(error.value)
    assert rule_for(NodeView("refused", {}, ((4,),), ((4,),))) is None


@pytest.mark.parametrize(
    ("rule", "operands", "results", "message"),
    [
        ("a -> a", ((4, 8),), ((4,),), "operand 0 has 2 dims, but the rule names 1"),
        ("a b, a -> b", ((4, 8),), ((8,),), "it has 2 operands, but the operation has 1"),
        ("a b -> a", ((4, 8),), ((5,),), "`a` has size 4 by other dims, but size 5 in result 0"),
        ("(h d) -> a b", ((8,),), ((2, 4),), "the size of `h` is unknown"),
        ("(h d), h -> d", ((8,), (3,)), ((4,),), "`(h d)` has size 12 by other dims, but size 8 in operand 0"),
    ],
)
def test_a_rule_that_does_not_fit_says_where(rule: str, operands: Shapes, results: Shapes, message: str) -> None:
    autopar.register_rule("misfit", rule)
    with pytest.raises(RuleError) as error:
        rule_for(NodeView("misfit", {}, operands, results))
    assert message in str(error.value)


def test_an_unknown_reduction_is_refused() -> None:
    options: dict[str, Any] = {"reduction": "mean"}
    with pytest.raises(RuleError, match="'mean' of `told` must be one of sum, max"):
        autopar.register_rule("told", "a -> ", **options)


def test_the_template_can_be_read() -> None:
    view = NodeView("ffi_call", {"target_name": "solver"}, ((4, 8), ()), ((4,), ()))
    assert template(view) == 'autopar.register_rule("solver", ". .,  -> ., ", local=...)'
    autopar.register_rule("solver", ". .,  -> ., ")
    found = rule_for(view)
    assert found is not None and not found.factors


def shift_rows(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] + jnp.roll(x_ref[...], 1, axis=1)


def shifted(x: jax.Array) -> jax.Array:
    return pl.pallas_call(shift_rows, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def step(x: jax.Array) -> jax.Array:
    return jnp.cos(shifted(jnp.sin(x)))


ROWS = jax.ShapeDtypeStruct((1024, 512), jnp.float32)


def planned(function: Callable[..., Any] = step, mesh: str = "8") -> autopar.Plan:
    return autopar.plan(function, ROWS, mesh=mesh, hardware="h100-sxm")


def compiled(plan: autopar.Plan, function: Callable[..., Any] = step) -> str:
    return autopar.parallelize(function, plan=plan).lower(ROWS).compile().as_text() or ""


def test_a_kernel_is_named_until_it_can_be_split_and_then_is() -> None:
    (note,) = planned().notes
    assert "`shift_rows` has no sharding rule: its 1 uses run replicated" in note
    assert "a `pallas_call`, is at" in note and "test_rules_registered.py" in note
    assert '`autopar.register_rule("shift_rows", ". . -> . .", local=...)`' in note

    autopar.register_rule("shift_rows", "rows . -> rows .")
    (note,) = planned().notes
    assert "`shift_rows` has a sharding rule without `local`, which runs a part of it: its 1 uses run repl" in note
    assert "give `register_rule` a function of one device's operands as `local`" in note
    assert not planned().regions
    assert [one.name for one in planned().replicated] == ["shift_rows"]

    autopar.register_rule("shift_rows", "rows . -> rows .", local=shifted)
    plan = planned()
    assert plan.notes == () and plan.replicated == ()
    assert plan.inputs[0].sharding.dims == (("data",), ())
    assert [region.operands[0].dims for region in plan.regions] == [(("data",), ())]
    assert not hlo.collectives(compiled(plan))
    x = np.random.default_rng(0).random(ROWS.shape, np.float32)
    np.testing.assert_allclose(autopar.parallelize(step, plan=plan)(x), step(jnp.asarray(x)), rtol=1e-6)


def test_the_summary_of_a_plan_names_what_has_no_rule_and_its_share(tmp_path: Path) -> None:
    """As `autopar plan` prints it; the share is that of the kernels in the plan's own timeline."""

    def twice(x: jax.Array) -> jax.Array:
        def kernel(x: jax.Array) -> jax.Array:
            return pl.pallas_call(shift_rows, out_shape=ROWS, interpret=True, name="without_rule")(x)

        return kernel(jnp.cos(kernel(jnp.sin(x))))

    plan = planned(twice)
    (one,) = plan.replicated
    assert (one.name, one.count) == ("without_rule", 2)
    assert 0 < one.time_s < plan.prediction.compute_s * (1 + 1e-9)
    plan.save(tmp_path / "plan.json")
    assert autopar.load_plan(tmp_path / "plan.json") == plan
    text = io.StringIO()
    render_summary(plan, Console(file=text, width=400))
    share = 100 * one.time_s / plan.prediction.step_time_s
    head = text.getvalue().split("Predicted step")[0]
    assert f"run replicated on all 8 devices: `without_rule` x2; {share:.0f} % of the step" in head
    assert "proven optimal among the strategies of the known sharding rules" in head
    alone = planned(twice, mesh="1")
    assert alone.replicated == () and "Replicated" not in str(autopar.explain(alone))


def column_sums(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.sum(x_ref[...], axis=0)


def summed(x: jax.Array) -> jax.Array:
    return pl.pallas_call(column_sums, out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype), interpret=True)(x)


def test_what_a_kernel_reduces_is_summed_once() -> None:
    def sums(x: jax.Array) -> jax.Array:
        return summed(jnp.sin(x)) / 2

    autopar.register_rule("column_sums", "rows . -> .", local=summed, flops_per_point=1e7)
    pin = {"x": jax.P("data")}
    plan = autopar.plan(sums, ROWS, mesh="8", hardware="h100-sxm", pin=pin)
    (region,) = plan.regions
    assert region.operands[0].dims == (("data",), ()) and region.results[0].unreduced == ("data",)
    text = compiled(plan, sums)
    assert {one.kind for one in hlo.collectives(text)} <= {"all-reduce", "all-gather"}  # the output may be split
    assert max(one.num_elements for one in hlo.collectives(text)) == 512
    x = np.random.default_rng(0).random(ROWS.shape, np.float32)
    np.testing.assert_allclose(autopar.parallelize(sums, plan=plan)(x), sums(jnp.asarray(x)), rtol=1e-5, atol=1e-5)


def test_a_saved_plan_needs_the_function_again(tmp_path: Path) -> None:
    def other(x: jax.Array) -> jax.Array:
        return pl.pallas_call(shift_rows, out_shape=ROWS, interpret=True, name="shifted_elsewhere")(jnp.sin(x))

    autopar.register_rule("shifted_elsewhere", "rows . -> rows .", local=shifted)
    plan = planned(other)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.load_plan(tmp_path / "plan.json")
    assert isinstance(loaded, autopar.Plan)
    assert loaded.regions == plan.regions != ()
    autopar.register_rule("shifted_elsewhere", "rows . -> rows .")
    with pytest.raises(
        RuleError, match=r"runs `shifted_elsewhere` on local shards, but no local function is registered"
    ):
        autopar.parallelize(other, plan=loaded)(np.zeros(ROWS.shape, np.float32))


def test_traits_are_registered_with_a_rule() -> None:
    autopar.register_rule("shaped", "a b -> a b", traits=Traits(library=True, linear="one"))
    assert traits_of("shaped").library and traits_of("shaped").linear == "one"
    before = registered_texts()
    autopar.register_rule("shaped", "a b -> a b")
    assert traits_of("shaped") == Traits()
    assert registered_texts() != before, "kept plans depend on them"


def test_a_pass_goes_by_the_traits_of_a_primitive_of_ones_own() -> None:
    summed_rows = Primitive("summed_rows")
    summed_rows.def_impl(lambda x: jnp.sum(x, 0))
    summed_rows.def_abstract_eval(lambda x: x.update(shape=x.shape[1:]))
    mlir.register_lowering(summed_rows, mlir.lower_fun(lambda x: jnp.sum(x, 0), multiple_results=False))

    def step(weight: jax.Array, batch: jax.Array) -> jax.Array:
        return weight - 0.1 * summed_rows.bind(jnp.tanh(batch * weight))

    args = np.zeros(256, np.float32), np.ones((64, 256), np.float32)
    autopar.register_rule("summed_rows", "b d -> d")
    with pytest.raises(MicrobatchError, match="summed_rows"):
        autopar.plan(step, *args, mesh="x=8", hardware="h100-sxm", num_microbatches=2)
    autopar.register_rule("summed_rows", "b d -> d", traits=Traits(terms=True))
    plan = autopar.plan(step, *args, mesh="x=8", hardware="h100-sxm", num_microbatches=2)
    got = autopar.parallelize(step, plan=plan)(*args)
    np.testing.assert_allclose(got, step(*map(jnp.asarray, args)), rtol=1e-5)
