"""Divide the rows of prefill chunks among prompts, so that no prompt delays another for long.

In: the number of tokens that each prompt still has to compute, and the shapes of chunks. Out: a shape, and the rows of each
prompt. A row is a part of the iteration's budget of tokens; a long prompt may have several, one chunk after the other. While
two prompts or more wait, none has more than half of the rows, unless the others need no more. The first row goes to the oldest
prompt, so each prompt ends; the next ones go to the shortest, so a short prompt waits for a few iterations only. Where the
chosen shape has one row, the oldest and the shortest take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ChunkRows(NamedTuple):
    """The chunks of one iteration.

    Args:
        rows, length: the shape.
        num_tokens: for each prompt with a chunk, in order, its number and the number of its tokens.
    """

    rows: int
    length: int
    num_tokens: tuple[tuple[int, int], ...]


def divide_rows(remaining: Sequence[int], shapes: Sequence[tuple[int, int]], *, shortest_first: bool) -> ChunkRows:
    """Choose the shape that computes the most tokens now, of those that serve two prompts if two wait.

    Args:
        remaining: the tokens of each prompt that are not computed, the oldest prompt first; none is 0.
        shapes: (rows, length) of each shape.
        shortest_first: whether the shortest prompt has its turn before the oldest.

    >>> divide_rows([16000, 20], ((4, 64), (1, 256)), shortest_first=False)
    ChunkRows(rows=4, length=64, num_tokens=((0, 192), (1, 20)))
    >>> divide_rows([16000], ((4, 64), (1, 256)), shortest_first=False)
    ChunkRows(rows=1, length=256, num_tokens=((0, 256),))
    """
    by_length = sorted(range(len(remaining)), key=remaining.__getitem__)
    order = by_length if shortest_first else [0, *(number for number in by_length if number)]

    def worth(chosen: ChunkRows) -> tuple[int, ...]:
        num_tokens = sum(num for _, num in chosen.num_tokens)
        return min(2, len(chosen.num_tokens)), num_tokens, -chosen.rows * chosen.length, -chosen.rows

    return max((_divided(remaining, order, rows, length) for rows, length in shapes), key=worth)


def _divided(remaining: Sequence[int], order: Sequence[int], rows: int, length: int) -> ChunkRows:
    """Give the rows of one shape to prompts: at most half to each, then those that are left over."""
    # A last token alone in a further row is left to a decode step, as after a single row: its logits are then the same.
    needed = [-(-num // length) - (num > length and num % length == 1) for num in remaining]
    given: dict[int, int] = {}
    left = rows
    for most in (max(1, rows // 2), rows):
        for number in order:
            more = min(left, most - given.get(number, 0), needed[number] - given.get(number, 0))
            if more > 0:
                given[number] = given.get(number, 0) + more
                left -= more
            if not left:
                break
    num_tokens = {number: min(num * length, remaining[number]) for number, num in given.items()}
    return ChunkRows(rows, length, tuple(sorted(num_tokens.items())))
