"""Choose the number of microbatches (gradient accumulation): the fastest that fits.

In: a program, the plans for some numbers of microbatches. Out: the next number to plan for; the fastest plan. A step that fits
without microbatches is planned once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Literal

from autopar.errors import BudgetError, MicrobatchError, TimeLimitError
from autopar.planner.mesh_search import Found
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.plans.records import Tried
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program


class MicrobatchSearch:
    """The numbers of microbatches to plan for: the requested number, or 1, 2, 4, ... for "auto", of which the fastest plan wins.

    The search goes on while no plan fits, while memory limits the plan and more microbatches made it faster, and while the
    plan rematerializes, which more microbatches may avoid.

    Raises:
        MicrobatchError: `num_microbatches` is neither "auto" nor 1 or more.
    """

    def __init__(self, program: Program, requested: int | Literal["auto"]) -> None:
        if requested != "auto" and (not isinstance(requested, int) or isinstance(requested, bool) or requested < 1):
            raise MicrobatchError(f'`num_microbatches` is {requested!r}: give 1 or more, or "auto"')
        self._program, self._requested = program.as_traced, requested
        self._best: Found | None = None
        self._first: NothingFitsError | None = None
        self._tried: list[Tried] = []
        self._is_done = False

    def __iter__(self) -> Iterator[int]:
        if isinstance(self._requested, int):
            yield self._requested
            return
        count = 1
        while not self._is_done and (count == 1 or num_examples(self._program.graph) % count == 0):
            yield count
            count *= 2

    def note(self, count: int, found: Found) -> None:
        """Record the plan for a number of microbatches."""
        plan, best = found.plan, self._best
        self._tried.append(_tried(count, plan))
        slower = best is not None and plan.prediction.step_time_s >= best.plan.prediction.step_time_s
        self._best = best if slower else found
        self._is_done = not plan.outcome.memory_bound or (slower and not plan.rematerialized)

    def fail(self, count: int, error: NothingFitsError | MicrobatchError | TimeLimitError) -> None:
        """Record that there is no plan for a number of microbatches.

        Raises:
            BudgetError: no plan fits, and the user requested this number.
            MicrobatchError: one microbatch does not fit and the batch cannot be split.
            TimeLimitError: the solver found no plan in time, and no plan fits yet.
        """
        self._is_done = not isinstance(error, NothingFitsError)
        if self._requested != "auto":
            raise (
                error.as_budget_error(accumulate=count == 1) if isinstance(error, NothingFitsError) else error
            ) from None
        if isinstance(error, NothingFitsError):
            self._first = self._first or error
            self._tried.append(Tried(count=count, step_time_s=inf, peak_bytes=inf))
        elif self._best is None:
            if self._first is None or isinstance(error, TimeLimitError):
                raise error
            short = self._first.as_budget_error(accumulate=False)
            raise MicrobatchError(f"{short} More microbatches do not help: {error}") from None

    def fastest(self) -> Found:
        """The fastest plan.

        Raises:
            BudgetError: no plan fits; with the text for one microbatch.
        """
        best = self._best
        if best is None:
            assert self._first is not None
            counts = ", ".join(str(one.count) for one in self._tried)
            raise BudgetError(
                f"{self._first.as_budget_error(accumulate=False)} No plan fits with {counts} microbatches either."
            )
        split = best.plan.microbatches
        if split is None or self._requested != "auto":
            return best
        others = tuple(one for one in self._tried if one.count != split.count)
        return replace(best, plan=replace(best.plan, microbatches=replace(split, tried=others)))


def _tried(count: int, plan: Plan) -> Tried:
    prediction = plan.prediction
    return Tried(
        count=count,
        step_time_s=prediction.step_time_s,
        peak_bytes=prediction.peak_bytes,
        rematerializes=bool(plan.rematerialized),
    )
