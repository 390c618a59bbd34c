"""Predict a scheduler's throughput in the steady state, where requests always wait.

In: `Options`, the tokens of a prompt and of its output, the number of sequences that run at once. Out: `SteadyState`: the
sequences that end per iteration, and the share of iterations with prefill.

Let a prompt have P tokens and its output O tokens, and let a chunk shape be `rows` chunks of `length` tokens:

    chunks = min over chunk shapes of ceil(P / length)          iterations to prefill one prompt alone
    share  = min over chunk shapes of ceil(P / length) / rows   iterations with chunks per prompt, if many wait
    life   = chunks + (O - 1) + ahead                           iterations that a sequence occupies its slot

The last chunk yields a sequence's first token, and each later iteration one more. The scheduler dispatches `ahead`
iterations before it sees a result, so a slot is reused only that much later. An iteration has one chunk shape:

    ended = min(num_running / life, 1 / share)                  sequences that end per iteration
    mixed = min(1, ended x chunks)                              the share of iterations with chunks

This is the bound of a closed queue: a slot waits for prefill only if all chunk rows are in use. A simulation with the real
scheduler is within 10 % of it, and lower if almost all iterations are mixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.inference.schedule.requests import Options


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The averages of an iteration.

    Args:
        ended: the number of sequences that end.
        mixed: the share of iterations that compute prefill chunks.
    """

    ended: float
    mixed: float

    def iteration_s(self, plain_s: float, mixed_s: float) -> float:
        """The average seconds of an iteration, which is the time between two tokens of a sequence.

        Args:
            plain_s, mixed_s: the seconds of an iteration without and with prefill chunks.
        """
        return self.mixed * mixed_s + (1 - self.mixed) * plain_s

    def tokens_per_s(self, output: int, plain_s: float, mixed_s: float) -> float:
        """The tokens generated per second.

        Args:
            output: the tokens generated for each sequence.
            plain_s, mixed_s: as for `iteration_s`.
        """
        return self.ended * output / self.iteration_s(plain_s, mixed_s)


def num_chunks(options: Options, prompt: int) -> int:
    """The number of iterations to prefill one prompt alone.

    >>> num_chunks(Options(chunks=((4, 64), (1, 256))), 1000)
    4
    """
    return min(-(-prompt // length) for _, length in options.chunks)


def steady_state(options: Options, prompt: int, output: int, num_running: int, ahead: int = 1) -> SteadyState:
    """Predict the steady state by the formulas of the module's docstring.

    >>> steady_state(Options(chunks=((1, 256),)), prompt=512, output=97, num_running=10)
    SteadyState(ended=0.101..., mixed=0.202...)
    """
    chunks = num_chunks(options, prompt)
    share = min(-(-prompt // length) / rows for rows, length in options.chunks)
    ended = min(num_running / (chunks + output - 1 + ahead), 1 / share)
    return SteadyState(ended, min(1.0, ended * chunks))
