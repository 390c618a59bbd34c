"""Collect the tokens of all slots in arrays, and pass them to their generations a window at a time.

In: the updates of the scheduler, and the outputs of programs. Out: `SlotOutputs`. An iteration costs a few array operations.
A generation gets its tokens when somebody reads it, when its window is full, and when it ends; text is decoded only then.
"""

from __future__ import annotations

import numpy as np

from autopar.inference.schedule.requests import Iteration, Update
from autopar.inference.serve.generation import Generation
from autopar.inference.step.step import Out

_WINDOW = 64


class SlotOutputs:
    """The outputs of all slots.

    Args:
        num_slots: the number of slots. longest: the largest number of tokens that an iteration has for a slot.
    """

    def __init__(self, num_slots: int, longest: int) -> None:
        self._window = max(_WINDOW, longest)
        self._tokens = np.zeros((num_slots, self._window), np.int32)
        self._logprobs = np.zeros((num_slots, self._window), np.float32)
        self._num = np.zeros(num_slots, np.int32)
        self._generations: list[Generation | None] = [None] * num_slots
        self._with_best: set[int] = set()
        self._with_stops: set[int] = set()
        self._with_states: set[int] = set()

    @property
    def needs_states(self) -> bool:
        """Whether a running request wants hidden states."""
        return bool(self._with_states)

    @property
    def needs_best(self) -> bool:
        """Whether a running request records the most probable tokens."""
        return bool(self._with_best)

    def assign(self, slot: int, generation: Generation) -> None:
        """Assign a slot to a generation, until it is assigned to another one."""
        if generation.slot is not None:  # before a preemption
            self.release(generation)
        previous = self._generations[slot]
        if previous is not None:
            self.release(previous)
        self._generations[slot], generation.slot = generation, slot
        if generation.num_best:
            self._with_best.add(slot)
        if generation.stops.stop_strings:
            self._with_stops.add(slot)
        if generation.wants_state:
            self._with_states.add(slot)

    def release(self, generation: Generation) -> None:
        """Pass the remaining tokens to a generation, and forget it."""
        slot = generation.slot
        if slot is None:
            return
        self.collect(generation)
        self._generations[slot] = generation.slot = None
        self._with_best.discard(slot)
        self._with_stops.discard(slot)
        self._with_states.discard(slot)

    def collect(self, generation: Generation) -> None:
        """Pass new tokens to a generation."""
        slot = generation.slot
        if slot is None or not self._num[slot]:
            return
        num = int(self._num[slot])
        generation.append(self._tokens[slot, :num].tolist(), self._logprobs[slot, :num].tolist())
        self._num[slot] = 0

    def score_prompts(self, iteration: Iteration, out: Out) -> None:
        """Pass the logprobs of prompts' tokens to the generations that asked for them, before `record`."""
        for row, run in enumerate(iteration.chunks if out.prompt is not None else ()):
            generation = self._generations[run.slot]
            if run.next_token >= 0 and generation is not None and generation.name == run.name:
                generation.score_prompt(run.start, out.prompt, row)

    def record(self, update: Update, out: Out) -> list[Generation]:
        """Record the new tokens of an iteration.

        Returns:
            The generations that have ended: by the scheduler's decision, or at a stop string.
        """
        slots, rows, width = update.slots, update.rows, update.tokens.shape[1]
        for slot in slots[self._num[slots] + width > self._window].tolist():
            self.collect(self._at(slot))
        places = slots[:, None], self._num[slots][:, None] + np.arange(width)
        self._tokens[places] = update.tokens
        self._logprobs[places] = np.asarray(out.logprobs)[rows]
        self._num[slots] += update.num_new
        if self._with_best:
            self._record_best(update, out)
        if self._with_states and out.states is not None:
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                if slot in self._with_states and self._at(slot).state is None:
                    self._at(slot).state = np.asarray(out.states)[row]
        ended: list[Generation] = []
        for slot, why in update.ended.items():
            generation = self._at(slot)
            self.collect(generation)
            generation.ended = why
            ended.append(generation)
        for slot in self._with_stops.intersection(slots.tolist()) if self._with_stops else ():
            generation = self._at(slot)
            self.collect(generation)
            if generation.stops_early() and generation not in ended:
                ended.append(generation)
        for generation in ended:
            self.release(generation)
        return ended

    def _at(self, slot: int) -> Generation:
        generation = self._generations[slot]
        assert generation is not None, "a slot with results has a generation"
        return generation

    def _record_best(self, update: Update, out: Out) -> None:
        """Pass the most probable tokens to the generations that record them. Verified tokens have none."""
        if out.best_tokens is None or out.best_logprobs is None:
            return
        for slot, row, num in zip(
            *(each.tolist() for each in (update.slots, update.rows, update.num_new)), strict=True
        ):
            if slot in self._with_best:
                generation = self._at(slot)
                best = (
                    each[row, :num, : generation.num_best].tolist() for each in (out.best_tokens, out.best_logprobs)
                )
                generation.best += [tuple(zip(*each, strict=True)) for each in zip(*best, strict=True)]
