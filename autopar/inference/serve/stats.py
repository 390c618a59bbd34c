"""Count what an engine does.

In: the scheduler, the pool of pages, counters. Out: `Stats`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autopar.inference.kv_cache.byte_pool import Pages
from autopar.inference.serve.iterations import Iterations


@dataclass(frozen=True, slots=True)
class Stats:
    """The counters of an engine, and its current state.

    Args:
        num_waiting, num_running: requests in the queue, and in slots.
        free_pages, evictable_pages, held_pages: pages of the cache by state; they add up to all pages. In a pool of bytes, pages that the
            engine can get are free, and the sum changes.
        num_iterations: calls of a program. num_steps: model steps; a call can have several.
        num_prompt_tokens: prompt tokens computed. num_cached_tokens: prompt tokens found in the cache.
        num_tokens: tokens generated. num_preempted: preemptions of requests.
        num_compiled: compiled programs.
    """

    num_waiting: int
    num_running: int
    free_pages: int
    evictable_pages: int
    held_pages: int
    num_iterations: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    num_preempted: int
    num_compiled: int


def stats_of(iterations: Iterations, pool: Pages) -> Stats:
    """The counters and the current state."""
    scheduler = iterations.scheduler
    return Stats(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        free_pages=pool.num_free,
        evictable_pages=pool.num_evictable,
        held_pages=pool.num_held,
        num_compiled=iterations.runner.num_compiled,
        num_prompt_tokens=scheduler.num_prompt_tokens,
        num_preempted=scheduler.num_preempted,
        **asdict(iterations.counts),
    )
