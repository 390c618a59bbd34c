"""Convert a state to nested dicts of plain arrays, as checkpoints store it, and back.

In: a pytree of arrays and numbers (a `TrainState`, optax's tuples, anything). Out: nested dicts for orbax, and a list
of the leaves. Orbax can read such a checkpoint without autopar: names of leaves become keys, typed PRNG keys become
integer arrays, and arrays without elements are not written.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import numpy as np

from autopar.errors import CheckpointError
from autopar.frontend.pytree_paths import leaf_keys
from autopar.frontend.pytrees import shape_and_dtype
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.run.transfers import without_shards
from autopar.plans.records import Placement, type_text

#: How many leaves an error names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Leaf:
    """The path, shape and type of one array of a state.

    Args:
        keys: `("params", "Dense_0", "kernel")`.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def path(self) -> str:
        """The path as in a plan, without the argument's name: `params/Dense_0/kernel`."""
        return "/".join(self.keys)

    @property
    def type(self) -> str:
        return type_text(self.shape, self.dtype)

    @property
    def is_written(self) -> bool:
        """Whether orbax writes the array: it refuses arrays without elements."""
        return math.prod(self.shape) > 0


def leaves_of(state: Any) -> tuple[Leaf, ...]:
    """The leaves of a state, in order.

    Raises:
        CheckpointError: two leaves have one name, or a leaf is no array.
    """
    found = []
    for keys, leaf in zip(leaf_keys(state), jax.tree.leaves(state), strict=True):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise CheckpointError(
                f"`{'/'.join(keys)}` is a {type(leaf).__name__}, but a checkpoint holds arrays and numbers: leave it out"
                " of the state, or give it to `save` as `extra`"
            )
        shape, dtype = shape_and_dtype(leaf)
        found.append(Leaf(keys, tuple(map(int, shape)), str(dtype)))
    named: dict[tuple[str, ...], Leaf] = {}
    for leaf in found:
        if leaf.keys in named:
            raise CheckpointError(f"two parts of the state are called `{leaf.path}`: rename one of the keys")
        named[leaf.keys] = leaf
    return tuple(found)


def stored(state: Any) -> dict[str, Any]:
    """The nested dicts of arrays to write. Only PRNG keys are copied.

    Raises:
        CheckpointError: the state's buffers were donated to a step.
    """
    values = jax.tree.leaves(state)
    leaves = leaves_of(state)
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(value, jax.Array) and value.is_deleted():
            raise CheckpointError(
                f"`{leaf.path}` was given to the step, which reuses its memory (donation): save what the step returned"
            )
    return _nested(leaves, [_plain(value) for value in values])


def wanted(state: Any) -> dict[str, Any]:
    """Like `stored`, for a state of `jax.ShapeDtypeStruct`s with shardings: what to restore."""
    values = [
        jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=struct.sharding)
        for struct in jax.tree.leaves(state)
        for raw in [jax_compat.raw_struct(struct)]
    ]
    return _nested(leaves_of(state), values)


def restored(read: dict[str, Any], state: Any) -> list[Any]:
    """The leaves of a state from the arrays that were read, with the types and shardings of `state`, the argument of
    `wanted`."""
    structs = jax.tree.leaves(state)
    values = [_found(read, leaf) if leaf.is_written else None for leaf in leaves_of(state)]

    odd: dict[Any, list[int]] = {}  # by the devices that they lie on
    for n, (value, struct) in enumerate(zip(values, structs, strict=True)):
        if value is None or _is_odd(value, struct):
            odd.setdefault(frozenset(struct.sharding.device_set), []).append(n)
    for places in odd.values():
        laid = _retyped([values[n] for n in places], [structs[n] for n in places])
        for n, value in zip(places, laid, strict=True):
            values[n] = value
    return values


def _found(tree: Any, leaf: Leaf) -> Any:
    """A leaf's array in nested dicts."""
    for key in leaf.keys or ("value",):
        tree = tree[key]
    return tree


#: Of each array by its keys, something of its parts.
ByKeys = Mapping[tuple[str, ...], Mapping[Any, Any]]


def parts_started(tree: Mapping[str, Any], leaves: Sequence[Leaf], *, once: bool) -> ByKeys:
    """Start to digest the local shards of the arrays that are written or were read.

    Args:
        once: digest each shard in one process only.
    """
    digests = import_module("autopar.api.checkpoint.array_digest")  # what it needs takes most of a second to import
    return {leaf.keys: digests.parts_of(_found(tree, leaf), once=once) for leaf in leaves if leaf.is_written}


def sums_to_json(parts: ByKeys) -> list[Any]:
    """Wait for the digests of the saved arrays, and convert them to JSON types."""
    return [[list(keys), sum(map(int, of_one.values()))] for keys, of_one in parts.items() if of_one]


def changed(said: Sequence[Any], found: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Keys of the arrays whose digest differs from the one that was written.

    Args:
        said: `sums_to_json` of all processes that wrote.
        found: `parts_to_json` of all processes that read. If several read the same shard, their digests must be equal.

    Raises:
        TypeError, ValueError: `said` is damaged.
    """
    written: dict[tuple[str, ...], int] = defaultdict(int)
    for keys, number in said:
        written[tuple(map(str, keys))] += int(number)
    read: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    differ = set()
    for keys, box, number in (part for of_process in found for part in of_process):
        if read[tuple(keys)].setdefault(str(box), number) != number:
            differ.add(tuple(keys))
    return [
        list(keys)
        for keys, parts in read.items()
        if keys in differ or keys not in written or (sum(parts.values()) - written[keys]) % 2**32
    ]


def parts_to_json(parts: ByKeys) -> list[Any]:
    """The digests of the arrays that this process read, as JSON types."""
    return [[list(keys), box, int(part)] for keys, of_one in parts.items() for box, part in of_one.items()]


def _retyped(values: Sequence[Any], structs: Sequence[Any]) -> list[Any]:
    """Convert arrays to the types of their leaves, on the same devices; None stands for an array without elements."""
    if not structs[0].sharding.addressable_devices:
        return [without_shards(one.shape, one.dtype, one.sharding) for one in structs]

    def retyped(raw: list[Any]) -> list[Any]:
        return [jax_compat.retyped(value, struct) for value, struct in zip(raw, structs, strict=True)]

    # In one program, which also runs where several processes hold parts of one array.
    return jax.jit(retyped, out_shardings=[one.sharding for one in structs])(list(values))


def difference(saved: Sequence[Leaf], here: Sequence[Leaf]) -> str | None:
    """Describe how a checkpoint's state differs from the expected one; None if they match."""
    there, now = {leaf.path: leaf for leaf in saved}, {leaf.path: leaf for leaf in here}
    missing = [f"`{path}`, {leaf.type}" for path, leaf in now.items() if path not in there]
    extra = [f"`{path}`, {leaf.type}" for path, leaf in there.items() if path not in now]
    other = [
        f"`{path}` is {there[path].type} there, {leaf.type} here"
        for path, leaf in now.items()
        if path in there and there[path].type != leaf.type
    ]
    found = []
    if missing:
        found.append(f"it lacks {some(missing)}")
    if extra:
        found.append(f"it holds {some(extra)}, which the state here has not")
    if other:
        found.append(some(other))
    return "; ".join(found) or None


def arguments_of(plan: Placement, state: Any) -> tuple[str, ...] | None:
    """The arguments of a planned step that a state corresponds to: one with the same leaves, or several in order if the
    state is a tuple; None if there are none."""
    if plan.in_tree is None:
        return None
    given: list[tuple[str, list[tuple[str, tuple[int, ...], str]]]] = []
    offset = 0
    for child in plan.in_tree.children():
        tensors = plan.inputs[offset : offset + child.num_leaves]
        offset += child.num_leaves
        if tensors:
            roots = {tensor.path.split("/", 1)[0] for tensor in tensors}
            root = roots.pop()
            given.append((root, [(t.path[len(root) + 1 :], t.shape, t.dtype) for t in tensors]))
    whole = _types(state)
    for name, types in given:
        if types == whole:
            return (name,)
    if not isinstance(state, tuple) or not state:
        return None
    names: list[str] = []
    rest = iter(given)
    for part in state:
        types = _types(part)
        name = next((name for name, own in rest if own == types), None)
        if name is None:
            return None
        names.append(name)
    return tuple(names)


def _types(state: Any) -> list[tuple[str, tuple[int, ...], str]]:
    return [(leaf.path, leaf.shape, leaf.dtype) for leaf in leaves_of(state)]


def _nested(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, Any]:
    """Nest values under their keys. A state that is a single array gets the key `value`.

    Raises:
        CheckpointError: the state has no arrays.
    """
    tree: dict[str, Any] = {}
    for leaf, value in zip(leaves, values, strict=True):
        if not leaf.is_written:
            continue
        *outer, last = leaf.keys or ("value",)
        at = tree
        for key in outer:
            at = at.setdefault(key, {})
        at[last] = value
    if not tree:
        raise CheckpointError("the state holds no array, so there is nothing to save or to restore")
    return tree


def _plain(value: Any) -> Any:
    """Convert a leaf to an array that orbax accepts."""
    if isinstance(value, jax.Array):
        return _words(value) if _is_key(value.dtype) else value
    return np.asarray(value, shape_and_dtype(value)[1])


def _words(keys: jax.Array) -> jax.Array:
    """The integer array of PRNG keys, which may have shards in other processes only."""
    if keys.sharding.addressable_devices:
        return jax.jit(jax.random.key_data)(keys)
    raw = jax_compat.raw_struct(keys)
    return without_shards(raw.shape, raw.dtype, keys.sharding)


def _is_key(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _is_odd(value: Any, struct: Any) -> bool:
    """Whether a leaf must be converted after it was read: it is a PRNG key or weakly typed."""
    return _is_key(struct.dtype) or bool(getattr(struct, "weak_type", False)) != bool(value.weak_type)


def some(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def to_json(leaves: Sequence[Leaf]) -> list[Any]:
    """The leaves of a state as JSON types."""
    return [[list(leaf.keys), list(leaf.shape), leaf.dtype] for leaf in leaves]


def from_json(data: Any) -> Iterator[Leaf]:
    """The inverse of `to_json`.

    Raises:
        ValueError, TypeError: the JSON is damaged.
    """
    for keys, shape, dtype in data:
        yield Leaf(tuple(map(str, keys)), tuple(map(int, shape)), str(dtype))
