"""Compare the predicted times of all-reduce algorithms over each axis of a mesh, by buffer size.

In: a mesh and a hardware profile. Out: `price_all_reduce`, rows of plain numbers; `render_all_reduce` prints them to a
console; `plot_all_reduce` draws them into a file with matplotlib (the extra `plot`). The times are those that the
planner uses, for a collective by itself and including its launch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.cost.all_reduce import ALGORITHMS, BACKENDS, Workers, available, backend_of
from autopar.cost.all_reduce_steps import seconds_by_messages
from autopar.cost.collectives import all_reduce_choice, collective_time, groupings
from autopar.errors import PlotError
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.system.install_command import install_command
from autopar.system.units import human_bytes, human_seconds

#: The buffer sizes of the table's columns: 1 KB to 1 GB.
TABLE_SIZES = tuple(10.0**k for k in range(3, 10))
#: The buffer sizes of the plot's points.
PLOT_SIZES = tuple(10.0 ** (k / 4) for k in range(12, 37))
#: The colours of the plot's lines, in the order of `ALGORITHMS`.
_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "black", "C8", "C9", "C7")
_MARKS = ("o", "s", "D", "^", "v", "P", "o", "x", "d", "*", "p")
#: The printed names of communication libraries.
_BACKEND_NAMES = {"nccl": "NCCL", "gloo": "Gloo", "mpi": "MPI"}


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """The times of one algorithm over one axis.

    Args:
        in_backend: whether the communication library has the algorithm.
        seconds: the time of each buffer size by the algorithm's formula, including the launch.
        by_messages_s: the same by simulation of each message.
    """

    name: str
    title: str
    in_backend: bool
    seconds: tuple[float, ...]
    by_messages_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AxisPrices:
    """The times of all algorithms over one axis, and the algorithm that the cost model chooses for each size.

    Args:
        group: the group of workers that one `host` stands for: a host, or an NVLink domain of several hosts.
        planned_s: the time that plans count, which inside an NVLink domain is a fit to measured all-reduces.
    """

    axis: str
    backend: str
    group: str
    workers: Workers
    sizes_bytes: tuple[float, ...]
    rows: tuple[AlgorithmRow, ...]
    chosen: tuple[str, ...]
    planned_s: tuple[float, ...]


def price_all_reduce(
    mesh: MeshShape,
    profile: HardwareProfile,
    sizes_bytes: Sequence[float] = TABLE_SIZES,
    *,
    by_messages: bool = False,
) -> tuple[AxisPrices, ...]:
    """Price the all-reduce over each axis of more than one device.

    Args:
        sizes_bytes: the buffer sizes.
        by_messages: whether to simulate each message too.
    """
    axes = [axis for axis in mesh.axis_names if mesh.size(axis) > 1]
    return tuple(_axis(axis, mesh, profile, tuple(sizes_bytes), by_messages) for axis in axes)


def _axis(
    axis: str, mesh: MeshShape, profile: HardwareProfile, sizes: tuple[float, ...], by_messages: bool
) -> AxisPrices:
    grouped, backend = groupings((axis,), mesh, profile), backend_of(profile.platform)
    able = {name: [w for w in grouped if name in available((name,), w)] for name in ALGORITHMS}
    launch_s = profile.collective_launch_s
    rows = [
        AlgorithmRow(
            name=name,
            title=ALGORITHMS[name].title,
            in_backend=name in BACKENDS[backend],
            seconds=tuple(min(ALGORITHMS[name].load(s, w).seconds for w in among) + launch_s for s in sizes),
            by_messages_s=tuple(
                min(seconds_by_messages(name, s, w) for w in among) + launch_s for s in sizes if by_messages
            ),
        )
        for name, among in able.items()
        if among
    ]
    chosen = tuple(all_reduce_choice(size, (axis,), mesh, profile)[0] for size in sizes)
    group = "host" if len(grouped) == 1 else "NVLink domain"
    planned_s = tuple(collective_time("all-reduce", size, (axis,), mesh, profile) for size in sizes)
    return AxisPrices(axis, backend, group, grouped[0], sizes, tuple(rows), chosen, planned_s)


# -- table -----------------------------------------------------------------------------------


def render_all_reduce(
    mesh: MeshShape, profile: HardwareProfile, console: Console, *, by_messages: bool = False
) -> None:
    """Print a table for each axis.

    Args:
        by_messages: whether to print a second table with the times by simulation of each message.
    """
    console.print(Text(f"All-reduce on {mesh.num_devices} {profile.name} devices, mesh {mesh.describe()}", "bold"))
    prices = price_all_reduce(mesh, profile, by_messages=by_messages)
    for axis in prices:
        console.print(Text(f"\n{_heading(axis)}"))
        console.print(Padding(_table(axis), (0, 0, 0, 2)))
        if by_messages:
            console.print(Text(f"\nAxis `{axis.axis}`, message by message"))
            console.print(Padding(_table(axis, by_messages=True), (0, 0, 0, 2)))
    if not prices:
        console.print(Text("\nNo axis has more than one device: nothing is reduced."))
        return
    backend = _BACKEND_NAMES[prices[0].backend]
    console.print(
        Text(
            f"\nSeconds of one all-reduce by itself, launch included, by the formulas of the cost model. * marks the"
            f" algorithm that the cost model chooses: the cheapest of {backend}. Algorithms without `yes` are shown for"
            " comparison. Plans count measured times where the profile has them: inside an NVLink domain."
        )
    )


def _heading(axis: AxisPrices) -> str:
    link = axis.workers.slowest_link
    speed = f"{human_bytes(link.bytes_per_s)}/s, {human_seconds(link.latency_s)} a step"
    return f"Axis `{axis.axis}`: {_place(axis)}; slowest link {speed}"


def _place(axis: AxisPrices) -> str:
    workers, group = axis.workers, axis.group
    if workers.num_hosts == 1:
        return f"{workers.num_workers} devices in one {group}"
    return f"{workers.num_workers} devices on {workers.num_hosts} {group}s, {workers.num_local} in each"


def _table(axis: AxisPrices, *, by_messages: bool = False) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("algorithm", no_wrap=True)
    table.add_column(_BACKEND_NAMES[axis.backend])
    for size in axis.sizes_bytes:
        table.add_column(_short_bytes(size), justify="right", no_wrap=True)
    for row in axis.rows:
        seconds = row.by_messages_s if by_messages else row.seconds
        cells = [_cell(seconds[k], is_chosen=row.name == axis.chosen[k]) for k in range(len(axis.sizes_bytes))]
        table.add_row(Text(row.title), Text("yes" if row.in_backend else ""), *cells)
    if not by_messages:
        table.add_row(Text("counted in plans"), Text(), *(Text(f"{human_seconds(s)} ") for s in axis.planned_s))
    return table


def _cell(seconds: float, *, is_chosen: bool) -> Text:
    return Text(f"{human_seconds(seconds)}{'*' if is_chosen else ' '}", "bold green" if is_chosen else "")


def _short_bytes(num_bytes: float) -> str:
    """A size such as `10 KB`; sizes in the table are powers of ten, so they need no decimals."""
    number, unit = human_bytes(num_bytes).split()
    return f"{float(number):.0f} {unit} "


# -- plot ------------------------------------------------------------------------------------


def plot_all_reduce(mesh: MeshShape, profile: HardwareProfile, path: str) -> None:
    """Plot seconds over bytes: a panel for each axis, a line for each algorithm, and a wide line for the chosen one.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    check_can_plot(path)
    prices = price_all_reduce(mesh, profile, PLOT_SIZES)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(1.2 + 5.4 * max(1, len(prices)), 5.6), layout="constrained", dpi=110
    )
    figure.suptitle(f"All-reduce on {mesh.num_devices} {profile.name} devices, mesh {mesh.describe()}")
    panels = figure.subplots(1, max(1, len(prices)), squeeze=False, sharey=True)[0]
    lines: dict[str, Any] = {}
    for axis, panel in zip(prices, panels, strict=False):
        lines |= _draw(axis, panel)
    panels[0].set_ylabel("seconds, launch included")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3 if len(prices) < 2 else 4)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the file extension
        raise PlotError(f"cannot draw into {path!r}: {error}") from error


def check_can_plot(path: str) -> None:
    """Check before planning that a plot can be written.

    Raises:
        PlotError: matplotlib is missing, or the file's folder cannot be written to.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(f"--plot draws with matplotlib, which is missing: {install_command('plot')}") from error
    if Path(path).is_dir() or not os.access(Path(path).resolve().parent, os.W_OK):
        raise PlotError(f"cannot write {path!r}: give --plot a file in a folder that can be written to")


def _draw(axis: AxisPrices, panel: Any) -> dict[str, Any]:
    """Draw the lines of one axis and return them by label. Algorithms of the library are solid lines, the others
    dashed."""
    lines: dict[str, Any] = {}
    chosen = [min(row.seconds[k] for row in axis.rows if row.in_backend) for k in range(len(axis.sizes_bytes))]
    (lines["chosen by the cost model"],) = panel.plot(axis.sizes_bytes, chosen, color="0.82", linewidth=9, zorder=0)
    names = list(ALGORITHMS)
    for row in axis.rows:
        style: dict[str, Any] = (
            {"linestyle": "-", "linewidth": 2.0} if row.in_backend else {"linestyle": "--", "linewidth": 1.2}
        )
        k = names.index(row.name)  # the same colour and mark in all panels
        style |= {"color": _COLORS[k], "marker": _MARKS[k], "markersize": 5}
        style |= {"markevery": (2 * k % 8, 8)}  # staggered, so that overlapping lines can be distinguished
        label = f"{row.title} ({_BACKEND_NAMES[axis.backend]})" if row.in_backend else row.title
        (lines[label],) = panel.plot(axis.sizes_bytes, row.seconds, **style)
    panel.set(xscale="log", yscale="log", xlabel="bytes of the buffer")
    panel.set_title(f"axis {axis.axis}: {_place(axis)}", fontsize="medium")
    panel.grid(alpha=0.3)
    return lines
