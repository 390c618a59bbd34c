"""Rules that users give in one line of text: for their own primitives, Pallas kernels and custom calls.

In: a name and a text such as `"b s d, d f -> b s f"`. Out: entries that `table.rule_for` looks up if the table has
none. They are the only state that this package keeps between calls, because a user registers a name once and plans with
it often.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from autopar.errors import RuleError
from autopar.rules.factors import DimNames, Name, Reduction, Rule, build_rule
from autopar.rules.kernels import KERNEL_TRAITS
from autopar.rules.node_view import NodeView, counted, matrix_efficiency
from autopar.rules.traits import PLAIN, Traits

_TOKEN = re.compile(r"\s*(->|[A-Za-z_]\w*|[.,()]|\S)")
_GRAMMAR = (
    "A rule names the loops of each dim as an einsum does: `b s d, d f -> b s f`. Spaces separate dims and commas separate"
    " tensors; `.` is a dim that stays whole, `(h d)` is a dim of two loops, and an empty text is a scalar"
)


#: Primitives that XLA's partitioner does not split.
_WHOLE = ("ffi_call", *KERNEL_TRAITS)


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
    """Register the sharding rule of a primitive that autopar does not know.

    Args:
        name: the name of the primitive; for a `pallas_call` that of the kernel, for a `jax.ffi.ffi_call` that of the
            target.
        rule: the loops of each dim, `"b s d, d f -> b s f"`. A loop that no result has is reduced.
        local: a function that runs the same operation on one device's operands. It takes any shapes that a split may
            give them and returns the result or results; if a loop is reduced, it returns one term of the reduction. A
            `pallas_call` or `ffi_call` is split only with this function, because it is traced for one set of shapes and
            XLA runs it whole. Any other primitive needs none, because XLA's partitioner splits it.
        reduction: how the parts of a reduced loop combine: sum, max, min, prod, and, or.
        flops_per_point: operations per point of the iteration space of all loops, `2.0` for a matmul. By default those
            counted in a Pallas kernel or in cuDNN's attention; otherwise 1.
        traits: further properties of a primitive: linear, a library's kernel, ...

    If a name is registered again, the new rule replaces the old one. A primitive that autopar has a rule for keeps that
    rule. The shapes are checked against the rule when a step is planned.

    Raises:
        RuleError: the text cannot be read; the message quotes the wrong token.

    >>> register_rule("my_matmul", "b s d, d f -> b s f", flops_per_point=2.0)
    """
    if reduction not in get_args(Reduction):
        raise RuleError(f"the reduction {reduction!r} of `{name}` must be one of {', '.join(get_args(Reduction))}")
    operands, results = _read(name, rule)
    flops = None if flops_per_point is None else float(flops_per_point)
    _registered[name] = _Registered(rule, operands, results, reduction, flops, local, traits)


def called(view: NodeView) -> str:
    """The name under which a node's rule is registered: that of a kernel or of a custom call's target, else that of the
    primitive."""
    for parameter in ("name", "target_name"):
        name = view.params.get(parameter)
        if view.primitive in _WHOLE and isinstance(name, str):
            return name
    return view.primitive


def template(view: NodeView) -> str:
    """The line of code that registers a rule for a node, with every dim whole.

    >>> template(NodeView("mystery", {}, ((4, 8), ()), ((4,),)))
    'autopar.register_rule("mystery", ". .,  -> .")'
    """
    left, right = (
        ", ".join(" ".join("." * len(s)) for s in shapes) for shapes in (view.operand_shapes, view.result_shapes)
    )
    local = ", local=..." if view.primitive in _WHOLE else ""
    return f'autopar.register_rule("{called(view)}", "{left} -> {right}"{local})'


def registered_rule(view: NodeView) -> Rule | None:
    """The rule that a user registered for this node, or None.

    Raises:
        RuleError: the rule does not fit the node's number of tensors, their dims or their sizes.
    """
    registered = _registered.get(called(view)) or _registered.get(view.primitive)
    if registered is None:
        return None
    sizes = _sizes(view, registered)
    whole = needs_local(view)
    names = [
        [()] * len(term) if whole else term
        # The text of a node without operands has one empty operand.
        for term in (*registered.operands[: len(view.operand_shapes)], *registered.results)
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
        matrix_efficiency=matrix_efficiency(view.params),
        manual=sizes if registered.local is not None else (),
    )


def needs_local(view: NodeView) -> bool:
    """Whether a rule cannot be used for lack of a `local` function: it names loops of a node that XLA would run
    whole."""
    registered = _registered.get(called(view)) or _registered.get(view.primitive)
    if registered is None or registered.local is not None or view.primitive not in _WHOLE:
        return False
    return any(names for term in (*registered.operands, *registered.results) for names in term)


def registered_traits(primitive: str) -> Traits:
    """The traits that a user registered for a primitive, else the defaults, which promise nothing."""
    given = _registered.get(primitive)
    return PLAIN if given is None else given.traits


def registered_local(name: str, primitive: str) -> Callable[..., Any] | None:
    """The function that runs a part of a node, by the node's name (see `called`) and its primitive."""
    registered = _registered.get(name) or _registered.get(primitive)
    return None if registered is None else registered.local


def no_local(name: str) -> RuleError:
    """The error of a plan that runs a node in parts for which there is no function."""
    return RuleError(
        f"the plan runs `{name}` on local shards, but no local function is registered for it."
        f' Register it before the step runs: `autopar.register_rule("{name}", ..., local=...)`'
    )


def _read(name: str, rule: str) -> tuple[tuple[DimNames, ...], tuple[DimNames, ...]]:
    def refuse(token: str, why: str) -> RuleError:
        return RuleError(f"cannot read the rule {rule!r} of `{name}` at {token!r}: {why}. {_GRAMMAR}")

    sides: list[list[list[tuple[Name, ...]]]] = [[[]]]
    inside: list[Name] | None = None
    for token in _TOKEN.findall(rule):
        term = sides[-1][-1]
        if inside is not None and token in ("->", ",", "(", "."):
            raise refuse(token, "parentheses may hold names only")
        if token == "->":
            sides.append([[]])
        elif token == ",":
            sides[-1].append([])
        elif token == "(":
            inside = []
        elif token == ")":
            if not inside:
                raise refuse(token, "it closes no parenthesis with a name in it")
            term.append(tuple(inside))
            inside = None
        elif token == ".":
            term.append(())
        elif not token.isidentifier():
            raise refuse(token, "it is not a name, `.`, `,`, `->` or a parenthesis")
        elif any(token in names for names in (*term, tuple(inside or ()))):
            raise refuse(token, "the name occurs twice in one tensor")
        elif inside is not None:
            inside.append(token)
        else:
            term.append((token,))
    if inside is not None:
        raise refuse("(", "it is never closed")
    if len(sides) != 2:
        raise refuse("->", f"a rule has one `->`, between operands and results; this one has {len(sides) - 1}")
    return tuple(sides[0]), tuple(sides[1])


def _sizes(view: NodeView, registered: _Registered) -> dict[Name, int]:
    """The size of each loop. If one loop of a dim `(a b)` occurs in no other dim, the sizes of the other loops give its
    size."""

    def refuse(why: str) -> RuleError:
        shapes = f"{_shapes(view.operand_shapes)} -> {_shapes(view.result_shapes)}"
        return RuleError(f"the rule {registered.text!r} of `{called(view)}` does not fit {shapes}: {why}")

    sides = (("operand", registered.operands, view.operand_shapes), ("result", registered.results, view.result_shapes))
    dims: list[tuple[tuple[Name, ...], int, str]] = []
    for word, terms, shapes in sides:
        if len(terms) != len(shapes) and not (not shapes and list(terms) == [[]]):
            raise refuse(f"it has {len(terms)} {word}s, but the operation has {len(shapes)}")
        for i, (term, shape) in enumerate(zip(terms, shapes, strict=False)):
            if len(term) != len(shape):
                raise refuse(f"{word} {i} has {len(shape)} dims, but the rule names {len(term)}")
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
            raise refuse(f"the size of `{missing[0]}` is unknown, because the name occurs only in parentheses")
        product = math.prod(sizes[name] for name in names)
        if names and product != size:
            dim = names[0] if len(names) == 1 else f"({' '.join(map(str, names))})"
            raise refuse(f"`{dim}` has size {product} by other dims, but size {size} in {where}")
    return sizes


def _shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def registered_texts() -> tuple[tuple[object, ...], ...]:
    """All registered rules as plain values, because plans and their cache keys depend on them."""
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
