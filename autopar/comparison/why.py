"""Why a tensor is split as it is: the step planned again with the runner-up in its place.

In: a step, how it is planned, the path of a parameter or a module. Out: `Why`: the two plans, and what the whole step would
lose, with its causes read off their difference. A decision's own `runner_up_extra_s` leaves all other decisions as they are;
here they may answer to the change.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.comparison.plan_check import unlike_collectives
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
class Sent:
    """Collectives of one kind over the same axes that one of the plans has and the other has not."""

    kind: str
    axes: tuple[str, ...]
    count: int
    num_bytes: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Why:
    """What the runner-up would cost.

    Args:
        decisions: those asked about; all get their runner-up at once.
        plan: the best. forced: the best with the runner-ups; None where none fits, as `refused` says.
    """

    decisions: tuple[Decision, ...]
    plan: Plan
    forced: Plan | None
    refused: str = ""

    @property
    def extra_s(self) -> float:
        """Seconds that a step would take longer."""
        if self.forced is None:
            return float("inf")
        return self.forced.prediction.step_time_s - self.plan.prediction.step_time_s

    @property
    def more(self) -> tuple[Sent, ...]:
        """Collectives that forcing adds."""
        return self._sent()[0]

    @property
    def fewer(self) -> tuple[Sent, ...]:
        """Collectives that it saves."""
        return self._sent()[1]

    def _sent(self) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
        if self.forced is None:
            return (), ()
        added, gone = unlike_collectives(self.plan.collectives, self.forced.collectives)
        return _summed(added), _summed(gone)

    @property
    def words(self) -> str:
        """The answer in a line or two."""
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
        """What differs between the plans, the largest part of the time first."""
        assert self.forced is not None
        before, after = self.plan.prediction, self.forced.prediction
        parts = [(after.compute_s - before.compute_s, "kernels take {} {}")]
        for kind in sorted({*before.exposed_s, *after.exposed_s}):
            extra = after.exposed_s.get(kind, 0.0) - before.exposed_s.get(kind, 0.0)
            parts.append((extra, f"{kind}s that nothing hides take {{}} {{}}"))
        parts.sort(key=lambda part: -abs(part[0]))
        least = 0.01 * max(abs(self.extra_s), 1e-12)
        told = [
            text.format(human_seconds(abs(extra)), "more" if extra > 0 else "less")
            for extra, text in parts
            if abs(extra) > least
        ]
        told += [f"it adds {_sent_words(one)}" for one in self.more]
        told += [f"it saves {_sent_words(one)}" for one in self.fewer]
        memory = after.peak_bytes - before.peak_bytes
        if abs(memory) > 0.001 * before.peak_bytes:
            told.append(f"peak memory is {human_bytes(abs(memory))} {'more' if memory > 0 else 'less'}")
        return "; ".join(told) or "the two plans send the same and hold the same"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """As text."""
        told = self.plan.prediction
        name = self.plan.program.name
        head = f"`{name}` on mesh {self.plan.mesh} ({self.plan.hardware}): {human_seconds(told.step_time_s)} a step"
        sources = dict.fromkeys(short_source(one.source) for one in self.decisions if one.source)
        alone = sum(one.runner_up_extra_s for one in self.decisions)
        rest = f"With all other decisions as they are, the solver's price would rise by {human_seconds(alone)}."
        return [head, f"  {self.words}.", f"  {rest} Where: {', '.join(sources)}." if sources else f"  {rest}"]

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        sides = {"plan": self.plan, "forced": self.forced}
        document: dict[str, Any] = {
            "format": "autopar-why",
            "version": 1,
            "words": self.words,
            "extra_s": self.extra_s,
            "decisions": [_decision_json(one) for one in self.decisions],
            "more": [asdict(one) for one in self.more],
            "fewer": [asdict(one) for one in self.fewer],
            "refused": self.refused or None,
        }
        for side, plan in sides.items():
            told = None if plan is None else plan.prediction
            document[side] = told and asdict(told) | {"peak_bytes": told.peak_bytes}
        return finite(document)


def why(path: str, step: Callable[..., Any], *args: Any, **options: Any) -> Why:
    """What a step would lose by the runner-up of a decision.

    Args:
        path: of an argument's array (`state/params/wq/kernel`), or of a module (`GPT/h_0/attn`) for what it makes; a glob
            stands for all that it matches, which are forced together.
        step, args: as of `autopar.plan`. options: of `autopar.plan`, for one program.

    Raises:
        PinError: nothing has that path, or there is no other choice for it.
        AutoparError: the step cannot be planned.
    """
    program = program_of(step, args, carry=None, donate=None)
    plan = plan_program(program, PlanRequest(**options))
    return why_of_plan(path, program, plan, options)


def why_of_plan(path: str, program: Program, plan: Plan, options: Mapping[str, Any]) -> Why:
    """`why` of a plan made in this process of a program."""
    asked = [one for one in asked_about(path, plan.decisions) if one.runner_up is not None]
    if not asked:
        raise PinError(f"{path!r} could be split in no other way on mesh {plan.mesh}: there is no runner-up to force")
    try:
        return Why(tuple(asked), plan, _forced(asked, program, plan, options))
    except BudgetError as error:
        return Why(tuple(asked), plan, None, str(error))


def _forced(asked: Sequence[Decision], program: Program, plan: Plan, options: Mapping[str, Any]) -> Plan:
    inputs = {one.path: one.runner_up for one in asked if one.kind != "activation"}
    values = {one.value: one.runner_up for one in asked if one.kind == "activation" and one.value is not None}
    if values and plan.recomputed:
        raise AutoparError(
            "the plan computes values again, and which of them are held depends on how they are split: ask about an"
            " argument, or plan with --no-rematerialize"
        )
    pinned = {tensor.path: tensor.sharding for tensor in plan.inputs if tensor.pinned}
    kept = ("hardware", "memory_budget_bytes", "rematerialize", "solver", "time_limit_s", "progress")
    request = PlanRequest(**{name: options[name] for name in kept if name in options})
    request = replace(request, mesh=plan.mesh, pin={**pinned, **inputs}, held=values)
    if values:  # their numbers are of this form of the program
        request = replace(request, rematerialize=False)
    form = program.of(replace(plan, recomputed=()))
    return search_meshes(replace(form, whole=None), request, may_fork=False).plan


def asked_about(path: str, decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions that a path means: of arguments' arrays, of parameters alone where it means some; else the largest tensor that each module makes, in the forward
    pass if it makes one there.

    Raises:
        PinError: none, with paths that are close.
    """
    inputs = [one for one in decisions if one.kind != "activation"]
    found = [one for one in inputs if one.path == path] or [one for one in inputs if _matches(one.path, path)]
    parameters = [one for one in found if one.kind == "parameter"]  # what is kept of them follows, or need not
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
        f"nothing that is decided has the path {path!r}. Paths look like {', '.join(map(repr, close or known[:4]))}; a glob"
        " such as '*/kernel' stands for many"
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


def _summed(uses: Sequence[CollectiveUse]) -> tuple[Sent, ...]:
    alike: dict[tuple[str, tuple[str, ...]], list[CollectiveUse]] = defaultdict(list)
    for use in uses:
        alike[use.kind, use.axes].append(use)
    found = [
        Sent(
            kind,
            axes,
            sum(use.num_times for use in own),
            sum(use.bytes_per_step for use in own),
            sum(use.time_s for use in own),
        )
        for (kind, axes), own in alike.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.time_s))


def _sent_words(one: Sent) -> str:
    count = f"{one.count} {one.kind}{'s' if one.count > 1 else ''}"
    return f"{count} over {', '.join(one.axes)} ({human_bytes(one.num_bytes)}, {human_seconds(one.time_s)})"


def _either(shardings: Sequence[TensorSharding | None]) -> str:
    return " or ".join(dict.fromkeys(map(_with_words, shardings)))


def _with_words(sharding: TensorSharding | None) -> str:
    """Of a matrix, which way."""
    assert sharding is not None
    split = [d for d, axes in enumerate(sharding.dims) if axes]
    if len(sharding.dims) == 2 and not sharding.unreduced and len(split) < 2:
        return f"{sharding} ({'by rows' if split == [0] else 'by columns' if split else 'whole'})"
    return str(sharding)


def _decision_json(one: Decision) -> dict[str, Any]:
    about = {name: getattr(one, name) for name in ("path", "kind", "primitive", "phase", "source", "shape", "dtype")}
    other = None if one.runner_up is None else str(one.runner_up)
    return about | {"sharding": str(one.sharding), "runner_up": other, "runner_up_extra_s": one.runner_up_extra_s}
