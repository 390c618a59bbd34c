"""Match compiled collectives with the decisions that predicted them.

In: predicted and compiled collectives of one kind over the same mesh axes. Out: for each compiled collective, the
predicted ones that it contains; the unmatched bytes on both sides. XLA combines collectives and rarely splits them, so
one compiled collective matches many decisions. The match goes by bytes, and by module path where several predictions
have the same bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from autopar.plans.records import CollectiveUse
from autopar.xla_compiler.hlo_collectives import Collective

#: Relative difference of bytes that counts as equal: XLA adds padding when it combines.
TOLERANCE = 0.02
_TRANSFORM = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)$")
#: Parts of name stacks that JAX adds for loops and calls; a plan's paths are without them.
_CONTROL = frozenset(
    ("while", "body", "cond", "closed_call", "core_call", "checkpoint", "rematted_computation", "remat")
)
#: A step that runs by a plan repeats the whole name stack of an operation in a loop behind this part.
REPLAYED = "eval_jaxpr"
_BRANCH = re.compile(r"branch_\d+_fun")
_ARGUMENT = re.compile(r"^\w+\[\d+\](.*)$")
_NAME = re.compile(r"[\w\-]+")


@dataclass(slots=True)
class Share:
    """One buffer of a compiled or a predicted collective.

    Args:
        owner: position of the collective.
        paths: module paths; a combined collective has several.

    Attributes:
        left: bytes without a counterpart so far.
    """

    owner: int
    num_bytes: float
    paths: tuple[str, ...]
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.num_bytes

    @property
    def is_unmatched(self) -> bool:
        """Whether more bytes are unmatched than padding explains."""
        return self.left > TOLERANCE * self.num_bytes


@dataclass(frozen=True, slots=True)
class Pairing:
    """Compiled collective -> predicted ones that it contains; unmatched bytes. All by position."""

    predicted: dict[int, tuple[int, ...]]
    compiled_left: dict[int, float]
    predicted_left: dict[int, float]


def pair(found: Sequence[Collective], uses: Sequence[tuple[int, CollectiveUse]], num_devices: int) -> Pairing:
    """Match compiled collectives (`found`) with predicted ones (`uses`, with positions in the plan)."""
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

    for keys_of in (_same_path, _related, _anything):
        _match_equal(parts, wanted, keys_of, note)
    for keys_of in (_related, _anything):
        _fill(parts, wanted, keys_of, note)  # several predictions in one compiled buffer
    for keys_of in (_related, _anything):
        _fill(wanted, parts, keys_of, lambda use, part: note(part, use))  # one prediction in several
    return Pairing(
        {owner: tuple(sorted(positions)) for owner, positions in members.items()}, _left(parts), _left(wanted)
    )


def _match_equal(
    parts: Sequence[Share],
    wanted: Sequence[Share],
    keys_of: Callable[[Share], Iterable[str]],
    note: Callable[[Share, Share], None],
) -> None:
    """Match buffers of equal bytes that share a key."""
    waiting: dict[tuple[int, str], list[Share]] = defaultdict(list)
    for use in wanted:
        if use.left > 0:
            for key in keys_of(use):
                waiting[round(use.num_bytes), key].append(use)
    for part in parts:
        if part.left <= 0:
            continue
        rows = (waiting[round(part.num_bytes), key] for key in keys_of(part))
        use = next((use for row in rows for use in row if use.left == use.num_bytes), None)
        if use is not None:
            part.left = use.left = 0.0
            note(part, use)


def _fill(
    holders: Sequence[Share],
    items: Sequence[Share],
    keys_of: Callable[[Share], Iterable[str]],
    note: Callable[[Share, Share], None],
) -> None:
    """Assign items to holders with enough unmatched bytes and a shared key, the largest items first."""
    waiting = sorted((item for item in items if item.is_unmatched), key=lambda item: -item.left)
    for holder in sorted(holders, key=lambda holder: -holder.left):
        if not holder.is_unmatched:
            continue
        keys = set(keys_of(holder))
        for item in waiting:
            if item.is_unmatched and item.left <= holder.left * (1 + TOLERANCE) and not keys.isdisjoint(keys_of(item)):
                holder.left, item.left = max(0.0, holder.left - item.left), 0.0
                note(holder, item)


def _same_path(share: Share) -> Iterable[str]:
    return share.paths


def _related(share: Share) -> Iterable[str]:
    """The enclosing modules: `a/b/c`, `a/b`; without the outermost, which all share."""
    for path in share.paths:
        names = path.split("/")
        yield from ("/".join(names[:end]) for end in range(len(names), min(1, len(names) - 1), -1))


def _anything(share: Share) -> Iterable[str]:
    return ("",)


def _left(shares: Sequence[Share]) -> dict[int, float]:
    left: dict[int, float] = defaultdict(float)
    for share in shares:
        left[share.owner] += share.left if share.is_unmatched else 0.0
    return {owner: num_bytes for owner, num_bytes in left.items() if num_bytes > 0}


# -- paths -----------------------------------------------------------------------------------


def module_paths(op_name: str) -> tuple[str, ...]:
    """The module paths in XLA's `op_name`, in a plan's form: without transformations and the primitive.

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
        found[_without_control("/".join(filter(None, names)))] = None
    return tuple(found)


def describe_origin(op_name: str) -> str:
    """Describe an `op_name`: `transpose(jvp(MLP))/Dense_0/dot_general`, or the common prefix of several paths.

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
    """Input paths in a decision's cause, without the argument's name, which XLA does not know."""
    return [path.split("/", 1)[1] for path in re.findall(r"`([^`]+)`", cause) if "/" in path]


def _expand(name: str) -> list[str]:
    """Expand the `op_name` of a merged operation: XLA writes `a/(b/x:c/x)/y` for `a/b/x/y` and `a/c/x/y`."""
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
    else:  # XLA truncates long names
        cuts.append(len(name))
    before, after = name[:start], name[cuts[-1] + 1 :]
    pieces = [name[a + 1 : b] for a, b in pairwise(cuts)]
    return [whole for piece in pieces for whole in _expand(f"{before}{piece}{after}")]


def _without_control(path: str) -> str:
    """A module path without the parts of loops and calls.

    >>> _without_control("net/while/body/closed_call/layer"), _without_control("net/while/body/eval_jaxpr/net/layer")
    ('net/layer', 'net/layer')
    """
    parts = path.split("/")
    while REPLAYED in parts:
        parts = parts[parts.index(REPLAYED) + 1 :]
    return "/".join(part for part in parts if part not in _CONTROL and not _BRANCH.fullmatch(part))


def _without_transforms(part: str) -> str:
    while match := _TRANSFORM.match(part):
        part = match[1]
    return part
