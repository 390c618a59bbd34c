"""Find the running sequences that begin with given tokens, by hashes of their prefixes.

In: the keys of the pages of running sequences, whether computed or not. Out: `RunningPrefixes`. The prefix cache has only
pages that are computed; here a request finds a sequence that is still computing its prefix. A look-up takes a time that grows
with the logarithm of the prompt's pages, and not with the number of running sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def prefix_hashes(keys: Iterable[bytes], before: int = 0) -> list[int]:
    """The hash of each prefix of whole pages: a hash of the page's key and of the prefix before it.

    Args:
        keys: the keys of the pages, in order. before: the hash of the prefix before the first of them.
    """
    hashes: list[int] = []
    for key in keys:
        before = hash((before, key))
        hashes.append(before)
    return hashes


class RunningPrefixes:
    """The prefixes of running sequences. Two prefixes may have one hash, so the caller compares the tokens.

    Args:
        num_slots: the number of sequences that run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots: dict[int, dict[int, None]] = {}  # the slots with each prefix: dicts keep their order
        self._hashes: list[list[int]] = [[] for _ in range(num_slots)]

    def add(self, slot: int, hashes: Sequence[int]) -> None:
        """Add the next prefixes of a slot's sequence."""
        self._hashes[slot] += hashes
        for each in hashes:
            self._slots.setdefault(each, {})[slot] = None

    def last_hash(self, slot: int) -> int:
        """The hash of the longest prefix of a slot; 0 before the first page."""
        return self._hashes[slot][-1] if self._hashes[slot] else 0

    def num_pages(self, slot: int) -> int:
        """The number of pages of a slot's longest prefix."""
        return len(self._hashes[slot])

    def remove(self, slot: int) -> None:
        """Remove all prefixes of a slot."""
        for each in self._hashes[slot]:
            slots = self._slots.get(each, {})
            slots.pop(slot, None)
            if not slots:
                self._slots.pop(each, None)
        self._hashes[slot] = []

    def longest(self, hashes: Sequence[int]) -> tuple[int, list[int]]:
        """The number of pages of the longest prefix that a running sequence has, and the slots of those that have it.

        Args:
            hashes: the hashes of the prefixes, the shortest first.
        """
        low, high = 0, len(hashes)
        while low < high:  # a sequence that has a prefix has all shorter ones
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._slots:
                low = middle
            else:
                high = middle - 1
        return low, list(self._slots[hashes[low - 1]]) if low else []
