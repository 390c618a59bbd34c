"""Name a plan's strategy as the field does: FSDP, ZeRO-1, HSDP, Megatron tensor, sequence, context and expert parallelism.

In: `Formulation`, the solver's choices, the arguments' shardings. Out: e.g. "FSDP (ZeRO-3) over `data`, Megatron tensor
parallel over `model`". A strategy without a name is described.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.context_method import context_of
from autopar.formulate.formulation import Formulation
from autopar.ir.sharding import TensorSharding
from autopar.plans.records import Role, TensorPlan
from autopar.rules.grouping import Define, Group, Read, Work

#: An axis has a role if it has the role in more than this share of the forward FLOPs, or of the forward activations.
_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class _Roles:
    """The dims of activations, as (value, dim), that index the examples of the batch, and those that index the positions in an
    example."""

    examples: frozenset[tuple[int, int]]
    positions: frozenset[tuple[int, int]]


def strategy_text(f: Formulation, choices: Sequence[int], inputs: Sequence[TensorPlan]) -> str:
    """The name of the strategy: the role of each mesh axis in the forward pass and for the state.

    Args:
        choices: by decision, the position of its strategy.
    """
    work = _Work(f, choices, inputs)
    data, most = work.axes("data"), {role: _state_axes(f, inputs, role) for role in ("parameter", "optimizer")}
    stored = [axis for axis in f.mesh.axis_names if not work.splits_weights(axis)]
    parameters = [axis for axis in stored if axis in most["parameter"]]
    optimizer = [axis for axis in stored if axis in most["optimizer"]]
    has_optimizer = any(tensor.role == "optimizer" for tensor in inputs)
    fsdp = [axis for axis in data if axis in parameters and (axis in optimizer or not has_optimizer)]
    zero1 = [axis for axis in data if axis in optimizer and axis not in parameters]
    replicas = [axis for axis in data if axis in stored and axis not in (*fsdp, *zero1)]
    is_hybrid = bool(fsdp and replicas)
    plain = [axis for axis in data if axis not in (*fsdp, *zero1) and not (is_hybrid and axis in replicas)]
    phrases = [f"HSDP: FSDP (ZeRO-3) over {_names(fsdp)}, replicas over {_names(replicas)}"] if is_hybrid else []
    phrases += _phrases(
        ("FSDP (ZeRO-3)", [] if is_hybrid else fsdp),
        ("ZeRO-1", zero1),
        ("data parallel", plain),
    )
    megatron = [axis for axis in work.axes("tensor") if work.is_megatron(axis)]
    with_sequence = [axis for axis in megatron if work.splits_positions(axis)]
    phrases += _phrases(
        ("spatial parallel", work.axes("spatial")),
        ("Megatron tensor and sequence parallel", with_sequence),
        ("Megatron tensor parallel", [axis for axis in megatron if axis not in with_sequence]),
        ("tensor parallel", [axis for axis in work.axes("tensor") if axis not in megatron]),
        ("expert parallel", work.axes("expert")),
        ("context parallel", work.axes("context")),
        *_methods(f, choices),
        ("parameters sharded", [axis for axis in parameters if axis not in fsdp]),
        ("optimizer state sharded", [axis for axis in optimizer if axis not in (*fsdp, *zero1)]),
    )
    return ", ".join(phrases) or "replicated"


def _methods(f: Formulation, choices: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
    """The methods by which devices share the tokens of attention, each with its axes."""
    found: dict[str, list[str]] = defaultdict(list)
    for decision, chosen in zip(f.decisions, choices, strict=True):
        group = f.groups[decision.group] if decision.kind == "group" else None
        if group is None or group.region is None or group.region.context is None:
            continue
        context = context_of(group, decision.strategies[chosen], f.graph, f.mesh, f.profile)
        if context is not None:
            found[context.method] += [axis for axis in context.axes if axis not in found[context.method]]
    names = {"ring": "ring attention", "ulysses": "Ulysses attention", "gathered": "attention to gathered keys"}
    yield from ((names[method], axes) for method, axes in found.items())


class _Work:
    """The FLOPs and activations that each mesh axis shards in the forward pass, by role. Arguments as for `strategy_text`."""

    def __init__(self, f: Formulation, choices: Sequence[int], inputs: Sequence[TensorPlan]) -> None:
        self._f = f
        self._derived = _parameter_derived(f)
        self._roles = _roles_of_dims(f, inputs)
        self._total = 0.0
        self._flops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._weight_dims: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._activations, self._by_position = 0.0, dict[str, float]()
        for decision, chosen in zip(f.decisions, choices, strict=True):
            if decision.kind == "group":
                group, axes = f.groups[decision.group], decision.strategies[chosen].axes
                self._add_flops(group, axes)
                self._add_activations(group, axes)

    def axes(self, kind: str) -> list[str]:
        """The axes with a role in the forward FLOPs.

        Args:
            kind: the role: "data", "tensor", "expert", "context", "spatial" or "attention".
        """
        return [a for a in self._f.mesh.axis_names if self._flops[a][kind] > _SHARE * self._total > 0]

    def splits_weights(self, axis: str) -> bool:
        """Whether an axis shards the weights in contractions, not only in storage."""
        return any(self._flops[axis][kind] > _SHARE * self._total > 0 for kind in ("tensor", "expert"))

    def is_megatron(self, axis: str) -> bool:
        """Whether an axis shards the columns of some weights and the rows of others, so that two matmuls share an all-reduce."""
        dims = self._weight_dims[axis]
        return all(dims[kind] > _SHARE * self._total for kind in ("columns", "rows"))

    def splits_positions(self, axis: str) -> bool:
        """Whether an axis shards activations over the sequence between matmuls."""
        return self._by_position.get(axis, 0.0) > _SHARE * self._activations

    def _add_flops(self, group: Group, axes: Sequence[Sequence[str]]) -> None:
        windows = group.windows()
        for work, flops in _forward_contractions(self._f, group):
            self._total += flops
            for factor in work.factors:
                for axis in axes[factor]:
                    kind = "spatial" if factor in windows else self._kind(group, factor)
                    self._flops[axis][kind] += flops
                    if kind == "tensor":
                        is_summed = factor not in _factors(group.defines)
                        self._weight_dims[axis]["rows" if is_summed else "columns"] += flops

    def _kind(self, group: Group, factor: int) -> str:
        """The role of sharding a factor of a contraction.

        The factor of experts is in all tensors of the contraction; where the inputs are in groups of unequal size, it is in
        the weights alone.
        """
        weights = _factors(read for read in group.reads if read.value in self._derived)
        activations = _factors(read for read in group.reads if read.value not in self._derived)
        if not weights:
            return "attention"  # sharding over the batch or over heads, which look alike here
        if factor not in weights:
            return "context" if self._is_position(group, factor) else "data"
        is_expert = (factor in activations) == (factor in _factors(group.defines))
        is_convolution = any(self._f.graph.nodes[n].primitive == "conv_general_dilated" for n in group.nodes)
        return "expert" if is_expert and not is_convolution else "tensor"

    def _is_position(self, group: Group, factor: int) -> bool:
        places = {
            (side.value, i)
            for side in (*group.reads, *group.defines)
            for i, dim in enumerate(side.dims)
            if factor in dim[:1]
        }
        return bool(places & self._roles.positions) and not places & self._roles.examples

    def _add_activations(self, group: Group, axes: Sequence[Sequence[str]]) -> None:
        for define in group.defines:
            node = self._f.graph.nodes[define.node]
            if node.phase != "forward" or define.value in self._derived or group.region:
                continue
            num_bytes = self._f.graph.values[define.value].num_bytes
            self._activations += num_bytes
            for i, dim in enumerate(define.dims):
                if (define.value, i) in self._roles.positions:
                    for axis in {axis for factor in dim[:1] for axis in axes[factor]}:
                        self._by_position[axis] = self._by_position.get(axis, 0.0) + num_bytes


def _forward_contractions(f: Formulation, group: Group) -> Iterator[tuple[Work, float]]:
    for n, work in zip(group.nodes, group.works, strict=True):
        if work.contraction and f.graph.nodes[n].phase == "forward":
            flops = work.flops_per_point
            for factor in work.factors:
                flops *= group.factors[factor].size
            yield work, flops


def _roles_of_dims(f: Formulation, inputs: Sequence[TensorPlan]) -> _Roles:
    """Follow the dims of the batch through the forward pass by their factors. A merged dim has the role of its outermost part,
    because sharding the dim evenly shards that part."""
    examples, positions = set[tuple[int, int]](), set[tuple[int, int]]()
    for value, tensor in zip(f.graph.inputs, inputs, strict=True):
        rank = len(tensor.shape)
        if tensor.role == "data" and rank:
            examples.add((value, 0))
            is_index = tensor.dtype.startswith(("int", "uint"))
            positions |= {(value, i) for i in range(1, rank if is_index else rank - 1)}
    for group in f.groups:
        for found in (examples, positions):
            factors = {
                dim[0] for read in group.reads for i, dim in enumerate(read.dims) if dim and (read.value, i) in found
            }
            found |= {
                (one.value, i) for one in group.defines for i, dim in enumerate(one.dims) if factors & set(dim[:1])
            }
    return _Roles(frozenset(examples), frozenset(positions - examples))


def _state_axes(f: Formulation, inputs: Sequence[TensorPlan], role: Role) -> list[str]:
    """The axes that shard more than half of the bytes of parameters or optimizer state."""
    sizes: list[tuple[float, TensorSharding]] = [
        (f.graph.values[value].num_bytes, tensor.sharding)
        for value, tensor in zip(f.graph.inputs, inputs, strict=True)
        if tensor.role == role
    ]
    half = sum(size for size, _ in sizes) / 2
    return [a for a in f.mesh.axis_names if half and sum(size for size, sharding in sizes if a in sharding.axes) > half]


def _factors(sides: Iterator[Read] | Sequence[Read | Define]) -> set[int]:
    return {factor for side in sides for dim in side.dims for factor in dim}


def _phrases(*named: tuple[str, Sequence[str]]) -> list[str]:
    return [f"{kind} over {_names(axes)}" for kind, axes in named if axes]


def _names(axes: Sequence[str]) -> str:
    return " and ".join(f"`{axis}`" for axis in axes)


def _parameter_derived(f: Formulation) -> set[int]:
    """Values computed from parameters alone, such as cast or reshaped weights."""
    carried = {f.graph.inputs[i] for i, _ in f.graph.carried}
    derived = set(carried)
    for node in f.graph.nodes:
        operands = [v for v in node.operands if v is not None]
        if operands and all(v in derived for v in operands):
            derived.update(node.results)
    return derived
