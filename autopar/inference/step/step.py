"""Build the function of one iteration, to be compiled once for each `Shape`.

In: a decoder, a `Shape`, an attention backend. Out: `step_of`: a pure function of the weights, the state that stays on the
devices between iterations, and the host's inputs of this iteration. All inputs have static shapes, so no request causes
a new compilation.

In a mixed iteration, the tokens of decoding slots and of prefill chunks form one row of tokens. So the weights are read once
for both, and only attention treats them separately.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from autopar.inference.kernels.paged_attention import REFERENCE, attend_paged
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.kv_cache.scores import PLAIN, Scores
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Shape
from autopar.inference.step.host_inputs import Rows
from autopar.inference.step.penalties import adjusted, adjusted_after_drafts, counted, started
from autopar.inference.step.prompt_logprobs import PromptLogprobs, prompt_logprobs
from autopar.inference.step.sampling import Sampled, only_allowed, sample
from autopar.inference.step.sampling_params import TokenCounts
from autopar.inference.step.verify_draft import verify


class Resident(NamedTuple):
    """The state that stays on the devices between iterations.

    Args:
        pages: the KV cache pages of each layer.
        last: int32 `[slots]`, the last token of each slot.
        state: the counts of tokens and the biases of each slot. Counts are those of the last request that asked for them.
        logits: f32 `[slots, vocabulary]`, of the latest decode step; None if they are not sampled from apart.
    """

    pages: tuple[KVPages, ...]
    last: jax.Array
    state: TokenCounts
    logits: jax.Array | None = None


class Out(NamedTuple):
    """The results of all rows, first the slots, then the chunks.

    Args:
        tokens: int32 `[rows, steps]`; after verification `[rows, width]`, of which the first `num` are new.
        num: int32 `[rows]`, the number of valid tokens.
        logprobs: f32, the logprobs of the tokens.
        is_sound: bool `[rows]`; False if logits were NaN or infinite.
        best_tokens, best_logprobs: `[rows, steps, candidates]`, the most probable tokens; None after verification.
        states: f32 `[rows, hidden]`, the last hidden states that the row's first logits come from.
        prompt: of the chunks; None without chunks.
    """

    tokens: jax.Array
    num: jax.Array
    logprobs: jax.Array
    is_sound: jax.Array
    best_tokens: jax.Array | None = None
    best_logprobs: jax.Array | None = None
    states: jax.Array | None = None
    prompt: PromptLogprobs | None = None


Step = Callable[..., tuple[Resident, Out]]


def step_of(model: Decoder, shape: Shape, attention: str = REFERENCE) -> Step:
    """Return the function `(params, resident, allowed, slots[, chunks]) -> (resident, out)` of a shape, on packed rows.

    `allowed` has a bit for each token, as in `only_allowed`, for all rows: first the slots, then the chunks. If draft tokens are
    verified, each slot has several masks: for the next token, and after each draft token.

    Args:
        shape: the static sizes of the iteration.
        attention: a backend of `paged_attention`.
    """

    def logits_of(params: Any, states: jax.Array) -> Any:
        return model.apply(params, states, method="logits")

    def states_of(params: Any, pages: Any, parts: list[Rows], tokens: list[jax.Array], only: Any) -> Any:
        """The last hidden states of several parts, whose tokens are one row of the decoder's input."""
        positions = [positions_of(part) for part in parts]
        attend_parts = AttendParts(attention, [part.tables for part in parts], positions)
        flat, at = (jnp.concatenate([each.reshape(1, -1) for each in arrays], 1) for arrays in (tokens, positions))
        applied: Any = model.apply(params, flat, jnp.maximum(at, 0), attend_parts, pages, only, method="states")
        states, pages = applied
        return states[0], pages

    def single_step(params: Any, resident: Resident, allowed: jax.Array, *parts: Rows) -> tuple[Resident, Out]:
        """One decode step of each slot, and prefill chunks if there are any."""
        slots = parts[0]
        tokens = [with_last(slots.tokens, resident.last), *(part.tokens for part in parts[1:])]
        ends, start = [], 0
        for part in parts:
            rows, width = part.tokens.shape
            ends.append(start + jnp.arange(rows) * width + jnp.maximum(part.num_tokens - 1, 0))
            start += rows * width
        chunks = parts[1:]
        only = jnp.concatenate(ends)
        states, pages = states_of(params, resident.pages, list(parts), tokens, None if chunks else only[None])
        prompt = None
        if chunks:
            prompt = prompt_logprobs(functools.partial(logits_of, params), states[slots.tokens.size :], chunks[0])
            states = states[only]
        logits = logits_of(params, states)
        if resident.logits is not None and not chunks:
            resident = resident._replace(logits=logits)
        sampling = jax.tree.map(lambda *each: jnp.concatenate(each), *(part.sampling for part in parts))
        new_positions = jnp.concatenate([part.start + part.num_tokens for part in parts])
        owners = jnp.concatenate([part.slots for part in parts])
        logits = adjusted(logits, resident.state, owners[slots.slots.size :], sampling)
        sampled = sample(only_allowed(logits, allowed), sampling, new_positions)
        last = resident.last.at[owners].set(sampled.tokens, mode="drop")
        out = out_of(sampled)._replace(states=states.astype(jnp.float32), prompt=prompt)
        state = counted(resident.state, owners, sampled.tokens)
        return resident._replace(pages=pages, last=last, state=state), out

    def multi_step(params: Any, resident: Resident, allowed: jax.Array, slots: Rows) -> tuple[Resident, Out]:
        """Several decode steps of each slot: as many as it has `num_tokens`. Then the slot is idle."""

        def iterate(carry: tuple[Resident, jax.Array], number: jax.Array) -> Any:
            resident, tokens = carry
            is_active = number < slots.num_tokens
            start = jnp.where(is_active, slots.start + number, 0)
            rows = slots._replace(tokens=tokens, start=start, num_tokens=is_active.astype(jnp.int32))
            resident, out = single_step(params, resident, allowed, rows)
            out = out._replace(is_sound=out.is_sound | ~is_active)
            return (resident, jnp.full_like(tokens, -1)), out

        steps = jnp.arange(shape.steps, dtype=jnp.int32)
        (resident, _), outs = jax.lax.scan(iterate, (resident, slots.tokens), steps)
        return resident, Out(
            tokens=outs.tokens[..., 0].T,
            num=outs.num.sum(0),
            logprobs=outs.logprobs[..., 0].T,
            is_sound=outs.is_sound.all(0),
            best_tokens=outs.best_tokens[:, :, 0].swapaxes(0, 1),
            best_logprobs=outs.best_logprobs[:, :, 0].swapaxes(0, 1),
            states=outs.states[0],
        )

    def verify_drafts(params: Any, resident: Resident, allowed: jax.Array, slots: Rows) -> tuple[Resident, Out]:
        """One step that verifies the draft tokens of each slot."""
        tokens = with_last(slots.tokens, resident.last)
        states, pages = states_of(params, resident.pages, [slots], [tokens], None)
        states = states.reshape(*tokens.shape, -1)
        logits = adjusted_after_drafts(logits_of(params, states), resident.state, tokens[:, 1:], slots.sampling)
        logits = only_allowed(logits, allowed)
        num_draft = jnp.maximum(slots.num_tokens - 1, 0)
        result = verify(logits, tokens[:, 1:], num_draft, slots.sampling, slots.start + 1)
        newest = jnp.take_along_axis(result.tokens, result.num_accepted[:, None], 1)[:, 0]
        last = resident.last.at[slots.slots].set(newest, mode="drop")
        out = Out(result.tokens, result.num_accepted + 1, result.logprobs, result.is_sound)
        out = out._replace(states=states[:, 0].astype(jnp.float32))
        is_new = jnp.arange(tokens.shape[1]) <= result.num_accepted[:, None]
        owners = jnp.where(is_new, slots.slots[:, None], last.size)
        state = counted(resident.state, owners.reshape(-1), result.tokens.reshape(-1))
        return resident._replace(pages=pages, last=last, state=state), out

    def unpacked(function: Callable[..., Any]) -> Step:
        def decode(params: Any, resident: Resident, allowed: jax.Array, slots: jax.Array) -> tuple[Resident, Out]:
            return function(params, resident, allowed, Rows.unpacked(slots, shape.width))

        def mixed(params: Any, resident: Resident, allowed: Any, slots: Any, chunks: Any) -> tuple[Resident, Out]:
            return function(params, resident, allowed, Rows.unpacked(slots, 1), Rows.unpacked(chunks, shape.length))

        chosen = mixed if shape.rows else decode
        chosen.__qualname__ = f"iteration of {shape}"  # names the plan
        return chosen

    if shape.width > 1:
        return unpacked(verify_drafts)
    return unpacked(multi_step if shape.steps > 1 else single_step)


def copy_pages(resident: Resident, copies: jax.Array) -> Resident:
    """Copy pages to other pages, in all layers.

    Args:
        copies: int32 `[2, num]`, sources and targets, padded with the scratch page.
    """
    return resident._replace(pages=tuple(kv_pages.copy(pages, *copies) for pages in resident.pages))


def copy_rows_of(num_layers: int) -> Callable[..., Resident]:
    """The function that copies pages whose layers are rows of one array."""

    def copy_rows(resident: Resident, copies: jax.Array) -> Resident:
        rows = copies[:, :, None] + jnp.arange(num_layers, dtype=copies.dtype)
        return copy_pages(resident, rows.reshape(2, -1))

    return copy_rows


def start_slot(resident: Resident, slot: jax.Array, row: TokenCounts) -> Resident:
    """Set the counts and the biases of a slot, for a request that starts there.

    Args:
        slot: int32 `[1]`. row: `[vocabulary]` each.
    """
    return resident._replace(state=started(resident.state, slot, row))


class AttendParts:
    """`Attend` for several parts that form one row of the decoder's input, each with its own page tables."""

    def __init__(self, attention: str, tables: list[jax.Array], positions: list[jax.Array]) -> None:
        self.attention, self.tables, self.positions = attention, tables, positions

    def __call__(
        self,
        cache: tuple[KVPages, ...],
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        scores: Scores = PLAIN,
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """See `Attend`; `cache` has the pages of every layer.

        All parts are written before any is read: a read between two writes makes XLA copy all pages. If the pages of all layers
        are in one array, that of a layer is as many rows further (`PageRows`).
        """
        at = layer if len(cache) > 1 else 0
        pages, attended = cache[at], []
        all_tables = [tables + (layer - at) for tables in self.tables]
        for part in zip(self._parts(keys), self._parts(values), all_tables, self.positions, strict=True):
            pages = kv_pages.write(pages, *part)
        for part, tables, positions in zip(self._parts(queries), all_tables, self.positions, strict=True):
            outputs = attend_paged(self.attention, part, pages, tables, positions, scores)
            attended.append(outputs.reshape(1, positions.size, *outputs.shape[2:]))
        return jnp.concatenate(attended, 1), (*cache[:at], pages, *cache[at + 1 :])

    def _parts(self, array: jax.Array) -> list[jax.Array]:
        """Split one row of tokens into the rows of each part."""
        ends = list(itertools.accumulate(positions.size for positions in self.positions))
        pieces = jnp.split(array[0], ends[:-1])
        return [
            piece.reshape(*positions.shape, *array.shape[2:])
            for piece, positions in zip(pieces, self.positions, strict=True)
        ]


def positions_of(rows: Rows) -> jax.Array:
    """The positions of tokens, int32 `[rows, width]`; -1 for padding."""
    ranks = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    return jnp.where(ranks < rows.num_tokens[:, None], rows.start[:, None] + ranks, -1)


def with_last(tokens: jax.Array, last: jax.Array) -> jax.Array:
    """The tokens of slots, with -1 replaced by the slot's last token."""
    first = jnp.where(tokens[:, :1] < 0, last[:, None], tokens[:, :1])
    return jnp.concatenate([first, tokens[:, 1:]], 1)


def out_of(sampled: Sampled) -> Out:
    """The results of a step."""
    return Out(
        sampled.tokens[:, None],
        jnp.ones_like(sampled.tokens),
        sampled.logprobs[:, None],
        sampled.is_sound,
        sampled.best_tokens[:, None],
        sampled.best_logprobs[:, None],
    )


# -- shapes --------------------------------------------------------------------------------------


def resident_shapes(
    config: DecoderConfig,
    num_slots: int,
    num_pages: int,
    page_size: int,
    dtype: Any,
    *,
    has_logits: bool,
    has_rows: bool = False,
) -> Resident:
    """The shapes and dtypes of `Resident`, with `num_pages` pages and the scratch page.

    Args:
        has_rows: whether all layers are rows of one array. Then `num_pages` is the number of the scratch page.
    """

    def empty() -> Resident:
        more, num = (config.num_layers - 1, 1) if has_rows else (0, config.num_layers)
        one = (num_pages + more, page_size, config.num_kv_heads, config.head_dim, dtype)
        pages = tuple(kv_pages.empty_pages(*one) for _ in range(num))
        logits = jnp.zeros((num_slots, config.vocab_size), jnp.float32) if has_logits else None
        state = TokenCounts.empty(num_slots, config.vocab_size)
        return Resident(pages, jnp.zeros(num_slots, jnp.int32), state, logits)

    return jax.eval_shape(empty)
