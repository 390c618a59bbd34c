"""One iteration as a function of arrays: what is compiled, once for each `Shape`.

In: a decoder, a `Shape`, and a backend of attention. Out: `step_of`: a pure function of weights, what stays on
the devices between iterations, and what the host says of this one; and the shapes of its arguments. What the host
sends are numbers of static shapes, whatever was asked for: no request makes a new program.

In a mixed iteration the slots' tokens and the chunks' are one row of tokens, so that weights are read once for both;
only attention takes them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from autopar.inference.kernels.paged_attention import REFERENCE, attend_paged
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Shape
from autopar.inference.step.host_inputs import Rows
from autopar.inference.step.sampling import Sampled, sample
from autopar.inference.step.verify_draft import verify


class Resident(NamedTuple):
    """What stays on the devices.

    Args:
        pages: of each layer.
        last: int32 `[slots]`, the token that each generated last.
    """

    pages: tuple[KVPages, ...]
    last: jax.Array


class Out(NamedTuple):
    """What came out, of all rows: first the slots, then the chunks.

    Args:
        tokens: int32 `[rows, steps]`; of proposals `[rows, width]`, of which the first `num` are new.
        num: int32 `[rows]`, how many count. logprobs: f32, of these tokens.
        is_sound: bool `[rows]`; False where logits were no numbers. is_cut: bool `[rows]`, as in `Sampled`.
        best_tokens, best_logprobs: `[rows, steps, candidates]`, the most probable tokens; None of proposals.
    """

    tokens: jax.Array
    num: jax.Array
    logprobs: jax.Array
    is_sound: jax.Array
    is_cut: jax.Array
    best_tokens: jax.Array | None = None
    best_logprobs: jax.Array | None = None


Step = Callable[..., tuple[Resident, Out]]


def step_of(model: Decoder, shape: Shape, attention: str = REFERENCE) -> Step:
    """The function `(params, resident, slots[, chunks]) -> (resident, out)` of a shape; rows are packed.

    Args:
        attention: a backend of `paged_attention`.
    """

    def logits_of(params: Any, pages: Any, parts: list[Rows], tokens: list[jax.Array], only: Any) -> Any:
        """Of the tokens of several parts, which are one row to the decoder."""
        positions = [_positions(part) for part in parts]
        attend_parts = _AttendParts(attention, [part.tables for part in parts], positions)
        flat, at = (jnp.concatenate([each.reshape(1, -1) for each in arrays], 1) for arrays in (tokens, positions))
        applied: Any = model.apply(params, flat, jnp.maximum(at, 0), attend_parts, pages, only)
        logits, pages = applied
        return logits[0], pages

    def plain(params: Any, resident: Resident, *parts: Rows) -> tuple[Resident, Out]:
        """A token of each slot, and chunks of prompts beside them."""
        slots = parts[0]
        tokens = [_known(slots.tokens, resident.last), *(part.tokens for part in parts[1:])]
        ends, start = [], 0
        for part in parts:
            rows, width = part.tokens.shape
            ends.append(start + jnp.arange(rows) * width + jnp.maximum(part.num_tokens - 1, 0))
            start += rows * width
        logits, pages = logits_of(params, resident.pages, list(parts), tokens, jnp.concatenate(ends)[None])
        sampling = jax.tree.map(lambda *each: jnp.concatenate(each), *(part.sampling for part in parts))
        after = jnp.concatenate([part.start + part.num_tokens for part in parts])
        found = sample(logits, sampling, after)
        owners = jnp.concatenate([part.slots for part in parts])
        last = resident.last.at[owners].set(found.tokens, mode="drop")
        return Resident(pages, last), _out(found)

    def many(params: Any, resident: Resident, slots: Rows) -> tuple[Resident, Out]:
        """Several tokens of each slot, one after the other."""
        is_there = (slots.num_tokens > 0).astype(jnp.int32)

        def one(carry: tuple[Resident, jax.Array], number: jax.Array) -> Any:
            resident, tokens = carry
            now = slots._replace(tokens=tokens, start=slots.start + number * is_there)
            resident, out = plain(params, resident, now)
            return (resident, jnp.full_like(tokens, -1)), out

        (resident, _), outs = jax.lax.scan(one, (resident, slots.tokens), jnp.arange(shape.steps, dtype=jnp.int32))
        return resident, Out(
            tokens=outs.tokens[..., 0].T,
            num=outs.num.sum(0),
            logprobs=outs.logprobs[..., 0].T,
            is_sound=outs.is_sound.all(0),
            is_cut=outs.is_cut.any(0),
            best_tokens=outs.best_tokens[:, :, 0].swapaxes(0, 1),
            best_logprobs=outs.best_logprobs[:, :, 0].swapaxes(0, 1),
        )

    def verified(params: Any, resident: Resident, slots: Rows) -> tuple[Resident, Out]:
        """Proposals held against what the model says."""
        tokens = _known(slots.tokens, resident.last)
        logits, pages = logits_of(params, resident.pages, [slots], [tokens], None)
        logits = logits.reshape(*tokens.shape, -1)
        num_proposed = jnp.maximum(slots.num_tokens - 1, 0)
        found = verify(logits, tokens[:, 1:], num_proposed, slots.sampling, slots.start + 1)
        newest = jnp.take_along_axis(found.tokens, found.num_accepted[:, None], 1)[:, 0]
        last = resident.last.at[slots.slots].set(newest, mode="drop")
        is_cut = jnp.zeros(tokens.shape[0], bool)
        return Resident(pages, last), Out(found.tokens, found.num_accepted + 1, found.logprobs, found.is_sound, is_cut)

    def unpacked(function: Callable[..., Any]) -> Step:
        def decode(params: Any, resident: Resident, slots: jax.Array) -> tuple[Resident, Out]:
            return function(params, resident, Rows.unpacked(slots, shape.width))

        def mixed(params: Any, resident: Resident, slots: jax.Array, chunks: jax.Array) -> tuple[Resident, Out]:
            return function(params, resident, Rows.unpacked(slots, 1), Rows.unpacked(chunks, shape.length))

        chosen = mixed if shape.rows else decode
        chosen.__qualname__ = f"iteration of {shape}"  # by which its plan is known
        return chosen

    if shape.width > 1:
        return unpacked(verified)
    return unpacked(many if shape.steps > 1 else plain)


def copy_pages(resident: Resident, copies: jax.Array) -> Resident:
    """Contents of pages to others.

    Args:
        copies: int32 `[2, num]`, sources and targets, padded with the scratch page.
    """
    return resident._replace(pages=tuple(kv_pages.copy(pages, *copies) for pages in resident.pages))


class _AttendParts:
    """`Attend` of rows that are one to the decoder, each part by its own tables."""

    def __init__(self, attention: str, tables: list[jax.Array], positions: list[jax.Array]) -> None:
        self.attention, self.tables, self.positions = attention, tables, positions

    def __call__(
        self, cache: tuple[KVPages, ...], layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, tuple[KVPages, ...]]:
        """As `Attend` says; `cache` is of every layer.

        All parts are written before any is read: what is read between two writes, XLA copies, and that is all pages.
        """
        pages, attended = cache[layer], []
        for part in zip(self._parts(keys), self._parts(values), self.tables, self.positions, strict=True):
            pages = kv_pages.write(pages, *part)
        for part, tables, positions in zip(self._parts(queries), self.tables, self.positions, strict=True):
            found = attend_paged(self.attention, part, pages, tables, positions)
            attended.append(found.reshape(1, positions.size, *found.shape[2:]))
        return jnp.concatenate(attended, 1), (*cache[:layer], pages, *cache[layer + 1 :])

    def _parts(self, array: jax.Array) -> list[jax.Array]:
        """One row of tokens, as the rows of each part."""
        ends = list(itertools.accumulate(positions.size for positions in self.positions))
        pieces = jnp.split(array[0], ends[:-1])
        return [
            piece.reshape(*positions.shape, *array.shape[2:])
            for piece, positions in zip(pieces, self.positions, strict=True)
        ]


def _positions(rows: Rows) -> jax.Array:
    """int32 `[rows, width]`, negative where there is no token."""
    ranks = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    return jnp.where(ranks < rows.num_tokens[:, None], rows.start[:, None] + ranks, -1)


def _known(tokens: jax.Array, last: jax.Array) -> jax.Array:
    """Tokens of slots, with what each generated last where it says -1."""
    first = jnp.where(tokens[:, :1] < 0, last[:, None], tokens[:, :1])
    return jnp.concatenate([first, tokens[:, 1:]], 1)


def _out(found: Sampled) -> Out:
    return Out(
        found.tokens[:, None],
        jnp.ones_like(found.tokens),
        found.logprobs[:, None],
        found.is_sound,
        found.is_cut,
        found.best_tokens[:, None],
        found.best_logprobs[:, None],
    )


# -- shapes --------------------------------------------------------------------------------------


def resident_shapes(config: DecoderConfig, num_slots: int, num_pages: int, page_size: int, dtype: Any) -> Resident:
    """Of what stays, `num_pages` without that for waste."""

    def empty() -> Resident:
        one = (num_pages, page_size, config.num_kv_heads, config.head_dim, dtype)
        pages = tuple(kv_pages.empty_pages(*one) for _ in range(config.num_layers))
        return Resident(pages, jnp.zeros(num_slots, jnp.int32))

    return jax.eval_shape(empty)
