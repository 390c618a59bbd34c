"""`build` and `load`: from vectors, or a file, to an index.

In: what the user gives. Out: an `Index` of the kind asked for. `KINDS` is the table of kinds: one entry makes a kind known
to both.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost.hardware_profile import HardwareProfile
from autopar.errors import AutoparError, IndexFileError, SearchError, SearchWarning
from autopar.ir.mesh import MeshShape
from autopar.vector_search.choose_index import choose
from autopar.vector_search.data import inputs
from autopar.vector_search.data.build_request import Asked
from autopar.vector_search.data.index import Index
from autopar.vector_search.data.index_file import Saved, read
from autopar.vector_search.data.placement import Place
from autopar.vector_search.data.progress import progress_bar
from autopar.vector_search.exact import index as exact_index
from autopar.vector_search.exact.index import ExactIndex
from autopar.vector_search.frame.recall_tuning import can_tell
from autopar.vector_search.graph import index as graph_index
from autopar.vector_search.ivf import index as lists_index


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of index is made.

    Args:
        build: from vectors. load: from a file that its `save` has written.
    """

    build: Callable[[Asked], Index]
    load: Callable[[Saved, Place], Index]


def _exact(asked: Asked) -> Index:
    asked.whole_numbers(exact_index.KIND, {})
    return ExactIndex(asked.vectors, asked.ids, asked.metric, asked.place, asked.why)


def _load_exact(saved: Saved, place: Place) -> Index:
    metric = inputs.checked_metric(saved.settings["metric"])
    return ExactIndex(saved.arrays["vectors"], saved.arrays["ids"], metric, place)


#: By what `index` of `build` calls them. Read-only.
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        exact_index.KIND: Kind(_exact, _load_exact),
        lists_index.IVF: Kind(partial(lists_index.build, kind=lists_index.IVF), lists_index.load),
        lists_index.IVF_PQ: Kind(partial(lists_index.build, kind=lists_index.IVF_PQ), lists_index.load),
        graph_index.GRAPH: Kind(graph_index.build, graph_index.load),
    }
)


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
    """Make vectors searchable.

    Args:
        vectors: `[n, d]`, float32, bfloat16 or int8; other numbers become float32. n may be 0.
        metric: `"l2"` (squared distances), `"inner_product"` or `"cosine"`.
        index: `"exact"`; `"ivf"`, lists of near vectors of which a query probes some; `"ivfpq"`, lists of codes, which
            are far smaller; `"graph"`, of near vectors, which a query walks; `"auto"`, what the cost model says; or a `Kind` of
            one's own.
        recall_target: the share of the true nearest neighbours that a search is to find: when the index is built, the
            least effort that reaches it is found on a sample. `"exact"` finds all. Where no effort reaches it, `"auto"` takes
            another kind, and for any other a warning says so, as does `stats().reached`.
        memory_budget_bytes: per device; by default what the hardware profile says is usable.
        mesh: as of `autopar.plan`; by default the planner's choice for all visible devices.
        ids: the user's own, 64-bit integers, `[n]`; by default positions.
        hardware: as of `autopar.plan`.
        batch: queries that a search is expected to have: for as many the layout is chosen. Others are searched as well.
        queries: `[num_queries, d]`, some hundred of your own, by which recall is measured: where they are other than the
            vectors, as questions are other than passages. By default it is measured by the vectors themselves.
        progress: whether to show a bar; by default where standard error is a terminal.
        settings: of one kind of index alone: of `"ivf"` num_lists and copies, in how many lists a vector near their
            border may be; of `"ivfpq"` these, code_bytes of a vector and refined, how many candidates for each neighbour
            are scored by the vectors; of `"graph"` degree, edges of a node, and width, nodes looked at in one round.

    Raises:
        SearchError: vectors or ids that cannot be, an unknown metric, kind or setting.
        AutoparError: of planning: no layout fits the memory budget, a mesh that is not there.
    """
    name, own = ("", index) if isinstance(index, Kind) else (index, None)
    if name not in ("", "auto", *KINDS):
        raise SearchError(f"`index` is {index!r}: give one of auto, {', '.join(KINDS)}")
    if not 0 < recall_target <= 1:
        raise SearchError(f"`recall_target` is {recall_target!r}: give a share of the neighbours, above 0 and up to 1")
    with progress_bar(progress) as report:
        report("check the vectors", 0.0)
        checked = inputs.checked_vectors(vectors)
        asked = Asked(
            vectors=checked,
            ids=inputs.checked_ids(ids, len(checked)),
            metric=inputs.checked_metric(metric),
            recall_target=recall_target,
            place=_place(mesh, hardware, memory_budget_bytes, batch),
            settings=settings,
            report=report,
            queries=_sample(queries, checked, recall_target),
        )
        kind, why = choose(name, asked)
        if kind != exact_index.KIND:  # they are kept as they are now, whatever becomes of the user's array
            asked = replace(asked, vectors=np.array(checked))
        elif name not in (kind, "auto"):  # there are none, for whatever settings
            asked = replace(asked, settings={})
        made = (own if own and kind == name else KINDS[kind]).build(replace(asked, why=why))
        missed: list[str] = []
        while name == "auto" and made.stats().reached is False:
            missed.append(kind)
            kind, why = choose(name, asked, missed)
            if kind in missed:  # nothing else fits
                break
            why = f"{why}; {', '.join(missed)} did not reach a recall of {recall_target:g}"
            made = max(made, KINDS[kind].build(replace(asked, why=why)), key=_promised)
        report("done", 1.0)
    if made.stats().reached is False:
        _warn_of_missed(made, recall_target)
    return made


def _sample(queries: ArrayLike | None, vectors: NDArray[Any], recall_target: float) -> NDArray[Any] | None:
    if queries is None:
        return None
    checked = inputs.checked_queries(queries, vectors.shape[1], vectors.dtype)
    if not len(checked):
        raise SearchError("`queries` are none: give some hundred to measure recall by, or leave them out")
    if recall_target < 1 and not can_tell(len(checked), recall_target):
        warnings.warn(
            f"`queries` are {len(checked)}: were all their neighbours found, that would not tell a recall of"
            f" {recall_target:g}, so that searches look at more than they may need to. Give some hundred, or leave them out",
            SearchWarning,
            stacklevel=3,
        )
    return checked


def _promised(made: Index) -> float:
    """The recall that its sample promises; 1 of what needs none."""
    return made.stats().details.get("recall_at_least", 1.0)


def _warn_of_missed(made: Index, recall_target: float) -> None:
    told = made.stats()
    warnings.warn(
        f"the index of kind {told.kind!r} finds {told.details['recall']:.3f} of the true neighbours of its sample, which"
        f" speaks for at least {told.details['recall_at_least']:.3f}, and `recall_target` is {recall_target:g}: no effort"
        " that was tried reaches it. Build one of another kind, with other settings, or `index='exact'`, which finds all",
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
) -> Index:
    """A saved index, onto the devices there are, however many it was built on.

    Args:
        kind: what it was built as, if that was one's own.
        memory_budget_bytes, mesh, hardware, batch: as of `build`.

    Raises:
        IndexFileError: the file is not there, is no index, or is damaged: cut short, or changed by as little as a bit.
        AutoparError: of planning, as of `build`.
    """
    saved = read(path)
    kind = KINDS.get(saved.kind, kind)
    if kind is None:
        raise IndexFileError(
            f"{path} holds an index of kind {saved.kind!r}, and this autopar knows {', '.join(KINDS)}: one of your own is"
            " read with `kind=`"
        )
    place = _place(mesh, hardware, memory_budget_bytes, batch)
    try:
        return kind.load(saved, place)
    except AutoparError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        # Of the settings: a right digest says that they are as they were written, not by whom.
        raise IndexFileError(
            f"{path} is damaged: it holds an index of kind {saved.kind!r} whose settings cannot be ({error!r}). Build and"
            " save the index anew"
        ) from error


def _place(mesh: Any, hardware: Any, memory_budget_bytes: float | None, batch: int) -> Place:
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise SearchError(f"`batch` is {batch!r}: give the number of queries that a search is expected to have")
    options = {"mesh": mesh, "hardware": hardware, "memory_budget_bytes": memory_budget_bytes, "cache": True}
    return Place({name: value for name, value in options.items() if value is not None}, batch)
