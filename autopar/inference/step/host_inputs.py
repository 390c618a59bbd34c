"""Pack an iteration's host inputs into one array, so that one transfer copies them to the devices.

In: `Rows` of NumPy arrays on the host. Out: `Rows` of `jax.Array`s inside the program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.inference.step.sampling import SamplingParams

_NUM_FIELDS = 7  # per row, without its tokens and its pages


class Rows(NamedTuple):
    """Rows of tokens: one for each slot, or one for each prefill chunk.

    Args:
        tokens: int32 `[rows, width]`. In a slot's row, -1 stands for the last token of the slot, which is on the device.
        start: int32 `[rows]`, the position of the first token.
        num_tokens: int32 `[rows]`, the number of valid tokens, or of decode steps if there are several; 0 in an idle row.
        slots: int32 `[rows]`, the slot whose last token the row sets; the number of slots if it sets none.
        sampling: the sampling parameters of each row.
        tables: int32 `[rows, pages of a sequence]`, padded with the scratch page.
    """

    tokens: Any
    start: Any
    num_tokens: Any
    slots: Any
    sampling: SamplingParams
    tables: Any

    @classmethod
    def empty(cls, num: int, width: int, pages_of_sequence: int, scratch_page: int, no_slot: int) -> Rows:
        """Idle rows, on the host."""
        zeros = np.zeros(num, np.int32)
        return cls(
            tokens=np.zeros((num, width), np.int32),
            start=zeros.copy(),
            num_tokens=zeros.copy(),
            slots=np.full(num, no_slot, np.int32),
            sampling=SamplingParams(
                np.zeros(num, np.float32), zeros.copy(), np.ones(num, np.float32), np.zeros(num, np.uint32)
            ),
            tables=np.full((num, pages_of_sequence), scratch_page, np.int32),
        )

    @classmethod
    def views(cls, num: int, width: int, pages_of_sequence: int) -> tuple[NDArray[np.int32], Rows]:
        """A packed array of zeros, and the rows as views of it, on the host: what is written to a row is packed already."""
        packed = np.zeros((num, width + _NUM_FIELDS + pages_of_sequence), np.int32)
        start, num_tokens, slots, temperature, top_k, top_p, seed = (
            packed[:, width + field] for field in range(_NUM_FIELDS)
        )
        sampling = SamplingParams(temperature.view(np.float32), top_k, top_p.view(np.float32), seed.view(np.uint32))
        return packed, cls(packed[:, :width], start, num_tokens, slots, sampling, packed[:, width + _NUM_FIELDS :])

    def packed(self) -> NDArray[np.int32]:
        """The rows as one array, `[rows, width + fields + pages of a sequence]`."""
        sampling = [np.asarray(field).view(np.int32) for field in self.sampling]
        fields = np.stack([self.start, self.num_tokens, self.slots, *sampling], 1)
        return np.concatenate([self.tokens, fields, self.tables], 1, dtype=np.int32)

    @classmethod
    def unpacked(cls, packed: jax.Array, width: int) -> Rows:
        """The rows of a packed array, inside a program."""
        start, num_tokens, slots, temperature, top_k, top_p, seed = (
            packed[:, width + field] for field in range(_NUM_FIELDS)
        )
        sampling = SamplingParams(
            jax.lax.bitcast_convert_type(temperature, jnp.float32),
            top_k,
            jax.lax.bitcast_convert_type(top_p, jnp.float32),
            jax.lax.bitcast_convert_type(seed, jnp.uint32),
        )
        return cls(packed[:, :width], start, num_tokens, slots, sampling, packed[:, width + _NUM_FIELDS :])
