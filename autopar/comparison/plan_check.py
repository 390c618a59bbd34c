"""Check a changed step against its committed plan: added collectives, peak memory, step time.

In: a saved plan, the current step. Out: `PlanCheck`, which passes or lists the failures by module and source line. The
step is planned again with the options of the saved plan: its mesh, hardware, memory budget and pins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autopar.api.make_plan import plan as plan_of
from autopar.errors import BudgetError, PlanMismatchError
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.plans.plan import Plan
from autopar.plans.records import CollectiveUse
from autopar.system.text_tables import finite, short_source
from autopar.system.units import human_bytes, human_seconds


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tolerated increase over the planned figure: a fraction of it, plus an absolute amount."""

    fraction: float = 0.0
    amount: float = 0.0

    def of(self, planned: float) -> float:
        """The largest tolerated figure."""
        return planned * (1 + self.fraction) + self.amount


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """The result of a check.

    Args:
        saved: the committed plan.
        now: plan of the current step; None where none fits.
        refused: the reason why none fits.
        added, gone: collectives that only the current plan has, and only the saved one.
        memory, time: tolerated increase; None for a figure that is not checked.
    """

    saved: Plan
    now: Plan | None
    refused: str = ""
    added: tuple[CollectiveUse, ...] = ()
    gone: tuple[CollectiveUse, ...] = ()
    memory: Allowed | None = field(default_factory=lambda: Allowed(fraction=0.05))
    time: Allowed | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """The reasons why the check fails, one line each."""
        if self.now is None:
            return (f"the step no longer fits: {self.refused}",)
        found = [f"a collective more: {_describe(use)}" for use in self.added]
        before, after = self.saved.prediction, self.now.prediction
        if self.memory is not None and after.peak_bytes > self.memory.of(before.peak_bytes):
            found.append(_more("peak memory", before.peak_bytes, after.peak_bytes, self.memory, human_bytes))
        if self.time is not None and after.step_time_s > self.time.of(before.step_time_s):
            found.append(_more("step time", before.step_time_s, after.step_time_s, self.time, human_seconds))
        return tuple(found)

    @property
    def holds(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The report as lines of text."""
        name = self.saved.program.name
        if self.now is None or not self.holds:
            head = f"`{name}` is no longer as planned on mesh {self.saved.mesh} ({self.saved.hardware}):"
            return [head, *(f"  {line}" for line in self.failures), *self._comparison_lines(), _WAY_OUT]
        return [f"`{name}` is as planned on mesh {self.saved.mesh} ({self.saved.hardware}).", *self._comparison_lines()]

    def _comparison_lines(self) -> list[str]:
        if self.now is None:
            return []
        before, after = self.saved.prediction, self.now.prediction
        memory = f"peak memory {human_bytes(before.peak_bytes)} -> {human_bytes(after.peak_bytes)}"
        time = f"step time {human_seconds(before.step_time_s)} -> {human_seconds(after.step_time_s)}"
        count = f"{len(self.saved.collectives)} -> {len(self.now.collectives)} collectives"
        gone = [f"  a collective less: {_describe(use)}" for use in self.gone]
        return [*gone, f"  planned -> now: {memory}, {time}, {count}"]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types."""
        sides = {"planned": self.saved, "now": self.now}
        document: dict[str, Any] = {
            "format": "autopar-check",
            "version": 1,
            "holds": self.holds,
            "failures": list(self.failures),
            "added": [asdict(use) for use in self.added],
            "gone": [asdict(use) for use in self.gone],
        }
        for name, plan in sides.items():
            prediction = None if plan is None else plan.prediction
            document[name] = prediction and asdict(prediction) | {"peak_bytes": prediction.peak_bytes}
        return finite(document)


_WAY_OUT = "If this is intended, plan again and commit that plan: `autopar plan TARGET ... -o PLAN.json`."


def check_plan(
    saved: AnyPlan,
    step: Callable[..., Any],
    *args: Any,
    memory: Allowed | None = Allowed(fraction=0.05),
    time: Allowed | None = None,
    **options: Any,
) -> PlanCheck:
    """Check a step against its saved plan.

    Args:
        saved: the saved plan.
        step, args: as in `autopar.plan`.
        memory, time: tolerated increase of the prediction; None for no check.
        options: options of `autopar.plan` in place of the saved plan's: a profile file, `time_limit_s`, `cache`.

    Raises:
        PlanMismatchError: the plan has pipeline stages.
        AutoparError: the step cannot be planned.
    """
    if isinstance(saved, PipelinePlan):
        raise PlanMismatchError(
            f"the plan of `{saved.program.name}` has {len(saved.stages)} stages, but only plans without stages can be checked"
            " against new code: compare two saved plans by `autopar diff A.json B.json`"
        )
    try:
        now = plan_of(step, *args, **options_of(saved) | options)
    except BudgetError as error:
        return PlanCheck(saved, None, str(error), memory=memory, time=time)
    added, gone = unmatched_collectives(saved.collectives, now.collectives)
    return PlanCheck(saved, now, added=added, gone=gone, memory=memory, time=time)


def options_of(saved: Plan) -> dict[str, Any]:
    """The options of `autopar.plan` that a saved plan records."""
    pins = {tensor.path: tensor.sharding for tensor in saved.inputs if tensor.pinned}
    options: dict[str, Any] = {"mesh": saved.mesh, "hardware": saved.hardware, "pin": pins}
    options |= {"memory_budget_bytes": saved.memory_budget_bytes, "dims_as_written": saved.dims_as_written}
    if saved.attention_kernel is not None:
        options["attention"] = "auto"
    if saved.microbatches is not None:
        options["num_microbatches"] = saved.microbatches.count
        options["per_microbatch_statistics"] = saved.microbatches.own_statistics
    return options


def unmatched_collectives(
    before: Sequence[CollectiveUse], after: Sequence[CollectiveUse]
) -> tuple[tuple[CollectiveUse, ...], tuple[CollectiveUse, ...]]:
    """Collectives of the second list without a match in the first, and the reverse.

    Two collectives match if they have the same kind and place, whatever their bytes. Of the rest, two match if they
    differ only in their place, because a module may have been renamed. A collective that XLA can combine with one in
    the other list also matches.
    """
    old, new = list(before), list(after)
    for key_of in (_by_place, _by_size):
        old, new = _without_common(old, new, key_of)
    merged = {(use.kind, use.axes) for use in before if use.combinable}
    added = [use for use in new if not (use.combinable and (use.kind, use.axes) in merged)]
    left = {(use.kind, use.axes) for use in after if use.combinable}
    gone = [use for use in old if not (use.combinable and (use.kind, use.axes) in left)]
    return tuple(added), tuple(gone)


def _by_place(use: CollectiveUse) -> Hashable:
    return use.kind, use.axes, use.phase, use.path, use.cause, use.num_times


def _by_size(use: CollectiveUse) -> Hashable:
    return use.kind, use.axes, use.phase, use.num_bytes, use.num_times


def _without_common(
    old: Sequence[CollectiveUse], new: Sequence[CollectiveUse], key_of: Callable[[CollectiveUse], Hashable]
) -> tuple[list[CollectiveUse], list[CollectiveUse]]:
    """Remove the multiset intersection, by key, from both lists."""
    common = Counter(map(key_of, old)) & Counter(map(key_of, new))
    out: list[list[CollectiveUse]] = []
    for uses in (old, new):
        left: dict[Hashable, int] = defaultdict(int, common)
        kept = []
        for use in uses:
            left[key_of(use)] -= 1
            if left[key_of(use)] < 0:
                kept.append(use)
        out.append(kept)
    return out[0], out[1]


def _describe(use: CollectiveUse) -> str:
    """Describe a collective in one line: kind, size, place and cause."""
    times = f" x {use.num_times}" if use.num_times > 1 else ""
    where = f"{use.phase} of `{use.path}`" if use.path else use.phase
    line = f" ({short_source(use.source)})" if use.source else ""
    size = f"{human_bytes(use.num_bytes)}{times}"
    return f"{use.kind} over {', '.join(use.axes)} of {size}, {where}{line}: {use.cause}; {human_seconds(use.time_s)}"


def _more(name: str, before: float, after: float, allowed: Allowed, human: Callable[[float], str]) -> str:
    percent = f", {100 * (after / before - 1):+.1f} %" if before else ""
    return f"more {name}: {human(after)} instead of {human(before)}{percent}; {human(allowed.of(before))} are allowed"
