"""`parallelize`: a decorator that plans a step at its first call and dispatches like `jit` from then on.

In: a user's step. Out: a `ParallelStep`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

from autopar.api import make_plan as plan_step
from autopar.api.by_consistency import step_by_consistency
from autopar.api.parallel_step import ParallelStep
from autopar.pipeline.plan import AnyPlan
from autopar.plans.plan import Plan


@overload
def parallelize(  # pyright: ignore[reportOverlappingOverload]
    step: Callable[..., Any] | None = None, /, *, consistency: Any, **options: Any
) -> Any: ...
@overload
def parallelize(  # pyright: ignore[reportOverlappingOverload]
    *, everything: Literal["auto"], **options: Any
) -> Callable[[Callable[..., Any]], ParallelStep[Any]]: ...
@overload
def parallelize(  # pyright: ignore[reportOverlappingOverload]
    step: Callable[..., Any], /, *, plan: AnyPlan | str | Path | None = None, **options: Any
) -> ParallelStep[Plan]: ...
@overload
def parallelize(  # pyright: ignore[reportOverlappingOverload]
    *, plan: AnyPlan | str | Path | None = None, stages: int | Literal["auto"], **options: Any
) -> Callable[[Callable[..., Any]], ParallelStep[Any]]: ...
@overload
def parallelize(  # pyright: ignore[reportOverlappingOverload]
    *, plan: AnyPlan | str | Path | None = None, **options: Any
) -> Callable[[Callable[..., Any]], ParallelStep[Plan]]: ...
def parallelize(
    step: Callable[..., Any] | None = None,
    /,
    *,
    plan: AnyPlan | str | Path | None = None,
    consistency: Any = None,
    **options: Any,
) -> Any:
    """Run a step sharded over devices, with shardings that autopar plans.

    Use it bare, `@autopar.parallelize`, for every visible device; or with options,
    `@autopar.parallelize(mesh="2x4", memory_budget_bytes=40e9)`.

    Args:
        step: a function of pytrees of arrays that runs under `jax.jit`, e.g. a Flax train step
            `(state, batch) -> (state, loss)`; or of objects that it changes in place, as Flax NNX modules and
            optimizers. It is not changed.
        plan: a saved plan (a path, a `Plan` or a `PipelinePlan`) to run instead of planning; refused for another program.
        options: those of `autopar.plan`: everything, mesh, num_devices, hardware, memory_budget_bytes, stages, num_microbatches,
            schedule, pin, static_argnames, carry, donate, metadata, logical_axis_rules, solver, time_limit_s, progress,
            cache; `like` may also be another step made by `parallelize`. Here `cache` is on by default: the plan and the compiled
            program are kept on disk for the next start.
        pipelines (int): run at least so many pipelines side by side, where there are nodes for them (`docs/pipelines.md`); with
            `num_microbatches`, and `stages` and `schedule` of each.

    Raises:
        OptionError: an option that `autopar.plan` does not have.
    """
    if consistency is not None:
        made = functools.partial(step_by_consistency, consistency=consistency, plan=plan, options=options)
        return made if step is None else made(step)
    known = (*plan_step.option_names(), "pipelines")
    plan_step.check_options([name for name in options if name not in known], "plan", "pipelines")
    if step is None:
        return lambda decorated: ParallelStep(decorated, plan, options)
    return ParallelStep(step, plan, options)
