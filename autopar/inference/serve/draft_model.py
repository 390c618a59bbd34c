"""Propose draft tokens with a small model, for speculative decoding.

In: a decoder with the vocabulary of the target model, and sequences. Out: `DraftModel`, a `Proposer`. Its KV cache is
contiguous, with one row per slot, and the host records the tokens in each row. The common prefix of a row and of its slot's
sequence is reused, also after rejected draft tokens, after preemption, and for a new request in the slot. Two programs of
static shapes compute the rest:

- prefill: a chunk of tokens for a few slots;
- draft: the last two tokens of each slot, then greedy decode steps. Two tokens, because if all draft tokens were accepted,
  the last of them is not in the cache yet, and neither is the token after it.

Draft tokens are greedy, not sampled, so `verify` needs no draft probabilities.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.errors import InferenceError
from autopar.inference.model.attention import AttendContiguous, ContiguousCache
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.speculation_policy import DraftRequest


class Prepared(Protocol):
    """A compiled function, and the sharding of each array of its arguments."""

    @property
    def run(self) -> Callable[..., Any]: ...

    @property
    def shardings(self) -> Sequence[jax.sharding.Sharding]: ...


class _Known(NamedTuple):
    """A `DraftRequest` with its tokens as a list."""

    slot: int
    tokens: list[int]
    max_tokens: int


#: (function, argument shapes) -> program. The function donates its argument `cache`, and returns the new cache first.
Prepare = Callable[[Callable[..., Any], tuple[Any, ...]], Prepared]


@dataclass(frozen=True, slots=True)
class Jitted:
    """A function that runs on the first device."""

    run: Callable[..., Any]
    shardings: Sequence[jax.sharding.Sharding]

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Jitted:
        """Wrap a function. It compiles at its first call."""
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return cls(jax.jit(function, donate_argnames="cache"), [device] * len(jax.tree.leaves(arguments)))


class DraftModel:
    """A small model that proposes draft tokens (`Proposer`).

    A call runs each program at most once. So a long prompt, which needs several chunks, delays no other sequence; its own
    sequence has no draft tokens until it is prefilled.

    Args:
        model: the draft model. params: its weights.
        num_slots, max_length, num_proposals: as in `Options`. Sequences longer than the draft model's own limit have no
            draft tokens.
        vocab_size: the vocabulary size of the target model.
        chunk: (rows, length) of a prefill chunk.
        prepare: plans or jits a program. Both programs must have the same cache shardings; weights are resharded if needed.

    Raises:
        InferenceError: the vocabularies differ.
    """

    def __init__(
        self,
        model: Decoder,
        params: Any,
        num_slots: int,
        max_length: int,
        num_proposals: int,
        *,
        vocab_size: int,
        chunk: tuple[int, int] = (2, 256),
        prepare: Prepare = Jitted.of,
    ) -> None:
        config = model.config
        if config.vocab_size != vocab_size:
            raise InferenceError(
                f"the draft model has a vocabulary of {config.vocab_size} tokens, but the target model has one of "
                f"{vocab_size}: use a draft model with the same tokenizer, or propose='n-gram'"
            )
        self._chunk = chunk
        self._length = min(max_length, config.max_positions)
        model = Decoder(config.for_length(self._length))
        self._cached: list[list[int]] = [[] for _ in range(num_slots)]  # the tokens in each row of the cache

        def empty() -> ContiguousCache:
            return ContiguousCache.empty(config, num_slots, self._length, params["params"]["norm"]["weight"].dtype)

        resident = jax.eval_shape(lambda: (params, empty()))
        slots, rows, pairs = (jax.ShapeDtypeStruct(n, np.int32) for n in (chunk[:1], chunk, (num_slots, 2)))
        draft = prepare(_draft_of(model, num_proposals), (*resident, pairs, pairs))
        prefill = prepare(_prefill_of(model), (*resident, slots, rows, rows))
        self._draft, self._prefill = draft.run, prefill.run
        shardings = jax.tree.unflatten(jax.tree.structure(resident), draft.shardings[: len(jax.tree.leaves(resident))])
        self._params = jax.device_put(params, shardings[0])
        self._places, self._empty = shardings[0], jax.jit(empty, out_shardings=shardings[1])
        self._cache: Any = self._empty()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """See `Proposer`. The draft tokens are the model's own greedy continuation, once a sequence is prefilled."""
        known = [_Known(each.slot, np.asarray(each.tokens).tolist(), each.max_tokens) for each in requests]
        short = [each for each in known if len(each.tokens) <= self._length]
        for slot, tokens, _ in short:
            del self._cached[slot][_num_common(self._cached[slot], tokens) :]
        self._prefill_chunk([each for each in short if self._num_to_prefill(each) > 0])
        ready = [each for each in short if self._num_to_prefill(each) <= 0]
        drafts = self._draft_tokens(ready) if ready else {}
        return [drafts.get(each.slot, ()) for each in requests]

    def sleep(self) -> None:
        """Move the weights to the host, and free the cache. `wake_up` comes before the next call."""
        self._params, self._cache = jax.tree.map(np.asarray, self._params), None

    def wake_up(self) -> None:
        """Move the weights back, and allocate an empty cache."""
        self._params, self._cache = jax.device_put(self._params, self._places), self._empty()
        for cached in self._cached:
            cached.clear()

    def warm_up(self) -> float:
        """Compile both programs, and return the seconds of a call of the draft program."""
        rows = len(self._cached)
        slots = np.full(self._chunk[0], rows, np.int32)
        self._cache = self._prefill(self._params, self._cache, slots, *_padding(*self._chunk))
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            self._cache, tokens = self._draft(self._params, self._cache, *_padding(rows, 2))
            jax.block_until_ready(tokens)
            seconds = time.perf_counter() - started
        return seconds

    @property
    def held_bytes(self) -> int:
        """The bytes of weights and cache on one device."""
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves((self._params, self._cache))
        )

    def _num_to_prefill(self, request: _Known) -> int:
        """The number of tokens to prefill before the last two."""
        return len(request.tokens) - 2 - len(self._cached[request.slot])

    def _prefill_chunk(self, requests: Sequence[_Known]) -> None:
        """Prefill one chunk of each of the first requests; the scheduler lists the oldest first."""
        if not requests:
            return
        rows, length = self._chunk
        slots = np.full(rows, len(self._cached), np.int32)  # padding: the slot is out of range, so it is not written
        tokens, positions = _padding(rows, length)
        for row, each in enumerate(requests[:rows]):
            cached = self._cached[each.slot]
            new = each.tokens[len(cached) : len(each.tokens) - 1][:length]
            slots[row] = each.slot
            tokens[row, : len(new)] = new
            positions[row, : len(new)] = np.arange(len(cached), len(cached) + len(new))
            cached += new
        self._cache = self._prefill(self._params, self._cache, slots, tokens, positions)

    def _draft_tokens(self, ready: Sequence[_Known]) -> dict[int, list[int]]:
        """The draft tokens of prefilled sequences, by slot."""
        tokens, positions = _padding(len(self._cached), 2)
        for slot, known, _ in ready:
            last = known[-2:]
            tokens[slot, -len(last) :] = last
            positions[slot, -len(last) :] = np.arange(len(known) - len(last), len(known))
        self._cache, drafted = self._draft(self._params, self._cache, tokens, positions)
        drafts: dict[int, list[int]] = {}
        rows = np.asarray(drafted)[[each.slot for each in ready]].tolist()
        for (slot, known, max_tokens), draft in zip(ready, rows, strict=True):
            drafts[slot] = draft[: min(max_tokens, self._length - len(known) + 1)]
            self._cached[slot] = [*known, *draft[:-1]][: self._length]
        return drafts


def _padding(rows: int, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens and positions of padding rows."""
    return np.zeros((rows, length), np.int32), np.full((rows, length), -1, np.int32)


def _num_common(tokens: list[int], others: list[int]) -> int:
    """The length of the common prefix, by bisection: the lists are long, differ near the end, and slices compare fast."""
    low, high = 0, min(len(tokens), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _prefill_of(model: Decoder) -> Callable[..., ContiguousCache]:
    def prefill(
        params: Any, cache: ContiguousCache, slots: jax.Array, tokens: jax.Array, positions: jax.Array
    ) -> ContiguousCache:
        """Write tokens `[rows, length]` of `slots` `[rows]` to the cache."""
        rows = jax.tree.map(lambda array: array.at[slots].get(mode="clip"), cache)
        applied: Any = model.apply(params, tokens, positions, AttendContiguous(positions), rows)
        return jax.tree.map(lambda array, row: array.at[slots].set(row, mode="drop"), cache, applied[1])

    return prefill


def _draft_of(model: Decoder, num_proposals: int) -> Callable[..., tuple[ContiguousCache, jax.Array]]:
    def next_tokens(params: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        """The most probable next token of each slot, `[slots]`, and the cache."""
        last = jnp.full((tokens.shape[0], 1), tokens.shape[1] - 1)
        applied: Any = model.apply(params, tokens, positions, AttendContiguous(positions), cache, last)
        return jnp.argmax(applied[0][:, 0], -1).astype(jnp.int32), applied[1]

    def draft(
        params: Any, cache: ContiguousCache, tokens: jax.Array, positions: jax.Array
    ) -> tuple[ContiguousCache, jax.Array]:
        """Write tokens `[slots, 2]` to the cache, and return it with the draft tokens, `[slots, proposals]`."""

        def iterate(carry: Any, number: jax.Array) -> Any:
            cache, token = carry
            next_positions = jnp.where(positions[:, 1:] < 0, -1, positions[:, 1:] + number)
            new, cache = next_tokens(params, cache, token[:, None], next_positions)
            return (cache, new), new

        first, cache = next_tokens(params, cache, tokens, positions)
        (cache, _), rest = jax.lax.scan(iterate, (cache, first), jnp.arange(1, num_proposals, dtype=jnp.int32))
        return cache, jnp.concatenate([first[None], rest]).T

    return draft
