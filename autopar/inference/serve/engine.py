"""Serve requests from one model on one mesh.

In: a model's folder, devices. Out: `Engine`. The engine has no thread of its own: a caller that waits for a token, or calls
`step`, runs the next iteration for all requests. Several threads may call it.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np

from autopar.errors import InferenceError
from autopar.inference.kernels.paged_attention import REFERENCE
from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.model.async_load import Load, Progress
from autopar.inference.model.checkpoint import Checkpoint
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.tokenizer import load_tokenizer, text_stream, tokens_of
from autopar.inference.schedule.requests import Iteration, Options, Request, Results, Shape, Update
from autopar.inference.schedule.scheduler import Scheduler
from autopar.inference.schedule.speculation_policy import Proposer, SpeculationPolicy
from autopar.inference.schedule.stop_strings import TextUntilStop
from autopar.inference.serve.generation import Generation
from autopar.inference.serve.runner import DispatchedIteration, PageMemory, Runner
from autopar.inference.serve.setup import (
    OpenedModel,
    Propose,
    make_policy,
    make_proposer,
    open_model,
    served_of,
    stop_tokens_of,
)
from autopar.inference.serve.slot_outputs import SlotOutputs
from autopar.inference.serve.stats import Counts, Stats, stats_of
from autopar.inference.serve.token_masks import AllowedDrafts, Constraint, TokenMasks
from autopar.inference.step.sampling import NUM_CANDIDATES, num_words
from autopar.inference.step.sampling_params import SamplingOptions
from autopar.inference.step.step import Out
from autopar.jax_interop.compat import shape_struct

#: Called with the new tokens of each step, and the arrays they come from.
Listener = Callable[[Update, Out], None]
#: The number of iterations in flight while the next one is dispatched.
_AHEAD = 1


class Serving(TypedDict, total=False):
    """The options of `Engine.open`.

    Args:
        options: slots, the longest sequence, prefill chunks; by default for the model's number of positions.
        mesh, hardware, memory_budget_bytes, cache: as for `autopar.plan`; by default a 1D mesh of all visible devices.
        num_pages: the number of pages of the KV cache; by default as many as fit. page_size: tokens per page, 16 by default.
        shares_prefixes: whether requests share the pages of a common prefix; True by default.
        propose: the source of draft tokens for speculative decoding: "n-gram", which looks them up in the text so far; the
            folder of a small model with the same tokenizer; or a `Proposer`. It is disabled while it does not pay.
        attention: an attention backend (`paged_attention.BACKENDS`); by default the fastest correct one, measured at the
            start.
        pages_of: the engine of another model on the same mesh, whose pages this model shares. Its pages must have the same
            shape and dtype, and it must have at least as many layers.
        quantize: how to quantize a folder's float weights: "int8", "int4", by groups as "int8-g128"; by default they stay floats.
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
    pages_of: Engine | None
    cache: bool | str | os.PathLike[str]
    quantize: str | None
    progress: Progress | None


class Engine:
    """Serve requests from one model.

    Args:
        runner: the programs and weights on the devices. tokenizer: one of the package `tokenizers`; None for tokens only.
        stop_tokens: the default stop tokens of requests.
        pages_of: the engine of another model that shares its pages; `runner` must use its memory.
        num_pages: the number of pages to use; by default all.
        proposer: the source of draft tokens. policy: decides when to speculate.

    Attributes:
        listener: called at the end of each step that has results; None by default. options: as given.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any = None,
        stop_tokens: Iterable[int] = (),
        pages_of: Engine | None = None,
        *,
        num_pages: int | None = None,
        shares_prefixes: bool = True,
        proposer: Proposer | None = None,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.proposer = proposer
        self.stop_tokens = frozenset(stop_tokens)
        self.pool = pages_of.pool if pages_of is not None else PagePool(num_pages or runner.layout.num_pages)
        served = runner.served
        window = served.model.config.window
        cache = PagedCache(self.pool, served.page_size, shares_prefixes=shares_prefixes, window=window)
        options = served.options
        self._masks = TokenMasks(options.num_slots, num_words(served.model.config.vocab_size))
        drafts = None if proposer is None else AllowedDrafts(proposer, self._masks)
        self._scheduler = Scheduler(cache, options, drafts, policy, runner.layout.num_pages)
        self._outputs = SlotOutputs(options.num_slots, max(options.steps, 1 + options.num_proposals))
        self._generations: dict[str, Generation] = {}
        self._in_flight: deque[DispatchedIteration] = deque()
        self.lock = pages_of.lock if pages_of is not None else threading.RLock()
        self._engines = pages_of._engines if pages_of is not None else []  # all that share the pages
        self._engines.append(self)
        self._names = itertools.count()
        self._broken: BaseException | None = None
        self._counts = Counts()
        self.listener: Listener | None = None
        self.options: dict[str, Any] = {"shares_prefixes": shares_prefixes, "proposer": proposer, "policy": policy}

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, dtype: Any = None, **serving: Unpack[Serving]) -> Engine:
        """Serve a model's folder in Hugging Face's format.

        Args:
            dtype: the dtype of weights and cache; by default the checkpoint's. serving: see `Serving`.

        Raises:
            ModelError: the folder is not a supported model. InferenceError: the model does not fit, or sizes are invalid.
        """
        checkpoint = Checkpoint.open(folder, serving.get("quantize"))
        shapes = checkpoint.abstract_params(dtype)
        tokenizer = load_tokenizer(folder) if (Path(folder) / "tokenizer.json").is_file() else None
        stop_tokens = stop_tokens_of(folder)

        def load(shardings: Any, on_read: Callable[[int], None]) -> Any:
            return checkpoint.load(shardings, dtype, lambda _, num_bytes: on_read(num_bytes))

        runner, options = _open_runner(checkpoint.config, shapes, load, serving)
        return cls(runner, tokenizer, stop_tokens, **options)

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
        """Serve a `Decoder`'s weights from memory, for example after training.

        Args:
            params: the result of `Decoder(config).init`, with any sharding. serving: see `Serving`.

        Raises:
            InferenceError: the model does not fit, or sizes are invalid.
        """

        def load(shardings: Any, _: Callable[[int], None]) -> Any:
            return jax.device_put(params, shardings)

        runner, options = _open_runner(config, jax.tree.map(shape_struct, params), load, serving)
        return cls(runner, tokenizer, stop_tokens, **options)

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
        priority: int = 0,
        constraint: Constraint | None = None,
        scored_from: int | None = None,
        wants_state: bool = False,
    ) -> Generation:
        """Queue a request.

        Args:
            prompt: text, or tokens. max_tokens: the largest number of tokens to generate.
            sampling: the sampling options; by default greedy decoding.
            stop: strings that end the text and are not shown. stop_tokens: tokens that end it; by default the model's.
            num_best: the number of most probable tokens to record for each token, at most `NUM_CANDIDATES`.
            name: the request's name; by default a new one. priority: as in `Request`.
            constraint: decides which tokens may follow; by default all may.
            scored_from: the position, from 1 on, of the first token of the prompt whose logprob is wanted; by default none.
            wants_state: whether to keep the hidden state after the prompt.

        Raises:
            InferenceError: the request can never be served.
        """
        tokens = self.tokens_of(prompt)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = sampling or SamplingOptions()
        _check_options(sampling, num_best, scored_from, len(tokens), self.runner.served.model.config.vocab_size)
        stops = TextUntilStop(stop)
        if stop and self.tokenizer is None:
            raise InferenceError("stop strings need a tokenizer, but the model's folder has none: give stop_tokens")
        ends = self.stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        with self.lock:
            self._check()
            name = name or next(new for n in self._names if (new := f"request-{n}") not in self._generations)
            request = Request(name, tokens, max_tokens, ends, priority, constraint is not None, scored_from)
            self._scheduler.submit(request)
            decode = None if self.tokenizer is None else text_stream(self.tokenizer)
            generation = Generation(request, sampling, num_best, decode, self, stops, constraint, wants_state)
            self._generations[name] = generation
            return generation

    def generate(self, prompts: Iterable[str | Sequence[int]], **options: Any) -> list[Generation]:
        """Submit several prompts and wait for all results, in order. The options are those of `submit`."""
        generations = [self.submit(prompt, **options) for prompt in prompts]
        return [generation.result() for generation in generations]

    def abort(self, name: str) -> None:
        """Abort a request. An unknown name has no effect."""
        with self.lock:
            if name in self._generations:
                self._scheduler.abort(name)
                self._end(self._generations[name], "aborted")

    def collect(self, generation: Generation) -> None:
        """Pass new tokens to a generation. It calls this when it is read."""
        self._outputs.collect(generation)

    def tokens_of(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """Tokenize a text prompt, or check a prompt of tokens.

        Args:
            special: whether to add the special tokens that the tokenizer begins or ends a text with.

        Raises:
            InferenceError: text is given without a tokenizer, or a token is not in the vocabulary.
        """
        return tokens_of(prompt, self.tokenizer, self.runner.served.model.config.vocab_size, special=special)

    def step(self) -> bool:
        """Dispatch the next iteration, and process the results of an earlier one. Returns whether there was anything to do."""
        with self.lock:
            if self._did_step():
                return True
            # These requests wait for pages that another model's requests hold, so run those.
            others = [engine for engine in self._engines if engine is not self] if self._generations else []
            return any(engine._did_step() for engine in others)

    def run(self) -> None:
        """Run until all requests have ended."""
        while self.step():
            pass

    def _did_step(self) -> bool:
        self._check()
        try:
            return self._step()
        except BaseException as error:
            # The failed program may have consumed its donated buffers, and with them the pages of all models.
            for engine in self._engines:
                engine._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        self._broken = error
        for generation in list(self._generations.values()):
            self._end(generation, "failed")

    def _step(self) -> bool:
        iteration = self._scheduler.next()
        if iteration is not None:
            for slot, name, num_shared in iteration.started:
                if (generation := self._generations.get(name)) is not None:  # it may be aborted since
                    self._outputs.assign(slot, generation)
                    self.runner.start(slot, generation.sampling, generation.request.prompt, generation.tokens)
                    self._masks.assign(slot, generation.constraint)
                    self._counts.num_cached_tokens += generation.start(num_shared)
            self._in_flight.append(_dispatched(self, iteration))
            self._counts.num_iterations += 1
            self._counts.num_steps += iteration.shape.steps
        elif not self._in_flight:
            return False
        if len(self._in_flight) > (_AHEAD if iteration is not None else 0):
            self._process(self._in_flight.popleft())
        return True

    def _process(self, dispatched: DispatchedIteration) -> None:
        out = dispatched.fetch(needs_best=self._outputs.needs_best, needs_states=self._outputs.needs_states)
        self._outputs.score_prompts(dispatched.iteration, out)
        results = Results(*map(np.asarray, (out.tokens, out.num, out.is_sound)))
        update = self._scheduler.update(dispatched.iteration, results)
        self._counts.num_tokens += int(update.num_new.sum())
        self._masks.take(update)
        ended = self._outputs.record(update, out)
        if self.listener is not None:
            self.listener(update, out)
        for generation in ended:
            self._scheduler.abort(generation.name)  # if a stop string has ended it
            del self._generations[generation.name]

    def _end(self, generation: Generation, why: str) -> None:
        self._outputs.release(generation)
        generation.ended = why
        del self._generations[generation.name]

    def _check(self) -> None:
        if self._broken is not None:
            raise InferenceError(
                f"the engine has failed: {type(self._broken).__name__}: {self._broken}. Open the model again"
            ) from self._broken

    @property
    def stats(self) -> Stats:
        """The counters and the current state."""
        with self.lock:
            return stats_of(self._scheduler, self.pool, self.runner.num_compiled, self._counts)


def _dispatched(engine: Engine, iteration: Iteration) -> DispatchedIteration:
    """Dispatch an iteration. If masks depend on results in flight, the devices compute the logits meanwhile, where they can."""
    runner, masks, in_flight = engine.runner, engine._masks, engine._in_flight
    if not masks.needs_results(iteration):
        return runner.dispatch(iteration, masks.of(iteration))
    is_apart = runner.served.options.samples_apart and iteration.shape == Shape()
    packed = runner.forward(iteration) if is_apart else None
    while in_flight:
        engine._process(in_flight.popleft())
    allowed = masks.of(iteration)
    return runner.dispatch(iteration, allowed) if packed is None else runner.sample(iteration, packed, allowed)


def _check_options(
    sampling: SamplingOptions, num_best: int, scored_from: int | None, num_prompt: int, vocabulary: int
) -> None:
    """Refuse options that are out of range for a model or a prompt."""
    if not 0 <= num_best <= NUM_CANDIDATES:
        raise InferenceError(f"num_best is {num_best}: give 0 to {NUM_CANDIDATES}")
    if (largest := max(sampling.logit_bias, default=0)) >= vocabulary:
        raise InferenceError(f"logit_bias has token {largest}, but the model's tokens are 0 to {vocabulary - 1}")
    if scored_from is not None and not 1 <= scored_from < num_prompt:
        raise InferenceError(
            f"scored_from is {scored_from}, but the prompt has {num_prompt} tokens: give 1 to {num_prompt - 1}; the first token"
            " follows none"
        )


def renewed(engine: Engine) -> Engine:
    """An engine with the same programs and weights, and without requests and cached prefixes."""
    num_pages = engine.pool.num_pages
    return Engine(engine.runner, engine.tokenizer, engine.stop_tokens, num_pages=num_pages, **engine.options)


def _open_runner(config: DecoderConfig, shapes: Any, load: Load, serving: Serving) -> tuple[Runner, dict[str, Any]]:
    """Open a model and run each program once. Returns the runner and the options of its `Engine`."""
    propose, pages_of, progress = (serving.get(name) for name in ("propose", "pages_of", "progress"))
    attention = serving.get("attention")
    if serving.get("quantize") is not None and config.quantization is None:
        raise InferenceError(
            "`quantize` is for the weights of a folder: write them with `write_checkpoint(params=)` first"
        )
    served = served_of(
        config, shapes, serving.get("options"), serving.get("page_size", 16), propose, attention or REFERENCE
    )
    place = {name: serving.get(name) for name in ("mesh", "hardware", "memory_budget_bytes")}
    place["cache"] = serving.get("cache", True)
    setup = make_proposer(propose, served, place)
    reserved = setup.held_bytes + (pages_of.runner.layout.bytes_without_pages if pages_of is not None else 0)
    shared = pages_of.runner.layout if pages_of is not None else None
    arguments = (served, attention, load, place, serving.get("num_pages"), progress, reserved, shared)
    memory = pages_of.runner.memory if pages_of is not None else None
    model = open_model(*arguments)
    try:
        runner = _warm_runner(model, memory)
    except jax.errors.JaxRuntimeError as error:
        if model.cache is None or memory is not None:
            raise
        model.cache.warn_damaged(error)
        runner = _warm_runner(open_model(*arguments, ignore_cache=True), memory)
    policy = make_policy(runner.seconds(), setup.seconds) if served.options.num_proposals else None
    shares = serving.get("shares_prefixes", True)
    return runner, {"pages_of": pages_of, "shares_prefixes": shares, "proposer": setup.proposer, "policy": policy}


def _warm_runner(model: OpenedModel, memory: PageMemory | None) -> Runner:
    """Make a runner, and run each program once."""
    runner = Runner(model.served, model.layout, model.params, memory)
    runner.warm_up()
    return runner
