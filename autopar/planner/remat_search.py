"""Candidates that compute forward values again, up a ladder of prices of memory.

In: a candidate that does not keep to a memory budget, and the ladder from it (`remat.candidates`): each rung computes more
again, at a price of memory at which the solver splits, too. Out: the fastest candidate found that fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import TimeLimitError
from autopar.planner.candidate import Candidate, Planning
from autopar.planner.fork_pool import Least
from autopar.planner.remat.candidates import Rung, ladder
from autopar.planner.reshard_to_fit import TooLargeError, resharded_to_fit
from autopar.plans.records import Prediction
from autopar.transforms.program import recomputing

#: How much faster a plan has to be to be looked for on the rungs between two.
_WORTH_LOOKING = 0.01
#: What of a plan's time is hidden at the most by how its collectives are merged and awaited, which comes after.
_MOST_HIDDEN = 0.03
#: How often the next rung to look at is guessed by memory, before those left are halved.
_MOST_GUESSES = 3
#: Of a collective that is run again, the part that nothing hides is so much at the least.
_LEAST_EXPOSED = 0.1


def ladder_of(free: Candidate) -> list[Rung]:
    """The ladder from a plan; empty where the program has no backward pass."""
    exposed = _exposed(free.parts.prediction)
    return ladder(free.program.trace, free.formulation, free.solution.choices, free.parts.device, exposed)


def _exposed(told: Prediction) -> dict[str, float]:
    """By kind of collective, the part that nothing will hide of what is sent again: as much as in this plan, but not
    less than a tenth, for it has but a part of the backward pass to run beside."""
    return {
        kind: min(1.0, max(_LEAST_EXPOSED, told.exposed_s.get(kind, 0.0) / seconds))
        for kind, seconds in told.collective_s.items()
        if seconds > 0
    }


class RematSearch:
    """The plans on the rungs of one ladder, made when they are asked for.

    Attributes:
        least: of all plans made, the one that needs least.
        outdone: where other plans ended the search, one that is slower than they are.
        late: of a plan for which the solver had too little time.
    """

    def __init__(
        self,
        budget: float,
        free: Candidate,
        planning: Planning,
        rungs: Sequence[Rung],
        least: Candidate,
        own_s: float = math.inf,
        fastest: Least | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.budget, self.free, self.planning, self.rungs, self.least = budget, free, planning, rungs, least
        self.outdone: Candidate | None = None
        self._own_s, self._fastest, self._deadline = own_s, fastest, deadline
        self.late: TimeLimitError | None = None
        self._needed = free.peak_bytes - budget  # by the ladder's figures
        self._without_limit: dict[tuple[int, bool], Candidate | None] = {}

    @property
    def to_beat(self) -> float:
        """Seconds of the fastest plan so far; of those on other meshes, before what is hidden later."""
        others = math.inf if self._fastest is None else self._fastest.value / (1 - _MOST_HIDDEN)
        return min(self._own_s, others)

    def fastest(self) -> Candidate | None:
        """The fastest plan found that fits; None where none does, or none is faster than another.

        Up the ladder a plan needs less and takes longer, whether arguments are split further or values computed again: the
        two have one price. So the fastest that fits is on the lowest rung where one does.

        Raises:
            TimeLimitError: none was found, and for one that might fit the solver had too little time.
        """
        rung, best = self._lowest(len(self.rungs), prompt=False)
        if best is None:  # it is sums that wait that take memory, of which those plans say nothing
            self._needed = self.free.peak_bytes - self.budget
        _, prompt = self._lowest(rung, prompt=True)
        best = prompt or best
        if best is None and self.outdone is None:  # that or nothing
            best = self._by_splitting(len(self.rungs) - 1)
            if best is None and self.late is not None:
                raise self.late
        return best

    def _lowest(self, end: int, *, prompt: bool) -> tuple[int, Candidate | None]:
        """The lowest rung before `end` where a plan fits and is faster than another, and the plan; where none is, the rung
        from which on they are slower, or `end`.

        Where to look follows from what the ladder has each rung save, and from how far that was out for the last plan.
        """
        saved = [rung.saved_bytes for rung in self.rungs]
        low, high, best, tries = 0, end, None, 0
        while low < high:  # those below `low` do not fit; from `high` on they take longer, or there are none
            if self.to_beat < math.inf and time.monotonic() > self._deadline:
                self.outdone = self.outdone or self.free
                break
            rung = next((i for i in range(low, high) if saved[i] >= self._needed), high - 1)
            rung, tries = (rung if tries < _MOST_GUESSES else (low + high) // 2), tries + 1
            made = self._on(rung, prompt=prompt)
            if made is None:
                low = rung + 1
                continue
            self._needed = made.peak_bytes + saved[rung] - self.budget
            if made.peak_bytes <= self.budget:
                high = rung
                if made.compared_s < self.to_beat:
                    best, self._own_s = made, made.compared_s
                else:
                    self.outdone = made
            elif made.compared_s > (1 - _WORTH_LOOKING) * self.to_beat:  # those above that fit are hardly faster
                self.outdone = made
                return rung, best
            else:
                low = rung + 1
        return high, best

    def _on(self, rung: int, *, prompt: bool = False) -> Candidate | None:
        """The plan that a rung's price of memory leads to; None where the solver had too little time.

        Args:
            prompt: gradients are summed at once: that holds less, but nothing hides the sums.
        """
        key = rung, prompt
        if key not in self._without_limit:
            again = tuple(replace(one, again=replace(one.again, prompt=prompt)) for one in self.rungs[rung].again)
            program = recomputing(self.free.program, [one.again for one in again])
            self._without_limit[key] = None
            try:
                made = self.planning.free(program, self.free.formulation, again, self.rungs[rung].price)
                self._without_limit[key] = made
                self.least = min(self.least, made, key=lambda one: one.peak_bytes)
            except TimeLimitError as error:
                self.late = error
        return self._without_limit[key]

    def _by_splitting(self, rung: int) -> Candidate | None:
        """A plan that fits by splitting otherwise, if one is found; or else the one that needs least."""
        for prompt in (False, True):
            made = self._on(rung, prompt=prompt)
            if made is None:
                continue
            try:
                return resharded_to_fit(self.budget, made, self.planning)
            except TooLargeError as short:
                self.least = min(self.least, short.least, key=lambda one: one.peak_bytes)
            except TimeLimitError as error:
                self.late = error
        return None
