"""How a model's own metadata say to split its arrays: Flax's `nn.Partitioned`, logical axis names, NNX `out_sharding`.

In: boxes and variables, rules from logical names to mesh axes, the axes of a mesh. Out: `PartitionSpec`s, by path, for
the planner to take as pins.
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
    """What is written on one array.

    Args:
        names: for each dim a name, several, or None. rules: its own, from names to mesh axes.
    """

    names: tuple[str | tuple[str, ...] | None, ...]
    rules: tuple[tuple[str, Any], ...] = ()


def annotations_in(tree: Any, root: str) -> dict[str, Annotation]:
    """By path, what is written on the boxes of a tree."""
    found = {path: annotation_of(box) for path, box in boxes(tree, root)}
    return {path: told for path, told in found.items() if told is not None}


def annotation_of(box: Any) -> Annotation | None:
    """What is written on a box or a variable; None where nothing is, or it does not hold one array."""
    library = nnx()
    if library is not None and isinstance(box, library.Variable):
        told = box.get_metadata()
        names, rules, value = told.get("out_sharding"), told.get("sharding_rules"), box.get_raw_value()
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
    """What annotations come to.

    Rules are gone through in order, and one holds whose axes are still free on this array, as Flax has it; a name
    without a rule is a mesh axis if there is one of that name.

    Args:
        rules: from names to mesh axes; an array's own come after them.
        axes: of all meshes that may be planned.

    Returns:
        By path the spec of each array of which a dim is split so; and the names that lead to no mesh axis, with the
        paths of the arrays that have them.
    """
    specs: dict[str, PartitionSpec] = {}
    lost: dict[str, list[str]] = {}
    for path, told in annotations.items():
        slots = [(dim, name) for dim, entry in enumerate(told.names) for name in _each(entry)]
        found = _assigned([name for _, name in slots], (*rules, *told.rules))
        split: list[list[str]] = [[] for _ in told.names]
        for (dim, name), wanted in zip(slots, found, strict=True):
            known = [axis for axis in wanted if axis in axes]
            if len(known) < len(wanted):
                lost.setdefault(name, []).append(path)
            split[dim] += known
        if any(split):
            specs[path] = PartitionSpec(*(dim[0] if len(dim) == 1 else tuple(dim) or None for dim in split))
    return specs, lost


def _assigned(names: Sequence[str], rules: Rules) -> list[tuple[str, ...]]:
    """Mesh axes of each name of one array; none where a rule says so, or those of all its rules are taken."""
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
