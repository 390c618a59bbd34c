"""Predict the compute time of a group on one device under each of its strategies, by a roofline.

In: a group, its strategies, the graph's values. Out: seconds per strategy by a roofline (Williams, Waterman, Patterson
2009): the longer of arithmetic at the unit's achievable rate and memory traffic at the memory bandwidth. Traffic is
what a fused group reads from and writes to memory; values inside a fusion are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.rules.factors import DimFactors, Factor
from autopar.rules.grouping import Group, Work
from autopar.rules.strategies import Strategy
from autopar.rules.table import traits_of


@dataclass(frozen=True, slots=True)
class Load:
    """The arithmetic and memory traffic of a group in one step, whatever its strategy. Identical layers have equal loads.

    Args:
        works: arithmetic over the group's factors.
        tensors: bytes per element in a step (over all iterations of a loop), shape and dims of each tensor that the
            group reads from memory or writes to memory.
    """

    factors: tuple[Factor, ...]
    works: tuple[Work, ...]
    tensors: tuple[tuple[float, tuple[int, ...], DimFactors], ...]


def load_of(group: Group, written: frozenset[int], graph: Graph) -> Load:
    """The load of a group.

    Args:
        written: values of the group with users outside, which are written to memory.
    """
    if all(traits_of(graph.nodes[n].primitive).view for n in group.nodes):  # it moves no data
        return Load(group.factors, (), ())
    values = graph.values
    moved = [(values[r.value].itemsize * values[r.value].repeat, r.value, r.dims) for r in group.reads]
    for define in group.defines:
        if define.value in written:
            # A loop-invariant value is written once, and so is a stack of all iterations.
            times = min(values[define.value].repeat, graph.nodes[define.node].repeat)
            moved.append((values[define.value].itemsize * times, define.value, define.dims))
    moved += [(values[value].itemsize, value, dims) for value, dims in group.inputs]
    return Load(group.factors, group.works, tuple((size, values[value].shape, dims) for size, value, dims in moved))


def compute_time(load: Load, strategies: Sequence[Strategy], mesh: MeshShape, profile: HardwareProfile) -> np.ndarray:
    """Seconds per step on one device, float[strategies]; 0 for a load without arithmetic and traffic."""
    if not load.works and not load.tensors:
        return np.zeros(len(strategies))
    parts = np.array([[mesh.sizes(axes) for axes in s.axes] for s in strategies], int)  # [strategies, factors]

    def points(factors: Sequence[int]) -> np.ndarray:
        total = np.ones(len(strategies))
        for f in factors:
            total *= -(-load.factors[f].size // parts[:, f])
        return total

    arithmetic, traffic = np.zeros(len(strategies)), np.zeros(len(strategies))
    for work in load.works:
        outside, inside = work.by_unit
        seconds = outside / profile.vector_flops_per_s
        inside_s = sum(flops / profile.matrix_rate(dtype) for dtype, flops in inside)
        seconds = max(seconds, inside_s / work.matrix_efficiency)
        arithmetic += points(work.factors) * work.repeat * seconds
        for factors in work.stored:  # written once and read once
            traffic += 2.0 * work.repeat * work.itemsize * points(factors)
    for num_bytes, shape, dims in load.tensors:
        local = np.ones(len(strategies), int)
        for size, dim in zip(shape, dims, strict=True):
            local *= -(-size // parts[:, dim[0]]) if dim else size
        traffic += num_bytes * local
    return np.maximum(arithmetic, traffic / profile.memory_bytes_per_s) + profile.kernel_launch_s + profile.kernel_gap_s
