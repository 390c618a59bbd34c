"""Collapse texts that differ only in their numbers into patterns: `h_{0..11}/kernel`. In: texts. Out: patterns."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence


def collapse(texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The patterns that match exactly these texts, each with the positions that it covers.

    >>> collapse(["h_0/k", "h_1/k", "h_2/k", "norm"])
    [('h_{0..2}/k', [0, 1, 2]), ('norm', [3])]
    """
    families: dict[str, dict[tuple[str, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for position, text in enumerate(texts):
        families[re.sub(r"\d+", "\0", text)][tuple(re.findall(r"\d+", text))].append(position)
    found = [block for family in families.items() for block in _blocks(*family)]
    return sorted(found, key=lambda block: block[1][0])


def _blocks(template: str, members: dict[tuple[str, ...], list[int]]) -> list[tuple[str, list[int]]]:
    """One pattern if the numbers form a full grid; otherwise split along the shortest column.

    Columns that determine each other (such as the layer number in a cause and in its path) count as one.
    """
    columns = [tuple(column) for column in zip(*members, strict=True)]
    distinct = [column for i, column in enumerate(columns) if not any(_linked(column, c) for c in columns[:i])]
    if math.prod(len(set(column)) for column in distinct) == len(members):
        parts = template.split("\0")
        numbers = [_number_set(column) for column in columns]
        text = parts[0] + "".join(number + part for number, part in zip(numbers, parts[1:], strict=True))
        return [(text, sorted(position for positions in members.values() for position in positions))]
    at = columns.index(min((c for c in distinct if len(set(c)) > 1), key=lambda c: len(set(c))))
    split: dict[str, dict[tuple[str, ...], list[int]]] = defaultdict(dict)
    for numbers, positions in members.items():
        split[numbers[at]][numbers] = positions
    return [block for part in split.values() for block in _blocks(template, part)]


def _linked(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return len(set(one)) == len(set(other)) == len(set(zip(one, other, strict=True)))


def _number_set(numbers: Iterable[str]) -> str:
    """`7`, `{0..11}`, `{0,2,..,10}` or `{1,5,6}`."""
    ordered = sorted(set(numbers), key=lambda text: (int(text), text))
    if len(ordered) == 1:
        return ordered[0]
    steps = {int(b) - int(a) for a, b in itertools.pairwise(ordered)}
    if len(ordered) > 2 and steps == {1}:
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    if len(ordered) > 3 and len(steps) == 1:
        return f"{{{ordered[0]},{ordered[1]},..,{ordered[-1]}}}"
    return "{" + ",".join(ordered) + "}"
