"""Restrict a planner's use of an axis to Megatron's: weights and features sharded, data whole.

Pins only fix inputs. Even with the weights pinned as in Megatron, autopar may prefer to gather them and shard the batch
over the same axis. Within `data_whole_over`, the solver's problem forbids strategies that shard the batch, the
sequence, or an image's rows and columns over the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from autopar.formulate.formulation import Formulation
from autopar.ir.sharding import TensorSharding
from autopar.planner import one_mesh

#: Number of an image's channels.
COLOURS = 3


@contextmanager
def data_whole_over(axis: str, batch: int, lengths: Collection[int]) -> Iterator[None]:
    """A context in which plans never shard data over the axis.

    Args:
        axis: the mesh axis.
        batch: size of the first dim of data; no weight's first dim has it.
        lengths: sizes of the second dim if it counts tokens.
    """
    formulate: Callable[..., Formulation] = one_mesh.formulate

    def restricted(*args: Any, **options: Any) -> Formulation:
        formulation = formulate(*args, **options)
        costs = [cost.copy() for cost in formulation.problem.node_costs]
        for cost, sharded in zip(costs, _shardings(formulation), strict=True):
            for shape, shardings in sharded:
                dims = data_dims(shape, batch, lengths)
                cost[np.array([any(axis in one.dims[dim] for dim in dims) for one in shardings], bool)] = np.inf
        return replace(formulation, problem=replace(formulation.problem, node_costs=tuple(costs)))

    with mock.patch.object(one_mesh, "formulate", restricted):
        yield


def data_dims(shape: tuple[int, ...], batch: int, lengths: Collection[int]) -> tuple[int, ...]:
    """The dims that count examples, tokens of one, or rows and columns of an image.

    >>> data_dims((64, 1024, 768), 64, [1024]), data_dims((512, 56, 56, 256), 512, []), data_dims((768, 3072), 64, [])
    ((0, 1), (0, 1, 2), ())
    """
    if not shape or shape[0] != batch:
        return ()
    if len(shape) == 4 and shape[1] == shape[2]:
        return (0, 1, 2)
    if len(shape) == 4 and shape[1] == COLOURS and shape[2] == shape[3]:
        return (0, 2, 3)
    return (0, 1) if len(shape) > 1 and shape[1] in lengths else (0,)


def _shardings(formulation: Formulation) -> list[list[tuple[tuple[int, ...], tuple[TensorSharding, ...]]]]:
    """For each decision, the shapes of its tensors, and their sharding under each strategy."""
    graph, found = formulation.graph, []
    for decision in formulation.decisions:
        shapes = []
        if decision.kind == "group":
            group = formulation.groups[decision.group]
            dims_of = [(d.value, d.dims) for d in group.defines] + [(r.value, r.dims) for r in group.reads]
            for value, dims in dims_of:
                shapes.append((graph.values[value].shape, tuple(s.sharding(dims) for s in decision.strategies)))
        elif decision.kind == "copy":
            shapes.append((graph.values[decision.value].shape, decision.shardings))
        found.append(shapes)
    return found
