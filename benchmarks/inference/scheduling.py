"""Simulate the scheduler on 128 requests, against static batches and an ideal schedule.

Outputs are geometrically distributed around 60 tokens, clipped to 4 to 240; prompts have 32 tokens; there are 16 slots.
Nothing is computed: every iteration gives each request the tokens that it is due. The scheduler's steps of the model
are compared with those of static batches of 16 in order of arrival, each as long as its longest request, and with an
ideal that never has an empty slot. The utilisation is the share of the allocated pages' places that hold a token. Ten
workloads are drawn; the gates apply to the worst.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.schedule.requests import Iteration, Options, Request, Results
from autopar.inference.schedule.scheduler import Scheduler
from benchmarks.inference.models import output_lengths, random_prompts
from benchmarks.inference.rows import Row, row

SLOTS, PAGE, LONGEST, PROMPT, REQUESTS, WORKLOADS = 16, 16, 512, 32, 128, 10
_AHEAD = 1  # iterations scheduled before the results of the first are known, as in the engine


class Simulated(NamedTuple):
    """Steps of the model, and the mean share of allocated places in use."""

    steps: int
    utilisation: float


def measure() -> list[Row]:
    """Rows of the worst workload."""
    lengths = [output_lengths(REQUESTS, seed) for seed in range(WORKLOADS)]
    found = [simulated(each) for each in lengths]
    static = [static_steps(each, SLOTS) for each in lengths]
    ideal = [sum(each) / SLOTS for each in lengths]
    return [
        row("steps, static batches, first workload", static[0]),
        row("steps, continuous, first workload", found[0].steps),
        row("steps, ideal, first workload", ideal[0]),
        row("static / continuous, least", min(s / one.steps for s, one in zip(static, found, strict=True)), at_least=2),
        row(
            "continuous / ideal, largest", max(one.steps / i for i, one in zip(ideal, found, strict=True)), at_most=1.4
        ),
        row("utilisation of held pages, least", min(one.utilisation for one in found), at_least=0.85),
    ]


def static_steps(lengths: list[int], slots: int) -> int:
    """Steps of batches in order of arrival, each as long as its longest request."""
    return sum(max(lengths[start : start + slots]) for start in range(0, len(lengths), slots))


def simulated(lengths: list[int], slots: int = SLOTS, prompt: int = PROMPT) -> Simulated:
    """Schedule requests with these output lengths, all submitted at the start."""
    pool = PagePool(slots * LONGEST // PAGE)
    cache = PagedCache(pool, PAGE, shares_prefixes=False)
    scheduler = Scheduler(cache, Options(num_slots=slots, max_length=LONGEST))
    for number, tokens in enumerate(random_prompts([prompt] * len(lengths), 10**6, 0)):
        scheduler.submit(Request(str(number), tuple(tokens), lengths[number]))
    on_their_way: deque[Iteration] = deque()
    steps, used = 0, []
    while scheduler.num_waiting or scheduler.num_running:
        iteration = scheduler.next()
        if iteration is not None:
            steps += iteration.shape.steps
            used.append(scheduler.num_cached_tokens / (pool.num_held * PAGE))
            on_their_way.append(iteration)
        if len(on_their_way) > (_AHEAD if iteration is not None else 0):
            done = on_their_way.popleft()
            rows = slots + done.shape.rows
            results = Results(
                np.zeros((rows, done.shape.steps), np.int32), np.ones(rows, np.int32), np.ones(rows, bool)
            )
            scheduler.update(done, results)
    return Simulated(steps, sum(used) / len(used))
