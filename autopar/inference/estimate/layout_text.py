"""Describe the shardings of a served model: weights by kind, cache, logits.

In: the plan of a decode program. Out: pairs of a tensor kind and its sharding, as text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from autopar.ir.sharding import TensorSharding
from autopar.plans.plan import Plan
from autopar.rules.table import traits_of

#: (pattern of the end of a path, names of the dims). The first match counts.
_DIMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"/experts/(gate|up|down)/weight", ("experts", "outputs", "inputs")),
    (r"/experts/(gate|up|down)/(scale|zero)", ("experts", "outputs", "groups")),
    (r"/(query|key|value)/(scale|zero)", ("heads", "head dim", "groups")),
    (r"/(embed|head)/scale", ("vocabulary", "groups")),
    (r"/(\w+)/(scale|zero)", ("outputs", "groups")),
    (r"/(query|key|value)/weight", ("heads", "head dim", "inputs")),
    (r"/(query|key|value)/bias", ("heads", "head dim")),
    (r"/out/weight", ("outputs", "heads", "head dim")),
    (r"/(embed|head)/weight", ("vocabulary", "hidden")),
    (r"/embed_positions/weight", ("positions", "hidden")),
    (r"norm/(weight|bias)", ("hidden",)),
    (r"/(query|key)_norm/weight", ("heads", "head dim")),
    (r"/(\w+)/weight", ("outputs", "inputs")),
    (r"/(\w+)/bias", ("outputs",)),
    (r"pages/\d+/(keys|values)", ("pages", "tokens of a page", "heads", "head dim")),
)
_LAYER = re.compile(r"(?<=/)layers_\d+/|(?<=pages/)\d+/")
_REPLICATED = "replicated"


def describe_layout(plan: Plan) -> list[tuple[str, str]]:
    """List tensor kinds with their shardings. Kinds with equal shardings share an entry.

    Args:
        plan: the plan of an engine's program.
    """
    kinds: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for tensor in plan.inputs:
        if not tensor.path.startswith(("params/", "resident/pages/")):
            continue
        names = _names_of(tensor.path, len(tensor.shape))
        text = describe_sharding(names, tensor.sharding, plan)
        kinds[_kind(tensor.path)][text] += 1
    equal: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (group, kind), counts in kinds.items():
        equal[group, _over_layers(counts)].append(kind)
    rows = [(f"{group}: {', '.join(sorted(names))}", text) for (group, text), names in equal.items()]
    rows.sort(key=lambda row: (row[0].startswith("cache"), row[1] == _REPLICATED, row))
    return [*rows, *_logits(plan)]


def describe_sharding(names: Sequence[str], sharding: TensorSharding, plan: Plan) -> str:
    """Describe the sharding of one tensor, such as "heads over 8".

    Args:
        names: the names of its dims.
        plan: the plan, for the sizes of mesh axes.
    """
    parts = [
        f"{name} over {plan.mesh.sizes(axes)}"
        for name, axes in zip(names, sharding.dims, strict=True)
        if plan.mesh.sizes(axes) > 1
    ]
    return ", ".join(parts) or _REPLICATED


def _names_of(path: str, num_dims: int) -> tuple[str, ...]:
    """The names of a tensor's dims.

    >>> _names_of("params/layers_0/query_norm/weight", 2)
    ('heads', 'head dim')
    """
    return next(dims for pattern, dims in _DIMS if len(dims) == num_dims and re.search(pattern + "$", path))


def _kind(path: str) -> tuple[str, str]:
    """
    >>> _kind("params/params/layers_3/query/weight"), _kind("resident/pages/0/keys")
    (('weights', 'query'), ('cache', 'keys'))
    >>> _kind("params/params/layers_3/experts/gate/weight")
    ('weights', 'experts gate')
    """
    *_, owner, leaf = _LAYER.sub("", path).replace("experts/", "experts ").split("/")
    if owner == "pages":
        return "cache", leaf
    return "weights", owner if leaf == "weight" else f"{owner} ({leaf})"


def _over_layers(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{text} in {num} layers" for text, num in counts.items())


def _logits(plan: Plan) -> list[tuple[str, str]]:
    for decision in plan.decisions:
        is_made = decision.kind == "activation" and traits_of(decision.primitive).contraction
        if is_made and decision.path.endswith(".logits"):
            names = [*["rows"] * (len(decision.shape) - 1), "vocabulary"]
            return [("logits", describe_sharding(names, decision.sharding, plan))]
    return []
