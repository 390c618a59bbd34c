"""Build and load indexes of any kind.

In: vectors, or an index file. Out: an `Index`. `KINDS` is the table of index kinds; an entry makes a kind known to both
functions.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import AutoparError, IndexFileError, SearchError, SearchWarning
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.vector_search.choose_index import choose
from autopar.vector_search.data import inputs
from autopar.vector_search.data.build_request import BuildRequest
from autopar.vector_search.data.demand import Demand
from autopar.vector_search.data.index import Index
from autopar.vector_search.data.index_file import Saved, read
from autopar.vector_search.data.placement import Place
from autopar.vector_search.data.progress import progress_bar
from autopar.vector_search.exact import index as exact_index
from autopar.vector_search.exact.index import ExactIndex
from autopar.vector_search.frame.recall_tuning import can_reach
from autopar.vector_search.graph import index as graph_index
from autopar.vector_search.graph_on_disk import build_graph_on_disk as graph_disk
from autopar.vector_search.graph_on_disk.index import KIND as GRAPH_DISK
from autopar.vector_search.ivf import index as ivf_index
from autopar.vector_search.on_disk import build_on_disk as disk
from autopar.vector_search.on_disk.index import KIND as DISK
from autopar.vector_search.on_disk.page_file import is_page_file, kind_of
from autopar.vector_search.servers.divide import PART
from autopar.vector_search.updates import build as updatable
from autopar.vector_search.updates.folder import is_folder
from autopar.vector_search.updates.index import KIND as UPDATABLE


@dataclass(frozen=True, slots=True)
class Kind:
    """The two functions of an index kind.

    Args:
        build: builds an index from vectors.
        load: loads an index from a file that its `save` wrote.
    """

    build: Callable[[BuildRequest], Index]
    load: Callable[[Saved, Place], Index]


def _exact(request: BuildRequest) -> Index:
    request.whole_numbers(exact_index.KIND, {})
    return ExactIndex(request.vectors, request.ids, request.metric, request.place, request.why)


def _load_exact(saved: Saved, place: Place) -> Index:
    metric = inputs.checked_metric(saved.settings["metric"])
    return ExactIndex(saved.arrays["vectors"], saved.arrays["ids"], metric, place)


#: Index kinds by the name that `build` takes. Read-only.
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        exact_index.KIND: Kind(_exact, _load_exact),
        ivf_index.IVF: Kind(partial(ivf_index.build, kind=ivf_index.IVF), ivf_index.load),
        ivf_index.IVF_PQ: Kind(partial(ivf_index.build, kind=ivf_index.IVF_PQ), ivf_index.load),
        graph_index.GRAPH: Kind(graph_index.build, graph_index.load),
        DISK: Kind(disk.build, disk.load),
        GRAPH_DISK: Kind(graph_disk.build, graph_disk.load),
        UPDATABLE: Kind(updatable.build, updatable.load),
    }
)
#: Kinds that are files: they copy the array.
_ON_DISK = (DISK, GRAPH_DISK, UPDATABLE)


def build(
    vectors: ArrayLike,
    *,
    metric: str = "l2",
    index: str | Kind = "auto",
    recall_target: float = 0.95,
    memory_budget_bytes: float | None = None,
    mesh: str | MeshShape | jax.sharding.Mesh | None = None,
    ids: ArrayLike | None = None,
    hardware: str | HardwareProfile | None = None,
    batch: int = 256,
    queries: ArrayLike | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Index:
    """Build an index, so that vectors can be searched.

    Args:
        vectors: `[n, d]`, float32, bfloat16, float16, int8 or uint8; other numbers become float32. n may be 0.
        metric: `"l2"` (squared distances), `"inner_product"` or `"cosine"`.
        index: the index kind. `"exact"`; `"ivf"`, inverted lists of vectors, of which a query probes some; `"ivfpq"`,
            inverted lists of product-quantized codes, which are much smaller; `"graph"`, a neighbour graph with beam
            search; `"ivfdisk"`, inverted lists in a file; `"graphdisk"`, a neighbour graph in a file; `"updatable"`,
            inverted lists in a folder that can be changed; `"auto"`, one of these, by predicted time, memory, drives,
            prices and updates; or a `Kind` of your own.
        recall_target: recall@10 that a search has to reach. `build` finds the least effort that reaches it on a sample.
            `"exact"` has recall 1. If no effort reaches the target, `"auto"` builds another kind; the other kinds warn,
            and `stats().reached` is False.
        memory_budget_bytes: memory budget per device; by default the usable memory of the hardware profile.
        mesh: as in `autopar.plan`; by default the planner chooses a mesh of all visible devices.
        ids: your own 64-bit integer ids, `[n]`; by default positions.
        hardware: as in `autopar.plan`.
        batch: expected number of queries per search, which determines the layout. Other numbers work too.
        queries: `[num_queries, d]`, a sample of a few hundred of your queries for measuring recall, if their
            distribution differs from the vectors', as questions differ from passages. By default vectors of the corpus
            are the sample.
        progress: whether to show a progress bar; by default if standard error is a terminal.
        settings: settings of the index kind. `"ivf"`: num_lists, and copies, the maximum number of lists per vector.
            `"ivfpq"`: these, code_bytes per vector, and refined, the re-ranked candidates per neighbour. `"graph"`:
            degree, edges per node, and width, nodes expanded per iteration. `"ivfdisk"`: path, and num_lists, copies,
            space and reader as in `build_on_disk`. `"graphdisk"`: path, and degree, code_bytes, width and reader as in
            `build_graph_on_disk`. `"updatable"`: path, and copies, space and reader as in `make_updatable`. `"auto"`:
            path and reader, without which only kinds in memory are considered; disk_bytes_per_s (5e9), the read
            bandwidth of the drive; updates_per_s, vectors that change; queries_per_s, the rate that is needed; memory_usd
            and disk_usd, prices of a GB for a month, with which the cheapest kind is chosen, not the fastest.

    Raises:
        SearchError: invalid vectors or ids, or an unknown metric, kind or setting.
        AutoparError: planning fails: no layout fits the memory budget, or the mesh does not exist.
    """
    name, own = ("", index) if isinstance(index, Kind) else (index, None)
    if name not in ("", "auto", *KINDS):
        raise SearchError(f"`index` is {index!r}: expected one of auto, {', '.join(KINDS)}")
    if not 0 < recall_target <= 1:
        raise SearchError(f"`recall_target` is {recall_target!r}: give a recall above 0 and at most 1")
    with progress_bar(progress) as report:
        report("check vectors", 0.0)
        checked = inputs.checked_vectors(vectors)
        request = BuildRequest(
            vectors=checked,
            ids=inputs.checked_ids(ids, len(checked)),
            metric=inputs.checked_metric(metric),
            recall_target=recall_target,
            place=_place(mesh, hardware, memory_budget_bytes, batch),
            settings=settings,
            report=report,
            queries=_sample(queries, checked, recall_target),
        )
        kind, why = choose(name, request)
        if name in _ON_DISK and kind != name:
            raise SearchError("`vectors` is empty: an index on disk needs at least one vector")
        if kind not in (exact_index.KIND, *_ON_DISK):  # a copy: the user may change the array
            request = replace(request, vectors=np.array(checked))
        elif name not in (kind, "auto"):  # an empty corpus is exact: the settings do not apply
            request = replace(request, settings={})
        made = (own if own and kind == name else KINDS[kind]).build(_request_of(kind, name, request, why))
        missed: list[str] = []
        while name == "auto" and made.stats().reached is False and kind not in _ON_DISK:
            missed.append(kind)
            kind, why = choose(name, request, missed)
            if kind in missed:  # nothing else fits
                break
            why = f"{why}; {', '.join(missed)} did not reach a recall of {recall_target:g}"
            made = max(made, KINDS[kind].build(_request_of(kind, name, request, why)), key=_recall_bound)
        report("done", 1.0)
    if made.stats().reached is False:
        _warn_of_missed(made, recall_target)
    return made


def _request_of(kind: str, name: str, request: BuildRequest, why: str) -> BuildRequest:
    """The request of a kind. Of the settings of `"auto"`, kinds on disk have the file."""
    settings = request.settings
    if name == "auto":
        settings = Demand.of(settings).file if kind in _ON_DISK else {}
    return replace(request, settings=settings, why=why)


def _sample(queries: ArrayLike | None, vectors: NDArray[Any], recall_target: float) -> NDArray[Any] | None:
    if queries is None:
        return None
    checked = inputs.checked_queries(queries, vectors.shape[1], vectors.dtype)
    if not len(checked):
        raise SearchError("`queries` is empty: give a few hundred to measure recall, or omit it")
    if recall_target < 1 and not can_reach(len(checked), recall_target):
        warnings.warn(
            f"`queries` has {len(checked)} rows, too few to show a recall of {recall_target:g}, even if all neighbours are"
            " found: searches then use more effort than they may need. Give a few hundred, or omit it",
            SearchWarning,
            stacklevel=3,
        )
    return checked


def _recall_bound(made: Index) -> float:
    """The lower confidence bound of the sample's recall; 1 if there is none."""
    return made.stats().details.get("recall_at_least", 1.0)


def _warn_of_missed(made: Index, recall_target: float) -> None:
    stats = made.stats()
    warnings.warn(
        f"the index of kind {stats.kind!r} has a recall of {stats.details['recall']:.3f} on its sample, with a lower bound of"
        f" {stats.details['recall_at_least']:.3f}, and `recall_target` is {recall_target:g}: no effort reaches it. Build"
        " another kind, use other settings, or `index='exact'`, whose recall is 1",
        SearchWarning,
        stacklevel=3,
    )


def load(
    path: str | os.PathLike[str],
    *,
    memory_budget_bytes: float | None = None,
    mesh: str | MeshShape | jax.sharding.Mesh | None = None,
    hardware: str | HardwareProfile | None = None,
    batch: int = 256,
    kind: Kind | None = None,
    reader: str | None = None,
) -> Index:
    """Load a saved index onto the current devices, whose number may differ from that at build time.

    Args:
        kind: the index kind, if it is your own.
        reader: for an index on disk, the engine that reads it, as in `build_on_disk`.
        memory_budget_bytes: as in `build`. For an index on disk, host memory: what the index and searches leave is a
            cache of pages; by default there is none.
        mesh, hardware, batch: as in `build`.

    Raises:
        IndexFileError: the file is missing, no index, or damaged; a truncated file or a flipped bit is detected.
        AutoparError: planning fails, as in `build`.
    """
    if is_folder(path):
        saved = Saved(UPDATABLE, {}, {}, Path(path), reader)
    elif is_page_file(path):
        saved = Saved(kind_of(path), {}, {}, Path(path), reader)
    else:
        saved = read(path)
        if reader is not None:
            raise SearchError(f"`reader` is {reader!r}, and {path} is not an index on disk: omit it")
    kind = KINDS.get(DISK if saved.kind == PART else saved.kind, kind)
    if kind is None:
        raise IndexFileError(
            f"{path} has an index of kind {saved.kind!r}, and the known kinds are {', '.join(KINDS)}: pass your own kind as"
            " `kind=`"
        )
    place = _place(mesh, hardware, memory_budget_bytes, batch)
    try:
        return kind.load(saved, place)
    except AutoparError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        # Invalid settings: a matching digest proves that the file is unchanged, not that its author is trusted.
        raise IndexFileError(
            f"{path} is damaged: the settings of its index of kind {saved.kind!r} are invalid ({error!r}). Rebuild and"
            " save the index"
        ) from error


def _place(mesh: Any, hardware: Any, memory_budget_bytes: float | None, batch: int) -> Place:
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise SearchError(f"`batch` is {batch!r}: give the expected number of queries per search")
    options = {"mesh": mesh, "hardware": hardware, "memory_budget_bytes": memory_budget_bytes, "cache": True}
    return Place({name: value for name, value in options.items() if value is not None}, batch)
