"""Readable paths of a pytree's leaves: `state/params/Dense_0/kernel`.

In: a tree and the name of its root. Out: a text for each leaf. A box around a leaf (`nn.Partitioned`, a Flax variable)
is passed over: what it holds has the path of the box.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from autopar.frontend.libraries import is_box


def leaf_paths(tree: Any, root: str) -> tuple[str, ...]:
    """`root/params/Dense_0/kernel` for each leaf."""
    return tuple(_text(root, keys) for keys in leaf_keys(tree))


def leaf_keys(tree: Any) -> tuple[tuple[str, ...], ...]:
    """`("params", "Dense_0", "kernel")` for each leaf: its path, step by step."""
    return tuple(keys for keys, _ in _walk(tree))


def boxes(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Path and box of each leaf that is in one."""
    for keys, box in _outer(tree):
        if is_box(box):
            yield joined(root, keys), box


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


def joined(root: str, keys: Any) -> str:
    """A root and the steps from it, as one text."""
    return _text(root, _texts(keys))


def _texts(keys: Any) -> tuple[str, ...]:
    return tuple(text for text in map(key_text, keys) if text)


def _text(root: str, keys: tuple[str, ...]) -> str:
    return "/".join((root, *keys) if root else keys)


def key_text(key: Any) -> str:
    """One step of a path, without the brackets and dots that JAX writes."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")
