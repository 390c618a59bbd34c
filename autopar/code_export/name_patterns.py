"""Summarize names by few patterns: `**/h/*/attn/c_attn/kernel` for a kernel of all layers and its optimizer state.

In: names with values. Out: patterns for `runtime.matches`; a pattern matches names of equal value, and no others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from autopar.code_export.runtime import matches, without_numbers
from autopar.ir.sharding import TensorSharding
from autopar.plans.records import TensorPlan

_T = TypeVar("_T", bound=Hashable)
_NUMBER = re.compile(r"\d+")


def as_patterns(values: Mapping[str, _T], others: Sequence[str]) -> list[tuple[str, _T]]:
    """Group names of equal value into patterns, in the order of the names.

    Args:
        values: name -> value.
        others: names without a value, which no pattern may match.

    >>> as_patterns({"h_0/k": 1, "h_1/k": 1, "h_2/k": 2}, ["h_0/b"])
    [('h_{0,1}/k', 1), ('h_2/k', 2)]
    """
    names_by_value: dict[tuple[str, _T], list[str]] = defaultdict(list)
    universe: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        names_by_value[without_numbers(name), value].append(name)
    for name in (*values, *others):
        universe[without_numbers(name)].append(name)
    return [
        (pattern, value)
        for (form, value), names in names_by_value.items()
        for pattern in _patterns_of(names, universe[form])
    ]


def _patterns_of(names: Sequence[str], universe: Sequence[str]) -> Sequence[str]:
    """Patterns that match exactly `names` among the names of `universe`."""
    if len(names) == 1:
        return names
    columns = list(zip(*map(_NUMBER.findall, names), strict=True))

    def is_exact(written: Sequence[str]) -> bool:
        pattern = _written(names[0], written)
        return sum(matches(pattern, name) for name in universe) == len(names)

    written = [_either(column) for column in columns]
    if is_exact(written):
        for n, column in enumerate(columns):
            open_here = [*written[:n], "*", *written[n + 1 :]]
            if len(set(column)) > 1 and is_exact(open_here):
                written = open_here
        return [_written(names[0], written)]
    column = min((c for c in columns if len(set(c)) > 1), key=lambda c: len(set(c)))
    parts: dict[str, list[str]] = defaultdict(list)
    for name, number in zip(names, column, strict=True):
        parts[number].append(name)
    return [pattern for part in parts.values() for pattern in _patterns_of(part, universe)]


def _either(column: Sequence[str]) -> str:
    numbers = sorted(set(column), key=int)
    return numbers[0] if len(numbers) == 1 else f"{{{','.join(numbers)}}}"


def _written(name: str, numbers: Sequence[str]) -> str:
    given = iter(numbers)
    return _NUMBER.sub(lambda _: next(given), name)


def inputs_as_patterns(tensors: Sequence[TensorPlan], paths: Sequence[str]) -> list[tuple[str, TensorSharding]]:
    """Patterns for the inputs that are not replicated; `paths` are the inputs' paths in the exported file.

    The path of optimizer state often ends with its parameter's path. With equal shardings, one pattern matches both.
    """
    split = {path: tensor.sharding for path, tensor in zip(paths, tensors, strict=True) if any(tensor.sharding.dims)}
    root = _root([path for path, tensor in zip(paths, tensors, strict=True) if tensor.role == "parameter"])
    patterns: dict[str, TensorSharding] = {}
    for path, sharding in list(split.items()):
        within = path.removeprefix(root)
        for pattern in _with_any_folder(within if within != path else ""):
            stands_for = [other for other in paths if matches(pattern, other)]
            if all(split.get(other) == sharding for other in stands_for):
                alone = all(other.startswith(root) for other in stands_for)
                patterns[root + pattern.removeprefix("**/") if alone else pattern] = sharding
                break
    left = {p: s for p, s in split.items() if not any(matches(pattern, p) for pattern in patterns)}
    return [*patterns.items(), *as_patterns(left, [path for path in paths if path not in left])]


def _with_any_folder(within: str) -> Iterator[str]:
    if within:
        yield f"**/{_NUMBER.sub('*', within)}"
        yield f"**/{within}"


def _root(paths: Sequence[str]) -> str:
    """The common folder of all paths."""
    if not paths:
        return ""
    parts = [path.split("/")[:-1] for path in paths]
    shared = 0
    while all(len(part) > shared for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return "".join(f"{part}/" for part in parts[0][:shared])


def carried_roots(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The folders of outputs that update inputs: `{"out/0": "state"}`.

    Args:
        pairs: paths of an output and of the input that it updates.
    """
    roots: dict[str, str] = {}
    for after, before in pairs:
        result, argument = after.split("/"), before.split("/")
        while len(result) > 1 and len(argument) > 1 and result[-1] == argument[-1]:
            result.pop()
            argument.pop()
        roots.setdefault("/".join(result), "/".join(argument))
    return roots
