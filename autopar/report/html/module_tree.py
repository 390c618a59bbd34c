"""Draw the model's modules with the shards of their tensors; identical layers are folded into one.

In: a `ModuleTree`. Out: elements. The page's script unfolds a layer: it puts the layer's name in the place of the pattern in
every `data-place`, and leaves out tensors that the layer does not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.ir.mesh import MeshShape
from autopar.report.html.blocks import axis_legend, blocks
from autopar.report.html.markup import Element, el
from autopar.report.module_tree import Module, ModuleTensor, ModuleTree
from autopar.report.rows import TensorRow
from autopar.system.text_tables import short_source
from autopar.system.units import human_bytes

#: Trees of more modules are open at the top alone.
_ALL_OPEN = 80


def module_view(tree: ModuleTree, mesh: MeshShape) -> Element:
    """The tree of all modules."""
    under = [text for text in (tree.parameters_under, tree.activations_under) if text]
    about = f"Parameters under {tree.parameters_under or 'the arguments'}"
    if tree.activations_under:
        about += f", activations under {tree.activations_under}"
    arguments = el(
        "details",
        el("summary", f"other arguments ({sum(row.count for row in tree.arguments)})"),
        el("ul", *(_row(row.path, row, mesh, row.path) for row in tree.arguments), class_="tensors"),
        class_="module",
    )
    depth = 99 if _count(tree.root) <= _ALL_OPEN else 2
    return el(
        "div",
        axis_legend(mesh),
        el("p", about + ". Point at a tensor, or tab to it, to see its shards.", class_="under") if under else None,
        *_inside(tree.root, mesh, depth),
        arguments if tree.arguments else None,
        class_="tree",
    )


def _count(module: Module) -> int:
    return 1 + sum(map(_count, module.modules))


def _inside(module: Module, mesh: MeshShape, depth: int) -> list[Element]:
    inputs = [one for one in module.tensors if one.row.kind == "parameter"]
    state = [one for one in module.tensors if one.row.kind == "optimizer"]
    activations = [one for one in module.tensors if one.row.kind == "activation"]
    found: list[Element] = []
    if inputs or state:
        rows = [_parameter(one, state, mesh) for one in inputs] + _other_state(inputs, state, mesh)
        found.append(el("ul", *rows, class_="tensors"))
    found += [_module(one, mesh, depth - 1) for one in module.modules]
    if activations:
        rows = [_activation(one, mesh) for one in activations]
        number = sum(one.row.count for one in activations)
        found.append(
            el(
                "details",
                el("summary", el("span", f"activations ({number})", data_number=number), class_="quiet"),
                el("ul", *rows, class_="tensors"),
                class_="activations",
            )
        )
    return found


def _module(module: Module, mesh: MeshShape, depth: int) -> Element:
    only = module
    names = [module.name]
    while only.count == 1 and not only.tensors and len(only.modules) == 1:  # nothing to say between the two
        only = only.modules[0]
        names.append(only.name)
    several = only.count > 1
    size = f"{human_bytes(only.local_bytes)} on each device" if only.local_bytes else ""
    summary = el(
        "summary",
        el("code", "/".join(names), class_="module-name"),
        el("span", f"x{only.count}", class_="times") if several else None,
        el("span", size, class_="size", data_bytes=only.local_bytes),
        el("button", f"show all {only.count}", type="button", class_="unfold") if several else None,
    )
    return el(
        "details",
        summary,
        *_inside(only, mesh, depth),
        class_="module",
        open=depth > 0,
        data_depth=only.depth if several else None,
        data_members=" ".join(only.members) if several else None,
        data_front="".join(f"{name}/" for name in names[:-1]) if several else None,
    )


def _parameter(one: ModuleTensor, state: Sequence[ModuleTensor], mesh: MeshShape) -> Element:
    """A parameter, with the number of optimizer-state tensors of the same sharding."""
    same = sum(
        other.row.count
        for other in state
        if other.place[-1:] == one.place[-1:] and other.row.sharding == one.row.sharding
    )
    number = same // max(1, one.row.count)
    plural = "s" * (number > 1)
    remark = f"+ {number} optimizer-state tensor{plural}, same sharding" if same >= one.row.count else ""
    return _row(one.place[-1], one.row, mesh, "/".join(one.place), remark)


def _other_state(inputs: Sequence[ModuleTensor], state: Sequence[ModuleTensor], mesh: MeshShape) -> list[Element]:
    """Optimizer state whose sharding differs from its parameter's, once for each sharding."""
    same = {(one.place[-1:], one.row.sharding) for one in inputs}
    others: dict[tuple[str, str], list[ModuleTensor]] = defaultdict(list)
    for one in state:
        if (one.place[-1:], one.row.sharding) not in same:
            others[one.place[-1] if one.place else "", one.row.sharding].append(one)
    return [
        _row(
            f"{name}: optimizer state",
            rows[0].row,
            mesh,
            "/".join(rows[0].place),
            f"{len(rows)} tensors" * (len(rows) > 1),
        )
        for (name, _), rows in others.items()
    ]


def _activation(one: ModuleTensor, mesh: MeshShape) -> Element:
    about = ", ".join(filter(None, (f"{one.row.phase} {one.row.primitive}", short_source(one.row.source))))
    name = one.place[-1] if one.place else "(outside any module)"
    return _row(about, one.row, mesh, "/".join(one.place), name)


def _row(name: str, row: TensorRow, mesh: MeshShape, place: str, remark: str = "") -> Element:
    return el(
        "li",
        el("span", name, class_="tensor-name"),
        blocks(row.shape, row.split, mesh, name),
        el("span", row.dtype, class_="type"),
        el("span", f"x{row.count}" if row.count > 1 else "", class_="times", data_count=row.count),
        el("span", "pinned", class_="pinned") if row.pinned else None,
        el("span", remark, class_="remark") if remark else None,
        data_place=place,
    )
