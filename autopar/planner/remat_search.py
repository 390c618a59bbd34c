"""Search the fastest plan that fits by rematerialization, over rising prices of memory.

In: a candidate over the memory budget, and its rematerialization levels (`remat.candidates`). Each level has a price of memory:
the higher it is, the more is rematerialized, and the further the solver shards. Out: the fastest candidate found that fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import TimeLimitError
from autopar.planner.candidate import Candidate
from autopar.planner.fork_pool import SharedMinimum
from autopar.planner.mesh_task import MeshTask
from autopar.planner.remat.candidates import RematLevel, remat_levels
from autopar.planner.reshard_to_fit import TooLargeError, resharded_to_fit
from autopar.plans.records import Prediction
from autopar.transforms.program import recomputing

#: The search goes on between two levels only if a plan there could be faster by this share.
_WORTH_LOOKING = 0.01
#: At most this share of a plan's time is hidden later, by combining collectives and starting reductions early.
_MOST_HIDDEN = 0.03
#: How many levels are chosen by their expected memory before the search bisects.
_MOST_GUESSES = 3
#: At least this share of a repeated collective is exposed.
_LEAST_EXPOSED = 0.1


def levels_of(plan: Candidate) -> list[RematLevel]:
    """The rematerialization levels of a plan; empty where the program has no backward pass."""
    exposed = _exposed(plan.parts.prediction)
    return remat_levels(plan.program.trace, plan.formulation, plan.solution.choices, plan.parts.device, exposed)


def _exposed(prediction: Prediction) -> dict[str, float]:
    """The expected exposed share of repeated collectives, by kind: the share of this plan, but at least a tenth, because only
    a part of the backward pass can hide them."""
    return {
        kind: min(1.0, max(_LEAST_EXPOSED, prediction.exposed_s.get(kind, 0.0) / seconds))
        for kind, seconds in prediction.collective_s.items()
        if seconds > 0
    }


class RematSearch:
    """Search the rematerialization levels; each level is planned when it is needed.

    Args:
        unlimited: the plan without a memory limit, which does not fit.
        smallest: the plan with the lowest peak memory so far.
        own_s: seconds of the fastest plan on this mesh that fits.
        fastest: seconds of the fastest plan on any mesh.
        deadline: time (`time.monotonic`) after which the search ends if a plan that fits is known.

    Attributes:
        slower: a plan slower than the fastest known, where that ended the search.
        timeout: the error of a level for which the solver ran out of time.
    """

    def __init__(
        self,
        task: MeshTask,
        unlimited: Candidate,
        levels: Sequence[RematLevel],
        smallest: Candidate,
        own_s: float = math.inf,
        fastest: SharedMinimum | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.task, self.unlimited, self.levels, self.smallest = task, unlimited, levels, smallest
        self.budget = task.budget_bytes
        self.slower: Candidate | None = None
        self._own_s, self._fastest, self._deadline = own_s, fastest, deadline
        self.timeout: TimeLimitError | None = None
        self._needed = unlimited.peak_bytes - self.budget  # bytes to save, by the levels' own figures
        self._plans: dict[tuple[int, bool], Candidate | None] = {}

    @property
    def to_beat(self) -> float:
        """Seconds of the fastest plan so far. Plans on other meshes count without the share that overlap may have hidden."""
        others = math.inf if self._fastest is None else self._fastest.value / (1 - _MOST_HIDDEN)
        return min(self._own_s, others)

    def fastest(self) -> Candidate | None:
        """The fastest plan found that fits; None where no plan fits, or where a plan on another mesh is faster.

        Each level needs less memory than the level before and takes longer, because one price covers both sharding arguments
        further and rematerializing. So the fastest plan that fits is on the lowest level with a plan that fits.

        Raises:
            TimeLimitError: no plan was found, and the solver ran out of time on a level.
        """
        n, best = self._lowest(len(self.levels), prompt=False)
        if best is None:  # start the estimate again: plans so far had pending gradient reductions in memory
            self._needed = self.unlimited.peak_bytes - self.budget
        _, prompt = self._lowest(n, prompt=True)
        best = prompt or best
        if best is None and self.slower is None:
            best = self._resharded(len(self.levels) - 1)
            if best is None and self.timeout is not None:
                raise self.timeout
        return best

    def _lowest(self, end: int, *, prompt: bool) -> tuple[int, Candidate | None]:
        """The lowest level below `end` with a plan that fits and is faster than `to_beat`, and the plan. Without such a
        plan: the level from which on plans are slower, or `end`.

        The next level to try follows from the bytes that each level saves, corrected by the error of the last plan.
        """
        saved = [level.saved_bytes for level in self.levels]
        low, high, best, tries = 0, end, None, 0
        while low < high:  # levels below `low` do not fit; from `high` on they are slower
            if self.to_beat < math.inf and time.monotonic() > self._deadline:
                self.slower = self.slower or self.unlimited
                break
            n = next((i for i in range(low, high) if saved[i] >= self._needed), high - 1)
            n, tries = (n if tries < _MOST_GUESSES else (low + high) // 2), tries + 1
            plan = self._plan(n, prompt=prompt)
            if plan is None:
                low = n + 1
                continue
            self._needed = plan.peak_bytes + saved[n] - self.budget
            if plan.peak_bytes <= self.budget:
                high = n
                if plan.step_time_s < self.to_beat:
                    best, self._own_s = plan, plan.step_time_s
                else:
                    self.slower = plan
            elif plan.step_time_s > (1 - _WORTH_LOOKING) * self.to_beat:  # higher levels take longer still
                self.slower = plan
                return n, best
            else:
                low = n + 1
        return high, best

    def _plan(self, n: int, *, prompt: bool = False) -> Candidate | None:
        """The plan of a level; None where the solver ran out of time.

        Args:
            prompt: whether to reduce gradients at once, which needs less memory but exposes the reductions.
        """
        key = n, prompt
        if key not in self._plans:
            level = self.levels[n]
            recomputed = tuple(replace(one, segment=replace(one.segment, prompt=prompt)) for one in level.recomputed)
            program = recomputing(self.unlimited.program, [one.segment for one in recomputed])
            self._plans[key] = None
            try:
                plan = self.task.plan_without_limit(program, self.unlimited.formulation, recomputed, level.price)
                self._plans[key] = plan
                self.smallest = min(self.smallest, plan, key=lambda one: one.peak_bytes)
            except TimeLimitError as error:
                self.timeout = error
        return self._plans[key]

    def _resharded(self, n: int) -> Candidate | None:
        """A plan of a level that fits after resharding; None where none is found."""
        for prompt in (False, True):
            plan = self._plan(n, prompt=prompt)
            if plan is None:
                continue
            try:
                return resharded_to_fit(self.task, plan)
            except TooLargeError as error:
                self.smallest = min(self.smallest, error.smallest, key=lambda one: one.peak_bytes)
            except TimeLimitError as error:
                self.timeout = error
        return None
