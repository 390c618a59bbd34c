"""`parallelize(step, stages=..., consistency="auto", max_delay=...)`: choose an asynchronous pipeline within a bound on its delay.

In: a user's step, a bound, options. Out: a `StreamedStep` that plans under every rule at its first stream and takes the fastest
whose gradients are at most as late as allowed. Notes of its plan say what each would take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.api.dispatch import Dispatcher
from autopar.api.step_plans import Planned, StepPlans
from autopar.api.streamed_step import Ready, StreamedStep
from autopar.errors import BudgetError, MicrobatchError, OptionError, ScheduleError
from autopar.frontend.call import Call
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.corrections import Consistency
from autopar.system.units import human_bytes, human_seconds

#: Numbers of microbatches per update that are tried where the fastest one is too late: more of them are less late.
_MORE = (2, 4, 8, 16, 32, 64)
#: Corrected weights take more memory than the same rule without, and no less time, so they would never be chosen.
_TRIED = {name: kind for name, kind in ASYNCHRONOUS.items() if not kind.reads.corrects}


class ChosenStep(StreamedStep):
    """A `StreamedStep` whose rule is chosen at its first stream.

    Args:
        max_delay: the most updates between the version that a gradient is computed from and the one that it is applied to.
    """

    def __init__(self, step: Callable[..., Any], max_delay: Any, plan: Any, options: Mapping[str, Any]) -> None:
        if isinstance(max_delay, bool) or not isinstance(max_delay, int) or max_delay < 1:
            raise OptionError(
                f"`max_delay` is {max_delay!r}: with `consistency='auto'`, give the most updates that a gradient may be late, 1 or"
                " more; for none, leave `consistency` out"
            )
        if isinstance(plan, PipelinePlan | str | Path):
            raise OptionError("`consistency` is 'auto', but a given `plan` has a rule: name it, or leave `plan` out")
        super().__init__(step, Consistency(next(iter(_TRIED.values()))), None, options)
        self._given, self._max_delay, self._is_chosen = dict(options), max_delay, False

    def _ready_for(self, call: Call) -> Ready:
        if not self._is_chosen:
            self._choose(call)
        return super()._ready_for(call)

    def _choose(self, call: Call) -> None:
        """Plan under every rule, and keep the fastest that is not too late."""
        found: dict[str, tuple[StepPlans, Planned]] = {}
        notes: list[str] = []
        for name in _TRIED:
            fits = None
            for plans, planned in self._tried(name, call):
                plan = planned.plan
                assert isinstance(plan, PipelinePlan), "planned in stages"
                late = max(one.most_delay for one in plan.weight_versions)
                fits = late <= self._max_delay
                size = human_bytes(plan.prediction.peak_bytes)
                notes.append(
                    f"{name}, {plan.num_microbatches} microbatches: {human_seconds(plan.prediction.step_time_s)} a step, {size},"
                    f" {late} updates late" + ("" if fits else ", more than allowed")
                )
                if fits:
                    found[name] = plans, planned
                    break
            if fits is None:
                notes.append(f"{name}: not for these numbers of stages and microbatches, or does not fit")
        if not found:
            raise ScheduleError(
                f"no asynchronous pipeline of `{self.name}` has gradients at most {self._max_delay} updates late:"
                f" {'; '.join(notes)}. Raise `max_delay` or `num_microbatches`, or leave `consistency` out"
            )
        best = min(found, key=lambda name: _seconds(found[name][1]))
        plans, planned = found[best]
        plan = dataclasses.replace(planned.plan, notes=(*planned.plan.notes, f"consistency='auto' took {best}", *notes))
        plans.know(call, dataclasses.replace(planned, plan=plan))
        self.kind, self._plans, self._dispatch = _TRIED[best], plans, Dispatcher(plans)
        self._is_chosen = True

    def _tried(self, name: str, call: Call) -> Iterator[tuple[StepPlans, Planned]]:
        """Plans under a rule, with the fastest number of microbatches first, then with more."""
        given = self._given.get("num_microbatches", "auto")
        for count in (given,) if given != "auto" else ("auto", *_MORE):
            plans = StepPlans(self.called, None, {**self._given, "schedule": name, "num_microbatches": count})
            try:
                planned = plans.of(call, to_run=True)
            except (BudgetError, MicrobatchError, ScheduleError):  # of this rule or number; other errors are the step's
                continue
            if isinstance(planned.plan, PipelinePlan) and planned.plan.weight_versions:
                yield plans, planned


def _seconds(planned: Planned) -> float:
    return planned.plan.prediction.step_time_s
