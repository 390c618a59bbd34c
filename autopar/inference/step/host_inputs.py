"""Pack an iteration's host inputs into one array, so that one transfer copies them to the devices.

In: `Rows` of NumPy arrays on the host. Out: `Rows` of `jax.Array`s inside the program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from autopar.inference.step.sampling_params import NEUTRAL, NUM_PARAMS, SamplingParams

_NUM_FIELDS = 4  # per row, without its tokens, its sampling parameters and its pages


class Rows(NamedTuple):
    """Rows of tokens: one for each slot, or one for each prefill chunk.

    Args:
        tokens: int32 `[rows, width]`. In a slot's row, -1 stands for the last token of the slot, which is on the device.
        start: int32 `[rows]`, the position of the first token.
        num_tokens: int32 `[rows]`, the number of valid tokens, or of decode steps if there are several; 0 in an idle row.
        slots: int32 `[rows]`, the slot whose last token the row sets; the number of slots if it sets none.
        next_token: int32 `[rows]`, the token after the row's last one, if the logprobs of the row's next tokens are wanted; else -1.
        sampling: the sampling parameters of each row.
        tables: int32 `[rows, pages of a sequence]`, padded with the scratch page.
    """

    tokens: Any
    start: Any
    num_tokens: Any
    slots: Any
    next_token: Any
    sampling: SamplingParams
    tables: Any

    @classmethod
    def views(
        cls, num: int, width: int, pages_of_sequence: int, scratch_page: int, no_slot: int
    ) -> tuple[NDArray[np.int32], Rows]:
        """A packed array of idle rows, and the rows as views of it, on the host: what is written to a row is packed already."""
        packed = np.zeros((num, width + _NUM_FIELDS + NUM_PARAMS + pages_of_sequence), np.int32)
        block = sampling_block(packed, width)
        block[:] = NEUTRAL
        start, num_tokens, slots, next_token = (packed[:, width + field] for field in range(_NUM_FIELDS))
        tables = packed[:, width + _NUM_FIELDS + NUM_PARAMS :]
        slots[:], next_token[:], tables[:] = no_slot, -1, scratch_page
        return packed, cls(packed[:, :width], start, num_tokens, slots, next_token, SamplingParams.views(block), tables)

    @classmethod
    def unpacked(cls, packed: jax.Array, width: int) -> Rows:
        """The rows of a packed array, inside a program."""
        start, num_tokens, slots, next_token = (packed[:, width + field] for field in range(_NUM_FIELDS))
        sampling = SamplingParams.unpacked(sampling_block(packed, width))
        tables = packed[:, width + _NUM_FIELDS + NUM_PARAMS :]
        return cls(packed[:, :width], start, num_tokens, slots, next_token, sampling, tables)


def sampling_block(packed: Any, width: int) -> Any:
    """The sampling parameters in a packed array, `[rows, NUM_PARAMS]`."""
    at = width + _NUM_FIELDS
    return packed[:, at : at + NUM_PARAMS]
