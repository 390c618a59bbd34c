"""Separate a pytree into its arrays and its static part.

In: a user's tree; its leaves may include functions, strings, modules and others.
Out: the same tree with arrays only (None for the rest), and `Kept`, the hashable static part, which reassembles it.
`mutable_objects` splits objects that a step mutates; here their places hold a mapping from paths to values.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.errors import StepSignatureError
from autopar.frontend.libraries import has_own_numbers, is_object, is_pure_state
from autopar.frontend.pytree_paths import path_text


class Mark(enum.Enum):
    """A leaf that is an array, or a number that is traced as an array."""

    ARRAY = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """A leaf that is not an array: part of the traced program. Equal to leaves of the same type and value."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@dataclass(frozen=True, slots=True)
class ObjectAt:
    """The place of a mutated object, and the static part of its mapping."""

    values: Kept


@dataclass(frozen=True, slots=True)
class Kept:
    """The static part of a tree.

    Args:
        structure: its `PyTreeDef`, which treats values with their own rules as leaves.
        leaves: for each leaf: a mark for an array, a static value, or the static part of the tree in its place.
    """

    structure: Any
    leaves: tuple[Mark | Static | Kept | ObjectAt, ...]

    @property
    def is_plain(self) -> bool:
        """Whether all leaves are arrays, so that the tree of arrays is the tree itself."""
        return all(leaf is Mark.ARRAY or (isinstance(leaf, Kept) and leaf.is_plain) for leaf in self.leaves)

    @property
    def is_of_objects(self) -> bool:
        """Whether it has no arrays outside its objects."""
        return all(isinstance(leaf, ObjectAt | Static) for leaf in self.leaves)

    @property
    def num_objects(self) -> int:
        return sum(isinstance(leaf, ObjectAt) for leaf in self.leaves)


def objects_in(tree: Any) -> list[Any]:
    """The mutable objects in the order of their places; one may occur several times."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_has_own_rules) if is_object(leaf)]


def take_apart(
    tree: Any, root: str, values: Iterator[Mapping[str, Any]] | None = None, *, is_key: bool = True
) -> tuple[Any, Kept]:
    """Separate a tree into its arrays and its static part.

    Args:
        root: the tree's name in messages.
        values: for each object in it, its values by path.
        is_key: whether the static part must be hashable, because it is part of a plan's key; true for arguments.

    Raises:
        StepSignatureError: a leaf is neither an array nor hashable.
    """
    return _apart(tree, root, values or iter(()), is_key, numbers_are_static=False, nested=False)


def _apart(
    tree: Any, root: str, values: Iterator[Mapping[str, Any]], is_key: bool, *, numbers_are_static: bool, nested: bool
) -> tuple[Any, Kept]:
    stop = None if nested else _has_own_rules
    leaves, structure = jax.tree.flatten(tree, is_leaf=stop)
    parts: list[Any] = []
    entries: list[Mark | Static | Kept | ObjectAt] = []
    for position, leaf in enumerate(leaves):
        if stop is not None and stop(leaf):
            if is_object(leaf):
                held = dict(next(values))
                part, kept = _apart(held, root, values, is_key, numbers_are_static=False, nested=True)
                entry: Mark | Static | Kept | ObjectAt = ObjectAt(kept)
            else:
                own = has_own_numbers(leaf)
                part, entry = _apart(leaf, root, values, is_key, numbers_are_static=own, nested=True)
        elif _is_array(leaf, numbers_are_static):
            part, entry = leaf, Mark.ARRAY
        else:
            if is_key:
                _check(leaf, lambda position=position: _path(tree, root, position, stop))
            part, entry = None, Static(leaf)
        parts.append(part)
        entries.append(entry)
    kept = Kept(structure, tuple(entries))
    return (tree if kept.is_plain else structure.unflatten(parts)), kept


def put_together(kept: Kept, tree: Any, objects: Iterator[Any] | None = None) -> Any:
    """The inverse of `take_apart`, given the objects in the order of their places."""
    if kept.is_plain:
        return tree
    parts = zip(kept.leaves, kept.structure.flatten_up_to(tree), strict=True)
    return kept.structure.unflatten([_together(entry, part, objects) for entry, part in parts])


def values_of_objects(kept: Kept, tree: Any) -> Iterator[dict[str, Any]]:
    """The values of each object in a separated tree, by path."""
    if kept.num_objects:
        for entry, part in zip(kept.leaves, kept.structure.flatten_up_to(tree), strict=True):
            if isinstance(entry, ObjectAt):
                yield put_together(entry.values, part)


def at_objects(kept: Kept, values: Iterator[Mapping[str, Any]]) -> Any:
    """A separated tree with only the values of its objects."""
    return kept.structure.unflatten([dict(next(values)) if isinstance(e, ObjectAt) else None for e in kept.leaves])


def _together(entry: Mark | Static | Kept | ObjectAt, part: Any, objects: Iterator[Any] | None) -> Any:
    if isinstance(entry, Static):
        return entry.value
    if isinstance(entry, Kept):
        return put_together(entry, part, objects)
    return next(objects or iter(())) if isinstance(entry, ObjectAt) else part


def _has_own_rules(value: Any) -> bool:
    return is_object(value) or is_pure_state(value) or has_own_numbers(value)


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of an array, a `ShapeDtypeStruct` or a Python number."""
    return jax.numpy.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)


def is_number(leaf: Any) -> bool:
    """Whether it is a Python number that is traced as an array; members of enumerations are not."""
    return isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, enum.Enum)


def _is_array(leaf: Any, numbers_are_static: bool) -> bool:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return True
    if is_number(leaf):
        return not numbers_are_static
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"
    if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    try:  # an array of another library, as an abstract value
        np.dtype(leaf.dtype)
    except TypeError:
        return False
    return True


def _check(leaf: Any, path: Any) -> None:
    """Refuse leaves that are neither traceable nor hashable.

    Raises:
        StepSignatureError: the text names the leaf's path and type.
    """
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type):
        raise StepSignatureError(
            f"`{path()}` is a {kind} of {leaf.dtype}, which JAX does not take: convert it to a NumPy array of numbers"
        )
    try:
        hash(leaf)
    except TypeError:
        raise StepSignatureError(
            f"`{path()}` is a {kind}, which is not an array and cannot be hashed. A step takes arrays, numbers, and pytrees of"
            " them. Other leaves (a text, a function, a setting) are part of the key of a plan, and so must be"
            " hashable. Convert it, e.g. to a dict or a tuple; close over it in the step; or leave it out"
        ) from None


def _path(tree: Any, root: str, position: int, stop: Any) -> str:
    keys, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0][position]
    return path_text(root, keys)
