"""Turn the records of a plan into the rows of a report, and merge rows that differ only in a layer number.

In: a plan. Out: `TensorRow`s, `StateRow`s and `CollectiveRow`s, which `explain` prints.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from autopar.ir.sharding import TensorSharding
from autopar.plans.plan import Plan
from autopar.plans.records import CollectiveUse, Decision, TensorPlan
from autopar.system.name_patterns import collapse

Span: TypeAlias = tuple[float, float]  # lowest and highest value of the tensors in a row
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Tensors whose paths differ only in numbers.

    Args:
        sharding: the text of `split`.
        num_bytes, local_bytes: the bytes of all these tensors together.
        collectives: (kind, axes, seconds for one tensor).
    """

    path: str
    kind: Literal["parameter", "optimizer", "data", "activation"]
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    split: TensorSharding
    num_bytes: float
    local_bytes: float
    count: int = 1
    pinned: bool = False
    primitive: str = ""
    phase: str = ""
    source: str = ""
    cost_s: Span | None = None
    runner_up: tuple[str, ...] = ()
    runner_up_extra_s: Span | None = None
    collectives: tuple[tuple[str, tuple[str, ...], float], ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Collectives of one kind and cause; bytes and time are sums over all of them."""

    kind: str
    axes: tuple[str, ...]
    cause: str
    path: str
    phase: str
    source: str
    count: int
    num_bytes: float
    time_s: float
    combinable: bool


@dataclass(frozen=True, slots=True)
class StateRow:
    """Optimizer state of one sharding; `num_bytes` and `local_bytes` are its bytes globally and on one device."""

    sharding: str
    num_tensors: int
    num_bytes: float
    local_bytes: float
    example: str


def _merge(rows: Iterable[_T], key: Callable[[_T], Hashable], text: Callable[[_T], str]) -> list[tuple[str, list[_T]]]:
    """Merge rows with equal keys and texts that differ only in numbers: (pattern, rows), in the order of the first
    rows."""
    same: dict[Hashable, list[tuple[int, _T]]] = defaultdict(list)
    for order, row in enumerate(rows):
        same[key(row)].append((order, row))
    merged = [
        (members[positions[0]][0], pattern, [members[p][1] for p in positions])
        for members in same.values()
        for pattern, positions in collapse([text(row) for _, row in members])
    ]
    return [(pattern, members) for _, pattern, members in sorted(merged, key=lambda block: block[0])]


# -- rows of a plan's records ---------------------------------------------------------------


def _global_bytes(plan: Plan, tensor: TensorPlan) -> float:
    """Global bytes of a tensor, computed from the recorded bytes of its largest shard."""
    return tensor.num_bytes * math.prod(tensor.shape) / max(1, tensor.sharding.local_size(tensor.shape, plan.mesh))


def of_input(plan: Plan, tensor: TensorPlan, decision: Decision | None) -> TensorRow:
    return TensorRow(
        path=tensor.path,
        kind=tensor.role,
        shape=tensor.shape,
        dtype=tensor.dtype,
        sharding=str(tensor.sharding),
        split=tensor.sharding,
        num_bytes=_global_bytes(plan, tensor),
        local_bytes=tensor.num_bytes,
        pinned=tensor.pinned,
        **(_decision_fields(plan, decision) if decision else {}),
    )


def of_activation(plan: Plan, decision: Decision) -> TensorRow:
    itemsize = _itemsize(decision.dtype)
    return TensorRow(
        path=decision.path,
        kind=decision.kind,
        shape=decision.shape,
        dtype=decision.dtype,
        sharding=str(decision.sharding),
        split=decision.sharding,
        num_bytes=itemsize * math.prod(decision.shape),
        local_bytes=itemsize * decision.sharding.local_size(decision.shape, plan.mesh),
        **_decision_fields(plan, decision),
    )


def _decision_fields(plan: Plan, decision: Decision) -> dict[str, Any]:
    """The fields of a row that come from a decision. A tensor too small for a decision keeps the defaults."""
    times: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for use in (plan.collectives[position] for position in decision.collectives):
        times[use.kind, use.axes] += use.time_s
    extra = decision.runner_up_extra_s
    known = decision.runner_up is not None and math.isfinite(extra)
    return {
        "primitive": decision.primitive,
        "phase": decision.phase,
        "source": decision.source,
        "cost_s": (decision.cost_s, decision.cost_s),
        "runner_up": (str(decision.runner_up),) if known else (),
        "runner_up_extra_s": (extra, extra) if known else None,
        "collectives": tuple((kind, axes, time_s) for (kind, axes), time_s in sorted(times.items())),
    }


def merge_tensors(rows: Sequence[TensorRow]) -> tuple[TensorRow, ...]:
    def key(row: TensorRow) -> Hashable:
        uses = tuple((kind, axes) for kind, axes, _ in row.collectives)
        return row.primitive, row.phase, row.source, row.shape, row.dtype, row.sharding, row.pinned, uses

    return tuple(_merged(pattern, rows) for pattern, rows in _merge(rows, key, lambda row: row.path))


def _merged(pattern: str, rows: Sequence[TensorRow]) -> TensorRow:
    first = rows[0]
    return replace(
        first,
        path=pattern,
        count=len(rows),
        num_bytes=sum(row.num_bytes for row in rows),
        local_bytes=sum(row.local_bytes for row in rows),
        cost_s=_span(row.cost_s for row in rows),
        runner_up=tuple(dict.fromkeys(text for row in rows for text in row.runner_up)),
        runner_up_extra_s=_span(row.runner_up_extra_s for row in rows),
        collectives=tuple(
            (kind, axes, sum(row.collectives[i][2] for row in rows) / len(rows))
            for i, (kind, axes, _) in enumerate(first.collectives)
        ),
    )


def _span(spans: Iterable[Span | None]) -> Span | None:
    known = [span for span in spans if span is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def merge_state(plan: Plan, tensors: Sequence[TensorPlan]) -> tuple[StateRow, ...]:
    rows = []
    for _, same in _merge(tensors, lambda tensor: str(tensor.sharding), lambda _: ""):
        sizes = [_global_bytes(plan, tensor) for tensor in same]
        largest = same[sizes.index(max(sizes))]
        local = sum(tensor.num_bytes for tensor in same)
        rows.append(StateRow(str(largest.sharding), len(same), sum(sizes), local, largest.path))
    return tuple(sorted(rows, key=lambda row: -row.num_bytes))


def merge_collectives(collectives: Sequence[CollectiveUse]) -> tuple[CollectiveRow, ...]:
    def key(use: CollectiveUse) -> Hashable:
        return use.kind, use.axes, use.phase, use.source, use.combinable

    rows = []
    for pattern, uses in _merge(collectives, key, lambda use: f"{use.cause}\n{use.path}"):
        cause, path = pattern.rsplit("\n", 1)
        row = CollectiveRow(
            kind=uses[0].kind,
            axes=uses[0].axes,
            cause=cause,
            path=path,
            phase=uses[0].phase,
            source=uses[0].source,
            count=len(uses),
            num_bytes=sum(use.num_bytes for use in uses),
            time_s=sum(use.time_s for use in uses),
            combinable=uses[0].combinable,
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.time_s))


def largest_first(rows: Iterable[TensorRow]) -> tuple[TensorRow, ...]:
    return tuple(sorted(rows, key=lambda row: -row.num_bytes / row.count))


def _itemsize(dtype: str) -> float:
    """Bytes per element of a dtype, given by name; 8 for a PRNG key."""
    if dtype == "bool":
        return 1
    match = re.search(r"\d+", dtype)
    return int(match[0]) / 8 if match else 8
