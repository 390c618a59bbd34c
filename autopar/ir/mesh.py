"""Define the shape of a device mesh: named axes with sizes, without devices.

In: text such as `"2x4"` or `"data=2,model=4"`, or a device count. Out: `MeshShape`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import MeshError

#: Axis names of a mesh that is described by sizes alone, outermost first.
DEFAULT_AXIS_NAMES = ("data", "model", "expert")


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Axis names and sizes, outermost (slowest links) first, as in `jax.sharding.Mesh`.

    Args:
        axis_names: distinct Python identifiers.
        axis_sizes: number of devices along each axis, at least 1.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.axis_sizes) or not self.axis_names:
            raise MeshError(f"a mesh needs one size per axis; got {self.axis_names} and {self.axis_sizes}")
        if len(set(self.axis_names)) != len(self.axis_names):
            raise MeshError(f"mesh axis names must differ; got {self.axis_names}")
        for name in self.axis_names:
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(
                    f"a mesh axis is called {name!r}: give it a Python identifier, such as 'data', as its name"
                )
        if any(size < 1 for size in self.axis_sizes):
            raise MeshError(f"mesh axis sizes must be at least 1; got {self.axis_sizes}")

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis_sizes)

    @property
    def size_of(self) -> dict[str, int]:
        """Number of devices along each axis, by name."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    def size(self, axis: str) -> int:
        """Number of devices along one axis."""
        return self.axis_sizes[self.axis_names.index(axis)]

    def sizes(self, axes: tuple[str, ...]) -> int:
        """Number of devices along several axes together."""
        found = 1
        for axis in axes:  # a plain loop: this is called millions of times
            found *= self.axis_sizes[self.axis_names.index(axis)]
        return found

    def stride(self, axis: str) -> int:
        """Distance between neighbours of an axis in the row-major device order."""
        return math.prod(self.axis_sizes[self.axis_names.index(axis) + 1 :])

    def __str__(self) -> str:
        return "x".join(map(str, self.axis_sizes))

    def describe(self) -> str:
        """`2x4 (data=2, model=4)`."""
        named = ", ".join(f"{n}={s}" for n, s in self.size_of.items())
        return f"{self} ({named})"


def parse_mesh(text: str) -> MeshShape:
    """Read `"8"`, `"2x4"` or `"data=2,model=4"`.

    Raises:
        MeshError: the text is none of these.

    >>> parse_mesh("2x4")
    MeshShape(axis_names=('data', 'model'), axis_sizes=(2, 4))
    """
    text = text.strip()
    if re.fullmatch(r"\d+([x*]\d+)*", text):
        sizes = tuple(int(part) for part in re.split(r"[x*]", text))
        if len(sizes) > len(DEFAULT_AXIS_NAMES):
            raise MeshError(
                f"mesh {text!r} has {len(sizes)} axes; at most {len(DEFAULT_AXIS_NAMES)} can be given by size"
                " alone: name them, as in 'data=2,model=4'"
            )
        return MeshShape(DEFAULT_AXIS_NAMES[: len(sizes)], sizes)
    if re.fullmatch(r"\s*\w+\s*=\s*\d+\s*(,\s*\w+\s*=\s*\d+\s*)*", text):
        pairs = [part.split("=") for part in text.split(",")]
        return MeshShape(tuple(n.strip() for n, _ in pairs), tuple(int(s) for _, s in pairs))
    raise MeshError(f"cannot read mesh {text!r}: write sizes ('8', '2x4') or names and sizes ('data=2,model=4')")


def mesh_of(given: Any) -> MeshShape:
    """Convert a user's mesh: text, a number of devices, sizes `(2, 4)`, or sizes by name `{"data": 2, "model": 4}`.

    Raises:
        MeshError: the argument is none of these.

    >>> str(mesh_of({"rows": 2, "columns": 4})), str(mesh_of((2, 4)))
    ('2x4', '2x4')
    """
    if isinstance(given, MeshShape):
        return given
    if isinstance(given, str):
        return parse_mesh(given)
    named = given if isinstance(given, Mapping) else None
    sizes = tuple(named.values()) if named is not None else (given,) if isinstance(given, int) else given
    if not isinstance(sizes, tuple | list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in sizes):
        raise MeshError(
            f"`mesh` is {given!r}: give sizes ('2x4' or (2, 4)), names and sizes ('data=2,model=4' or"
            " {'data': 2, 'model': 4}), or a `jax.sharding.Mesh`"
        )
    if named is None:
        return parse_mesh("x".join(map(str, sizes)))
    wrong = [name for name in named if not isinstance(name, str) or not name.isidentifier()]
    if wrong:
        raise MeshError(f"`mesh` names an axis {wrong[0]!r}: the name of an axis is an identifier, such as 'data'")
    return MeshShape(tuple(named), tuple(sizes))


def factorisations(num_devices: int) -> tuple[MeshShape, ...]:
    """All meshes of at most two axes with this number of devices, the one-axis mesh first.

    >>> [str(m) for m in factorisations(8)]
    ['8', '2x4', '4x2']
    """
    if num_devices < 1:
        raise MeshError(f"a plan needs at least one device; got {num_devices}")
    pairs = [(a, num_devices // a) for a in range(2, num_devices // 2 + 1) if num_devices % a == 0]
    return (
        MeshShape(DEFAULT_AXIS_NAMES[:1], (num_devices,)),
        *(MeshShape(DEFAULT_AXIS_NAMES[:2], pair) for pair in pairs),
    )
