"""Which decisions predicted which compiled collectives.

In: a plan's collectives and XLA's, of one kind over the same mesh axes. Out: for each compiled one the
predicted ones that are in it, and what remains on both sides. XLA merges collectives and seldom splits
them, so one compiled collective answers many decisions. Bytes decide; where several predictions have
the bytes, the module path does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from autopar.plans.records import CollectiveUse
from autopar.xla_compiler.hlo_collectives import Collective

#: Relative difference of bytes that is none: XLA pads a little when it combines.
TOLERANCE = 0.02
_TRANSFORM = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)$")
_ARGUMENT = re.compile(r"^\w+\[\d+\](.*)$")
_NAME = re.compile(r"[\w\-]+")


@dataclass(slots=True)
class Share:
    """Bytes of one buffer of a compiled collective, or of a predicted one, and how many found no counterpart.

    Args:
        owner: position of the compiled collective, or of the predicted one.
        paths: of modules; what XLA merged has several.
    """

    owner: int
    num_bytes: float
    paths: tuple[str, ...]
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.num_bytes

    @property
    def lacks(self) -> bool:
        """Whether more is left than padding."""
        return self.left > TOLERANCE * self.num_bytes


@dataclass(frozen=True, slots=True)
class Pairing:
    """Compiled collective -> positions of the predicted ones in it; and bytes without a counterpart."""

    predicted: dict[int, tuple[int, ...]]
    compiled_left: dict[int, float]
    predicted_left: dict[int, float]


def pair(found: Sequence[Collective], uses: Sequence[tuple[int, CollectiveUse]], num_devices: int) -> Pairing:
    """Pair collectives of one kind over the same axes.

    Args:
        uses: with their positions in the plan.
    """
    parts = [
        Share(position, one.num_times * size, module_paths(one.op_name))
        for position, one in enumerate(found)
        for size in one.parts(num_devices)
    ]
    wanted = [Share(position, use.bytes_per_step, (use.path, *_inputs_named(use.cause))) for position, use in uses]
    members: dict[int, list[int]] = defaultdict(list)

    def note(part: Share, use: Share) -> None:
        if use.owner not in members[part.owner]:
            members[part.owner].append(use.owner)

    for alike in (_same_path, _related, _anything):
        _join_equal(parts, wanted, alike, note)
    for alike in (_related, _anything):
        _fill(parts, wanted, alike, note)  # several predictions in one compiled buffer
    for alike in (_related, _anything):
        _fill(wanted, parts, alike, lambda use, part: note(part, use))  # one prediction in several
    return Pairing(
        {owner: tuple(sorted(positions)) for owner, positions in members.items()}, _left(parts), _left(wanted)
    )


def _join_equal(
    parts: Sequence[Share],
    wanted: Sequence[Share],
    alike: Callable[[Share], Iterable[str]],
    note: Callable[[Share, Share], None],
) -> None:
    """Buffers of the same bytes that share a key."""
    waiting: dict[tuple[int, str], list[Share]] = defaultdict(list)
    for use in wanted:
        if use.left > 0:
            for key in alike(use):
                waiting[round(use.num_bytes), key].append(use)
    for part in parts:
        if part.left <= 0:
            continue
        rows = (waiting[round(part.num_bytes), key] for key in alike(part))
        use = next((use for row in rows for use in row if use.left == use.num_bytes), None)
        if use is not None:
            part.left = use.left = 0.0
            note(part, use)


def _fill(
    holders: Sequence[Share],
    items: Sequence[Share],
    alike: Callable[[Share], Iterable[str]],
    note: Callable[[Share, Share], None],
) -> None:
    """The largest items first, into whatever has room for them."""
    waiting = sorted((item for item in items if item.lacks), key=lambda item: -item.left)
    for holder in sorted(holders, key=lambda holder: -holder.left):
        if not holder.lacks:
            continue
        keys = set(alike(holder))
        for item in waiting:
            if item.lacks and item.left <= holder.left * (1 + TOLERANCE) and not keys.isdisjoint(alike(item)):
                holder.left, item.left = max(0.0, holder.left - item.left), 0.0
                note(holder, item)


def _same_path(share: Share) -> Iterable[str]:
    return share.paths


def _related(share: Share) -> Iterable[str]:
    """Every module that it lies in: `a/b/c`, `a/b`; never the outermost, which all share."""
    for path in share.paths:
        names = path.split("/")
        yield from ("/".join(names[:end]) for end in range(len(names), min(1, len(names) - 1), -1))


def _anything(share: Share) -> Iterable[str]:
    return ("",)


def _left(shares: Sequence[Share]) -> dict[int, float]:
    left: dict[int, float] = defaultdict(float)
    for share in shares:
        left[share.owner] += share.left if share.lacks else 0.0
    return {owner: num_bytes for owner, num_bytes in left.items() if num_bytes > 0}


# -- paths -----------------------------------------------------------------------------------


def module_paths(op_name: str) -> tuple[str, ...]:
    """The modules that XLA names as the origin, as a plan names them: without transformations and the primitive.

    >>> module_paths("jit(run)/transpose(jvp(MLP))/(a/dot_general:b/(c/add:d/add))")
    ('MLP/a', 'MLP/b/c', 'MLP/b/d')
    >>> module_paths("args[0].params[\\'Dense_0\\'][\\'kernel\\']")  # an input, as XLA names it
    ('params/Dense_0/kernel',)
    """
    found: dict[str, None] = {}
    for name in _expand(op_name):
        if argument := _ARGUMENT.match(name):
            found["/".join(_NAME.findall(argument[1]))] = None
            continue
        parts = [part for part in name.split("/")[:-1] if not part.startswith("jit(") and part != "shard_map"]
        names = list(map(_without_transforms, parts))
        found["/".join(filter(None, names))] = None
    return tuple(found)


def describe_origin(op_name: str) -> str:
    """One line of an origin: `transpose(jvp(MLP))/Dense_0/dot_general`, or what several have in common.

    >>> describe_origin("jit(run)/transpose(jvp(MLP))/(a/dot_general:b/add)")
    'MLP/*'
    """
    paths = module_paths(op_name)
    if len(paths) == 1 and not _ARGUMENT.match(op_name) and "/(" not in op_name and not op_name.startswith("("):
        return op_name.split("/", 1)[1] if op_name.startswith("jit(") and "/" in op_name else op_name
    levels = zip(*(path.split("/") for path in paths), strict=False)  # as deep as the shallowest
    common = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]
    return "/".join([*common, "*"] if len(paths) > 1 else common)


def _inputs_named(cause: str) -> list[str]:
    """Paths in a decision's words, without the argument, whose name XLA does not know."""
    return [path.split("/", 1)[1] for path in re.findall(r"`([^`]+)`", cause) if "/" in path]


def _expand(name: str) -> list[str]:
    """XLA writes `a/(b/x:c/x)/y` for what it merged from `a/b/x/y` and `a/c/x/y`."""
    start = 0 if name.startswith("(") else name.find("/(") + 1
    if start == 0 and not name.startswith("("):
        return [name]
    depth, cuts = 0, [start]
    for place in range(start, len(name)):
        depth += (name[place] == "(") - (name[place] == ")")
        if name[place] == ":" and depth == 1:
            cuts.append(place)
        if depth == 0:
            cuts.append(place)
            break
    else:  # cut off: XLA limits the length of names
        cuts.append(len(name))
    before, after = name[:start], name[cuts[-1] + 1 :]
    pieces = [name[a + 1 : b] for a, b in pairwise(cuts)]
    return [whole for piece in pieces for whole in _expand(f"{before}{piece}{after}")]


def _without_transforms(part: str) -> str:
    while match := _TRANSFORM.match(part):
        part = match[1]
    return part
