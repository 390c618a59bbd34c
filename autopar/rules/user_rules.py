"""Rules that users give in one line of text: for their own primitives, Pallas kernels and custom calls.

In: a name and a text such as `"b s d, d f -> b s f"`. Out: entries that `table.rule_for` looks up where the table has
none. They are the one state that this package keeps between calls, since a name is registered once and planned with often.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from autopar.errors import RuleError
from autopar.rules.factors import DimNames, Name, Reduction, Rule, build_rule
from autopar.rules.node_view import NodeView, counted
from autopar.rules.traits import PLAIN, Traits

_TOKEN = re.compile(r"\s*(->|[A-Za-z_]\w*|[.,()]|\S)")
_GRAMMAR = (
    "A rule names the loops of each dim as an einsum does: `b s d, d f -> b s f`. Dims stand apart by spaces, tensors by"
    " commas; `.` is a dim that stays whole, `(h d)` one made of two loops, nothing at all a scalar"
)


#: What XLA's partitioner runs whole, on gathered operands.
_WHOLE = ("pallas_call", "ffi_call")


@dataclass(frozen=True, slots=True)
class _Registered:
    text: str
    operands: tuple[DimNames, ...]
    results: tuple[DimNames, ...]
    reduction: Reduction
    flops_per_point: float | None
    local: Callable[..., Any] | None
    traits: Traits


_registered: dict[str, _Registered] = {}


def register_rule(
    name: str,
    rule: str,
    *,
    local: Callable[..., Any] | None = None,
    reduction: Reduction = "sum",
    flops_per_point: float | None = None,
    traits: Traits = PLAIN,
) -> None:
    """Tell how a primitive that autopar does not know may be split.

    Args:
        name: of the primitive; of the kernel for a `pallas_call`; of the target for a `jax.ffi.ffi_call`.
        rule: the loops of each dim, `"b s d, d f -> b s f"`. One that no result has is reduced.
        local: runs the same operation on one device's operands, of whatever shapes the split gives them, and returns
            its result or results; where a loop is reduced, one of the terms. A `pallas_call` or `ffi_call` is
            split only with it, for it is traced for one set of shapes, and XLA runs it whole. For any other
            primitive, XLA's partitioner is relied on without it.
        reduction: what combines the parts of a loop that is reduced: sum, max, min, prod, and, or.
        flops_per_point: operations for each point of the space of all loops, `2.0` for a matrix product. By default what
            is counted of a Pallas kernel or of cuDNN's attention, of anything else 1.
        traits: of a primitive, what it is besides: linear, a library's kernel, ...

    A name registered again is replaced; a primitive that autopar has a rule for keeps that one. A rule is held against
    shapes when a step is planned.

    Raises:
        RuleError: the text cannot be read; naming the token that is wrong.

    >>> register_rule("my_matmul", "b s d, d f -> b s f", flops_per_point=2.0)
    """
    if reduction not in get_args(Reduction):
        raise RuleError(f"the reduction {reduction!r} of `{name}` is none of {', '.join(get_args(Reduction))}")
    operands, results = _read(name, rule)
    flops = None if flops_per_point is None else float(flops_per_point)
    _registered[name] = _Registered(rule, operands, results, reduction, flops, local, traits)


def called(view: NodeView) -> str:
    """What a rule is registered by: the name of a kernel or of a custom call's target, else of the primitive."""
    for parameter in ("name", "target_name"):
        name = view.params.get(parameter)
        if view.primitive in _WHOLE and isinstance(name, str):
            return name
    return view.primitive


def template(view: NodeView) -> str:
    """The line that registers a rule for a node, every dim whole.

    >>> template(NodeView("mystery", {}, ((4, 8), ()), ((4,),)))
    'autopar.register_rule("mystery", ". .,  -> .")'
    """
    left, right = (
        ", ".join(" ".join("." * len(s)) for s in shapes) for shapes in (view.operand_shapes, view.result_shapes)
    )
    local = ", local=..." if view.primitive in _WHOLE else ""
    return f'autopar.register_rule("{called(view)}", "{left} -> {right}"{local})'


def registered_rule(view: NodeView) -> Rule | None:
    """The rule that a user gave for this node, or None.

    Raises:
        RuleError: the node has other tensors, dims or sizes than the rule says.
    """
    registered = _registered.get(called(view)) or _registered.get(view.primitive)
    if registered is None:
        return None
    sizes = _sizes(view, registered)
    whole = needs_local(view)
    names = [
        [()] * len(term) if whole else term
        for term in (
            *registered.operands[: len(view.operand_shapes)],
            *registered.results,
        )  # of none, the text has one: empty
    ]
    points = math.prod(sizes.values())
    flops, inside = (registered.flops_per_point or 1.0, ())
    if registered.flops_per_point is None and "work" in view.params:
        whole_flops, whole_inside = counted(view)
        flops, inside = whole_flops / points, tuple((dtype, each / points) for dtype, each in whole_inside)
    scale = points if whole else 1
    return build_rule(
        names[: len(view.operand_shapes)],
        names[len(view.operand_shapes) :],
        view.operand_shapes,
        view.result_shapes,
        sizes={} if whole else sizes,
        reduction=registered.reduction,
        flops_per_point=flops * scale,
        matrix_flops_per_point=tuple((dtype, each * scale) for dtype, each in inside),
        manual=sizes if registered.local is not None else (),
    )


def needs_local(view: NodeView) -> bool:
    """Whether a rule names loops of a node that XLA would run whole, without the function that runs a part of it."""
    registered = _registered.get(called(view)) or _registered.get(view.primitive)
    if registered is None or registered.local is not None or view.primitive not in _WHOLE:
        return False
    return any(names for term in (*registered.operands, *registered.results) for names in term)


def registered_traits(primitive: str) -> Traits:
    """The traits that a user gave a primitive; of one that nobody knows those that promise nothing."""
    given = _registered.get(primitive)
    return PLAIN if given is None else given.traits


def registered_local(name: str, primitive: str) -> Callable[..., Any] | None:
    """The function that runs a part of a node, by what the node is `called` and its primitive."""
    registered = _registered.get(name) or _registered.get(primitive)
    return None if registered is None else registered.local


# -- reading -------------------------------------------------------------------------------------


def _read(name: str, rule: str) -> tuple[tuple[DimNames, ...], tuple[DimNames, ...]]:
    def refuse(token: str, why: str) -> RuleError:
        return RuleError(f"cannot read the rule {rule!r} of `{name}` at {token!r}: {why}. {_GRAMMAR}")

    sides: list[list[list[tuple[Name, ...]]]] = [[[]]]
    inside: list[Name] | None = None
    for token in _TOKEN.findall(rule):
        term = sides[-1][-1]
        if inside is not None and token in ("->", ",", "(", "."):
            raise refuse(token, "it stands inside parentheses, which hold names alone")
        if token == "->":
            sides.append([[]])
        elif token == ",":
            sides[-1].append([])
        elif token == "(":
            inside = []
        elif token == ")":
            if not inside:
                raise refuse(token, "there is nothing that it closes")
            term.append(tuple(inside))
            inside = None
        elif token == ".":
            term.append(())
        elif not token.isidentifier():
            raise refuse(token, "it is neither a name, `.`, `,`, `->` nor a parenthesis")
        elif any(token in names for names in (*term, tuple(inside or ()))):
            raise refuse(token, "the name stands twice in one tensor")
        elif inside is not None:
            inside.append(token)
        else:
            term.append((token,))
    if inside is not None:
        raise refuse("(", "it is never closed")
    if len(sides) != 2:
        raise refuse("->", f"it stands {len(sides) - 1} times, and separates operands from results once")
    return tuple(sides[0]), tuple(sides[1])


def _sizes(view: NodeView, registered: _Registered) -> dict[Name, int]:
    """The size of each loop; one that stands in `(a b)` alone is what the others leave of the dim."""

    def refuse(why: str) -> RuleError:
        shapes = f"{_shapes(view.operand_shapes)} -> {_shapes(view.result_shapes)}"
        return RuleError(f"the rule {registered.text!r} of `{called(view)}` does not fit {shapes}: {why}")

    sides = (("operand", registered.operands, view.operand_shapes), ("result", registered.results, view.result_shapes))
    dims: list[tuple[tuple[Name, ...], int, str]] = []
    for word, terms, shapes in sides:
        if len(terms) != len(shapes) and not (not shapes and list(terms) == [[]]):
            raise refuse(f"it has {len(terms)} {word}s, and the operation {len(shapes)}")
        for i, (term, shape) in enumerate(zip(terms, shapes, strict=False)):
            if len(term) != len(shape):
                raise refuse(f"{word} {i} has {len(shape)} dims, and the rule names {len(term)}")
            dims += [(names, size, f"{word} {i}") for names, size in zip(term, shape, strict=True)]
    sizes: dict[Name, int] = {}
    for _ in range(1 + max((len(names) for names, _, _ in dims), default=0)):
        for names, size, _ in dims:
            unknown = [name for name in names if name not in sizes]
            known = math.prod(sizes[name] for name in names if name in sizes)
            if len(unknown) == 1 and known and size % known == 0:
                sizes[unknown[0]] = size // known
    for names, size, where in dims:
        missing = [name for name in names if name not in sizes]
        if missing:
            raise refuse(f"nothing says how large `{missing[0]}` is, for it stands in parentheses alone")
        product = math.prod(sizes[name] for name in names)
        if names and product != size:
            words = f"`{names[0]}` is" if len(names) == 1 else f"`({' '.join(map(str, names))})` make"
            raise refuse(f"{words} {product} elsewhere, and {size} in {where}")
    return sizes


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def registered_texts() -> tuple[tuple[object, ...], ...]:
    """All that was registered, as plain values: what a plan depends on beside the program."""
    return tuple(
        (
            name,
            registered.text,
            registered.reduction,
            registered.flops_per_point,
            registered.local is not None,
            repr(registered.traits),
        )
        for name, registered in sorted(_registered.items())
    )
