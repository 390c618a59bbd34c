"""Order slices of tokens: TeraPipe (Li et al., 2021, arXiv 2102.07988).

A causal model's tokens depend on no later tokens, so a stage can pass on the first tokens of an example before it
computes the others. Slice k of a microbatch waits on the same stage for the slices before it, whose keys and values it
reads; its backward pass waits for the slices after it, which add to the gradients of these keys and values.

In: the tokens of each slice. Out: a `ScheduleKind` whose tasks are numbered by parts: slice k of microbatch j
is part j n + k of n slices per microbatch.
"""

from __future__ import annotations

import functools

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind, one_stage_each
from autopar.pipeline.schedule.objective import Objective
from autopar.pipeline.schedule.tasks import Edges, Needs, Orders, Shares, Task, synchronous_needs


def terapipe(token_slices: tuple[int, ...], shares: Shares = ()) -> ScheduleKind:
    """The schedule with these tokens in each slice: forward passes of all parts in order, then backward passes, those of a
    microbatch from the last slice to the first.

    Args:
        shares: as in `ScheduleKind`.

    Raises:
        ScheduleError: there are no slices, or one has no token.

    >>> [str(task) for task in terapipe((3, 1)).orders(PipelineShape(1, 1))[0]][2:]
    ['backward of microbatch 1 on stage 0', 'backward of microbatch 0 on stage 0']
    """
    if min(token_slices, default=0) < 1:
        raise ScheduleError(
            f"slices of {list(token_slices)} tokens: give one slice or more, each of at least one token"
        )
    return _kind(token_slices, shares)


@functools.cache
def _kind(token_slices: tuple[int, ...], shares: Shares) -> ScheduleKind:
    n = len(token_slices)

    def orders(shape: PipelineShape) -> Orders:
        parts = range(n * shape.num_microbatches)
        back = [n * (part // n) + n - 1 - part % n for part in parts]
        return tuple(
            (*(Task(s, part, "forward") for part in parts), *(Task(s, part, "backward") for part in back))
            for s in range(shape.num_submeshes)
        )

    def needs(orders: Orders, edges: Edges) -> Needs:
        found = dict(synchronous_needs(orders, edges))
        for task in found:
            first, last = task.microbatch % n == 0, task.microbatch % n == n - 1
            if task.phase == "forward" and not first:
                found[task] = (*found[task], Task(task.stage, task.microbatch - 1, "forward"))
            if task.phase == "backward" and not last:
                found[task] = (*found[task], Task(task.stage, task.microbatch + 1, "backward"))
        return found

    def objective(num_microbatches: int, virtual: int) -> Objective:
        repeats = num_microbatches - 1 / n
        return Objective(
            once_s=lambda cost: cost.pass_s / n,
            repeated_s=lambda cost: repeats * cost.pass_s + cost.update_s,
            in_flight=lambda after, num_submeshes: num_microbatches,
            transfer_once=1 / n,
        )

    return ScheduleKind(
        name="terapipe",
        description="GPipe with each microbatch in slices of tokens, which follow each other through the stages.",
        orders=orders,
        needs=needs,
        requires=one_stage_each,
        parts=n,
        token_slices=token_slices,
        shares=shares,
        bubble="(p - 1)(F + B) / n",
        where="n slices of a microbatch take equally long",
        bubble_s=lambda even: even.filling_and_draining_s,  # its seconds are those of a task
        in_flight=lambda shape: (n * shape.num_microbatches,) * shape.num_submeshes,
        objective=objective,
    )


#: The entry of the table. Its one slice is replaced by the slices that are chosen for a step.
TERAPIPE = terapipe((1,))
