"""Rules of the pieces of loops and branches, of `with_sharding_constraint` and of `shard_map`.

In: `NodeView`. Out: `BORDERS` and `PINNED`, parts of the table. A tensor has the same sharding on both sides of a
border. A stack is an array of which a `scan` reads or writes one slice per iteration; its dim of iterations needs
replication. Dims that the program itself shards keep their axes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.rules.factors import Factor, Rule, build_rule, by_position
from autopar.rules.node_view import NodeView, RuleFunction, counted
from autopar.rules.traits import Traits, with_traits


def _passes(view: NodeView) -> Rule:
    """Operand and result have the same sharding; so have all branches and their common result."""
    return build_rule(
        [by_position(shape) for shape in view.operand_shapes if shape],
        [by_position(shape) for shape in view.result_shapes],
        [shape for shape in view.operand_shapes if shape],
        view.result_shapes,
        pointwise=True,
        flops_per_point=0.0,
    )


def _takes_one(view: NodeView) -> Rule:
    """`. d… -> d…`: each iteration reads one element of the stack."""
    (stack,), (one,) = view.operand_shapes, view.result_shapes
    operands = [[(), *by_position(one)]]
    return build_rule(operands, [by_position(one)], [stack], [one], pointwise=True, flops_per_point=0.0)


def _adds_one(view: NodeView) -> Rule:
    """`d… -> . d…`: each iteration writes one element of the stack."""
    (one,), (stack,) = view.operand_shapes, view.result_shapes
    results = [[(), *by_position(stack[1:])]]
    return build_rule([by_position(one)], results, [one], [stack], pointwise=True, flops_per_point=0.0)


def _decides(view: NodeView) -> Rule:
    return build_rule([()], [], [()], [], flops_per_point=1.0)


def _constrained(view: NodeView) -> Rule:
    """Dims that the program shards are pinned to its axes; dims that it leaves open are free."""
    rule = replace(_passes(view), pointwise=False)
    axes_of_dims = view.params.get("dims", (None,) * len(view.operand_shapes[0]))
    pinned = [
        (names[0], axes)
        for names, axes in zip(rule.operands[0], axes_of_dims, strict=True)
        if names and axes is not None
    ]
    return replace(rule, pinned=tuple(pinned), pointwise=not pinned)


def _manual(view: NodeView) -> Rule:
    """Each device runs the same program on its own part; the program shards all dims."""
    sizes = dict(view.params["axis_sizes"])
    factors: list[Factor] = []
    pinned: list[tuple[int, tuple[str, ...]]] = []
    points = 1.0

    def dims(shape: tuple[int, ...], axes_of_dims: tuple[tuple[str, ...], ...]) -> tuple[tuple[int, ...], ...]:
        nonlocal points
        out: list[tuple[int, ...]] = []
        for size, axes in zip(shape, axes_of_dims, strict=True):
            out.append((len(factors),) if axes and size > 1 else ())
            if out[-1]:
                pinned.append((len(factors), axes))
                factors.append(Factor(size))
                points *= size / math.prod(sizes[axis] for axis in axes)
        return tuple(out)

    operands = tuple(map(dims, view.operand_shapes, view.params["in_dims"]))
    results = tuple(map(dims, view.result_shapes, view.params["out_dims"]))
    flops, inside = counted(view)
    return Rule(
        tuple(factors),
        operands,
        results,
        flops_per_point=flops / points,
        matrix_flops_per_point=tuple((dtype, flops / points) for dtype, flops in inside),
        pinned=tuple(pinned),
    )


PINNED: dict[str, RuleFunction] = {"sharding_constraint": _constrained, "shard_map": _manual}

BORDERS: dict[str, RuleFunction] = {
    **dict.fromkeys(("enter_const", "enter_carry", "enter_branch", "exit_carry", "exit_branch", "barrier"), _passes),
    "enter_slice": _takes_one,
    "exit_stack": _adds_one,
    **dict.fromkeys(("index", "predicate"), _decides),
}

CONTROL_FLOW_TRAITS = with_traits(
    (*PINNED, *BORDERS),
    {
        "sharding_constraint": Traits(view=True, constrains=True),
        "shard_map": Traits(library=True, opaque=True),
        **dict.fromkeys(("enter_const", "enter_slice"), Traits(linear="one", held=True)),
    },
)
