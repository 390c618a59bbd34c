"""Parse the replica groups and stack frames of collectives in optimized HLO.

In: XLA's text for replica groups, in any of its notations, and its tables of stack frames. Out: groups of device
numbers, their mesh axes, and lines of the user's code.
"""

from __future__ import annotations

import itertools
import re
from typing import TypeAlias

import numpy as np

from autopar.errors import VerifyError
from autopar.ir.mesh import MeshShape
from autopar.system.source_paths import PACKAGE

#: Device numbers, group by group; for a collective-permute (source, target) pairs.
Groups: TypeAlias = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+))?")
_SUB_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_FRAMEWORKS = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:jax|jaxlib|flax|optax)[/\\]")


def read_groups(text: str) -> Groups:
    """Parse replica groups, or the source-target pairs of a collective-permute.

    Raises:
        VerifyError: the notation is unknown; a guess could name the wrong axes.

    >>> read_groups("{{0,1},{2,3}}")
    ((0, 1), (2, 3))
    >>> read_groups("[2,2]<=[4]")
    ((0, 1), (2, 3))
    >>> read_groups("[2,2]<=[2,2]T(1,0)")
    ((0, 2), (1, 3))
    >>> read_groups("mesh['data'=2,'model'=2] {'data'}")
    ((0, 2), (1, 3))
    >>> read_groups("mesh['model'=2,'data'=2], device_ids=([2,2]T(1,0)) {'model'}")
    ((0, 1), (2, 3))
    """
    if mesh := _MESH.match(text):
        return _of_mesh(*mesh.groups(default=""))
    if _IOTA.match(text):
        return _as_groups(_iota(text))
    if not re.fullmatch(r"\{[{}\d, ]*\}", text):
        raise VerifyError(f"cannot read the devices of a collective in XLA's program: {text!r}; please report it")
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text))


def mesh_axes(groups: Groups, mesh: MeshShape, *, pairs: bool = False) -> tuple[str, ...] | None:
    """The mesh axes that groups span, in the mesh's order; None where no set of axes gives these groups.

    Args:
        pairs: whether the groups are (source, target) pairs; the axes are then those along which any pair moves.

    >>> mesh_axes(((0, 1), (2, 3)), MeshShape(("data", "model"), (2, 2)))
    ('model',)
    >>> mesh_axes(((0, 2), (1, 3)), MeshShape(("data", "model"), (2, 2)), pairs=True)
    ('data',)
    """
    numbers = np.arange(mesh.num_devices).reshape(mesh.axis_sizes)
    if pairs:
        moves = [np.array(np.unravel_index(pair, mesh.axis_sizes)) for pair in groups]
        moved = [any(move[i][0] != move[i][1] for move in moves) for i in range(len(mesh.axis_names))]
        return tuple(itertools.compress(mesh.axis_names, moved))
    wanted = {frozenset(group) for group in groups} or {frozenset(range(mesh.num_devices))}
    for size in range(len(mesh.axis_names) + 1):
        for chosen in itertools.combinations(range(len(mesh.axis_names)), size):
            moved = np.moveaxis(numbers, chosen, range(-size, 0)) if size else numbers
            rows = moved.reshape(-1, int(np.prod([mesh.axis_sizes[i] for i in chosen])))
            if {frozenset(row.tolist()) for row in rows} == wanted:
                return tuple(mesh.axis_names[i] for i in chosen)
    return None


def read_sources(hlo_text: str) -> dict[int, tuple[str, str]]:
    """Map each stack frame to two source lines `file.py:12`.

    The first is of the innermost frame outside installed libraries and autopar; the second, of the innermost frame
    outside JAX, Flax and Optax, possibly in a model library. XLA writes the tables before the first computation; each
    refers to the previous one.
    """
    files = {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _table(hlo_text, "FileNames"), re.M)}
    entry = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.M)
    places = {
        int(n): (files.get(int(f), ""), int(line)) for n, f, line in entry.findall(_table(hlo_text, "FileLocations"))
    }
    entry = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.M)
    # XLA writes the number of the parent plus one; 1 means none.
    frames = {int(n): (int(place), int(up or 1) - 1) for n, place, up in entry.findall(_table(hlo_text, "StackFrames"))}
    return {
        frame: (_line(frame, frames, places, _INSTALLED), _line(frame, frames, places, _FRAMEWORKS)) for frame in frames
    }


def _line(
    frame: int, frames: dict[int, tuple[int, int]], places: dict[int, tuple[str, int]], skipped: re.Pattern[str]
) -> str:
    seen: set[int] = set()
    innermost = ""
    while frame in frames and frame not in seen:
        seen.add(frame)
        place, parent = frames[frame]
        file, line = places.get(place, ("", 0))
        if file and not skipped.search(file) and not file.startswith(str(PACKAGE)):
            return f"{file}:{line}"
        innermost = innermost or (f"{file}:{line}" if file else "")
        frame = parent
    return innermost


def _table(hlo_text: str, name: str) -> str:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", hlo_text, re.M)
    return found[1] if found else ""


def _of_mesh(axes: str, order: str, named: str) -> Groups:
    """Parse `mesh['data'=2,'model'=4] {'model'}`; a sub-axis `'model':(2)2` has the size before it and its own size."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    total = int(np.prod(list(sizes.values())))
    numbers = np.arange(total)
    if iota := _ORDER.match(order):
        dims, permutation = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
        numbers = numbers.reshape(dims).transpose(permutation or None).reshape(-1)
    elif order:
        numbers = np.array([int(n) for n in order.split(",")])
    shape: list[int] = []
    grouped: list[int] = []
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _SUB_AXIS.findall(named)}
    for name, size in sizes.items():
        before, part = parts.get(name, (size, 1))
        if name in parts:
            grouped.append(len(shape) + 1)
        shape += [before, part, size // (before * part)]
    moved = np.moveaxis(numbers.reshape(shape), grouped, range(-len(grouped), 0)) if grouped else numbers.reshape(shape)
    return _as_groups(moved.reshape(-1, int(np.prod([shape[i] for i in grouped]))))


def _iota(text: str) -> np.ndarray:
    """Parse `[4,2]<=[2,4]T(1,0)`: iota, reshape to [2,4], transpose, reshape to [4,2]."""
    match = _IOTA.match(text)
    assert match is not None
    shape, dims, order = ([int(n) for n in part.split(",")] if part else [] for part in match.groups())
    numbers = np.arange(int(np.prod(dims))).reshape(dims)
    return (numbers.transpose(order) if order else numbers).reshape(shape)


def _as_groups(rows: np.ndarray) -> Groups:
    rows = rows.reshape(-1, rows.shape[-1])
    return tuple(tuple(int(n) for n in row) for row in rows)
