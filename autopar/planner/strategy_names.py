"""A strategy in words, read off the assignment: which mesh axis does what.

In: `Formulation` and choices. Out: e.g. "data parallel over `data`, tensor parallel over `model`,
optimizer state sharded over `data`".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.formulate.formulation import Formulation
from autopar.ir.graph import Node
from autopar.plans.records import TensorPlan
from autopar.rules.grouping import Group

#: An axis is said to do what it does in at least this share of the forward arithmetic.
_SHARE = 0.05
#: Forms that split weights as the arithmetic goes.
_OF_WEIGHTS = ("tensor parallel", "expert parallel")


def strategy_words(f: Formulation, choices: Sequence[int], inputs: Sequence[TensorPlan]) -> str:
    """Describe what each axis does in the forward contractions, and what it does to stored state."""
    derived = _parameter_derived(f)
    work: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    total = 0.0
    for choice, chosen in zip(f.decisions, choices, strict=True):
        if choice.kind != "group":
            continue
        group = f.groups[choice.group]
        strategy = choice.strategies[chosen]
        windows = group.windows()
        for n, item in zip(group.nodes, group.works, strict=True):
            if not item.contraction or f.graph.nodes[n].phase != "forward":
                continue
            flops = item.flops_per_point
            for factor in item.factors:
                flops *= group.factors[factor].size
            total += flops
            for factor in item.factors:
                for axis in strategy.axes[factor]:
                    kind = _kind(f.graph.nodes[n], group, factor, derived)
                    work[axis]["spatial parallel" if factor in windows else kind] += flops
    phrases = []
    for kind in ("data parallel", "spatial parallel", *_OF_WEIGHTS):
        axes = [a for a in f.mesh.axis_names if total and work[a][kind] > _SHARE * total]
        if axes:
            phrases.append(f"{kind} over {_names(axes)}")
    return ", ".join([*phrases, *_state_words(f, inputs, work, total)]) or "replicated"


def _kind(node: Node, group: Group, factor: int, derived: set[int]) -> str:
    """What splitting a factor of a contraction is called. Of experts there are as many weights, each for its own
    inputs: their factor is in all tensors, or where inputs are in groups of unequal size in the weights alone."""
    weights = {f for read in group.reads if read.value in derived for dim in read.dims for f in dim}
    inputs = {f for read in group.reads if read.value not in derived for dim in read.dims for f in dim}
    results = {f for define in group.defines for dim in define.dims for f in dim}
    if not weights:
        return "attention"  # split alike by batch or by head: says nothing of its own
    if factor not in weights:
        return "data parallel"
    of_experts = (factor in inputs) == (factor in results) and node.primitive != "conv_general_dilated"
    return "expert parallel" if of_experts else "tensor parallel"


def _state_words(
    f: Formulation, inputs: Sequence[TensorPlan], work: dict[str, dict[str, float]], total: float
) -> list[str]:
    phrases = []
    for role, name in (("parameter", "parameters"), ("optimizer", "optimizer state")):
        tensors = [t for t in inputs if t.role == role]
        size = sum(f.graph.values[v].num_bytes for v, t in zip(f.graph.inputs, inputs, strict=True) if t.role == role)
        axes = []
        for axis in f.mesh.axis_names:
            split = sum(
                f.graph.values[v].num_bytes
                for v, t in zip(f.graph.inputs, inputs, strict=True)
                if t.role == role and axis in t.sharding.axes
            )
            as_weights = total and any(work[axis][kind] > _SHARE * total for kind in _OF_WEIGHTS)
            if tensors and size and split > size / 2 and not as_weights:
                axes.append(axis)
        if axes:
            phrases.append(f"{name} sharded over {_names(axes)}")
    return phrases


def _names(axes: Sequence[str]) -> str:
    return " and ".join(f"`{axis}`" for axis in axes)


def _parameter_derived(f: Formulation) -> set[int]:
    """Values computed from parameters alone: the weights of contractions, cast or reshaped."""
    carried = {f.graph.inputs[i] for i, _ in f.graph.carried}
    derived = set(carried)
    for node in f.graph.nodes:
        operands = [v for v in node.operands if v is not None]
        if operands and all(v in derived for v in operands):
            derived.update(node.results)
    return derived
