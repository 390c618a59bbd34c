"""What the host tells a program of each row of tokens: one array, so that it goes to the devices in one piece.

In: `Rows`, of NumPy arrays on the host. Out: the same of `jax.Array`s, inside the program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.inference.step.sampling import SamplingParams

_NUM_FIELDS = 7  # of a row, beside its tokens and its pages


class Rows(NamedTuple):
    """Rows of tokens: those of slots that generate, or chunks of prompts.

    Args:
        tokens: int32 `[rows, width]`; of a slot -1 for the one it generated last.
        start: int32 `[rows]`, the position of the first. num_tokens: int32 `[rows]`, so many count; of none, 0.
        slots: int32 `[rows]`, which slot's last token comes out; the number of slots where none does.
        sampling: of each row.
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
        """In which nothing is to be done, on the host."""
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

    def packed(self) -> NDArray[np.int32]:
        """`[rows, width + fields + pages of a sequence]`."""
        sampling = [np.asarray(field).view(np.int32) for field in self.sampling]
        fields = np.stack([self.start, self.num_tokens, self.slots, *sampling], 1)
        return np.concatenate([self.tokens, fields, self.tables], 1, dtype=np.int32)

    @classmethod
    def unpacked(cls, packed: jax.Array, width: int) -> Rows:
        """In a program."""
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
