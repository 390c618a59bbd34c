"""Decide which device sends which part of an array to which other device, and in which rounds.

In: where parts of arrays are, and where they are wanted, as boxes: a range of each dim of the whole array. Out: `Piece`s, each from one
device to one, and rounds of them: in a round, each device sends to at most one other and gets from at most one, so that one
collective-permute is enough.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: A range of each dim.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A part of an array on a device.

    Args:
        device: its number.
        box: of the whole array.
        array: which of the arrays that the whole consists of has it.
    """

    device: int
    box: Box
    array: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one device sends to another, or keeps.

    Args:
        value, source: which value is sent, and which of its sources sends it.
        held: the part of which it is taken.
        target: the device that gets it.
        box: of the whole array.
    """

    value: int
    source: int
    held: Held
    target: int
    box: Box

    @property
    def size(self) -> int:
        """The number of elements."""
        return volume(self.box)


#: The pieces from one device to another, and their bytes.
Message = tuple[int, int, Sequence[Piece], int]


class Router:
    """Chooses who sends, so that no device sends much more than others.

    Args:
        process_of: the process of each device.
    """

    def __init__(self, process_of: Sequence[int]) -> None:
        self._process_of = process_of
        self._sent: Counter[int] = Counter()

    def pieces(
        self, value: int, source: int, held: Iterable[Held], wanted: Mapping[int, Box], itemsize: int
    ) -> list[Piece]:
        """The pieces of which each device makes its part of a value: each from itself, else from a device of the same process, else from
        the one that has sent least so far."""
        holders: defaultdict[Box, dict[int, Held]] = defaultdict(dict)
        for one in held:
            holders[one.box][one.device] = one
        found: list[Piece] = []
        for target, box in wanted.items():
            covered = 0
            for there, of in holders.items():
                common = overlap(box, there)
                if common is None:
                    continue
                sender = min(of, key=lambda device: self._cost(device, target))
                found.append(Piece(value, source, of[sender], target, common))
                covered += volume(common)
                if sender != target:
                    self._sent[sender] += volume(common) * itemsize
            assert covered == volume(box), "every element of an array is in one box"
        return found

    def _cost(self, device: int, target: int) -> tuple[bool, bool, int, int]:
        is_near = self._process_of[device] == self._process_of[target]
        return device != target, not is_near, self._sent[device], device


def rounds_of(messages: Iterable[Message]) -> list[list[Message]]:
    """Messages in rounds, the largest first: all of a round take as long as its largest."""
    rounds: list[list[Message]] = []
    for message in sorted(messages, key=lambda one: (-one[3], one[0], one[1])):
        source, target = message[:2]
        for one in rounds:
            if all(other[0] != source and other[1] != target for other in one):
                one.append(message)
                break
        else:
            rounds.append([message])
    return rounds


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing.

    >>> overlap(((0, 4), (0, 2)), ((2, 8), (1, 2))), overlap(((0, 2),), ((2, 4),))
    (((2, 4), (1, 2)), None)
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def volume(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(stop - start for start, stop in box)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """A box as slices of another one that contains it."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))
