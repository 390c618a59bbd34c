"""Explain a plan of one program or of pipeline stages.

In: a plan, fresh or from a file, of workers, or pipelines over nodes that fail. Out: `explain(plan)`, which prints as plain text; `render(plan, console)` for a
terminal; `explain_json(plan)` for other programs.
"""

from __future__ import annotations

from typing import Any, overload

from rich.console import Console

from autopar.errors import OptionError
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.templates.templates import PipelineTemplates
from autopar.plans.plan import Plan
from autopar.plans.workers_plan import WorkersPlan
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
from autopar.report.templates import TemplatesExplanation
from autopar.report.workers import WorkersExplanation


@overload
def explain(plan: Plan) -> Explanation: ...
@overload
def explain(plan: PipelinePlan) -> StagesExplanation: ...
@overload
def explain(plan: WorkersPlan) -> WorkersExplanation: ...
@overload
def explain(plan: PipelineTemplates) -> TemplatesExplanation: ...
@overload
def explain(plan: AnyPlan) -> Explanation | StagesExplanation: ...
def explain(
    plan: AnyPlan | WorkersPlan | PipelineTemplates,
) -> Explanation | StagesExplanation | WorkersExplanation | TemplatesExplanation:
    """Explain what a plan does and why: `print(autopar.explain(plan))`."""
    if isinstance(plan, WorkersPlan):
        return WorkersExplanation(plan)
    if isinstance(plan, PipelineTemplates):
        return TemplatesExplanation(plan)
    if not isinstance(plan, Plan | PipelinePlan):
        raise OptionError(
            f"`explain` takes a plan, but {plan!r} is a {type(plan).__name__}: read a plan file with"
            " `autopar.load_plan(path)`"
        )
    return explain_stages(plan) if isinstance(plan, PipelinePlan) else explain_program(plan)


def render(plan: AnyPlan, console: Console) -> None:
    """Print the explanation to a console, with styles if it supports them."""
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
    """The explanation as JSON types: every row, seconds and bytes as numbers, infinite ones as null."""
    return stages_json(plan) if isinstance(plan, PipelinePlan) else program_json(plan)
