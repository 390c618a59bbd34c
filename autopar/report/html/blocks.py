"""Draw a tensor as a block for each of its dims, in the colours of the mesh axes that shard it.

In: shapes and shardings. Out: elements; the page's script draws the tensor's shards from what they carry.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.report.html.markup import Element, el

#: Colours there are for mesh axes; a mesh of more axes begins again.
NUM_COLOURS = 6


def axis_class(axis: str, mesh: MeshShape) -> str:
    """The class that has the axis's colour."""
    return f"axis{mesh.axis_names.index(axis) % NUM_COLOURS}"


def axis_legend(mesh: MeshShape) -> Element:
    """Names, sizes and colours of the axes."""
    items = [
        el("li", el("span", class_=f"swatch {axis_class(axis, mesh)}"), f"{axis} ({size})")
        for axis, size in mesh.size_of.items()
    ]
    return el("ul", *items, el("li", el("span", class_="swatch whole"), "replicated"), class_="legend")


def blocks(shape: tuple[int, ...], sharding: TensorSharding, mesh: MeshShape, name: str) -> Element:
    """A tensor's dims side by side.

    Args:
        name: the accessible name of the drawing of its shards.
    """
    dims = [_dim(size, axes, mesh) for size, axes in zip(shape, sharding.dims, strict=True)] or [
        el("span", "scalar", class_="dim")
    ]
    pending = [el("span", f"Σ {', '.join(sharding.unreduced)}", class_="pending")] if sharding.unreduced else []
    return el(
        "span",
        *dims,
        *pending,
        class_="blocks",
        tabindex="0",
        role="button",
        aria_label=f"{name}, {_shape_text(shape)}, {sharding}",
        data_shape=",".join(map(str, shape)),
        data_spec="|".join(",".join(axes) for axes in sharding.dims),
        data_pending=",".join(sharding.unreduced) or None,
    )


def _dim(size: int, axes: tuple[str, ...], mesh: MeshShape) -> Element:
    if not axes:
        return el("span", f"{size}", class_="dim")
    stripes = [el("i", class_=axis_class(axis, mesh)) for axis in axes]
    return el("span", f"{size}", el("small", f"/{mesh.sizes(axes)}"), el("b", *stripes), class_="dim split")


def _shape_text(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
