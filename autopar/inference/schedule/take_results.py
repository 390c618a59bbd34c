"""Apply the results of an iteration to the sequences, for all slots at once.

In: the slots, an iteration, its results. Out: `Update`: the new tokens of each request, and the requests that ended. Tokens
after the end of a request are dropped. Results of a sequence that ended or was preempted meanwhile are ignored.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.inference.schedule.admission import Admission
from autopar.inference.schedule.requests import Iteration, Results, Update
from autopar.inference.schedule.slot_arrays import SlotArrays

#: The reason of the end of a request with NaN or infinite logits.
UNSOUND = "unsound"


class _Work(NamedTuple):
    """What each sequence of an iteration computes.

    Args:
        slots, attempts, starts, num_tokens: as in `Decodes`.
        rows: the row of each in the results.
        num_sampled: the number of tokens generated, if no draft token is rejected.
    """

    slots: NDArray[np.int32]
    attempts: NDArray[np.int32]
    starts: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    rows: NDArray[np.int32]
    num_sampled: NDArray[np.int32]


def take_results(admission: Admission, iteration: Iteration, results: Results) -> Update:
    """Apply the results of an iteration, and release the slots and pages of the requests that end."""
    slots, shape = admission.slots, iteration.shape
    work = _running(_work(iteration, slots), slots)
    chosen, tokens = work.slots, results.tokens[work.rows]
    is_sound = results.is_sound[work.rows] | (work.num_sampled == 0)
    if shape.width > 1:
        num = results.num[work.rows].astype(np.int32)
        slots.is_verifying[chosen] = False
        num_done = work.starts + num  # the cache entries of rejected draft tokens are invalid
        slots.num_dispatched[chosen] = num_done
    else:
        num = work.num_sampled
        slots.num_pending[chosen] -= num
        num_done = work.starts + work.num_tokens
    num = np.where(is_sound, num, 0)
    num_new, is_stopped = _until_end(slots, chosen, tokens, num)
    _append(slots, chosen, tokens, num_new)
    num_done = np.minimum(num_done, slots.num_known[chosen])
    is_full = is_sound & (num_done >= slots.num_inserted[chosen])
    is_ended = ~is_sound | is_stopped | (slots.num_known[chosen] >= slots.num_end[chosen])
    for at in np.flatnonzero(is_full | (is_ended & is_sound)).tolist():
        admission.insert_prefix(int(chosen[at]), int(num_done[at]))
    for at in np.flatnonzero(~is_ended & (admission.first_needed(num_done) > slots.num_given_back[chosen])).tolist():
        admission.give_back(int(chosen[at]), int(num_done[at]))
    if shape.width > 1:
        for slot in chosen[~is_ended].tolist():
            admission.truncate(slot)
    is_new = (num_new > 0) | is_ended
    new = chosen[is_new]
    names = [slots.names[slot] for slot in new.tolist()]
    ended: dict[int, str] = {}
    for at in np.flatnonzero(is_ended).tolist():
        slot = int(chosen[at])
        ended[slot] = "stop" if is_stopped[at] else "length" if is_sound[at] else UNSOUND
        admission.remove(slot)
    return Update(new, work.rows[is_new], tokens[is_new], num_new[is_new], names, ended)


def _work(iteration: Iteration, slots: SlotArrays) -> _Work:
    """The decodes, and the last chunk of each sequence with chunks."""
    decodes = iteration.decodes
    rows = _Work(*decodes[:4], decodes.slots, decodes.num_tokens)
    last = {run.slot: (row, run) for row, run in enumerate(iteration.chunks, slots.attempts.size)}
    if not last:
        return rows
    fields = [(run.slot, run.attempt, run.start, run.num_tokens, row, run.samples) for row, run in last.values()]
    chunks = np.array(fields, np.int32).T
    return _Work(*(np.concatenate(each) for each in zip(rows, chunks, strict=True)))


def _running(work: _Work, slots: SlotArrays) -> _Work:
    """The work of sequences that still run in the same slot."""
    runs = slots.attempts[work.slots] == work.attempts
    return work if runs.all() else _Work(*(each[runs] for each in work))


def _until_end(
    slots: SlotArrays, chosen: NDArray[np.int32], tokens: NDArray[np.int32], num: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The number of tokens up to the end of each request, and whether a stop token ends it."""
    num = np.minimum(num, slots.num_end[chosen] - slots.num_known[chosen])
    stops = slots.stop_tokens[chosen]
    is_stop = (tokens[:, :, None] == stops[:, None, :]).any(2) & (np.arange(tokens.shape[1]) < num[:, None])
    is_stopped = is_stop.any(1)
    return np.where(is_stopped, is_stop.argmax(1) + 1, num).astype(np.int32), is_stopped


def _append(
    slots: SlotArrays, chosen: NDArray[np.int32], tokens: NDArray[np.int32], num_new: NDArray[np.int32]
) -> None:
    """Append new tokens to the known ones."""
    if tokens.shape[1] == 1:
        has_new = num_new > 0
        slots.tokens[chosen[has_new], slots.num_known[chosen[has_new]]] = tokens[has_new, 0]
    else:
        rows, columns = np.nonzero(np.arange(tokens.shape[1]) < num_new[:, None])
        slots.tokens[chosen[rows], slots.num_known[chosen[rows]] + columns] = tokens[rows, columns]
    slots.num_known[chosen] += num_new
