"""Serve requests from one model on one mesh.

In: a model's folder, devices. Out: `Engine`. The engine has no thread of its own: a caller that waits for a token, or calls
`step`, runs the next iteration for all requests. Several threads may call it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp

from autopar.api.microbatched_step import MicrobatchedStep
from autopar.errors import InferenceError
from autopar.inference.kernels.paged_attention import REFERENCE
from autopar.inference.kv_cache.byte_pool import Pages
from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.model.async_load import Load, Progress
from autopar.inference.model.checkpoint import Checkpoint
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.tokenizer import load_tokenizer, text_stream, tokens_of
from autopar.inference.schedule.requests import Options, Request, Update
from autopar.inference.schedule.speculation_policy import Proposer, SpeculationPolicy
from autopar.inference.schedule.stop_strings import TextUntilStop
from autopar.inference.serve.generation import Generation
from autopar.inference.serve.iterations import Iterations, Processed
from autopar.inference.serve.kv_pool import KVPool, PlaceInPool
from autopar.inference.serve.layout import Served
from autopar.inference.serve.lend import in_microbatches, lend
from autopar.inference.serve.lending import Training
from autopar.inference.serve.runner import PageMemory, Runner
from autopar.inference.serve.setup import (
    OpenedModel,
    Propose,
    make_policy,
    make_proposer,
    open_model,
    served_of,
    stop_tokens_of,
)
from autopar.inference.serve.shared_pages import SharedPages
from autopar.inference.serve.stats import Stats, stats_of
from autopar.inference.serve.token_masks import Constraint
from autopar.inference.serve.weights import Weights
from autopar.inference.step.sampling import NUM_CANDIDATES
from autopar.inference.step.sampling_params import SamplingOptions
from autopar.inference.step.step import Out
from autopar.jax_interop.compat import shape_struct

#: Called with the new tokens of each step, and the arrays they come from.
Listener = Callable[[Update, Out], None]


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
        pool: a pool of bytes that models with other pages share, too; with it, mesh and page_size are the pool's. quota: the share of it
            that this model can count on. priority: of its weights, if they do not have room at once; a lower number goes first.
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
    pool: KVPool | None
    quota: float
    priority: int
    cache: bool | str | os.PathLike[str]
    quantize: str | None
    progress: Progress | None


class Engine:
    """Serve requests from one model.

    Args:
        runner: the programs and weights on the devices. tokenizer: one of the package `tokenizers`; None for tokens only.
        stop_tokens: the default stop tokens of requests.
        pages_of, place: an engine whose pages it shares, or a place in a pool of bytes; `runner` must use the same memory.
        num_pages: the number of pages to use; by default all.
        proposer: the source of draft tokens. policy: decides when to speculate.
        load: reads the weights from where they came from; None if they came from memory.

    Attributes:
        listener: called at the end of each step that has results; None by default. shared, pool, lock: as for all on its pages.
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
        load: Load | None = None,
        place: PlaceInPool | None = None,
    ) -> None:
        self.runner, self.tokenizer, self.proposer = runner, tokenizer, proposer
        self.stop_tokens = frozenset(stop_tokens)
        self.shared, self.pool = _pages_for(runner, num_pages, pages_of, place)
        self.lock, window = self.shared.lock, runner.served.model.config.window
        cache = PagedCache(self.pool, runner.served.page_size, shares_prefixes=shares_prefixes, window=window)
        self._iterations = Iterations(runner, cache, proposer, policy, self._listen)
        self._weights = _registered(self.shared, Weights(self.shared, self._iterations, proposer, load), place)
        self._names = itertools.count()
        self.listener: Listener | None = None

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, dtype: Any = None, **serving: Unpack[Serving]) -> Engine:
        """Serve a model's folder in Hugging Face's format.

        Args:
            dtype: the dtype of weights and cache; by default the checkpoint's. serving: see `Serving`.

        Raises:
            ModelError: the folder is not a supported model. InferenceError: the model does not fit, or sizes are invalid.
        """
        runner, options = _open_folder(folder, dtype, serving)
        tokenizer = load_tokenizer(folder) if (Path(folder) / "tokenizer.json").is_file() else None
        return cls(runner, tokenizer, stop_tokens_of(folder), **options)

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
            return jax.device_put(params, shardings, may_alias=False)  # a trainer donates its own

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
        tokens, sampling = self.tokens_of(prompt), sampling or SamplingOptions()
        _check_options(sampling, num_best, scored_from, len(tokens), self.runner.served.model.config.vocab_size)
        stops = TextUntilStop((stop,) if isinstance(stop, str) else tuple(stop))
        if stops.stop_strings and self.tokenizer is None:
            raise InferenceError("stop strings need a tokenizer, but the model's folder has none: give stop_tokens")
        ends = self.stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        with self.lock:
            self.shared.check()
            name = name or next(n for i in self._names if (n := f"request-{i}") not in self._iterations.generations)
            request = Request(name, tokens, max_tokens, ends, priority, constraint is not None, scored_from)
            decode = None if self.tokenizer is None else text_stream(self.tokenizer)
            generation = Generation(request, sampling, num_best, decode, self, stops, constraint, wants_state)
            generation.note_weights(self.weights_version)
            self._iterations.add(generation)
            return generation

    def generate(self, prompts: Iterable[str | Sequence[int]], **options: Any) -> list[Generation]:
        """Submit several prompts and wait for all results, in order. The options are those of `submit`."""
        generations = [self.submit(prompt, **options) for prompt in prompts]
        return [generation.result() for generation in generations]

    def abort(self, name: str) -> None:
        """Abort a request. An unknown name has no effect."""
        with self.lock:
            self._iterations.abort(name)

    def collect(self, generation: Generation) -> None:
        """Pass new tokens to a generation. It calls this when it is read."""
        self._iterations.collect(generation)

    def tokens_of(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """Tokenize a text prompt, or check a prompt of tokens.

        Args:
            special: whether to add the special tokens that the tokenizer begins or ends a text with.

        Raises:
            InferenceError: text is given without a tokenizer, or a token is not in the vocabulary.
        """
        return tokens_of(prompt, self.tokenizer, self.runner.served.model.config.vocab_size, special=special)

    def step(self) -> bool:
        """Dispatch the next iteration, and process the results of an earlier one; or run a microbatch, if the devices are lent.

        Returns:
            Whether there was anything to do.
        """
        with self.lock:
            return self.shared.run_in_gap() or self.shared.step(self._iterations)

    def run(self) -> None:
        """Run until all requests have ended."""
        self.shared.run(self._iterations)

    def close(self) -> None:
        """Free the devices' memory that no other engine uses, for good. Requests are aborted."""
        self.shared.close(self._iterations, self.pool)

    def sleep(self, weights: Literal["host", "dropped"] = "host") -> None:
        """Free the devices' memory: the weights and, unless another engine uses them, the pages. Requests wait for `wake_up`.

        Running ones keep their tokens, and are computed again. To read a request meanwhile raises an `InferenceError`.

        Args:
            weights: whether they are kept in the host's memory, or dropped.

        Raises:
            InferenceError: `weights` is neither.
        """
        self._weights.sleep(weights)

    def wake_up(self, params: Any = None) -> None:
        """Load the weights again, and allocate the pages, which are empty. The programs are still compiled.

        Args:
            params: other weights, as for `update_weights`; by default those from before.

        Raises:
            InferenceError: the weights were dropped, and there is no folder to read them from.
        """
        self._weights.wake_up(params)

    def update_weights(self, params: Any) -> None:
        """Replace the weights between two iterations, for example by those of a train step. No request is dropped: running ones keep
        their tokens, and their keys and values are computed again. `Generation.versions` has the weights of each token.

        Args:
            params: as `Decoder(config).init` has them, in any shardings and floating-point dtype. They are copied.

        Raises:
            InferenceError: they are not weights of this model, or it sleeps. Nothing has changed.
        """
        self._weights.update(params)

    def lend(
        self,
        step: MicrobatchedStep | Callable[..., Any],
        state: Any,
        batches: Iterable[Any],
        *,
        tpot_s: float | None = None,
        num_microbatches: int = 8,
        **options: Any,
    ) -> Training:
        """Train in the gaps: between two iterations a microbatch runs whenever no request becomes late by it.

        Whoever steps the engine runs the microbatches. They run while there are no requests, and while all running ones stay within
        `tpot_s`; a new one waits for the rest of one microbatch. The first call compiles the step and measures it.

        Args:
            step: a function such as `(state, batch) -> (state, loss)`, or one that is in microbatches already.
            batches: an iterable; a batch is taken when the step before has ended.
            tpot_s: the most seconds per output token, on average over a request; by default 1.2 times those of a decode step.
            num_microbatches, options: as for `MicrobatchedStep`.

        Raises:
            InferenceError: the devices are lent already. AutoparError: the step cannot run in microbatches.
        """
        step = in_microbatches(step, num_microbatches, {"mesh": self.runner.mesh, **options})
        return lend(self.shared, self._iterations, step, state, batches, tpot_s)

    @property
    def weights_version(self) -> int:
        """The number of updates of the weights so far."""
        return self._weights.version

    def check_awake(self) -> None:
        """Raise an `InferenceError` if the engine sleeps. A generation calls this when it waits."""
        self._weights.check_awake()

    def _listen(self, processed: Processed) -> None:
        self.shared.note(self._iterations, processed)
        if self.listener is not None:
            self.listener(processed.update, processed.out)

    @property
    def stats(self) -> Stats:
        """The counters and the current state."""
        with self.lock:
            return stats_of(self._iterations, self.pool)


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


def _open_folder(folder: str | os.PathLike[str], dtype: Any, serving: Serving) -> tuple[Runner, dict[str, Any]]:
    """Open a model's folder. Returns the runner and the options of its `Engine`."""
    checkpoint = Checkpoint.open(folder, serving.get("quantize"))

    def load(shardings: Any, on_read: Callable[[int], None]) -> Any:
        return checkpoint.load(shardings, dtype, lambda _, num_bytes: on_read(num_bytes))

    runner, options = _open_runner(checkpoint.config, checkpoint.abstract_params(dtype), load, serving)
    return runner, {**options, "load": load}


def _pages_for(
    runner: Runner, num_pages: int | None, pages_of: Engine | None, place: PlaceInPool | None
) -> tuple[SharedPages, Pages]:
    """What an engine has in common with others, and its pages."""
    if place is not None:
        return place.shared, place.pages
    if pages_of is not None:
        return pages_of.shared, pages_of.pool
    return SharedPages(), PagePool(num_pages or runner.layout.num_pages)


def _registered(shared: SharedPages, weights: Weights, place: PlaceInPool | None) -> Weights:
    """Let an engine run with the others. Returns its weights."""
    shared.members.append(weights.iterations)
    if place is not None:
        place.take(weights)
    return weights


def _open_runner(config: DecoderConfig, shapes: Any, load: Load, serving: Serving) -> tuple[Runner, dict[str, Any]]:
    """Open a model and run each program once. Returns the runner and the options of its `Engine`."""
    propose, pages_of, progress = (serving.get(name) for name in ("propose", "pages_of", "progress"))
    attention = serving.get("attention")
    if serving.get("quantize") is not None and config.quantization is None:
        raise InferenceError(
            "`quantize` is for the weights of a folder: write them with `write_checkpoint(params=)` first"
        )
    pool = serving.get("pool")
    page_size = serving.get("page_size", 16) if pool is None else pool.page_size
    rows = None if pool is None else pool.rows(config)
    served = served_of(config, shapes, serving.get("options"), page_size, propose, attention or REFERENCE, rows)
    place = {name: serving.get(name) for name in ("mesh", "hardware", "memory_budget_bytes")}
    place["cache"] = serving.get("cache", True)
    place_in_pool = None if pool is None else _place_in_pool(pool, served, serving)
    if pool is not None:
        place["mesh"] = pool.mesh
    setup = make_proposer(propose, served, place)
    reserved = setup.held_bytes + (pages_of.runner.layout.bytes_without_pages if pages_of is not None else 0)
    reserved += 0 if pool is None else pool.reserved_bytes()
    shared = pages_of.runner.layout if pages_of is not None else None
    arguments = (served, attention, load, place, serving.get("num_pages"), progress, reserved, shared)
    memory = pool.memory if pool is not None else pages_of.runner.memory if pages_of is not None else None
    model = open_model(*arguments, pool=pool)
    try:
        runner = _warm_runner(model, memory)
    except jax.errors.JaxRuntimeError as error:
        if model.cache is None or memory is not None:
            raise
        model.cache.warn_damaged(error)
        runner = _warm_runner(open_model(*arguments, ignore_cache=True), memory)
    policy = make_policy(runner.seconds(), setup.seconds) if served.options.num_proposals else None
    options = {"pages_of": pages_of, "shares_prefixes": serving.get("shares_prefixes", True), "place": place_in_pool}
    return runner, {**options, "proposer": setup.proposer, "policy": policy}


def _place_in_pool(pool: KVPool, served: Served, serving: Serving) -> PlaceInPool:
    """A place for a model in a pool.

    Raises:
        InferenceError: the model does not go with the pool, or with other options.
    """
    for name in ("pages_of", "num_pages", "mesh", "page_size"):
        if serving.get(name) is not None:
            raise InferenceError(f"`{name}` and `pool` are given: with a pool, pages and mesh are the pool's")
    if jnp.dtype(served.dtype) != pool.dtype:
        raise InferenceError(
            f"the model's cache has the dtype {served.dtype}, and the pool {pool.dtype}: give both one `dtype`"
        )
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(served.params))
    return pool.place_for(served.model.config, num_bytes, serving.get("quota", 0.0), serving.get("priority", 0))


def _warm_runner(model: OpenedModel, memory: PageMemory | None) -> Runner:
    """Make a runner, and run each program once."""
    runner = Runner(model.served, model.layout, model.params, memory)
    runner.warm_up()
    return runner
