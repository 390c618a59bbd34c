"""A small model guesses what a large one will say.

In: a decoder with the same vocabulary, and what is asked of a `Proposer`. Out: `DraftModel`, which is one. Its cache is
contiguous, a row for each slot, and of each row the host remembers which tokens are in it. What a row has in common with
the sequence that it is asked for is used again, whatever lies between: proposals that were rejected, preemption, another
request in the slot. The rest is computed by one of two programs of static shapes:

- catch up: a chunk of tokens of a few slots;
- guess: the last two tokens of each slot, then token by token what is most probable. Two, for where all proposals were
  accepted the last of them has not been computed, but lies before the token that came after it.

A guess is proposed with certainty, so `speculation.verify` needs no probabilities of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.errors import InferenceError
from autopar.inference.model.attention import AttendContiguous, ContiguousCache
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.speculation_policy import DraftRequest


class Prepared(Protocol):
    """A program, and where each array of its arguments lies."""

    @property
    def run(self) -> Callable[..., Any]: ...

    @property
    def shardings(self) -> Sequence[jax.sharding.Sharding]: ...


#: A function whose argument `cache` comes back first and is used up, and the shapes of its arguments: to its program.
Prepare = Callable[[Callable[..., Any], tuple[Any, ...]], Prepared]


@dataclass(frozen=True, slots=True)
class Jitted:
    """On the first device."""

    run: Callable[..., Any]
    shardings: Sequence[jax.sharding.Sharding]

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Jitted:
        """Nothing is compiled yet."""
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return cls(jax.jit(function, donate_argnames="cache"), [device] * len(jax.tree.leaves(arguments)))


class DraftModel:
    """A `Proposer`.

    A call runs each program once at most. So a long prompt, for which chunks of several calls are needed, keeps nobody
    waiting: until then its sequence has no proposals.

    Args:
        model: the small one. params: its weights.
        num_slots, max_length, num_proposals: as in `Options`; of a sequence no more than the model was made for is computed,
            and what is longer has no proposals.
        vocab_size: of the large one.
        chunk: rows and length of what is caught up with at once.
        prepare: plans or jits a program. The caches of both must lie alike; weights that lie otherwise are moved.

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
                f"the draft model has a vocabulary of {config.vocab_size} tokens, but the model that it is to guess for "
                f"one of {vocab_size}: take a draft with the same tokenizer, or propose by n-grams"
            )
        self._chunk = chunk
        self._length = min(max_length, config.max_positions)
        self._held: list[list[int]] = [[] for _ in range(num_slots)]  # tokens of each row of the cache

        def empty() -> ContiguousCache:
            return ContiguousCache.empty(config, num_slots, self._length, jax.tree.leaves(params)[0].dtype)

        resident = jax.eval_shape(lambda: (params, empty()))
        slots, rows, pairs = (jax.ShapeDtypeStruct(n, np.int32) for n in (chunk[:1], chunk, (num_slots, 2)))
        guess = prepare(_guess_of(model, num_proposals), (*resident, pairs, pairs))
        catch_up = prepare(_catch_up_of(model), (*resident, slots, rows, rows))
        self._guess, self._catch_up = guess.run, catch_up.run
        lie = jax.tree.unflatten(jax.tree.structure(resident), guess.shardings[: len(jax.tree.leaves(resident))])
        self._params, self._cache = jax.device_put(params, lie[0]), jax.jit(empty, out_shardings=lie[1])()

    def propose(self, asked: Sequence[DraftRequest]) -> list[Sequence[int]]:
        """As `Proposer` says; what the model itself would say next, where it has caught up."""
        short = [each for each in asked if len(each.tokens) <= self._length]
        for slot, tokens, _ in short:
            del self._held[slot][_num_common(self._held[slot], tokens) :]
        self._catch_up_with([each for each in short if self._num_behind(each) > 0])
        ready = [each for each in short if self._num_behind(each) <= 0]
        guesses = self._guesses(ready) if ready else {}
        return [guesses.get(each.slot, ()) for each in asked]

    def warm_up(self) -> float:
        """Compile both programs; seconds of a guess."""
        rows = len(self._held)
        slots = np.full(self._chunk[0], rows, np.int32)
        self._cache = self._catch_up(self._params, self._cache, slots, *_padding(*self._chunk))
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            self._cache, found = self._guess(self._params, self._cache, *_padding(rows, 2))
            jax.block_until_ready(found)
            seconds = time.perf_counter() - started
        return seconds

    @property
    def held_bytes(self) -> int:
        """On the device that holds most."""
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves((self._params, self._cache))
        )

    def _num_behind(self, asked: DraftRequest) -> int:
        """Tokens to be computed before the last two."""
        return len(asked.tokens) - 2 - len(self._held[asked.slot])

    def _catch_up_with(self, behind: Sequence[DraftRequest]) -> None:
        """A chunk of each, as far as there are rows: the oldest first, as they are asked for."""
        if not behind:
            return
        rows, length = self._chunk
        slots = np.full(rows, len(self._held), np.int32)  # rows of nobody: not there, so not written
        tokens, positions = _padding(rows, length)
        for row, each in enumerate(behind[:rows]):
            held = self._held[each.slot]
            new = each.tokens[len(held) : len(each.tokens) - 1][:length]
            slots[row] = each.slot
            tokens[row, : len(new)] = new
            positions[row, : len(new)] = np.arange(len(held), len(held) + len(new))
            held += new
        self._cache = self._catch_up(self._params, self._cache, slots, tokens, positions)

    def _guesses(self, ready: Sequence[DraftRequest]) -> dict[int, list[int]]:
        """By slot."""
        tokens, positions = _padding(len(self._held), 2)
        for slot, known, _ in ready:
            last = known[-2:]
            tokens[slot, -len(last) :] = last
            positions[slot, -len(last) :] = np.arange(len(known) - len(last), len(known))
        self._cache, found = self._guess(self._params, self._cache, tokens, positions)
        guesses: dict[int, list[int]] = {}
        for (slot, known, most), guess in zip(
            ready, np.asarray(found)[[each.slot for each in ready]].tolist(), strict=True
        ):
            guesses[slot] = guess[: min(most, self._length - len(known) + 1)]
            self._held[slot] = [*known, *guess[:-1]][: self._length]
        return guesses


def _padding(rows: int, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens, and positions that say that there is none."""
    return np.zeros((rows, length), np.int32), np.full((rows, length), -1, np.int32)


def _num_common(tokens: list[int], others: list[int]) -> int:
    """With which both begin; by halves, each compared at once, for they are long and differ at the end."""
    low, high = 0, min(len(tokens), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _catch_up_of(model: Decoder) -> Callable[..., ContiguousCache]:
    def catch_up(
        params: Any, cache: ContiguousCache, slots: jax.Array, tokens: jax.Array, positions: jax.Array
    ) -> ContiguousCache:
        """Tokens `[rows, length]` of `slots` `[rows]` to the cache."""
        rows = jax.tree.map(lambda array: array.at[slots].get(mode="clip"), cache)
        applied: Any = model.apply(params, tokens, positions, AttendContiguous(positions), rows)
        return jax.tree.map(lambda array, row: array.at[slots].set(row, mode="drop"), cache, applied[1])

    return catch_up


def _guess_of(model: Decoder, num_proposals: int) -> Callable[..., tuple[ContiguousCache, jax.Array]]:
    def following(params: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
        """Tokens `[slots]` that follow the last of those given, and the cache."""
        last = jnp.full((tokens.shape[0], 1), tokens.shape[1] - 1)
        applied: Any = model.apply(params, tokens, positions, AttendContiguous(positions), cache, last)
        return jnp.argmax(applied[0][:, 0], -1).astype(jnp.int32), applied[1]

    def guess(
        params: Any, cache: ContiguousCache, tokens: jax.Array, positions: jax.Array
    ) -> tuple[ContiguousCache, jax.Array]:
        """Tokens `[slots, 2]` to the cache; with it comes back what follows them, `[slots, proposals]`."""

        def one(carry: Any, number: jax.Array) -> Any:
            cache, token = carry
            at = jnp.where(positions[:, 1:] < 0, -1, positions[:, 1:] + number)
            new, cache = following(params, cache, token[:, None], at)
            return (cache, new), new

        first, cache = following(params, cache, tokens, positions)
        (cache, _), rest = jax.lax.scan(one, (cache, first), jnp.arange(1, num_proposals, dtype=jnp.int32))
        return cache, jnp.concatenate([first[None], rest]).T

    return guess
