"""Search the fastest plan that fits by rematerialization, over rising prices of memory.

In: a candidate over the memory budget, and its levels (`remat.candidates`), each of which rematerializes more at a price of
memory by which the solver also shards further. Out: the fastest candidate found that fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import TimeLimitError
from autopar.planner.candidate import Candidate, Planning
from autopar.planner.fork_pool import Least
from autopar.planner.remat.candidates import RematLevel, remat_levels
from autopar.planner.reshard_to_fit import TooLargeError, resharded_to_fit
from autopar.plans.records import Prediction
from autopar.transforms.program import recomputing

#: A plan must be faster by this part to be worth searching the levels between two others.
_WORTH_LOOKING = 0.01
#: At most this part of a plan's time is hidden later, by combining collectives and starting reductions early.
_MOST_HIDDEN = 0.03
#: How often the next level is guessed from its memory before the search bisects.
_MOST_GUESSES = 3
#: At least this part of a repeated collective is exposed.
_LEAST_EXPOSED = 0.1


def levels_of(free: Candidate) -> list[RematLevel]:
    """The rematerialization levels of a plan; empty where the program has no backward pass."""
    exposed = _exposed(free.parts.prediction)
    return remat_levels(free.program.trace, free.formulation, free.solution.choices, free.parts.device, exposed)


def _exposed(prediction: Prediction) -> dict[str, float]:
    """Expected exposed share of repeated collectives by kind: that of this plan, but at least a tenth, because only a part
    of the backward pass can hide them."""
    return {
        kind: min(1.0, max(_LEAST_EXPOSED, prediction.exposed_s.get(kind, 0.0) / seconds))
        for kind, seconds in prediction.collective_s.items()
        if seconds > 0
    }


class RematSearch:
    """The plans of the rematerialization levels, made on demand.

    Attributes:
        least: the plan with the lowest peak memory so far.
        outdone: the plan that ended the search because plans on other meshes are faster.
        late: the error of a level for which the solver ran out of time.
    """

    def __init__(
        self,
        budget: float,
        free: Candidate,
        planning: Planning,
        levels: Sequence[RematLevel],
        least: Candidate,
        own_s: float = math.inf,
        fastest: Least | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.budget, self.free, self.planning, self.levels, self.least = budget, free, planning, levels, least
        self.outdone: Candidate | None = None
        self._own_s, self._fastest, self._deadline = own_s, fastest, deadline
        self.late: TimeLimitError | None = None
        self._needed = free.peak_bytes - budget  # bytes to save, by the levels' own figures
        self._without_limit: dict[tuple[int, bool], Candidate | None] = {}

    @property
    def to_beat(self) -> float:
        """Seconds of the fastest plan so far; for plans on other meshes, as it was before overlap was searched."""
        others = math.inf if self._fastest is None else self._fastest.value / (1 - _MOST_HIDDEN)
        return min(self._own_s, others)

    def fastest(self) -> Candidate | None:
        """The fastest plan found that fits; None if none fits, or if a plan on another mesh is faster.

        From level to level a plan needs less memory and takes longer, because sharding arguments further and rematerializing
        have one price. So the fastest plan that fits is on the lowest level where one fits.

        Raises:
            TimeLimitError: none was found, and the solver ran out of time for one that might fit.
        """
        n, best = self._lowest(len(self.levels), prompt=False)
        if best is None:  # pending gradient reductions take memory that those plans do not show
            self._needed = self.free.peak_bytes - self.budget
        _, prompt = self._lowest(n, prompt=True)
        best = prompt or best
        if best is None and self.outdone is None:  # the last way that is left
            best = self._by_splitting(len(self.levels) - 1)
            if best is None and self.late is not None:
                raise self.late
        return best

    def _lowest(self, end: int, *, prompt: bool) -> tuple[int, Candidate | None]:
        """The lowest level before `end` with a plan that fits and is faster than those on other meshes, and the plan.
        If there is none: the first level whose plan is slower than those, or `end`.

        The next level to try follows from the bytes that each level saves, corrected by the error of the last plan.
        """
        saved = [level.saved_bytes for level in self.levels]
        low, high, best, tries = 0, end, None, 0
        while low < high:  # levels below `low` do not fit; from `high` on they are slower
            if self.to_beat < math.inf and time.monotonic() > self._deadline:
                self.outdone = self.outdone or self.free
                break
            n = next((i for i in range(low, high) if saved[i] >= self._needed), high - 1)
            n, tries = (n if tries < _MOST_GUESSES else (low + high) // 2), tries + 1
            made = self._on(n, prompt=prompt)
            if made is None:
                low = n + 1
                continue
            self._needed = made.peak_bytes + saved[n] - self.budget
            if made.peak_bytes <= self.budget:
                high = n
                if made.compared_s < self.to_beat:
                    best, self._own_s = made, made.compared_s
                else:
                    self.outdone = made
            elif made.compared_s > (1 - _WORTH_LOOKING) * self.to_beat:  # higher levels that fit are hardly faster
                self.outdone = made
                return n, best
            else:
                low = n + 1
        return high, best

    def _on(self, n: int, *, prompt: bool = False) -> Candidate | None:
        """The plan of a level; None where the solver ran out of time.

        Args:
            prompt: whether to reduce gradients at once, which needs less memory but exposes the reductions.
        """
        key = n, prompt
        if key not in self._without_limit:
            level = self.levels[n]
            recomputed = tuple(replace(one, segment=replace(one.segment, prompt=prompt)) for one in level.recomputed)
            program = recomputing(self.free.program, [one.segment for one in recomputed])
            self._without_limit[key] = None
            try:
                made = self.planning.free(program, self.free.formulation, recomputed, level.price)
                self._without_limit[key] = made
                self.least = min(self.least, made, key=lambda one: one.peak_bytes)
            except TimeLimitError as error:
                self.late = error
        return self._without_limit[key]

    def _by_splitting(self, n: int) -> Candidate | None:
        """A plan of a level that fits after resharding; None if none is found."""
        for prompt in (False, True):
            made = self._on(n, prompt=prompt)
            if made is None:
                continue
            try:
                return resharded_to_fit(self.budget, made, self.planning)
            except TooLargeError as short:
                self.least = min(self.least, short.least, key=lambda one: one.peak_bytes)
            except TimeLimitError as error:
                self.late = error
        return None
