"""Time searches of one kind in turns on the same queries, and report them as rows with equal columns.

In: `Searcher`s: a method at one setting. Out: rows with its recall, its minimum time, its distance computations, and
its ratio to the gate's reference method at equal recall.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from benchmarks.timing import take_turns
from benchmarks.vector_search.data import Searched, recall

Row = dict[str, Any]
Made = TypeVar("Made")

CORES = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Searcher:
    """A method at one setting.

    Args:
        search: function that searches all queries at once; ids, `[num_queries, k]`, -1 if there is none.
        build_s: seconds to build its index.
        distances: mean number of distance computations per query; None if the method does not report it.
    """

    method: str
    setting: str
    search: Callable[[], np.ndarray]
    build_s: float
    distances: float | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """What `method` has to reach compared with `reference`, at the given `recall`.

    Args:
        of: `"queries_per_s"`: at least `bound` times as many. `"distances"`: at most.
        bound: the limit; None if the ratio is only reported.
    """

    method: str
    reference: str
    of: str
    bound: float | None
    recall: float = 0.95


def measured(part: str, name: str, data: Searched, searchers: Sequence[Searcher], gate: Gate, rounds: int) -> list[Row]:
    """A row for each searcher, in their order."""
    keys = [f"{one.method}, {one.setting}" for one in searchers]
    assert len(set(keys)) == len(keys)
    found = [recall(data, one.search()) for one in searchers]
    timed = {key: _timed(one.search) for key, one in zip(keys, searchers, strict=True)}
    times = take_turns(timed, rounds, warmup=1)
    best = [min(times[key]) for key in keys]
    rows: list[Row] = []
    for one, share, seconds in zip(searchers, found, best, strict=True):
        rows.append(
            {
                "part": part,
                "data": name,
                "method": one.method,
                "setting": one.setting,
                "vectors": len(data.corpus),
                "recall": share,
                "queries_per_s": len(data.queries) / seconds,
                "distances": "" if one.distances is None else one.distances,
                "build_s": one.build_s,
                "beside": "",
                "gate": "",
                "met": "",
            }
        )
    return _beside(rows, gate)


def _beside(rows: list[Row], gate: Gate) -> list[Row]:
    """Add to each row of the gate's method its ratio to the reference at the same recall.

    The gate is checked at the first setting that reaches the recall, in order of increasing effort. If none does, it is
    checked at the setting with the highest recall, and fails. If the reference never reaches the recall, its setting
    with the highest recall counts.
    """
    theirs = [(row["recall"], row[gate.of]) for row in rows if row["method"] == gate.reference]
    own = [row for row in rows if row["method"] == gate.method]
    for row in own:
        reference = at_recall(theirs, row["recall"])
        row["beside"] = "" if reference is None else row[gate.of] / reference
    if gate.bound is None:
        return rows
    enough = [row for row in own if row["recall"] >= gate.recall]
    held = min(enough, key=_recall) if enough else max(own, key=_recall)
    ratio = held[gate.of] / max(theirs)[1] if held["beside"] == "" else held["beside"]
    is_within = ratio <= gate.bound if gate.of == "distances" else ratio >= gate.bound
    held |= {"beside": ratio, "gate": gate.bound, "met": bool(enough) and is_within}
    return rows


def _recall(row: Row) -> float:
    return row["recall"]


def at_recall(points: Sequence[tuple[float, float]], share: float) -> float | None:
    """A method's figure at this recall, interpolated linearly between its settings; None if no setting reaches it.

    >>> at_recall([(0.8, 400.0), (1.0, 200.0)], 0.9), at_recall([(0.8, 400.0)], 0.9), at_recall([(0.8, 400.0)], 0.5)
    (300.0, None, 400.0)
    """
    ordered = sorted(points)
    if not ordered or share > ordered[-1][0]:
        return None
    return float(np.interp(share, [point[0] for point in ordered], [point[1] for point in ordered]))


def built(make: Callable[[], Made]) -> tuple[Made, float]:
    """The result of a call, and its seconds."""
    start = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start


def is_here(package: str) -> bool:
    """Whether a package is installed; methods without their package are left out."""
    return importlib.util.find_spec(package) is not None


def _timed(search: Callable[[], Any]) -> Callable[[], float]:
    return lambda: built(search)[1]
