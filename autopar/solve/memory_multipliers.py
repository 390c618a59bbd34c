"""Optimise Lagrange multipliers of the memory limit together with message passing.

In: a `Pairwise`. Out: prices, messages, assignments and bounds. If an assignment decoded from the messages exceeds
the limit, the worst instants get a price. Each price then rises or falls with the excess at its instant, in steps
that grow while the direction stays and shrink when it turns (Riedmiller and Braun's Rprop). A few passes of messages
follow each change of the prices. For all prices

    L = (bound of the priced problem) - sum over instants of price x limit

is a lower bound of the cost of every assignment that fits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.solve import trws as messages
from autopar.solve.flat_problem import Pairwise
from autopar.solve.instant_loads import loads_of, price

Meet = Callable[[np.ndarray], None]
_FACTORS, _PASSES_AROUND = (0.85, 0.9, 0.95, 1.05, 1.1, 1.2), 10
_SHARES, _PASSES_LOWER = (0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.13, 0.08, 0.05), 30
_PASSES = 2  # passes per change of the prices
_APART = 60  # instants that get a price in the same round are at least 1/60 of all instants apart
_AT_ONCE = 4
_FIRST, _FASTER, _SLOWER, _LEAST = 0.5, 1.15, 0.6, 1e-6  # relative steps
_STEEP = 3.0  # share of the step taken, by the relative excess over the limit; at most the whole step


class Multipliers:
    """The prices, the messages under them, and the best bound.

    Args:
        overdue: function that returns whether time has run out; called before each pass.
    """

    def __init__(self, p: Pairwise, overdue: Callable[[], bool], first_bound_passes: int = 20) -> None:
        num_instants = len(p.base)
        self.p = p
        self.values = np.zeros(num_instants)  # seconds per byte
        self.held = np.zeros(len(p.costs))  # cost of each strategy's memory at these prices
        self.messages = np.zeros(p.num_messages)
        self._active = np.zeros(num_instants, bool)
        self._steps, self._signs = np.zeros(num_instants), np.zeros(num_instants)
        self._loads = np.zeros(num_instants)
        self.bound = -np.inf
        self._overdue = overdue
        for i in range(first_bound_passes):
            if overdue():
                break
            self.bound = messages.sweep(p, p.costs, self.messages, i % 2 == 0)
        self.best, self.best_messages = self.values.copy(), self.messages.copy()
        self._first = 1e-3 * (abs(self.bound) if 0.0 < abs(self.bound) < np.inf else 1.0) / (abs(p.limit) or 1.0)

    def step(self, meet: Meet) -> float:
        """Pass messages, decode, and move the prices.

        Args:
            meet: callback for each assignment; the array is reused, so it must be copied to be kept.

        Returns:
            The largest relative excess over the limit.
        """
        p = self.p
        bound = -np.inf
        prices = p.costs + self.held
        for _ in range(_PASSES // 2):
            bound = messages.sweep(p, prices, self.messages, True)
            bound = messages.sweep(p, prices, self.messages, False)
        bound -= float(self.values.sum()) * p.limit if len(self.values) else 0.0
        if bound > self.bound:
            self.bound, self.best, self.best_messages = bound, self.values.copy(), self.messages.copy()
        excess = np.zeros(len(self.values))
        choices = np.zeros(len(p.nodes) - 1, np.int64)
        for forward in (True, False):
            messages.decode(p, prices, self.messages, forward, choices)
            meet(choices)
            if len(excess):
                loads_of(p, choices, self._loads)
                self._activate()
                excess += 0.5 * (self._loads / max(p.limit, _LEAST) - 1.0)
        if len(excess):
            self._move(excess)
        return float(excess.max(initial=-np.inf))

    def lower(self) -> None:
        """Search for a better bound at lower prices; the current prices stay.

        The prices at which single assignments fit are above the optimal ones of the relaxation, which mixes assignments.
        """
        p, kept = self.p, self.messages.copy()
        for share in _SHARES:
            values = share * self.values
            prices = p.costs + share * self.held
            bound = -np.inf
            for i in range(_PASSES_LOWER):
                if self._overdue():
                    break
                bound = messages.sweep(p, prices, self.messages, i % 2 == 0)
            bound -= float(values.sum()) * p.limit
            if bound > self.bound:
                self.bound, self.best, self.best_messages = bound, values, self.messages.copy()
        self.messages[:] = kept

    def around(self, meet: Meet) -> None:
        """Decode at somewhat lower and higher prices; the current prices stay."""
        p, kept = self.p, self.messages.copy()
        choices = np.zeros(len(p.nodes) - 1, np.int64)
        for factor in _FACTORS:
            prices = p.costs + factor * self.held
            for i in range(_PASSES_AROUND):
                if self._overdue():
                    break
                forward = i % 2 == 0
                messages.sweep(p, prices, self.messages, forward)
                messages.decode(p, prices, self.messages, not forward, choices)
                meet(choices)
            self.messages[:] = kept

    def _activate(self) -> None:
        """Give a price to the instants with the largest excess over the limit."""
        loads, apart = self._loads.copy(), len(self._loads) // _APART
        for _ in range(_AT_ONCE):
            worst = int(loads.argmax())
            if loads[worst] <= self.p.limit:
                break
            if not self._active[worst]:
                self._active[worst] = True
                self.values[worst] = max(self._first, 0.02 * float(self.values.sum()))
                self._steps[worst] = _FIRST
            loads[max(0, worst - apart) : worst + apart + 1] = -np.inf

    def _move(self, excess: np.ndarray) -> None:
        at = np.flatnonzero(self._active)
        signs = np.sign(excess[at])
        turned = signs * self._signs[at] <= 0
        self._steps[at] = np.clip(self._steps[at] * np.where(turned, _SLOWER, _FASTER), _LEAST, 1.0)
        self._signs[at] = signs
        self.values[at] *= np.exp(self._steps[at] * np.clip(_STEEP * excess[at], -1.0, 1.0))
        price(self.p, self.values, self.held)
