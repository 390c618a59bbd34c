"""Explain a plan of either kind: of one program, or of pipeline stages.

In: a plan, new or from a file. Out: `explain(plan)`, which prints as plain text; `render(plan, console)` for a
terminal; `explain_json(plan)` for programs.
"""

from __future__ import annotations

from typing import Any, overload

from rich.console import Console

from autopar.errors import OptionError
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.plans.plan import Plan
from autopar.report.explain_program import (
    Explanation,
    explain_program,
    program_json,
    render_program,
    render_program_summary,
)
from autopar.report.explain_stages import (
    StagesExplanation,
    explain_stages,
    render_stages,
    render_stages_summary,
    stages_json,
)


@overload
def explain(plan: Plan) -> Explanation: ...
@overload
def explain(plan: PipelinePlan) -> StagesExplanation: ...
@overload
def explain(plan: AnyPlan) -> Explanation | StagesExplanation: ...
def explain(plan: AnyPlan) -> Explanation | StagesExplanation:
    """Explain what a plan does and why: `print(autopar.explain(plan))`."""
    if not isinstance(plan, Plan | PipelinePlan):
        raise OptionError(
            f"`explain` takes a plan, and {plan!r} is a {type(plan).__name__}: load a plan file by `autopar.load_plan(path)`"
        )
    return explain_stages(plan) if isinstance(plan, PipelinePlan) else explain_program(plan)


def render(plan: AnyPlan, console: Console) -> None:
    """Print the explanation to a console, with styles where it has them."""
    if isinstance(plan, PipelinePlan):
        render_stages(plan, console)
    else:
        render_program(plan, console)


def render_summary(plan: AnyPlan, console: Console) -> None:
    """Print the summary: strategy, certainty, step time, memory."""
    if isinstance(plan, PipelinePlan):
        render_stages_summary(plan, console)
    else:
        render_program_summary(plan, console)


def explain_json(plan: AnyPlan) -> dict[str, Any]:
    """The explanation as JSON types: every row, raw seconds and bytes, null for what is infinite."""
    return stages_json(plan) if isinstance(plan, PipelinePlan) else program_json(plan)
