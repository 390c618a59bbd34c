"""Groups: which nodes are grouped, which must not be, and that every node of a catalogue program is in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import programs
import pytest

from autopar.ir.graph import Graph
from autopar.ir.mesh import parse_mesh
from autopar.ir.verifier import check
from autopar.rules.factors import Factor, Rule
from autopar.rules.grouping import SMALL_SIZE, Group, form_groups
from autopar.rules.node_view import NodeView
from autopar.rules.strategies import enumerate_strategies
from autopar.rules.table import rule_for, rules_of, unknown_rule
from autopar.transforms.program import program_of


def grouped(program: programs.Program) -> tuple[Graph, tuple[Group, ...]]:
    graph = program_of(program.step, program.abstract_args(), carry=None, donate=None).graph
    rules, unknown = rules_of(graph)
    assert not unknown
    return graph, form_groups(graph, rules, frozenset(range(len(graph.inputs))))


@pytest.mark.contract
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_node_that_matters_is_in_exactly_one_group(name: str) -> None:
    graph, groups = grouped(programs.PROGRAMS[name]())
    check(graph)
    members = [n for group in groups for n in group.nodes]
    assert len(members) == len(set(members))
    for n, node in enumerate(graph.nodes):
        touched = [v for v in (*node.operands, *node.results) if v is not None]
        assert (n in set(members)) == any(graph.values[v].size > SMALL_SIZE for v in touched)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_factors_have_the_sizes_of_the_dims_they_name(name: str) -> None:
    graph, groups = grouped(programs.PROGRAMS[name]())
    for group in groups:
        named = [(r.value, r.dims, r.uses) for r in group.reads] + [(d.value, d.dims, ()) for d in group.defines]
        region = group.region
        windows = {(region.node, h.operand, h.dim): h.window for h in region.halos} if region else {}
        for value, dims, uses in [*named, *((value, dims, ()) for value, dims in group.inputs)]:
            for d, (size, dim) in enumerate(zip(graph.values[value].shape, dims, strict=True)):
                product = 1
                for factor in dim:
                    product *= group.factors[factor].size
                read = {windows[n, i, d] for n, i in uses if (n, i, d) in windows}
                assert not dim or all((w.size, w.count) == (size, product) for w in read)
                assert not dim or read or product == size


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_equal_nodes_share_the_rule_that_each_would_have(name: str) -> None:
    graph, _ = grouped(programs.PROGRAMS[name]())
    rules, _ = rules_of(graph)
    shared: dict[str, Rule] = {}
    for node, rule in zip(graph.nodes, rules, strict=True):
        view = NodeView.of(node, graph)
        assert rule == (rule_for(view) or unknown_rule(view))
        assert shared.setdefault(repr(view), rule) is rule


def test_every_use_of_a_primitive_without_a_rule_is_counted() -> None:
    def step(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return x

    graph = program_of(step, (jax.ShapeDtypeStruct((64, 8), "float32"),), carry=[], donate=[]).graph
    assert rules_of(graph)[1] == {"pure_callback": 3}


def test_state_lives_in_a_group_only_where_one_output_and_no_other_renews_it() -> None:
    def inside(step: Callable[..., Any]) -> set[str]:
        arrays = [jax.ShapeDtypeStruct((256, 8), "float32")] * 2
        graph = program_of(step, arrays, carry=["m"], donate=[]).graph
        groups = form_groups(graph, rules_of(graph)[0], frozenset(range(len(graph.inputs))))
        return {graph.input_paths[graph.inputs.index(v)] for g in groups for v, _ in g.inputs}

    assert inside(lambda m, x: 0.9 * m + x) == {"m"}

    def twice(m: jax.Array, x: jax.Array) -> Any:
        after = 0.9 * m + x
        return after, after

    assert inside(twice) == set()
    assert inside(lambda m, x: (0.9 * m + x, m)) == set()


def test_optimizer_state_lives_with_its_update_and_parameters_do_not() -> None:
    graph, groups = grouped(programs.mlp(optimizer="adam"))
    inside = {graph.input_paths[graph.inputs.index(v)] for g in groups for v, _ in g.inputs}
    assert any("mu/Dense_0/kernel" in path for path in inside)
    assert any("nu/Dense_0/kernel" in path for path in inside)
    assert not any("/params/" in path for path in inside)


def test_layer_norm_and_softmax_are_one_group_each() -> None:
    def step(x: jax.Array) -> jax.Array:
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return jax.nn.softmax(x, axis=-1)

    graph = program_of(step, [jax.ShapeDtypeStruct((128, 256), "float32")], carry=[], donate=[]).graph
    groups = form_groups(graph, rules_of(graph)[0])
    assert len(groups) == 1
    assert sorted(f.size for f in groups[0].factors) == [128, 256]


def test_the_gradient_of_a_bias_is_not_tied_to_the_activations() -> None:
    graph, groups = grouped(programs.mlp(batch=256, width=128))
    for group in groups:
        phases = {graph.nodes[n].phase for n in group.nodes}
        assert not {"forward", "update"} <= phases


def test_strategies_are_all_assignments_of_axes_to_factors() -> None:
    mesh = parse_mesh("2x4")
    assert len(enumerate_strategies([Factor(8), Factor(16)], mesh)) == 9
    assert len(enumerate_strategies([Factor(8), Factor(16)], mesh, fixed={1})) == 4
    assert len(enumerate_strategies([Factor(8)], parse_mesh("1x4"))) == 2
    assert enumerate_strategies([Factor(8)], mesh)[0].axes == ((),)


def test_an_uneven_split_is_allowed_only_where_padding_is_small_and_nothing_forbids_it() -> None:
    mesh = parse_mesh("8")
    assert len(enumerate_strategies([Factor(50257)], mesh)) == 2
    assert len(enumerate_strategies([Factor(50257)], mesh, even={0})) == 1
    assert len(enumerate_strategies([Factor(12)], mesh)) == 1


@pytest.mark.parametrize(("num_rows", "splits"), [(32, True), (33, False)])
def test_combined_updates_are_split_into_equal_shares_only(num_rows: int, splits: bool) -> None:
    """What XLA pads an uneven share with counts: on 2x4, `segment_max` of 33 rows of negative numbers gave zeros."""

    def step(rows: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_max(rows, ids, 8)

    rows = jax.ShapeDtypeStruct((num_rows, 16), "float32")
    graph = program_of(step, [rows, jax.ShapeDtypeStruct((num_rows,), "int32")], carry=[], donate=[]).graph
    groups = form_groups(graph, rules_of(graph)[0])
    (scatter,) = (g for g in groups if any(graph.nodes[n].primitive == "scatter-max" for n in g.nodes))
    (loop,) = (f for f, factor in enumerate(scatter.factors) if factor.reduction)
    strategies = enumerate_strategies(scatter.factors, parse_mesh("2x4"), even=scatter.even, fixed=scatter.fixed)
    assert any(s.axes[loop] for s in strategies) is splits
