"""How many microbatches: the fewest that fit, or more where the step is then faster.

In: a function that plans for a number of them. Out: the best plan. A step that fits as it is, is planned once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

from autopar.errors import BudgetError, MicrobatchError
from autopar.plan import Plan, Tried


def fewest_that_fit(planned: Callable[[int], Plan], num_examples: Callable[[], int]) -> Plan:
    """The fastest plan among 1, 2, 4, ... microbatches. More are tried while nothing fits, and while memory limits the
    plan and more made it faster.

    Args:
        planned: raises `BudgetError` where no plan fits.
        num_examples: asked for where one microbatch is not enough.

    Raises:
        BudgetError: that of one microbatch, where no number fits.
        MicrobatchError: where one microbatch does not fit and the batch cannot be split.
    """
    best: Plan | None = None
    first: BudgetError | None = None
    tried: list[Tried] = []
    count = 1
    while count == 1 or num_examples() % count == 0:
        try:
            plan = planned(count)
        except BudgetError as error:
            first = first or error
            tried.append(Tried(count=count, step_time_s=inf, peak_bytes=inf))
        except MicrobatchError as error:
            if best is None:
                raise MicrobatchError(f"{first}. More microbatches are no way out: {error}") from None
            break
        else:
            told = plan.prediction
            tried.append(Tried(count=count, step_time_s=told.step_time_s, peak_bytes=told.peak_bytes))
            slower = best is not None and told.step_time_s >= best.prediction.step_time_s
            best = best if slower else plan
            if slower or not plan.outcome.memory_bound:
                break
        count *= 2
    if best is None:
        assert first is not None
        words = ", ".join(str(one.count) for one in tried)
        raise BudgetError(f"{first} Of {words} microbatches, none fits.")
    if best.microbatches is None:
        return best
    others = tuple(one for one in tried if one.count != best.microbatches.count)
    return replace(best, microbatches=replace(best.microbatches, tried=others))
