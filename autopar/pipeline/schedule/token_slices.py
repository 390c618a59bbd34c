"""Order slices of tokens: TeraPipe (Li et al., 2021, arXiv 2102.07988).

A causal model's tokens depend on no later tokens, so a stage can pass on the first tokens of an example before it
computes the others. Slice k of a microbatch waits on the same stage for the slices before it, whose keys and values it
reads; its backward pass waits for the slices after it, which add to the gradients of these keys and values.

In: the number of slices per microbatch. Out: a `ScheduleKind` whose tasks are numbered by parts: slice k of microbatch j
is part j n + k of n slices per microbatch.
"""

from __future__ import annotations

import functools

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind, one_stage_each
from autopar.pipeline.schedule.tasks import Edges, Needs, Orders, Task, synchronous_needs


@functools.cache
def terapipe(num_slices: int) -> ScheduleKind:
    """The schedule of this many slices per microbatch: forward passes of all parts in order, then backward passes, those
    of a microbatch from the last slice to the first.

    Raises:
        ScheduleError: the number is not positive.

    >>> [str(task) for task in terapipe(2).orders(PipelineShape(1, 1))[0]][2:]
    ['backward of microbatch 1 on stage 0', 'backward of microbatch 0 on stage 0']
    """
    if num_slices < 1:
        raise ScheduleError(f"the number of slices is {num_slices}: give 1 or more")
    n = num_slices

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

    return ScheduleKind(
        name="terapipe",
        description="GPipe with each microbatch in slices of tokens, which follow each other through the stages.",
        orders=orders,
        needs=needs,
        requires=one_stage_each,
        parts=n,
        bubble="(p - 1)(F + B)",
        where="F and B are of one slice, and slices take equally long",
        bubble_s=lambda even: even.filling_and_draining_s,
        in_flight=lambda shape: (n * shape.num_microbatches,) * shape.num_submeshes,
    )
