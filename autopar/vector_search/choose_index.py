"""Choose the index kind for `index="auto"` by predicted search time, or by price.

In: vectors, recall target, devices, and a `Demand`. Out: the kind, and the reason as text. The planner predicts the time of
a search of the expected batch for each kind in memory, from shapes only, before anything is built. For kinds on disk, pages
per query and bytes are those of `autopar estimate search`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api.planned_function import plan_of
from autopar.errors import BudgetError
from autopar.vector_search.data import metrics
from autopar.vector_search.data.build_request import BuildRequest
from autopar.vector_search.data.demand import Demand
from autopar.vector_search.data.metrics import FEW_QUERIES
from autopar.vector_search.estimate.servers import Served, Servers, best_served, served
from autopar.vector_search.estimate.sizes import SearchSpec
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
from autopar.vector_search.updates.index import KIND as UPDATABLE

#: Exact search is chosen if it takes at most this time.
_QUICK_S = 0.05
#: Minimum predicted speedup over exact search of a kind that is approximate and slow to build.
_MIN_SPEEDUP = 1.5
#: Typical slots per vector in inverted lists.
_PADDING = 1.25


def choose(index: str, request: BuildRequest, missed: Collection[str] = ()) -> tuple[str, str]:
    """The index kind, and the reason if `index` is `"auto"`.

    Args:
        missed: kinds that were built and missed the recall target; another kind is chosen, if one fits.

    Raises:
        SearchError: an invalid setting of `"auto"`.
    """
    demand = Demand.of(request.settings) if index == "auto" else None
    if demand is not None and demand.updates_per_s:
        return UPDATABLE, f"{demand.updates_per_s:g} vectors change per second, and only lists on disk can be changed"
    if index == UPDATABLE:
        return index, ""
    if not len(request.vectors):
        return exact_index.KIND, "the corpus is empty"
    if demand is None:
        return index, ""
    if request.recall_target == 1:
        return exact_index.KIND, "the recall target is 1"
    if demand.memory_usd is not None:
        return _cheapest(request, demand, missed)
    batch = f"{request.place.batch:,} {'query' if request.place.batch == 1 else 'queries'}"
    exact = _seconds(_exact(request), request)
    rate = request.place.batch / max(demand.queries_per_s, 1e-30)  # seconds that a batch may take
    if exact is not None and exact <= min(_QUICK_S, rate):
        return exact_index.KIND, f"exact search of {batch} is predicted to take {_ms(exact)}, below {_ms(_QUICK_S)}"
    kinds = _times(request, exact)
    fits = {kind: seconds for kind, seconds in kinds.items() if seconds is not None and kind not in missed}
    if not fits and demand.path is not None:
        return _on_disk(request, demand, missed)
    if not fits:
        budget = f"{request.place.budget_bytes / 1e9:.3g} GB per device"
        others = "the remaining kinds do" if missed else "the vectors do"
        return IVF_PQ, f"{others} not fit into {budget}: codes are smaller, and the vectors stay in host memory"
    times = ", ".join(f"{kind} {_ms(seconds)}" for kind, seconds in fits.items())
    best = min(fits, key=lambda kind: fits[kind])
    if exact is not None and fits[best] > exact / _MIN_SPEEDUP and exact <= rate:
        best, times = exact_index.KIND, f"{times}; no other kind is {_MIN_SPEEDUP:g} times as fast as exact"
    return best, f"predicted times of {batch}: {times}"


def _times(request: BuildRequest, exact: float | None) -> dict[str, float | None]:
    """The predicted seconds of a batch for each kind in memory; None if no layout fits the memory budget."""
    kinds = {exact_index.KIND: exact, IVF: _seconds(_lists(request), request)}
    if request.place.batch <= FEW_QUERIES:  # larger batches share the reads of inverted lists
        kinds[GRAPH] = _seconds(_graph(request), request)
    return kinds


def _on_disk(request: BuildRequest, demand: Demand, missed: Collection[str]) -> tuple[str, str]:
    """The kind that reads the fewest pages of those on disk whose part in memory fits; if none fits, the smallest."""
    every = [one for one in _served(request, demand) if one.disk_bytes and one.kind not in missed]
    budget = f"no other kind fits into {request.place.budget_bytes / 1e9:.3g} GB"
    takes = ", ".join(f"{one.kind} {one.pages:.0f} and {one.memory_bytes / 1e9:.2g} GB" for one in every)
    best = best_served(every, 1) or min(every, key=lambda one: one.memory_bytes)
    return best.kind, f"{budget}; pages per query, and memory: {takes}"


def _cheapest(request: BuildRequest, demand: Demand, missed: Collection[str]) -> tuple[str, str]:
    """The kind whose bytes cost the least, of those that fit and answer the queries; without any, the fastest."""
    times = _times(request, _seconds(_exact(request), request))
    every = []
    for one in _served(request, demand):
        if one.kind in missed:
            continue
        if one.kind in times and (seconds := times[one.kind]) is not None:
            rate = request.place.batch / seconds
            one = replace(one, queries_per_s=(rate,), why_not="rate" if rate < demand.queries_per_s else "")
        elif one.kind == IVF_PQ:  # the vectors stay in host memory
            codes = one.memory_bytes - request.vectors.nbytes
            can = one.queries_per_s[0] >= demand.queries_per_s
            fits = codes <= request.place.budget_bytes * request.place.num_devices
            one = replace(one, why_not="memory" if not fits else "" if can else "rate")
        elif not one.disk_bytes:
            one = replace(one, why_not="memory" if one.kind in times else "batch")
        if one.disk_bytes and demand.path is None:
            one = replace(one, why_not="path")
        every.append(one)
    costs = ", ".join(
        f"{one.kind} {one.usd_per_month:.3g}" + (f" (no: {one.why_not})" if one.why_not else "") for one in every
    )
    best = best_served(every, 1)
    if best is None:
        can = [one for one in every if one.why_not == "rate"] or [one for one in every if one.kind == IVF_PQ] or every
        best = max(can, key=lambda one: one.queries_per_s[0])
    return best.kind, f"USD per month: {costs}"


def _served(request: BuildRequest, demand: Demand) -> tuple[Served, ...]:
    """Each kind on one machine."""
    num, dim = request.vectors.shape
    case = SearchSpec(
        num_vectors=num,
        dim=dim,
        dtype=request.vectors.dtype.name,
        metric=request.metric,
        batch=request.place.batch,
        recall=request.recall_target,
        ssd_bytes_per_s=(demand.disk_bytes_per_s,),
    )
    servers = Servers(
        memory_bytes=request.place.budget_bytes,
        memory_bytes_per_s=request.place.memory_bytes_per_s,
        numbers=(1,),
        queries_per_s=demand.queries_per_s,
        memory_usd=demand.memory_usd,
        disk_usd=demand.disk_usd,
    )
    return served(case, servers)


def _seconds(step: Step, request: BuildRequest) -> float | None:
    """The predicted time of a search; None if no layout fits the memory budget."""
    try:
        return plan_of(*step, request.place.options).prediction.step_time_s
    except BudgetError:
        return None


def _exact(request: BuildRequest) -> Step:
    num, dim = request.vectors.shape
    tiling = Tiling.of(num, request.place.num_devices)
    blocks = Blocks.of(request.place.batch, request.place.num_devices)
    search = exact_search(request.metric, min(MEASURED_AT, num), at_once=blocks.at_once)
    return search, exact_arguments(tiling, blocks, dim, request.vectors.dtype, request.metric)


def _lists(request: BuildRequest) -> Step:
    num, dim = request.vectors.shape
    num_lists = usual_num_lists(num)
    slots = usual_slots(num, num_lists)
    num_blocks = math.ceil(_PADDING * num / num_lists / slots)  # per list
    first = _array((num_lists + 1,), jnp.int32)
    vectors = _array((num_lists * num_blocks, slots, dim), request.vectors.dtype)
    positions = _array(vectors.shape[:2], jnp.int32)
    longest = longest_of(np.full(num_lists, num_blocks))
    centroids = _array((num_lists, dim), jnp.float32)
    arrays = InvertedLists(centroids, first, vectors, _terms(vectors, request), positions, longest, request.metric)
    return _of(Lists(IVF, request.metric, num, num_lists, 1, request.place.step_bytes), arrays, request)


def _graph(request: BuildRequest) -> Step:
    num = len(request.vectors)
    vectors = _array(request.vectors.shape, request.vectors.dtype)
    edges, entries = _array((num, DEGREE), jnp.int32), _array((NUM_ENTRIES,), jnp.int32)
    arrays = NeighbourGraph(vectors, _terms(vectors, request), edges, entries, request.metric)
    return _of(Graph(request.metric, num, DEGREE, WIDTH), Nodes(arrays), request)


def _of(method: Method, arrays: Any, request: BuildRequest) -> Step:
    num_queries = rounded(min(request.place.batch, AT_ONCE))
    search = Search(num_queries, min(MEASURED_AT, len(request.vectors)), method.usual)
    return step_of(method, search, arrays, request.vectors.shape, request.vectors.dtype)


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _terms(vectors: Any, request: BuildRequest) -> Any:
    return jax.eval_shape(partial(metrics.terms, metric=request.metric), vectors)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
