"""Convert a state to nested dicts of plain arrays, named by the paths of its leaves, and back.

In: a pytree of arrays and numbers (a `TrainState`, optax's tuples, anything). Out: the dicts that orbax writes, a list
of the leaves, and the pytree again. Orbax can read such a checkpoint without autopar: names become keys, and typed PRNG
keys become their raw data. Arrays without elements are not written.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import CheckpointError
from autopar.frontend.pytree_paths import leaf_keys
from autopar.frontend.pytrees import shape_and_dtype
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.run.stacked_leaves import StackedLeaf
from autopar.pipeline.run.transfers import devices_of, without_shards
from autopar.plans.records import Placement, type_text

#: The number of leaves that an error names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a state.

    Args:
        keys: its path, for example `("params", "Dense_0", "kernel")`.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def path(self) -> str:
        """`params/Dense_0/kernel`: the path as in a plan, without the argument's name."""
        return "/".join(self.keys)

    @property
    def type(self) -> str:
        return type_text(self.shape, self.dtype)

    @property
    def is_written(self) -> bool:
        """Whether the leaf is written: orbax rejects arrays without elements."""
        return math.prod(self.shape) > 0


def leaves_of(state: Any) -> tuple[Leaf, ...]:
    """The leaves of a state, in order.

    Raises:
        CheckpointError: two leaves have the same name, or a leaf is no array.
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
            raise CheckpointError(f"two leaves of the state have the path `{leaf.path}`: rename one of the keys")
        named[leaf.keys] = leaf
    return tuple(found)


def stored(state: Any) -> dict[str, Any]:
    """The nested dicts of arrays to write. Only the raw data of PRNG keys is copied.

    Raises:
        CheckpointError: an array was donated to a step.
    """
    values = jax.tree.leaves(state)
    leaves = leaves_of(state)
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(value, jax.Array) and value.is_deleted():
            raise CheckpointError(
                f"`{leaf.path}` was donated to the step, which reuses its memory: save the state that the step returned"
            )
    return _nested(leaves, [_plain(value) for value in values])


def named(state: Any, values: Sequence[Any]) -> dict[str, Any]:
    """The nested dicts of a state with other values in place of its leaves."""
    return _nested(leaves_of(state), values)


def wanted(state: Any) -> dict[str, Any]:
    """The nested dicts to read into, for a state of `jax.ShapeDtypeStruct`s with shardings."""
    values = [
        jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=struct.sharding)
        for struct in jax.tree.leaves(state)
        for raw in [jax_compat.raw_struct(struct)]
    ]
    return _nested(leaves_of(state), values)


def restored(read: dict[str, Any], state: Any) -> list[Any]:
    """The leaves of a state from the arrays that were read.

    Args:
        state: the argument of `wanted`; it determines the types and shardings.
    """
    structs = jax.tree.leaves(state)
    values = [_array_at(read, leaf) if leaf.is_written else None for leaf in leaves_of(state)]

    to_convert: dict[Any, list[int]] = {}  # positions, by the devices in their order
    for n, (value, struct) in enumerate(zip(values, structs, strict=True)):
        if value is None or _needs_conversion(value, struct):
            to_convert.setdefault(_devices(struct.sharding), []).append(n)
    for positions in to_convert.values():
        converted = _retyped([values[n] for n in positions], [structs[n] for n in positions])
        for n, value in zip(positions, converted, strict=True):
            values[n] = value
    return values


def _array_at(tree: Any, leaf: Leaf) -> Any:
    """The array of a leaf in nested dicts."""
    for key in leaf.keys or ("value",):
        tree = tree[key]
    return tree


#: A value for each part of an array, by the array's keys.
ByKeys = Mapping[tuple[str, ...], Mapping[Any, Any]]


def parts_started(tree: Mapping[str, Any], leaves: Sequence[Leaf], *, once: bool) -> ByKeys:
    """Start to digest this process's parts of the arrays of `stored`, or of arrays that were read.

    Args:
        once: whether each part is digested in one process only.
    """
    digests = import_module("autopar.api.checkpoint.array_digest")  # its imports take most of a second
    return {leaf.keys: digests.parts_of(_array_at(tree, leaf), once=once) for leaf in leaves if leaf.is_written}


def sums_to_json(parts: ByKeys) -> list[Any]:
    """The digests of the arrays that this process saved; waits for the devices."""
    return [[list(keys), sum(map(int, digests.values()))] for keys, digests in parts.items() if digests]


def changed(saved: Sequence[Any], restored: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The keys of arrays that differ from what was written.

    Args:
        saved: `sums_to_json` of all processes that wrote the arrays.
        restored: `parts_to_json` of all processes that read them. Processes that read the same part must agree on its
            digest.

    Raises:
        TypeError, ValueError: the saved digests are damaged.
    """
    written: dict[tuple[str, ...], int] = defaultdict(int)
    for keys, number in saved:
        written[tuple(map(str, keys))] += int(number)
    read: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    differ = set()
    for keys, box, number in (part for of_process in restored for part in of_process):
        if read[tuple(keys)].setdefault(str(box), number) != number:
            differ.add(tuple(keys))
    return [
        list(keys)
        for keys, parts in read.items()
        if keys in differ or keys not in written or (sum(parts.values()) - written[keys]) % 2**32
    ]


def parts_to_json(parts: ByKeys) -> list[Any]:
    """The digests of the parts that this process read."""
    return [[list(keys), box, int(digest)] for keys, digests in parts.items() for box, digest in digests.items()]


def _devices(sharding: Any) -> Hashable:
    """What shardings have in common whose arrays one program may take."""
    return tuple(devices_of(sharding).flat) if isinstance(sharding, NamedSharding) else sharding


def _retyped(values: Sequence[Any], structs: Sequence[Any]) -> list[Any]:
    """Convert arrays on the same devices to the types of `structs`; None stands for an array without elements."""
    if not structs[0].sharding.addressable_devices:
        return [without_shards(one.shape, one.dtype, one.sharding) for one in structs]

    def retyped(raw: list[Any]) -> list[Any]:
        return [jax_compat.retyped(value, struct) for value, struct in zip(raw, structs, strict=True)]

    # One program converts all arrays; it also runs if several processes have parts of one array.
    return jax.jit(retyped, out_shardings=[one.sharding for one in structs])(list(values))


def difference(saved: Sequence[Leaf], here: Sequence[Leaf]) -> str | None:
    """How a checkpoint's state differs from the given one, as text; None if both have the same leaves."""
    before, now = {leaf.path: leaf for leaf in saved}, {leaf.path: leaf for leaf in here}
    missing = [f"`{path}`, {leaf.type}" for path, leaf in now.items() if path not in before]
    extra = [f"`{path}`, {leaf.type}" for path, leaf in before.items() if path not in now]
    retyped = [
        f"`{path}` is {before[path].type} there, {leaf.type} here"
        for path, leaf in now.items()
        if path in before and before[path].type != leaf.type
    ]
    texts = []
    if missing:
        texts.append(f"it lacks {some(missing)}")
    if extra:
        texts.append(f"it has {some(extra)}, which the state here lacks")
    if retyped:
        texts.append(some(retyped))
    return "; ".join(texts) or None


def arguments_of(plan: Placement, state: Any) -> tuple[str, ...] | None:
    """The names of the step's arguments that a state represents; None if it matches no argument. A state matches the
    argument with the same leaves, or, if it is a tuple, several arguments in order."""
    if plan.in_tree is None:
        return None
    arguments: list[tuple[str, list[tuple[str, tuple[int, ...], str]]]] = []
    offset = 0
    for child in plan.in_tree.children():
        tensors = plan.inputs[offset : offset + child.num_leaves]
        offset += child.num_leaves
        if tensors:
            roots = {tensor.path.split("/", 1)[0] for tensor in tensors}
            root = roots.pop()
            arguments.append((root, [(t.path[len(root) + 1 :], t.shape, t.dtype) for t in tensors]))
    state_types = _types(state)
    for name, types in arguments:
        if types == state_types:
            return (name,)
    if not isinstance(state, tuple) or not state:
        return None
    names: list[str] = []
    rest = iter(arguments)
    for part in state:
        part_types = _types(part)
        name = next((name for name, types in rest if types == part_types), None)
        if name is None:
            return None
        names.append(name)
    return tuple(names)


def _types(state: Any) -> list[tuple[str, tuple[int, ...], str]]:
    return [(leaf.path, leaf.shape, leaf.dtype) for leaf in leaves_of(state)]


def _nested(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, Any]:
    """Nest values under their keys. A state that is a single array gets the key `value`.

    Raises:
        CheckpointError: the state has no array to write.
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
    """An array that orbax can write."""
    if isinstance(value, StackedLeaf):
        return (
            value if not _is_key(value.dtype) else StackedLeaf({n: _key_data(part) for n, part in value.parts.items()})
        )
    if isinstance(value, jax.Array):
        return _key_data(value) if _is_key(value.dtype) else value
    return np.asarray(value, shape_and_dtype(value)[1])


def _key_data(keys: jax.Array) -> jax.Array:
    """The raw data of PRNG keys, which may all be in other processes."""
    if keys.sharding.addressable_devices:
        return jax.jit(jax.random.key_data)(keys)
    raw = jax_compat.raw_struct(keys)
    return without_shards(raw.shape, raw.dtype, keys.sharding)


def _is_key(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _needs_conversion(value: Any, struct: Any) -> bool:
    """Whether an array that was read must be converted: to a PRNG key, or to or from a weak type."""
    return _is_key(struct.dtype) or bool(getattr(struct, "weak_type", False)) != bool(value.weak_type)


def some(names: Sequence[str]) -> str:
    """The first names, and the number of further ones."""
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def to_json(leaves: Sequence[Leaf]) -> list[Any]:
    """The leaves as JSON types."""
    return [[list(leaf.keys), list(leaf.shape), leaf.dtype] for leaf in leaves]


def from_json(data: Any) -> Iterator[Leaf]:
    """The inverse of `to_json`.

    Raises:
        ValueError, TypeError: the data is damaged.
    """
    for keys, shape, dtype in data:
        yield Leaf(tuple(map(str, keys)), tuple(map(int, shape)), str(dtype))
