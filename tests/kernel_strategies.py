"""Kernels of a step: their rules as text, and each of them run by every strategy."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.frontend.equations import LiteralOperand
from autopar.ir.mesh import parse_mesh
from autopar.jax_interop import compat as jax_compat
from autopar.plans.records import ManualRegion
from autopar.rules.node_view import NodeView
from autopar.rules.strategies import enumerate_strategies
from autopar.rules.table import rule_for
from autopar.runtime.jit import make_mesh
from autopar.runtime.manual.region import run_region
from autopar.transforms.program import program_of


def kernels(step: Callable[..., Any], args: Sequence[Any], primitive: str) -> list[str]:
    """The rules of a step's kernels as text: factors by letter, with their sizes."""
    graph = program_of(step, tuple(args), carry=None, donate=None).graph
    views = [NodeView.of(node, graph) for node in graph.nodes if node.primitive.startswith(primitive)]
    found = []
    for view in views:
        rule = rule_for(view)
        if rule is None:
            found.append("none")
            continue
        letters = "abcdefgh"
        terms = [
            " ".join("".join(letters[f] for f in dim) or "." for dim in dims)
            for dims in (*rule.operands, *rule.results)
        ]
        left, right = terms[: len(rule.operands)], terms[len(rule.operands) :]
        shared = " ".join(f"{letters[f]}={rule.factors[f].size}" for f in sorted(rule.manual))
        found.append(f"{', '.join(left)} -> {', '.join(right)}; {shared}")
    return found


def run_every_strategy(step: Callable[..., Any], args: Sequence[Any], mesh: str, *, most: int = 1 << 10) -> int:
    """Run every kernel of a step by the strategies that split it, at most `most` for each kernel, and compare with the kernel
    on one device. Returns the number of strategies."""
    program = program_of(step, tuple(args), carry=None, donate=None)
    trace, shape = program.trace, parse_mesh(mesh)
    devices = make_mesh(shape)
    env: dict[int, Any] = dict(zip(trace.inputs, jax.tree.leaves(args), strict=True)) | dict(trace.constants)
    count = 0
    for n, equation in enumerate(trace.equations):
        operands = [v.value if isinstance(v, LiteralOperand) else env[v] for v in equation.operands]
        expected = jax_compat.bind(equation.source, operands)
        env |= dict(zip(equation.results, expected, strict=True))
        if equation.primitive != "pallas_call":
            continue
        rule = rule_for(NodeView.of(program.graph.nodes[n], program.graph))
        if rule is None:
            continue
        strategies = enumerate_strategies(rule.factors, shape, manual=rule.manual)
        split = [one for one in strategies if any(one.axes[f] for f in rule.manual)]
        for strategy in random.Random(0).sample(split, min(most, len(split))):
            results = tuple(strategy.sharding(dims) for dims in rule.results)
            region = ManualRegion(
                node=n,
                primitive=equation.primitive,
                path="",
                operands=tuple(strategy.sharding(dims) for dims in rule.operands),
                results=results,
            )

            def run(*values: Any, region: Any = region, source: Any = equation.source) -> Any:
                return run_region(region, source, values, devices, [None] * len(region.results))

            everywhere = NamedSharding(devices, jax.P())
            compiled = jax.jit(run).lower(*(jax.device_put(one, everywhere) for one in operands)).compile()
            assert not re.search(r" (all-|reduce-scatter|collective-)", compiled.as_text() or "")
            got = compiled(*(jax.device_put(one, everywhere) for one in operands))
            for one, other, sharding in zip(got, expected, results, strict=True):
                assert one.addressable_shards[0].data.shape == sharding.local_shape(other.shape, shape)
                np.testing.assert_allclose(
                    np.asarray(one, np.float32),
                    np.asarray(other, np.float32),
                    rtol=1e-5,
                    atol=1e-6,
                    err_msg=str(region),
                )
            count += 1
    return count
