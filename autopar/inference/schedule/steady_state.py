"""What a scheduler does in the long run, where requests always wait: how many sequences end in an iteration, and how many
iterations compute a prompt too. Numbers only.

In: `Options`, tokens of a prompt and tokens generated for it, sequences at once. Out: `SteadyState`.

With prompts of P tokens, O tokens generated for each, and chunks of `rows` times `length` tokens:

    chunks = least over chunk shapes of ceil(P / length)          iterations that compute one prompt by itself
    share  = least over chunk shapes of ceil(P / length) / rows   iterations of chunks for a prompt, where many wait
    life   = chunks + (O - 1) + ahead                             iterations that a slot is one sequence's

The last chunk gives a sequence's first token, and each iteration after it one more. Iterations are sent `ahead` of what
comes out, so that a slot is given to the next only so much later. Each iteration has room for one shape of chunks:

    ended = min(num_running / life, 1 / share)                    sequences that end in an iteration
    mixed = min(1, ended x chunks)                                iterations that compute chunks, of all

That is the bound of a closed queue: no slot waits for another's prompt unless all of the room for chunks is taken. A
simulation with the real scheduler is within a tenth of it, and lower where almost all iterations are mixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.inference.schedule.requests import Options


@dataclass(frozen=True, slots=True)
class SteadyState:
    """In an iteration, on average.

    Args:
        ended: sequences that end. mixed: part of the iterations that compute prompts beside the slots.
    """

    ended: float
    mixed: float

    def iteration_s(self, plain_s: float, mixed_s: float) -> float:
        """Seconds of an iteration, on average: what passes between two tokens of a sequence.

        Args:
            plain_s, mixed_s: without chunks and with them.
        """
        return self.mixed * mixed_s + (1 - self.mixed) * plain_s

    def tokens_per_s(self, output: int, plain_s: float, mixed_s: float) -> float:
        """Tokens generated in a second, `output` of each sequence."""
        return self.ended * output / self.iteration_s(plain_s, mixed_s)


def num_chunks(options: Options, prompt: int) -> int:
    """Iterations that compute one prompt by itself.

    >>> num_chunks(Options(chunks=((4, 64), (1, 256))), 1000)
    4
    """
    return min(-(-prompt // length) for _, length in options.chunks)


def steady_state(options: Options, prompt: int, output: int, num_running: int, ahead: int = 1) -> SteadyState:
    """See above.

    >>> steady_state(Options(chunks=((1, 256),)), prompt=512, output=97, num_running=10)
    SteadyState(ended=0.101..., mixed=0.202...)
    """
    chunks = num_chunks(options, prompt)
    share = min(-(-prompt // length) / rows for rows, length in options.chunks)
    ended = min(num_running / (chunks + output - 1 + ahead), 1 / share)
    return SteadyState(ended, min(1.0, ended * chunks))
