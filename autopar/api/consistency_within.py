"""Choose an asynchronous pipeline within a bound on its delay.

In: a function that plans under a rule with a number of microbatches; the bound. Out: the fastest plan whose gradients are at most as late
as allowed. Its notes say what each rule would take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autopar.errors import BudgetError, MicrobatchError, OptionError, ScheduleError
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.system.units import human_bytes, human_seconds

#: Numbers of microbatches per update that are tried where the fastest one is too late: more of them are less late.
_MORE = (2, 4, 8, 16, 32, 64)


def candidates() -> dict[str, ScheduleKind]:
    """The rules to choose from. Corrected weights take more memory than the same rule without, and no less time, so they would never
    be chosen."""
    return {name: kind for name, kind in ASYNCHRONOUS.items() if not kind.reads.corrects}


def check_max_delay(max_delay: Any) -> None:
    """Refuse a bound that is no number of updates.

    Raises:
        OptionError: it is none.
    """
    if isinstance(max_delay, bool) or not isinstance(max_delay, int) or max_delay < 1:
        raise OptionError(
            f"`max_delay` is {max_delay!r}: with `consistency='auto'`, give the most updates that a gradient may be late, 1 or"
            " more; for none, leave `consistency` out"
        )


def fastest_within(
    plan_with: Callable[[str, Any], AnyPlan], num_microbatches: Any, max_delay: int, name: str
) -> PipelinePlan:
    """The fastest plan whose gradients are at most `max_delay` updates late.

    Args:
        plan_with: plans under the rule of a name with a number of microbatches per update, or "auto".
        num_microbatches: as the user gives it: a number, "auto", or None for the latter.
        name: of the step, for errors.

    Raises:
        ScheduleError: no rule is within the bound.
    """
    found: list[PipelinePlan] = []
    notes: list[str] = []
    counts = (num_microbatches,) if num_microbatches not in (None, "auto") else ("auto", *_MORE)
    for rule in candidates():
        fits = None
        for count in counts:
            try:
                plan = plan_with(rule, count)
            except (BudgetError, MicrobatchError, ScheduleError):  # of this rule or number; other errors are the step's
                continue
            if not isinstance(plan, PipelinePlan) or not plan.weight_versions:
                continue
            late = max(one.most_delay for one in plan.weight_versions)
            fits = late <= max_delay
            size = human_bytes(plan.prediction.peak_bytes)
            notes.append(
                f"{rule}, {plan.num_microbatches} microbatches: {human_seconds(plan.prediction.step_time_s)} a step, {size},"
                f" {late} updates late" + ("" if fits else ", more than allowed")
            )
            if fits:
                found.append(plan)
                break
        if fits is None:
            notes.append(f"{rule}: not for these numbers of stages and microbatches, or does not fit")
    if not found:
        raise ScheduleError(
            f"no asynchronous pipeline of `{name}` has gradients at most {max_delay} updates late: {'; '.join(notes)}. Raise"
            " `max_delay` or `num_microbatches`, or leave `consistency` out"
        )
    best = min(found, key=lambda plan: plan.prediction.step_time_s)
    return dataclasses.replace(best, notes=(*best.notes, f"consistency='auto' took {best.schedule}", *notes))
