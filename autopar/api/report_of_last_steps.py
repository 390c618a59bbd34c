"""Compare the last steps with the plan, or say why there is nothing to compare.

In: what ran the calls of a step, and its plans. Out: `StepReport`.
"""

from __future__ import annotations

from autopar.api.dispatch import Dispatcher
from autopar.api.elastic.dealt_step import DealtStep
from autopar.api.elastic.side_by_side import SideBySideStep
from autopar.api.measure_stages import measure_stages
from autopar.api.measure_step import FEWEST_STEPS, measure
from autopar.api.step_plans import StepPlans
from autopar.api.step_report import StepReport
from autopar.errors import StepSignatureError
from autopar.pipeline.run.step import PipelinedStep
from autopar.plans.plan import Plan


def report_of_last_steps(name: str, dispatch: Dispatcher, plans: StepPlans) -> StepReport:
    """The report of a step; see `ParallelStep.report`.

    Raises:
        StepSignatureError: too few steps have run, or the plan predicts nothing for what runs it.
    """
    last, calls = dispatch.last, dispatch.calls
    if last is None or calls.num_steps < FEWEST_STEPS:
        raise StepSignatureError(
            f"`{name}` has run too few steps to report on: call it at least {FEWEST_STEPS + 2} times with"
            f" arguments of the same shapes; the first compiles, and {calls.num_steps} have been timed since"
        )
    if isinstance(last.run, DealtStep):
        raise StepSignatureError(
            f"the microbatches of `{name}` are dealt to members by their speed, and the plan predicts equal parts: there is nothing"
            " to compare. `autopar keep` says which member computes how many"
        )
    if isinstance(last.run, SideBySideStep):
        raise StepSignatureError(
            f"`{name}` runs in several pipelines, and a report compares the plan of one program: `autopar.explain` of its"
            " `pipelines` has the predicted times"
        )
    if isinstance(last.run, PipelinedStep):
        plan, devices = last.run.plan, plans.devices()
        profiles = plans.profiles(plan)
        return measure_stages(plan, last.program, calls, devices, profiles, last.measured)
    assert isinstance(last.plan, Plan), "of one program"
    hardware = plans.options.get("hardware")
    return measure(last.plan, last.program, last.run, last.compiled_for, calls, last.mesh, hardware)
