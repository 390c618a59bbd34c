"""Build a decode step of two programs: one computes the logits, the other samples from them.

In: a decoder. Out: the functions `forward` and `sample_logits`. The mask of tokens is needed by the second only. So the first runs before
the token of the step before is known to the host, and masks are computed meanwhile. Together they do what `step_of(Shape())` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autopar.inference.model.decoder import Decoder
from autopar.inference.step.host_inputs import Rows
from autopar.inference.step.penalties import adjusted, counted
from autopar.inference.step.sampling import only_allowed, sample
from autopar.inference.step.step import AttendParts, Out, Resident, out_of, positions_of, with_last


def forward_of(model: Decoder, attention: str) -> Callable[..., Resident]:
    """Return the function `(params, resident, slots) -> resident` that computes the logits of the next token of each slot."""

    def forward(params: Any, resident: Resident, slots: jax.Array) -> Resident:
        rows = Rows.unpacked(slots, 1)
        positions = positions_of(rows)
        attend = AttendParts(attention, [rows.tables], [positions])
        tokens = with_last(rows.tokens, resident.last)
        applied: Any = model.apply(
            params, tokens.reshape(1, -1), jnp.maximum(positions, 0).reshape(1, -1), attend, resident.pages
        )
        return resident._replace(pages=applied[1], logits=applied[0][0])

    return forward


def sample_logits(resident: Resident, allowed: jax.Array, slots: jax.Array) -> tuple[Resident, Out]:
    """Sample the next token of each slot from its logits."""
    assert resident.logits is not None, "the engine samples apart"
    rows = Rows.unpacked(slots, 1)
    logits = adjusted(resident.logits, resident.state, rows.slots[:0], rows.sampling)
    sampled = sample(only_allowed(logits, allowed), rows.sampling, rows.start + rows.num_tokens)
    last = resident.last.at[rows.slots].set(sampled.tokens, mode="drop")
    state = counted(resident.state, rows.slots, sampled.tokens)
    return resident._replace(last=last, state=state), out_of(sampled)
