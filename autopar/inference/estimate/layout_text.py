"""How a model lies on its devices, in words: weights by kind, cache, logits.

In: the plan of a decode program. Out: pairs of what and how. The kinds are the decoder's; nothing is known here of how a
plan comes to be.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from autopar.ir.sharding import TensorSharding
from autopar.plans.plan import Plan
from autopar.rules.table import traits_of

#: The dims of an array by what its path ends with, the first that fits.
_DIMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"/(query|key|value)/weight", ("heads", "head dim", "inputs")),
    (r"/(query|key|value)/bias", ("heads", "head dim")),
    (r"/out/weight", ("outputs", "heads", "head dim")),
    (r"/(embed|head)/weight", ("vocabulary", "hidden")),
    (r"/embed_positions/weight", ("positions", "hidden")),
    (r"norm/(weight|bias)", ("hidden",)),
    (r"/(\w+)/weight", ("outputs", "inputs")),
    (r"/(\w+)/bias", ("outputs",)),
    (r"pages/\d+/(keys|values)", ("pages", "tokens of a page", "heads", "head dim")),
)
_LAYER = re.compile(r"(?<=/)layers_\d+/|(?<=pages/)\d+/")
_WHOLE = "whole on each"


def layout_in_words(plan: Plan) -> list[tuple[str, str]]:
    """What, and how it is split; what lies alike in all layers is told once.

    Args:
        plan: of a program of an engine.
    """
    kinds: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for tensor in plan.inputs:
        if not tensor.path.startswith(("params/", "resident/pages/")):
            continue
        names = next(dims for pattern, dims in _DIMS if re.search(pattern + "$", tensor.path))
        how = split_in_words(names, tensor.sharding, plan)
        kinds[_kind(tensor.path)][how] += 1
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (what, kind), ways in kinds.items():
        alike[what, _together(ways)].append(kind)
    rows = [(f"{what}: {', '.join(sorted(names))}", how) for (what, how), names in alike.items()]
    rows.sort(key=lambda row: (row[0].startswith("cache"), row[1] == _WHOLE, row))
    return [*rows, *_logits(plan)]


def split_in_words(names: Sequence[str], sharding: TensorSharding, plan: Plan) -> str:
    """Of one tensor, e.g. "heads over 8".

    Args:
        names: of its dims.
    """
    parts = [
        f"{name} over {plan.mesh.sizes(axes)}"
        for name, axes in zip(names, sharding.dims, strict=True)
        if plan.mesh.sizes(axes) > 1
    ]
    return ", ".join(parts) or _WHOLE


def _kind(path: str) -> tuple[str, str]:
    """
    >>> _kind("params/params/layers_3/query/weight"), _kind("resident/pages/0/keys")
    (('weights', 'query'), ('cache', 'keys'))
    """
    *_, owner, leaf = _LAYER.sub("", path).split("/")
    if owner == "pages":
        return "cache", leaf
    return "weights", owner if leaf == "weight" else f"{owner} ({leaf})"


def _together(ways: dict[str, int]) -> str:
    if len(ways) == 1:
        return next(iter(ways))
    return "; ".join(f"{how} in {num} layers" for how, num in ways.items())


def _logits(plan: Plan) -> list[tuple[str, str]]:
    for decision in plan.decisions:
        is_made = decision.kind == "activation" and traits_of(decision.primitive).contraction
        if is_made and decision.path.endswith(".logits"):
            names = [*["rows"] * (len(decision.shape) - 1), "vocabulary"]
            return [("logits", split_in_words(names, decision.sharding, plan))]
    return []
