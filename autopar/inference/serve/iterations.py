"""Run the iterations of one engine: dispatch the next one, and process the results of an earlier one.

In: a runner, page tables, requests. Out: `Iterations`. It knows nothing of other engines, locks or failures, which are the engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.schedule.requests import Iteration, Results, Shape, Update
from autopar.inference.schedule.scheduler import Scheduler
from autopar.inference.schedule.speculation_policy import Proposer, SpeculationPolicy
from autopar.inference.serve.generation import Generation
from autopar.inference.serve.runner import DispatchedIteration, Runner
from autopar.inference.serve.slot_outputs import SlotOutputs
from autopar.inference.serve.token_masks import AllowedDrafts, TokenMasks
from autopar.inference.step.sampling import num_words
from autopar.inference.step.step import Out

#: The number of iterations in flight while the next one is dispatched.
_AHEAD = 1


@dataclass(slots=True)
class Counts:
    """The counters among the `Stats` of an engine."""

    num_iterations: int = 0
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0


class Processed(NamedTuple):
    """The results of an iteration.

    Args:
        seconds: from the moment at which the devices were free for it until its results were here. ended_s: when that was.
    """

    update: Update
    out: Out
    shape: Shape
    seconds: float
    ended_s: float


class Iterations:
    """The requests of one engine, and its iterations.

    Args:
        listen: called with the results of each iteration.

    Attributes:
        runner: as given.
        generations: the requests that have not ended, by name.
        scheduler, counts: of the engine. seconds: of each shape, once they are measured.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PagedCache,
        proposer: Proposer | None,
        policy: SpeculationPolicy | None,
        listen: Callable[[Processed], None],
    ) -> None:
        served, options = runner.served, runner.served.options
        self.runner, self._listen, self._clock = runner, listen, runner.clock
        self._masks = TokenMasks(options.num_slots, num_words(served.model.config.vocab_size))
        drafts = None if proposer is None else AllowedDrafts(proposer, self._masks)
        self.scheduler = Scheduler(cache, options, drafts, policy, runner.layout.num_pages)
        self._outputs = SlotOutputs(options.num_slots, max(options.steps, 1 + options.num_proposals))
        self._in_flight: deque[tuple[float, DispatchedIteration]] = deque()  # and when they were dispatched
        self._free_s = 0.0  # when the results of the last iteration were here
        self.generations: dict[str, Generation] = {}
        self.counts = Counts()
        self.seconds: dict[Shape, float] = {}

    def add(self, generation: Generation) -> None:
        """Queue a request.

        Raises:
            InferenceError: it can never be served.
        """
        self.scheduler.submit(generation.request)
        self.generations[generation.name] = generation

    def collect(self, generation: Generation) -> None:
        """Pass new tokens to a generation."""
        self._outputs.collect(generation)

    def abort(self, name: str) -> None:
        """Abort a request. An unknown name has no effect."""
        if name in self.generations:
            self.scheduler.abort(name)
            self._end(self.generations[name], "aborted")

    def fail(self) -> None:
        """End all requests, because the engine can run no more."""
        for generation in list(self.generations.values()):
            self._end(generation, "failed")

    def run_next(self) -> bool:
        """Dispatch the next iteration, and process the results of an earlier one. Returns whether there was anything to do."""
        if self.runner.is_asleep:
            return False
        iteration = self.scheduler.next()
        if iteration is not None:
            for slot, name, num_shared in iteration.started:
                if (generation := self.generations.get(name)) is not None:  # it may be aborted since
                    self._outputs.assign(slot, generation)
                    self.runner.start(slot, generation.sampling, generation.request.prompt, generation.tokens)
                    self._masks.assign(slot, generation.constraint)
                    self.counts.num_cached_tokens += generation.start(num_shared)
            self._in_flight.append((self._clock(), self._dispatched(iteration)))
            self.counts.num_iterations += 1
            self.counts.num_steps += iteration.shape.steps
        elif not self._in_flight:
            return False
        if len(self._in_flight) > (_AHEAD if iteration is not None else 0):
            self._process(*self._in_flight.popleft())
        return True

    def start_over(self) -> None:
        """Process what is in flight, and let all running requests wait again; see `Scheduler.start_over`."""
        self.process_all()
        self.scheduler.start_over()

    def process_all(self) -> None:
        """Process the results of all iterations in flight."""
        while self._in_flight:
            self._process(*self._in_flight.popleft())

    def _dispatched(self, iteration: Iteration) -> DispatchedIteration:
        """Dispatch an iteration. If masks depend on results in flight, the devices compute the logits meanwhile, where they can."""
        runner, masks = self.runner, self._masks
        if not masks.needs_results(iteration):
            return runner.dispatch(iteration, masks.of(iteration))
        is_apart = runner.served.options.samples_apart and iteration.shape == Shape()
        packed = runner.forward(iteration) if is_apart else None
        self.process_all()
        allowed = masks.of(iteration)
        return runner.dispatch(iteration, allowed) if packed is None else runner.sample(iteration, packed, allowed)

    def _process(self, dispatched_s: float, dispatched: DispatchedIteration) -> None:
        out: Any = dispatched.fetch(needs_best=self._outputs.needs_best, needs_states=self._outputs.needs_states)
        self._outputs.score_prompts(dispatched.iteration, out)
        results = Results(*map(np.asarray, (out.tokens, out.num, out.is_sound)))
        update = self.scheduler.update(dispatched.iteration, results)
        self.counts.num_tokens += int(update.num_new.sum())
        self._masks.take(update)
        ended = self._outputs.record(update, out)
        now_s = self._clock()
        self._listen(Processed(update, out, dispatched.iteration.shape, now_s - max(dispatched_s, self._free_s), now_s))
        self._free_s = now_s
        for generation in ended:
            self.scheduler.abort(generation.name)  # if a stop string has ended it
            del self.generations[generation.name]

    def _end(self, generation: Generation, why: str) -> None:
        self._outputs.release(generation)
        generation.ended = why
        del self.generations[generation.name]
