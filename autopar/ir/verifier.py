"""Verify that a graph or an explicit program is well-formed, once per plan and in tests.

In: `Graph`, `ExplicitProgram`. Out: nothing, or an AssertionError: a violation is a bug of autopar, not of the user.
"""

from __future__ import annotations

from collections import Counter

from autopar.ir.explicit_program import Communicate, ExplicitProgram, Extend
from autopar.ir.graph import Graph
from autopar.ir.sharding_changes import is_change


def check(graph: Graph) -> None:
    """Assert that every value is defined exactly once and before its uses, and that positions are in range."""
    num_values = len(graph.values)
    assert len(graph.inputs) == len(graph.input_paths), "one path per input"
    assert len(graph.outputs) == len(graph.output_paths), "one path per output"
    defined = set(graph.inputs) | set(graph.constants)
    assert len(defined) == len(graph.inputs) + len(graph.constants), "an input or constant is listed twice"
    for position, node in enumerate(graph.nodes):
        for operand in node.operands:
            assert operand is None or operand in defined, (
                f"node {position} ({node.primitive}) reads {operand} too early"
            )
        for result in node.results:
            assert 0 <= result < num_values, f"node {position} defines an unknown value"
            assert result not in defined, f"node {position} defines value {result} again"
            defined.add(result)
    for output in graph.outputs:
        assert output is None or output in defined, f"output {output} is never defined"
    for source, target in graph.carried:
        before, after = graph.inputs[source], graph.outputs[target]
        assert after is None or graph.values[before].shape == graph.values[after].shape, "carried state changes shape"


def check_explicit(program: ExplicitProgram, graph: Graph) -> None:
    """Assert that arrays are produced once and before their uses, that nodes read their own operands, and that each
    communication changes its operand's sharding into its result's."""
    defined = {program.made[value] for value in (*graph.inputs, *graph.constants)}
    computed = Counter[int]()
    halos = {op.operand for op in program.communications if op.cause == "halo"}
    for op in program.ops:
        if isinstance(op, Extend):
            value = graph.nodes[op.node].operands[op.operand]
            sent = {program.arrays[array].value for array in halos & defined if array is not None}
            assert {halo_slice.value for halo_slice in op.slices} <= {value} & sent, (
                f"{op} extends {value} by what is not sent"
            )
            continue
        read = [op.operand] if isinstance(op, Communicate) else op.operands
        if not (
            isinstance(op, Communicate) and op.cause in ("region", "context")
        ):  # a region's communication follows its node
            assert {array for array in read if array is not None} <= defined, f"{op} reads too early"
        if isinstance(op, Communicate):
            made = [] if op.result is None else [op.result]
            if op.operand is not None and op.result is not None:
                before, after = program.arrays[op.operand], program.arrays[op.result]
                assert before.value == after.value, f"{op} changes the value"
                is_valid = is_change(op.kind, before.sharding, after.sharding, set(op.axes))
                assert is_valid, f"{op}: {before.sharding} -> {after.sharding}"
        else:
            computed[op.node] += 1
            values = tuple(None if array is None else program.arrays[array].value for array in op.operands)
            assert values == graph.nodes[op.node].operands, f"node {op.node} reads other values"
            made = [program.made[value] for value in graph.nodes[op.node].results]
        assert defined.isdisjoint(made), f"{op} produces an array twice"
        defined.update(made)
    assert set(computed.values()) <= {1}, "a node is computed twice"
    assert all(n in computed for n, node in enumerate(graph.nodes) if node.results), "a node is not computed"
    values = tuple(None if array is None else program.arrays[array].value for array in program.outputs)
    assert values == graph.outputs, "outputs are other values"
    assert {array for array in program.outputs if array is not None} <= defined, "an output is never produced"
