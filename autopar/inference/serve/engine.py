"""The engine: requests in, text out, from one model on one mesh.

In: a model's folder, devices. Out: `Engine`. It runs where it is asked to: whoever waits for a token, or calls `step`,
makes it do the next iteration, for all requests alike; there is no thread of its own, and several threads may ask.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax

from autopar.errors import InferenceError
from autopar.inference.kernels.paged_attention import REFERENCE
from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.model.async_load import Load, Progress
from autopar.inference.model.checkpoint import Checkpoint
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.tokenizer import load_tokenizer, text_stream, tokens_of
from autopar.inference.schedule.requests import Iteration, Options, Request
from autopar.inference.schedule.scheduler import Scheduler
from autopar.inference.schedule.speculation_policy import Proposer, SpeculationPolicy
from autopar.inference.schedule.stop_strings import TextUntilStop
from autopar.inference.serve.generation import Generation
from autopar.inference.serve.runner import PageMemory, Runner, Running
from autopar.inference.serve.setup import Opened, Propose, opened, policy_of, proposer_of, served_of, stop_tokens_of
from autopar.inference.step.sampling import SamplingOptions
from autopar.jax_interop.compat import shape_struct

#: Iterations that are sent to the devices before the results of the first are looked at.
_AHEAD = 1


@dataclass(frozen=True, slots=True)
class Stats:
    """What an engine has done, and holds.

    Args:
        num_waiting, num_running: requests.
        free_pages, evictable_pages, held_pages: of the cache; they add up to all.
        num_iterations: calls of a program. num_steps: of the model; several in one call.
        num_prompt_tokens: computed. num_cached_tokens: of prompts, found in the cache. num_tokens: generated.
        num_compiled: programs that JAX has compiled.
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
    num_compiled: int


class Serving(TypedDict, total=False):
    """How a model is served.

    Args:
        options: how work is cut: slots, the longest sequence, chunks of prompts; by default for the model's positions.
        mesh, hardware, memory_budget_bytes, cache: as of `autopar.plan`; by default all visible devices in a row.
        num_pages: of the KV cache; by default what weights leave room for. page_size: tokens of each; by default 16.
        shares_prefixes: whether what one prompt begins with is found again for the next; by default it is.
        propose: who guesses tokens to be verified several at once: "n-gram", which looks for them in the text so far; a
            folder, of a small model with the same tokenizer; or a `Proposer`. While it does not pay it is not asked.
        attention: a backend (`paged_attention.BACKENDS`); by default the fastest of those that are right here, tried at
            the start.
        beside: another model's engine, whose pages are to be this one's too, on the same mesh. Pages must be of one shape
            in every layer, and this model has no more layers than the other.
        progress: called with a stage's name and the fraction done.
    """

    options: Options | None
    mesh: Any
    hardware: Any
    memory_budget_bytes: float | None
    num_pages: int | None
    page_size: int
    shares_prefixes: bool
    propose: Propose
    attention: str | None
    beside: Engine | None
    cache: bool | str | os.PathLike[str]
    progress: Progress | None


class Engine:
    """Serves requests from one model.

    Args:
        runner: programs and weights on devices. tokenizer: of the package `tokenizers`; None for tokens alone.
        stop_tokens: that end every request which does not say otherwise.
        beside: another model's engine, whose pages this one's are too; `runner` was made with its memory.
        num_pages: at most so many are used; by default as many as there are.
        proposer: guesses tokens to be verified, where the programs take proposals. policy: says when it is asked.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any = None,
        stop_tokens: Iterable[int] = (),
        beside: Engine | None = None,
        *,
        num_pages: int | None = None,
        shares_prefixes: bool = True,
        proposer: Proposer | None = None,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.proposer = proposer
        self.stop_tokens = frozenset(stop_tokens)
        self.pool = beside.pool if beside is not None else PagePool(num_pages or runner.layout.num_pages)
        served = runner.served
        cache = PagedCache(self.pool, served.page_size, shares_prefixes=shares_prefixes)
        self._scheduler = Scheduler(cache, served.options, proposer, policy)
        self._generations: dict[str, Generation] = {}
        self._on_their_way: deque[Running] = deque()
        self._lock = beside._lock if beside is not None else threading.RLock()
        self._all = beside._all if beside is not None else []  # that share the pages
        self._all.append(self)
        self._names = itertools.count()
        self._broken: BaseException | None = None
        self._counts = dict.fromkeys(("num_iterations", "num_steps", "num_prompt_tokens", "num_cached_tokens"), 0)
        self._num_tokens = 0

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, dtype: Any = None, **serving: Unpack[Serving]) -> Engine:
        """Serve a model's folder, as Hugging Face writes it.

        Args:
            dtype: of weights and cache; by default the checkpoint's. serving: see `Serving`.

        Raises:
            ModelError: the folder is no model that is supported. InferenceError: it does not fit, or sizes cannot be.
        """
        checkpoint = Checkpoint.open(folder)
        shapes = checkpoint.abstract_params(dtype)
        tokenizer = load_tokenizer(folder) if (Path(folder) / "tokenizer.json").is_file() else None
        stop_tokens = stop_tokens_of(folder)

        def load(shardings: Any, part_read: Callable[[int], None]) -> Any:
            return checkpoint.load(shardings, dtype, lambda _, num_bytes: part_read(num_bytes))

        return cls._opened(checkpoint.config, shapes, load, tokenizer, stop_tokens, serving)

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        params: Any,
        tokenizer: Any = None,
        *,
        stop_tokens: Iterable[int] = (),
        **serving: Unpack[Serving],
    ) -> Engine:
        """Serve a `Decoder`'s weights that are in memory, such as one that has just been trained.

        Args:
            params: as `Decoder(config).init` returns them, lying anywhere. serving: see `Serving`.

        Raises:
            InferenceError: it does not fit, or sizes cannot be.
        """

        def load(shardings: Any, _: Callable[[int], None]) -> Any:
            return jax.device_put(params, shardings)

        return cls._opened(config, jax.tree.map(shape_struct, params), load, tokenizer, stop_tokens, serving)

    @classmethod
    def _opened(
        cls,
        config: DecoderConfig,
        shapes: Any,
        load: Load,
        tokenizer: Any,
        stop_tokens: Iterable[int],
        serving: Serving,
    ) -> Engine:
        propose, beside, progress = (serving.get(name) for name in ("propose", "beside", "progress"))
        attention = serving.get("attention")
        served = served_of(
            config, shapes, serving.get("options"), serving.get("page_size", 16), propose, attention or REFERENCE
        )
        place = {name: serving.get(name) for name in ("mesh", "hardware", "memory_budget_bytes")}
        place["cache"] = serving.get("cache", True)
        proposing = proposer_of(propose, served, place)
        held = proposing.held_bytes + (beside.held_bytes if beside is not None else 0)
        others = beside.runner.layout if beside is not None else None
        asked = (served, attention, load, place, serving.get("num_pages"), progress, held, others)
        memory = beside.runner.memory if beside is not None else None
        found = opened(*asked)
        try:
            runner = _warm(found, memory)
        except jax.errors.JaxRuntimeError as error:
            if found.kept is None or memory is not None:
                raise
            found.kept.say_damaged(error)
            runner = _warm(opened(*asked, anew=True), memory)
        policy = policy_of(runner.seconds(), proposing.seconds) if served.options.num_proposals else None
        shares = serving.get("shares_prefixes", True)
        return cls(
            runner,
            tokenizer,
            stop_tokens,
            beside,
            shares_prefixes=shares,
            proposer=proposing.proposer,
            policy=policy,
        )

    @property
    def held_bytes(self) -> float:
        """Of weights and all else but pages, on the device that holds most: what is not there for a model beside it."""
        layout = self.runner.layout
        return layout.peak_bytes - layout.page_bytes * (layout.num_pages + 1)

    # -- requests ----------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        sampling: SamplingOptions | None = None,
        stop: Iterable[str] = (),
        stop_tokens: Iterable[int] | None = None,
        num_best: int = 0,
        name: str | None = None,
    ) -> Generation:
        """Queue a request.

        Args:
            prompt: text, or tokens. max_tokens: to generate, at most.
            sampling: by default the most probable token each time.
            stop: strings that end it, which are not shown. stop_tokens: by default the model's own.
            num_best: how many of the most probable tokens are told of each; the candidates that the programs keep at most.
            name: by which the request is known; by default a new one.

        Raises:
            InferenceError: it can never be served.
        """
        tokens = self.tokens_of(prompt)
        if isinstance(stop, str):
            stop = (stop,)
        sampling = sampling or SamplingOptions()
        if not 0 <= num_best <= sampling.num_candidates:
            raise InferenceError(f"num_best is {num_best}: 0 or more, and at most {sampling.num_candidates}")
        stops = TextUntilStop(stop)
        if tuple(stop) and self.tokenizer is None:
            raise InferenceError("stop strings need a tokenizer, and the model's folder has none: give stop_tokens")
        ends = self.stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        with self._lock:
            self._check()
            if name is None:
                name = next(new for n in self._names if (new := f"request-{n}") not in self._generations)
            request = Request(name, tokens, max_tokens, ends)
            self._scheduler.submit(request)
            decode = None if self.tokenizer is None else text_stream(self.tokenizer)
            generation = Generation(request, sampling, num_best, decode, self.step, self.abort, stops)
            self._generations[name] = generation
            return generation

    def generate(self, prompts: Iterable[str | Sequence[int]], **asked: Any) -> list[Generation]:
        """All of several requests, in their order; arguments as of `submit`."""
        generations = [self.submit(prompt, **asked) for prompt in prompts]
        return [generation.result() for generation in generations]

    def abort(self, name: str) -> None:
        """End a request; one that is not there has ended."""
        with self._lock:
            if name in self._generations:
                self._scheduler.abort(name)
                self._end(self._generations[name], "aborted")

    def tokens_of(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """Of text; tokens are checked.

        Args:
            special: add those that the tokenizer begins or ends a text with.

        Raises:
            InferenceError: there is no tokenizer for text, or a token that the model does not have.
        """
        return tokens_of(prompt, self.tokenizer, self.runner.served.model.config.vocab_size, special=special)

    # -- iterations --------------------------------------------------------------------------

    def step(self) -> bool:
        """Send the next iteration to the devices, and take what has come of one before.

        Returns:
            whether there was anything to do.
        """
        with self._lock:
            if self._did_step():
                return True
            # Who waits for pages that another model's requests hold, lets these go on.
            others = [engine for engine in self._all if engine is not self] if self._generations else []
            return any(engine._did_step() for engine in others)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.step():
            pass

    def _did_step(self) -> bool:
        self._check()
        try:
            return self._step()
        except BaseException as error:
            # What was given to a program is gone, whether or not it came back; the pages of all models are.
            for engine in self._all:
                engine._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        self._broken = error
        for generation in list(self._generations.values()):
            self._end(generation, "failed")

    def _step(self) -> bool:
        iteration = self._scheduler.next()
        if iteration is not None:
            sampling = {run.name: self._generations[run.name].sampling for run in iteration.runs}
            self._on_their_way.append(self.runner.start(iteration, sampling))
            self._count(iteration)
        elif not self._on_their_way:
            return False
        if len(self._on_their_way) > (_AHEAD if iteration is not None else 0):
            self._take(self._on_their_way.popleft())
        return True

    def _take(self, running: Running) -> None:
        results, told = running.results({name: each.num_best for name, each in self._generations.items()})
        for progress in self._scheduler.update(running.iteration, results):
            generation = self._generations[progress.name]
            before = len(generation.tokens)
            generation.take(progress.tokens, told[progress.name], progress.ended)
            self._num_tokens += len(generation.tokens) - before
            if generation.ended is not None:
                self._scheduler.abort(progress.name)  # where a stop string has ended it
                del self._generations[progress.name]

    def _end(self, generation: Generation, why: str) -> None:
        generation.end(why)
        del self._generations[generation.name]

    def _count(self, iteration: Iteration) -> None:
        self._counts["num_iterations"] += 1
        self._counts["num_steps"] += iteration.shape.steps
        for run in iteration.runs:
            generation = self._generations[run.name]
            if not generation.is_begun:
                generation.is_begun, generation.num_cached = True, run.start
                self._counts["num_cached_tokens"] += run.start
            self._counts["num_prompt_tokens"] += max(
                0, min(run.start + run.num_tokens, generation.num_prompt_tokens) - run.start
            )

    def _check(self) -> None:
        if self._broken is not None:
            raise InferenceError(
                f"the engine has stopped: {type(self._broken).__name__}: {self._broken}. Open the model again"
            ) from self._broken

    @property
    def stats(self) -> Stats:
        """Now."""
        with self._lock:
            return Stats(
                self._scheduler.num_waiting,
                self._scheduler.num_running,
                self.pool.num_free,
                self.pool.num_evictable,
                self.pool.num_held,
                **self._counts,
                num_tokens=self._num_tokens,
                num_compiled=self.runner.num_compiled,
            )


def _warm(found: Opened, memory: PageMemory | None) -> Runner:
    """What runs the programs, each of which has run."""
    runner = Runner(found.served, found.layout, found.params, memory)
    runner.warm_up()
    return runner
