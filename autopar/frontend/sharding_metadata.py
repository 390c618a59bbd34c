"""Read the sharding metadata of models: Flax's `nn.Partitioned`, logical axis names, NNX `out_sharding`.

In: boxes and variables, rules from logical names to mesh axes, and the axes of a mesh.
Out: `PartitionSpec`s by path, which the planner takes as pins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autopar.frontend.libraries import nnx
from autopar.frontend.pytree_paths import boxes

Rules = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Annotation:
    """The sharding metadata of one array.

    Args:
        names: for each dim a name, several names, or None.
        rules: the array's own rules from names to mesh axes.
    """

    names: tuple[str | tuple[str, ...] | None, ...]
    rules: tuple[tuple[str, Any], ...] = ()


def annotations_in(tree: Any, root: str) -> dict[str, Annotation]:
    """The annotations of the boxes of a tree, by path."""
    found = {path: annotation_of(box) for path, box in boxes(tree, root)}
    return {path: annotation for path, annotation in found.items() if annotation is not None}


def annotation_of(box: Any) -> Annotation | None:
    """The annotation of a box or a variable; None if it has none or does not hold one array."""
    library = nnx()
    if library is not None and isinstance(box, library.Variable):
        metadata = box.get_metadata()
        names, rules, value = metadata.get("out_sharding"), metadata.get("sharding_rules"), box.get_raw_value()
    else:
        names, rules, value = getattr(box, "names", None), getattr(box, "rules", None), getattr(box, "value", None)
    names = getattr(names, "spec", names)  # a `NamedSharding`
    if not isinstance(names, tuple | list | PartitionSpec) or not any(names):
        return None
    if not all(isinstance(name, str) for entry in names for name in _each(entry)):
        return None
    if len(names) > len(getattr(value, "shape", ())):
        return None
    plain = tuple(tuple(name) if isinstance(name, tuple | list) else name for name in names)
    return Annotation(plain, tuple((name, axes) for name, axes in rules or ()))


def specs_of(
    annotations: Mapping[str, Annotation], rules: Rules, axes: Sequence[str]
) -> tuple[dict[str, PartitionSpec], dict[str, list[str]]]:
    """Convert annotations to specs.

    Rules apply in order; as in Flax, a rule applies if its axes are still unused on this array. A name without a rule
    is a mesh axis if there is one of that name.

    Args:
        rules: rules from names to mesh axes; an array's own rules come after them.
        axes: the axes of all meshes that may be planned.

    Returns:
        The spec of each array with a sharded dim, by path; and the names without a mesh axis, with the paths of their
        arrays.
    """
    specs: dict[str, PartitionSpec] = {}
    lost: dict[str, list[str]] = {}
    for path, annotation in annotations.items():
        slots = [(dim, name) for dim, entry in enumerate(annotation.names) for name in _each(entry)]
        found = _assigned([name for _, name in slots], (*rules, *annotation.rules))
        split: list[list[str]] = [[] for _ in annotation.names]
        for (dim, name), wanted in zip(slots, found, strict=True):
            known = [axis for axis in wanted if axis in axes]
            if len(known) < len(wanted):
                lost.setdefault(name, []).append(path)
            split[dim] += known
        if any(split):
            specs[path] = PartitionSpec(*(dim[0] if len(dim) == 1 else tuple(dim) or None for dim in split))
    return specs, lost


def _assigned(names: Sequence[str], rules: Rules) -> list[tuple[str, ...]]:
    """The mesh axes of each name of one array; none if a rule says so or the axes of all its rules are used."""
    found: dict[int, tuple[str, ...]] = {}
    taken: set[str] = set()
    for known, axes in (*rules, *((name, name) for name in names if all(name != ruled for ruled, _ in rules))):
        wanted = (axes,) if isinstance(axes, str) else tuple(axes or ())
        for slot, name in enumerate(names):
            if name == known and slot not in found and not taken & {*wanted}:
                found[slot] = wanted
                taken |= {*wanted}
    return [found.get(slot, ()) for slot in range(len(names))]


def _each(entry: Any) -> tuple[Any, ...]:
    return tuple(entry or ()) if entry is None or isinstance(entry, tuple | list) else (entry,)
