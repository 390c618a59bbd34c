"""What a legal graph is; run between passes in tests, and once per plan (it is cheap).

In: `Graph`. Out: nothing, or an AssertionError: an illegal graph is our mistake, not the user's.
"""

from __future__ import annotations

from autopar.ir.graph import Graph


def check(graph: Graph) -> None:
    """Assert that every value is defined once, before it is read, and that positions are in range."""
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
