"""Searches of one kind, timed in turns on the same queries, and told as rows of one shape.

In: `Searcher`s: a method at one setting. Out: rows with its recall, its best time, what it computed, and how it stands
beside the method that a gate names, at equal recall.
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
        search: all queries at once; ids, `[num_queries, k]`, -1 where there is none.
        build_s: that its index took.
        distances: that a query computes on average; None where the method does not say.
    """

    method: str
    setting: str
    search: Callable[[], np.ndarray]
    build_s: float
    distances: float | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """What `method` has to reach beside `reference`, where it finds `recall` of the neighbours.

    Args:
        of: `"queries_per_s"`, at least `bound` times as many; or `"distances"`, at most.
        bound: None where the ratio is told and not held.
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
    """With what each of the gate's method's rows is times the reference, at the same recall; the gate stands at the
    first that finds enough, as the settings go from little to much. Where none does, it stands at the one that finds
    most, and is not met; where the reference nowhere finds as much, the reference is taken where it finds most."""
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
    """A method's figure where it finds as much, between its settings as on a line; None where none of them does.

    >>> at_recall([(0.8, 400.0), (1.0, 200.0)], 0.9), at_recall([(0.8, 400.0)], 0.9), at_recall([(0.8, 400.0)], 0.5)
    (300.0, None, 400.0)
    """
    ordered = sorted(points)
    if not ordered or share > ordered[-1][0]:
        return None
    return float(np.interp(share, [point[0] for point in ordered], [point[1] for point in ordered]))


def built(make: Callable[[], Made]) -> tuple[Made, float]:
    """What it makes, and the seconds that took."""
    start = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start


def is_here(package: str) -> bool:
    """Whether a package is installed: what is not is left out."""
    return importlib.util.find_spec(package) is not None


def _timed(search: Callable[[], Any]) -> Callable[[], float]:
    return lambda: built(search)[1]
