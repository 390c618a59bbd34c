"""Explain a sharding decision: plan the step again with the runner-up forced, and compare the two plans.

In: a step, planning options, the path of a parameter or a module. Out: `Why`: both plans, the extra step time, its
causes. A decision's own `runner_up_extra_s` keeps all other decisions fixed; here the planner may change them too.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.comparison.plan_check import unmatched_collectives
from autopar.errors import AutoparError, BudgetError, PinError
from autopar.ir.sharding import TensorSharding
from autopar.planner.mesh_search import search_meshes
from autopar.planner.planner import plan_program
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.records import CollectiveUse, Decision
from autopar.report.rows import collapse
from autopar.system.text_tables import finite, short_source
from autopar.system.units import human_bytes, human_seconds
from autopar.transforms.program import Program, program_of


@dataclass(frozen=True, slots=True)
class CollectiveDifference:
    """Collectives of one kind over the same axes that only one of the two plans has."""

    kind: str
    axes: tuple[str, ...]
    count: int
    num_bytes: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Why:
    """The cost of forcing runner-ups.

    Args:
        decisions: decisions whose runner-ups are forced, all at once.
        plan: the best plan.
        forced: the best plan with the runner-ups; None where none fits.
        refused: the reason why none fits.
    """

    decisions: tuple[Decision, ...]
    plan: Plan
    forced: Plan | None
    refused: str = ""

    @property
    def extra_s(self) -> float:
        """Extra seconds per step; `inf` where no plan fits."""
        if self.forced is None:
            return float("inf")
        return self.forced.prediction.step_time_s - self.plan.prediction.step_time_s

    @property
    def more(self) -> tuple[CollectiveDifference, ...]:
        """Collectives that only the forced plan has."""
        return self._differences()[0]

    @property
    def fewer(self) -> tuple[CollectiveDifference, ...]:
        """Collectives that only the best plan has."""
        return self._differences()[1]

    def _differences(self) -> tuple[tuple[CollectiveDifference, ...], tuple[CollectiveDifference, ...]]:
        if self.forced is None:
            return (), ()
        added, gone = unmatched_collectives(self.plan.collectives, self.forced.collectives)
        return _summed(added), _summed(gone)

    @property
    def summary(self) -> str:
        """The answer in one or two sentences."""
        paths = [pattern for pattern, _ in collapse([one.path or "the step" for one in self.decisions])]
        chosen = _either([one.sharding for one in self.decisions])
        other = _either([one.runner_up for one in self.decisions if one.runner_up is not None])
        head = f"{', '.join(paths)} {chosen}: forcing {other}"
        if self.forced is None:
            return f"{head} cannot be: {self.refused}"
        step_s = self.plan.prediction.step_time_s
        percent = 100 * self.extra_s / step_s if step_s else math.inf
        size = f"{human_seconds(abs(self.extra_s))} per step ({percent:+.1f} %)"
        if self.extra_s > 0:
            return f"{head} costs +{size}, because {self.because}"
        known = (
            "none of these decides the step time" if not self.extra_s else "the solver weighs kernels one by one, and"
        )
        known += "" if not self.extra_s else " what overlaps is seen in the whole step alone"
        return f"{head} costs nothing: -{size}; {known}. {self.because}"

    @property
    def because(self) -> str:
        """The differences between the plans, the largest difference in time first."""
        assert self.forced is not None
        before, after = self.plan.prediction, self.forced.prediction
        parts = [(after.compute_s - before.compute_s, "kernels take {} {}")]
        for kind in sorted({*before.exposed_s, *after.exposed_s}):
            extra = after.exposed_s.get(kind, 0.0) - before.exposed_s.get(kind, 0.0)
            parts.append((extra, f"{kind}s that nothing hides take {{}} {{}}"))
        parts.sort(key=lambda part: -abs(part[0]))
        least = 0.01 * max(abs(self.extra_s), 1e-12)
        causes = [
            text.format(human_seconds(abs(extra)), "more" if extra > 0 else "less")
            for extra, text in parts
            if abs(extra) > least
        ]
        causes += [f"it adds {_difference_text(one)}" for one in self.more]
        causes += [f"it saves {_difference_text(one)}" for one in self.fewer]
        memory = after.peak_bytes - before.peak_bytes
        if abs(memory) > 0.001 * before.peak_bytes:
            causes.append(f"peak memory is {human_bytes(abs(memory))} {'more' if memory > 0 else 'less'}")
        return "; ".join(causes) or "the two plans have the same collectives and peak memory"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The report as lines of text."""
        prediction = self.plan.prediction
        name = self.plan.program.name
        head = (
            f"`{name}` on mesh {self.plan.mesh} ({self.plan.hardware}): {human_seconds(prediction.step_time_s)} a step"
        )
        sources = dict.fromkeys(short_source(one.source) for one in self.decisions if one.source)
        alone = sum(one.runner_up_extra_s for one in self.decisions)
        rest = f"With all other decisions as they are, the solver's price would rise by {human_seconds(alone)}."
        return [head, f"  {self.summary}.", f"  {rest} Where: {', '.join(sources)}." if sources else f"  {rest}"]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types."""
        sides = {"plan": self.plan, "forced": self.forced}
        document: dict[str, Any] = {
            "format": "autopar-why",
            "version": 1,
            "summary": self.summary,
            "extra_s": self.extra_s,
            "decisions": [_decision_json(one) for one in self.decisions],
            "more": [asdict(one) for one in self.more],
            "fewer": [asdict(one) for one in self.fewer],
            "refused": self.refused or None,
        }
        for side, plan in sides.items():
            prediction = None if plan is None else plan.prediction
            document[side] = prediction and asdict(prediction) | {"peak_bytes": prediction.peak_bytes}
        return finite(document)


def why(path: str, step: Callable[..., Any], *args: Any, **options: Any) -> Why:
    """Plan a step with the runner-up of a decision forced, and compare.

    Args:
        path: path of an input (`state/params/wq/kernel`), or of a module (`GPT/h_0/attn`) for the values it produces. A
            glob forces all decisions that it matches at once.
        step, args: as in `autopar.plan`.
        options: options of `autopar.plan` for one program.

    Raises:
        PinError: no decision has that path, or the decision has no runner-up.
        AutoparError: the step cannot be planned.
    """
    program = program_of(step, args, carry=None, donate=None)
    plan = plan_program(program, PlanRequest(**options))
    return why_of_plan(path, program, plan, options)


def why_of_plan(path: str, program: Program, plan: Plan, options: Mapping[str, Any]) -> Why:
    """`why` for a plan that this process made of a program."""
    decisions = [one for one in decisions_at(path, plan.decisions) if one.runner_up is not None]
    if not decisions:
        raise PinError(
            f"{path!r} has a single possible sharding on mesh {plan.mesh}, so there is no runner-up to force: name another"
            " path, or remove its pin"
        )
    try:
        return Why(tuple(decisions), plan, _forced(decisions, program, plan, options))
    except BudgetError as error:
        return Why(tuple(decisions), plan, None, str(error))


def _forced(decisions: Sequence[Decision], program: Program, plan: Plan, options: Mapping[str, Any]) -> Plan:
    inputs = {one.path: one.runner_up for one in decisions if one.kind != "activation"}
    values = {one.value: one.runner_up for one in decisions if one.kind == "activation" and one.value is not None}
    if values and plan.rematerialized:
        raise AutoparError(
            "the plan rematerializes values, and their shardings decide which of them stay in memory, so no intermediate"
            " value can be forced: name an argument, or plan with --no-rematerialize"
        )
    pinned = {tensor.path: tensor.sharding for tensor in plan.inputs if tensor.pinned}
    kept = ("hardware", "memory_budget_bytes", "rematerialize", "solver", "time_limit_s", "progress")
    request = PlanRequest(**{name: options[name] for name in kept if name in options})
    request = replace(request, mesh=plan.mesh, pin={**pinned, **inputs}, held=values)
    if values:  # rematerialization would change the numbers of the values
        request = replace(request, rematerialize=False)
    form = program.of(replace(plan, rematerialized=()))
    return search_meshes(replace(form, whole=None), request, may_fork=False).plan


def decisions_at(path: str, decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions that a path names.

    These are inputs, restricted to parameters if any match. Otherwise they are the largest tensor that each matching
    module produces, in the forward pass if it produces one there.

    Raises:
        PinError: no decision matches; the text names similar paths.
    """
    inputs = [one for one in decisions if one.kind != "activation"]
    found = [one for one in inputs if one.path == path] or [one for one in inputs if _matches(one.path, path)]
    parameters = [one for one in found if one.kind == "parameter"]  # their optimizer state may follow
    if found:
        return parameters or found
    modules: dict[str, list[Decision]] = defaultdict(list)
    for one in decisions:
        if one.kind == "activation" and one.path and (one.path == path or _matches(one.path, path)):
            modules[one.path].append(one)
    if modules:
        return [_of_module(own) for own in modules.values()]
    known = list(dict.fromkeys(one.path for one in decisions if one.path))
    close = difflib.get_close_matches(path, known, n=4, cutoff=0.3)
    raise PinError(
        f"no decision has the path {path!r}. Paths look like {', '.join(map(repr, close or known[:4]))}; a glob such as"
        " '*/kernel' matches several"
    )


def _matches(path: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"*/{pattern}")


def _of_module(own: Sequence[Decision]) -> Decision:
    forward = [one for one in own if one.phase == "forward"] or own
    return max(forward, key=lambda one: (one.runner_up is not None, _size(one)))


def _size(one: Decision) -> int:
    size = 1
    for dim in one.shape:
        size *= dim
    return size


def _summed(uses: Sequence[CollectiveUse]) -> tuple[CollectiveDifference, ...]:
    by_key: dict[tuple[str, tuple[str, ...]], list[CollectiveUse]] = defaultdict(list)
    for use in uses:
        by_key[use.kind, use.axes].append(use)
    found = [
        CollectiveDifference(
            kind,
            axes,
            sum(use.num_times for use in own),
            sum(use.bytes_per_step for use in own),
            sum(use.time_s for use in own),
        )
        for (kind, axes), own in by_key.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.time_s))


def _difference_text(one: CollectiveDifference) -> str:
    count = f"{one.count} {one.kind}{'s' if one.count > 1 else ''}"
    return f"{count} over {', '.join(one.axes)} ({human_bytes(one.num_bytes)}, {human_seconds(one.time_s)})"


def _either(shardings: Sequence[TensorSharding | None]) -> str:
    return " or ".join(dict.fromkeys(map(_with_direction, shardings)))


def _with_direction(sharding: TensorSharding | None) -> str:
    """A sharding as text; for a matrix, with the direction of the split."""
    assert sharding is not None
    split = [d for d, axes in enumerate(sharding.dims) if axes]
    if len(sharding.dims) == 2 and not sharding.unreduced and len(split) < 2:
        return f"{sharding} ({'by rows' if split == [0] else 'by columns' if split else 'whole'})"
    return str(sharding)


def _decision_json(one: Decision) -> dict[str, Any]:
    about = {name: getattr(one, name) for name in ("path", "kind", "primitive", "phase", "source", "shape", "dtype")}
    other = None if one.runner_up is None else str(one.runner_up)
    return about | {"sharding": str(one.sharding), "runner_up": other, "runner_up_extra_s": one.runner_up_extra_s}
