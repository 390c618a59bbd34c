"""Format readable paths of a pytree's leaves, such as `state/params/Dense_0/kernel`.

In: a tree and the name of its root.
Out: a text per leaf. A box around a leaf (`nn.Partitioned`, a Flax variable) adds nothing: its content has the box's
path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from autopar.frontend.libraries import is_box


def leaf_paths(tree: Any, root: str) -> tuple[str, ...]:
    """The path of each leaf: `root/params/Dense_0/kernel`."""
    return tuple(_text(root, keys) for keys in leaf_keys(tree))


def leaf_keys(tree: Any) -> tuple[tuple[str, ...], ...]:
    """The path of each leaf as a tuple of steps: `("params", "Dense_0", "kernel")`."""
    return tuple(keys for keys, _ in _walk(tree))


def boxes(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    """The path and box of each boxed leaf."""
    for keys, box in _outer(tree):
        if is_box(box):
            yield path_text(root, keys), box


def _walk(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for keys, leaf in _outer(tree):
        if not is_box(leaf):
            yield _texts(keys), leaf
            continue
        for own, inner in jax.tree_util.tree_flatten_with_path(leaf)[0]:
            shown = own[1:] if own and key_text(own[0]) == "value" else own
            yield _texts((*keys, *shown)), inner


def _outer(tree: Any) -> Iterator[tuple[Any, Any]]:
    yield from jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]


def path_text(root: str, keys: Any) -> str:
    """A path from a root and JAX's key path, as text."""
    return _text(root, _texts(keys))


def _texts(keys: Any) -> tuple[str, ...]:
    return tuple(text for text in map(key_text, keys) if text)


def _text(root: str, keys: tuple[str, ...]) -> str:
    return "/".join((root, *keys) if root else keys)


def key_text(key: Any) -> str:
    """One step of a path as text, without JAX's brackets and dots."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")
