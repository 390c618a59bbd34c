"""Find the carried state: the arguments whose pytrees are returned in the output.

In: the pytrees of shapes of arguments and result.
Out: pairs of leaf positions (input, output).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from autopar.errors import StepSignatureError
from autopar.frontend.pytrees import shape_and_dtype

_DEPTH = 3  # the depth of the search in the output: (state, loss), {"state": …}, …


def carried_arguments(
    args: Sequence[Any],
    result: Any,
    names: Sequence[str],
    carry: Sequence[str] | None,
    in_place: Collection[str] = (),
) -> dict[int, int]:
    """Map each carried argument's position to the output leaf position where its tree starts.

    Args:
        carry: names of the arguments to carry; None finds them: an argument is carried if a subtree of the output has
            its structure, shapes and dtypes. Each subtree is used once.
        in_place: names of arguments that are mutated in place; they are skipped.

    Raises:
        StepSignatureError: a name is not an argument, or its tree is not returned.
    """
    every = [position for position, name in enumerate(names) if name not in in_place]
    wanted = every if carry is None else [_position(name, names) for name in carry]
    taken: set[int] = set()
    found: dict[int, int] = {}
    for position in wanted:
        signature = _signature(args[position])
        leaves = len(signature[1])
        for start, subtree in _subtrees(result, 0, _DEPTH):
            span = set(range(start, start + leaves))
            if leaves and not span & taken and _signature(subtree) == signature:
                found[position] = start
                taken |= span
                break
        else:
            if carry is not None:
                raise StepSignatureError(
                    f"argument `{names[position]}` was named in `carry`, but no part of the output has its structure,"
                    " shapes and dtypes. Return the updated state from the step, or leave it out of `carry`."
                )
    return found


def carried_leaves(args: Sequence[Any], arguments: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """Leaf pairs (input position, output position) of the carried arguments."""
    pairs: list[tuple[int, int]] = []
    offset = 0
    for position, arg in enumerate(args):
        num_leaves = len(jax.tree.leaves(arg))
        if position in arguments:
            pairs += [(offset + i, arguments[position] + i) for i in range(num_leaves)]
        offset += num_leaves
    return tuple(pairs)


def _position(name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise StepSignatureError(f"`carry` / `donate` names {name!r}, but the step's arguments are {', '.join(names)}")
    return list(names).index(name)


def donated_leaves(args: Sequence[Any], names: Sequence[str], donate: Sequence[str]) -> tuple[int, ...]:
    """Leaf positions of the arguments named in `donate`."""
    positions = {_position(name, names) for name in donate}
    offsets = [0]
    for arg in args:
        offsets.append(offsets[-1] + len(jax.tree.leaves(arg)))
    return tuple(i for p in sorted(positions) for i in range(offsets[p], offsets[p + 1]))


def _signature(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(shape_and_dtype, leaves))


def _subtrees(tree: Any, start: int, depth: int) -> Iterator[tuple[int, Any]]:
    """(first leaf position, subtree) in pre-order."""
    yield start, tree
    if depth == 0:
        return
    children = jax.tree_util.default_registry.flatten_one_level(tree)
    for child in children[0] if children else ():
        yield from _subtrees(child, start, depth - 1)
        start += len(jax.tree.leaves(child))
