"""Make the arrays of an iteration's results from the tokens of each run, for tests that simulate a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.inference.schedule.requests import Iteration, Results


def results_of(
    iteration: Iteration, num_slots: int, tokens: Mapping[tuple[int, int], Sequence[int]], unsound: Sequence[str] = ()
) -> Results:
    """The results of an iteration.

    Args:
        tokens: the generated tokens of each run, by its slot and its start.
        unsound: the names of requests whose logits are not finite.
    """
    shape, runs = iteration.shape, iteration.runs
    num_decodes = len(iteration.decodes.slots)
    width = max(shape.width, shape.steps)
    found = Results(
        np.full((num_slots + shape.rows, width), -7, np.int32),
        np.zeros(num_slots + shape.rows, np.int32),
        np.ones(num_slots + shape.rows, bool),
    )
    for number, run in enumerate(runs):
        row = run.slot if number < num_decodes else num_slots + number - num_decodes
        new = tokens[run.slot, run.start]
        found.tokens[row, : len(new)], found.num[row] = new, len(new)
        found.is_sound[row] = run.name not in unsound
    return found
