"""`parallelize(step, stages=..., consistency="auto", max_delay=...)`: choose an asynchronous pipeline within a bound on its delay.

In: a user's step, a bound, options. Out: a `StreamedStep` that plans under every rule at its first stream and takes the fastest
whose gradients are at most as late as allowed. Notes of its plan say what each would take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.api.consistency_within import candidates, check_max_delay, fastest_within
from autopar.api.dispatch import Dispatcher
from autopar.api.step_plans import Planned, StepPlans
from autopar.api.streamed_step import Ready, StreamedStep
from autopar.errors import OptionError
from autopar.frontend.call import Call, opened
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.schedule.corrections import Consistency


class ChosenStep(StreamedStep):
    """A `StreamedStep` whose rule is chosen at its first stream.

    Args:
        max_delay: the most updates between the version that a gradient is computed from and the one that it is applied to.
    """

    def __init__(self, step: Callable[..., Any], max_delay: Any, plan: Any, options: Mapping[str, Any]) -> None:
        check_max_delay(max_delay)
        if isinstance(plan, PipelinePlan | str | Path):
            raise OptionError("`consistency` is 'auto', but a given `plan` has a rule: name it, or leave `plan` out")
        super().__init__(step, Consistency(next(iter(candidates().values()))), None, options)
        self._given, self._max_delay, self._is_chosen = dict(options), max_delay, False

    def planned(self, *args: Any, **kwargs: Any) -> Any:
        with opened(self.called, args, kwargs) as call:
            self._choose(call)
        return super().planned(*args, **kwargs)

    def _ready_for(self, call: Call) -> Ready:
        self._choose(call)
        return super()._ready_for(call)

    def _choose(self, call: Call) -> None:
        """Plan under every rule, and keep the fastest that is not too late."""
        if self._is_chosen:
            return
        tried: dict[tuple[str, int], tuple[StepPlans, Planned]] = {}

        def plan_with(rule: str, count: Any) -> AnyPlan:
            plans = StepPlans(self.called, None, {**self._given, "schedule": rule, "num_microbatches": count})
            planned = plans.of(call, to_run=True)
            if isinstance(planned.plan, PipelinePlan):
                tried[rule, planned.plan.num_microbatches] = plans, planned
            return planned.plan

        plan = fastest_within(plan_with, self._given.get("num_microbatches"), self._max_delay, self.name)
        plans, planned = tried[plan.schedule, plan.num_microbatches]
        plans.know(call, dataclasses.replace(planned, plan=plan))
        self.kind, self._plans, self._dispatch = candidates()[plan.schedule], plans, Dispatcher(plans)
        self._is_chosen = True
