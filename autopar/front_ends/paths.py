"""Readable paths of a pytree's leaves: `state/params/Dense_0/kernel`.

In: a tree and the name of its root. Out: a text for each leaf. A box around a leaf (`nn.Partitioned`, a Flax variable)
is passed over: what it holds has the path of the box.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from autopar.front_ends.libraries import is_box


def leaf_paths(tree: Any, root: str) -> tuple[str, ...]:
    """`root/params/Dense_0/kernel` for each leaf."""
    return tuple(path for path, _ in _walk(tree, root))


def boxes(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Path and box of each leaf that is in one."""
    for path, box in _outer(tree, root):
        if is_box(box):
            yield path, box


def _walk(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    for path, leaf in _outer(tree, root):
        if not is_box(leaf):
            yield path, leaf
            continue
        for keys, inner in jax.tree_util.tree_flatten_with_path(leaf)[0]:
            shown = keys[1:] if keys and key_text(keys[0]) == "value" else keys
            yield joined(path, shown), inner


def _outer(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]:
        yield joined(root, keys), leaf


def joined(root: str, keys: Any) -> str:
    """A root and the steps from it, as one text."""
    return "/".join(part for part in (root, *map(key_text, keys)) if part)


def key_text(key: Any) -> str:
    """One step of a path, without the brackets and dots that JAX writes."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")
