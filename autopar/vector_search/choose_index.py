"""Which kind of index to build, where the user leaves it open.

In: vectors, the recall wanted, and the devices. Out: the kind, and why, in words. Kinds are priced by the planner: it
plans a search of each for the expected batch, of shapes alone, as if it were built already.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api.planned_function import plan_of
from autopar.errors import BudgetError
from autopar.vector_search.data import metrics
from autopar.vector_search.data.build_request import Asked
from autopar.vector_search.data.metrics import FEW_QUERIES
from autopar.vector_search.exact import index as exact_index
from autopar.vector_search.frame.planned_programs import Step
from autopar.vector_search.frame.recall_tuning import MEASURED_AT
from autopar.vector_search.frame.search_method import AT_ONCE, Method, Search, step_of
from autopar.vector_search.graph.index import DEGREE, GRAPH, NUM_ENTRIES, WIDTH, Graph, Nodes
from autopar.vector_search.graph.neighbor_graph import NeighbourGraph
from autopar.vector_search.ivf.build import usual_num_lists
from autopar.vector_search.ivf.index import IVF, IVF_PQ, Lists
from autopar.vector_search.ivf.lists import InvertedLists, longest_of, usual_slots
from autopar.vector_search.kernels.exact_top_k import exact_arguments, exact_search
from autopar.vector_search.kernels.tiling import Blocks, Tiling, rounded

#: A search that takes no longer is quick enough to be exact.
_QUICK_S = 0.05
#: What finds less, and takes long to build, is to be so many times as fast as exact search, by prediction.
_WORTH = 1.5
#: Places in lists for each vector, about.
_PADDING = 1.25


def choose(index: str, asked: Asked, missed: Collection[str] = ()) -> tuple[str, str]:
    """The kind, and why it was chosen, where `index` does not say it.

    Args:
        missed: kinds that were built and did not reach the recall target: another is chosen, if any is left that fits.
    """
    if not len(asked.vectors):
        return exact_index.KIND, "there are no vectors to put into anything else"
    if index != "auto":
        return index, ""
    if asked.recall_target == 1:
        return exact_index.KIND, "all neighbours are asked for"
    batch = f"{asked.place.batch:,} {'query' if asked.place.batch == 1 else 'queries'}"
    exact = _seconds(_exact(asked), asked)
    if exact is not None and exact <= _QUICK_S:
        return exact_index.KIND, f"exact search of {batch} is predicted to take {_ms(exact)}, which is quick enough"
    kinds = {exact_index.KIND: exact, IVF: _seconds(_lists(asked), asked)}
    if asked.place.batch <= FEW_QUERIES:  # of more, lists are read once for all of them
        kinds[GRAPH] = _seconds(_graph(asked), asked)
    fits = {kind: seconds for kind, seconds in kinds.items() if seconds is not None and kind not in missed}
    if not fits:
        budget = f"{asked.place.budget_bytes / 1e9:.3g} GB a device"
        others = "what is left does" if missed else "the vectors do"
        return IVF_PQ, f"{others} not fit into {budget}: codes are smaller, and the vectors stay on the host"
    told = ", ".join(f"{kind} {_ms(seconds)}" for kind, seconds in fits.items())
    best = min(fits, key=lambda kind: fits[kind])
    if exact is not None and fits[best] > exact / _WORTH:
        best, told = exact_index.KIND, f"{told}; others are to be {_WORTH:g} times as fast as exact"
    return best, f"predicted times of {batch}: {told}"


def _seconds(step: Step, asked: Asked) -> float | None:
    """What the planner expects a search to take; None where it fits no device."""
    try:
        return plan_of(*step, asked.place.options).prediction.step_time_s
    except BudgetError:
        return None


def _exact(asked: Asked) -> Step:
    num, dim = asked.vectors.shape
    tiling = Tiling.of(num, asked.place.num_devices)
    blocks = Blocks.of(asked.place.batch, asked.place.num_devices)
    search = exact_search(asked.metric, min(MEASURED_AT, num), at_once=blocks.at_once)
    return search, exact_arguments(tiling, blocks, dim, asked.vectors.dtype, asked.metric)


def _lists(asked: Asked) -> Step:
    num, dim = asked.vectors.shape
    num_lists = usual_num_lists(num)
    slots = usual_slots(num, num_lists)
    num_blocks = math.ceil(_PADDING * num / num_lists / slots)  # of each list
    first = _array((num_lists + 1,), jnp.int32)
    vectors = _array((num_lists * num_blocks, slots, dim), asked.vectors.dtype)
    positions = _array(vectors.shape[:2], jnp.int32)
    longest = longest_of(np.full(num_lists, num_blocks))
    centroids = _array((num_lists, dim), jnp.float32)
    arrays = InvertedLists(centroids, first, vectors, _terms(vectors, asked), positions, longest, asked.metric)
    return _of(Lists(IVF, asked.metric, num, num_lists, 1, asked.place.step_bytes), arrays, asked)


def _graph(asked: Asked) -> Step:
    num = len(asked.vectors)
    vectors = _array(asked.vectors.shape, asked.vectors.dtype)
    edges, entries = _array((num, DEGREE), jnp.int32), _array((NUM_ENTRIES,), jnp.int32)
    arrays = NeighbourGraph(vectors, _terms(vectors, asked), edges, entries, asked.metric)
    return _of(Graph(asked.metric, num, DEGREE, WIDTH), Nodes(arrays), asked)


def _of(method: Method, arrays: Any, asked: Asked) -> Step:
    num_queries = rounded(min(asked.place.batch, AT_ONCE))
    search = Search(num_queries, min(MEASURED_AT, len(asked.vectors)), method.usual)
    return step_of(method, search, arrays, asked.vectors.shape, asked.vectors.dtype)


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _terms(vectors: Any, asked: Asked) -> Any:
    return jax.eval_shape(partial(metrics.terms, metric=asked.metric), vectors)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
