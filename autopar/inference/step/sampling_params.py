"""Define the sampling parameters: of one request, checked, and of all rows of a program, as arrays.

In: a request's options. Out: `SamplingOptions`; `SamplingParams`, one array for each parameter, which are columns of one packed array
on the host. So no request and no combination of parameters compiles anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.errors import InferenceError


class SamplingParams(NamedTuple):
    """The sampling parameters of all rows, `[rows]` each. `SamplingOptions` says what they mean.

    Args:
        temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty: f32.
        top_k: int32. seed: uint32.
        has_bias: int32; 0 if the slot's biases are those of an earlier request.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any
    min_p: Any
    presence_penalty: Any
    frequency_penalty: Any
    repetition_penalty: Any
    has_bias: Any

    @classmethod
    def views(cls, packed: NDArray[np.int32]) -> SamplingParams:
        """The columns of a packed array `[rows, NUM_PARAMS]` on the host, as views."""
        return cls(*(packed[:, at].view(dtype) for at, dtype in enumerate(_DTYPES)))

    @classmethod
    def unpacked(cls, packed: jax.Array) -> SamplingParams:
        """The columns of a packed array, inside a program."""
        return cls(
            *(
                packed[:, at] if dtype == np.int32 else jax.lax.bitcast_convert_type(packed[:, at], dtype)
                for at, dtype in enumerate(_DTYPES)
            )
        )

    def has_penalty(self) -> jax.Array:
        """Whether earlier tokens change the logits of each row, bool `[rows]`."""
        return (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)


_F32, _I32 = np.float32, np.int32
_DTYPES = tuple(map(np.dtype, (_F32, _I32, _F32, np.uint32, _F32, _F32, _F32, _F32, _I32)))
#: The number of parameters.
NUM_PARAMS = len(_DTYPES)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The sampling parameters of one request, checked.

    The logits `z` are changed in this order, as in vLLM and `transformers`: `z + logit_bias`; `z / repetition_penalty` if it is
    positive, else `z * repetition_penalty`, for each token of the prompt and of the output; `z - frequency_penalty * n` for a
    token that was generated `n` times, and `z - presence_penalty` if `n > 0`. Logprobs are of these. Then temperature, `top_k`,
    `top_p` and `min_p` select the tokens to sample from, in this order.

    Args:
        temperature: 0 for greedy decoding, or larger.
        top_k: the number of most probable tokens to sample from; 0 for all.
        top_p: the probability mass to sample from (nucleus sampling): the fewest most probable tokens whose probabilities,
            after `top_k`, reach it; 1 for all.
        seed: the seed of the noise, an unsigned 32-bit integer.
        min_p: the least probability of a token, as a share of that of the most probable one; 0 for all.
        presence_penalty, frequency_penalty: 0 for none; negative ones favour repetition.
        repetition_penalty: above 1 to avoid repetition; 1 for none.
        logit_bias: what is added to the logits, by token.

    Raises:
        InferenceError: a parameter is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InferenceError(
                f"temperature is {self.temperature}: give 0 for the most probable token, or a larger finite number"
            )
        if not 0 <= self.top_k < 2**31:
            raise InferenceError(
                f"top_k is {self.top_k}: give the number of tokens to sample from, or 0 for all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise InferenceError(f"top_p is {self.top_p}: give a number above 0 and at most 1, which allows all tokens")
        if not 0 <= self.seed < 2**32:
            raise InferenceError(f"seed is {self.seed}: give an integer from 0 to 2**32 - 1")
        if not 0 <= self.min_p <= 1:
            raise InferenceError(f"min_p is {self.min_p}: give a number from 0, which allows all tokens, to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise InferenceError(f"{name} is {getattr(self, name)}: give a finite number, 0 for none")
        if not 0 < self.repetition_penalty < math.inf:
            raise InferenceError(
                f"repetition_penalty is {self.repetition_penalty}: give a finite number above 0, 1 for none"
            )
        for token, bias in self.logit_bias.items():
            if token < 0 or not math.isfinite(bias):
                raise InferenceError(f"logit_bias has {bias} for token {token}: give finite numbers by token")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def packed(self) -> NDArray[np.int32]:
        """The parameters as a row of a packed array, `[NUM_PARAMS]`."""
        row = np.zeros((1, NUM_PARAMS), np.int32)
        values = (
            self.temperature, self.top_k, self.top_p, self.seed, self.min_p, self.presence_penalty, self.frequency_penalty,
            self.repetition_penalty, bool(self.logit_bias),
        )  # fmt: skip
        for column, value in zip(SamplingParams.views(row), values, strict=True):
            column[0] = value
        return row[0]


#: The row of the default options.
NEUTRAL = SamplingOptions().packed()


def params_of(slots: Sequence[SamplingOptions | None]) -> SamplingParams:
    """Stack the parameters of all slots into host arrays; empty slots get the defaults."""
    return SamplingParams.views(np.stack([NEUTRAL if options is None else options.packed() for options in slots]))


class TokenCounts(NamedTuple):
    """What earlier tokens and biases a slot's logits depend on; they stay on the devices.

    Args:
        counts: int32 `[slots, vocabulary]`, twice the number of times that the token was generated, and 1 more if it is in the
            prompt.
        bias: f32 `[slots, vocabulary]`, added to the logits.
    """

    counts: Any
    bias: Any

    @classmethod
    def of(
        cls, options: SamplingOptions, prompt: Sequence[int], generated: Sequence[int], vocabulary: int
    ) -> TokenCounts:
        """The rows of one request, on the host."""
        bias = np.zeros(vocabulary, np.float32)
        bias[list(options.logit_bias)] = list(options.logit_bias.values())
        in_prompt = np.bincount(np.asarray(prompt, np.int64), minlength=vocabulary) > 0
        counts = 2 * np.bincount(np.asarray(generated, np.int64), minlength=vocabulary) + in_prompt
        return cls(counts.astype(np.int32), bias)

    @classmethod
    def empty(cls, slots: int, vocabulary: int) -> TokenCounts:
        """No tokens and no biases, inside a program."""
        return cls(jnp.zeros((slots, vocabulary), jnp.int32), jnp.zeros((slots, vocabulary), jnp.float32))
