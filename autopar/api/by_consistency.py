"""Choose what runs a step with `consistency`: data-parallel workers around versioned weights, or an asynchronous pipeline.

In: a step, a consistency policy and options. Out: a step with `stream(state, batches)`, an iterator of losses, and `drain()`, which
finishes what is in flight and returns the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.api.chosen_consistency import ChosenStep
from autopar.api.streamed_step import StreamedStep
from autopar.api.workers.step import WorkersStep
from autopar.errors import OptionError
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.corrections import find_consistency, is_asynchronous


def step_by_consistency(step: Callable[..., Any], consistency: Any, plan: Any, options: Mapping[str, Any]) -> Any:
    """The step under a consistency policy.

    Args:
        consistency: the name of a policy, or the policy.
        plan: the option `plan` of `parallelize`.
        options: its other options.

    Raises:
        OptionError: they do not go together.
    """
    of_stages = options.get("stages") not in (None, 1) or isinstance(plan, PipelinePlan)
    if consistency == "auto" and of_stages:
        rest = {name: value for name, value in options.items() if name != "max_delay"}
        return ChosenStep(step, options.get("max_delay"), plan, rest)
    if is_asynchronous(consistency):
        if not of_stages and plan is None:
            raise OptionError(
                f"`consistency` is {consistency!r}, an asynchronous pipeline: give the number of `stages` too, or 'auto'"
            )
        return StreamedStep(step, find_consistency(consistency), plan, options)
    if of_stages:
        raise OptionError(
            f"`consistency` is {consistency!r} with `stages`={options.get('stages')!r}: pipelines have"
            f" {', '.join(map(repr, ASYNCHRONOUS))}. Take one of them; leave `consistency` out for a synchronous pipeline, or"
            " `stages` for data-parallel workers"
        )
    return WorkersStep(step, consistency, plan, options)
