"""Define sharding recipes by hand, each as most users write it and as an expert does.

In: a step `(state, batch) -> (state, loss)` of a Flax linen model, its arguments as shapes, a mesh. Out: the jitted step.
A user gives the shardings of inputs and outputs, and of activations only where the recipe does not exist without (sequence, context and expert
parallelism, split vocabularies, MaxText's rules). An expert gives those of activations and gradients too.
`benchmarks.plans.tuned` adds what is no sharding: kernels, and XLA's options.

A recipe for N GPUs exists if the batch, and what it shards, divide by N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from autopar.ir.mesh import MeshShape
from autopar.runtime.jit import abstract_mesh
from benchmarks.baselines import maxtext_rules, pinned, roles
from benchmarks.baselines.jitted import jitted
from benchmarks.baselines.pinned import Pins
from benchmarks.plans.activations import Activations, batch_only, exchanged, gathered_keys, sequence_tensor, tensor

DATA, MODEL, FSDP, CONTEXT, EXPERT, TENSOR = "data", "model", "fsdp", "context", "expert", "tensor"
GPUS_PER_HOST = 8
#: Sizes of the inner axis of a grid; it stays within a host.
_INNER = (2, 4, 8)

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to shard, for a mesh.

    Args:
        kind: what is sharded, e.g. "FSDP"; a grid of several sizes is one kind.
        name: name in the table, e.g. "FSDP" or "TP + SP 2x4".
        by_users: the activations that users constrain.
        by_experts: the activations that experts constrain.
        shards_gradients: whether experts constrain gradients to the sharding of the optimizer state.
    """

    kind: str
    name: str
    mesh: MeshShape
    pins: Callable[[Sequence[Any], MeshShape], Pins]
    by_users: Activations | None = None
    by_experts: Activations | None = None
    shards_gradients: bool = False

    @property
    def num_gpus(self) -> int:
        return self.mesh.num_devices

    @property
    def inner(self) -> int:
        """Size of a grid's inner axis; 1 of a recipe without a grid."""
        return self.mesh.axis_sizes[-1] if self.mesh.axis_names[-1] in (MODEL, CONTEXT, EXPERT, TENSOR) else 1

    @property
    def num_hosts(self) -> int:
        return -(-self.num_gpus // GPUS_PER_HOST)

    @property
    def has_more_constraints(self) -> bool:
        """Whether an expert constrains more than a user."""
        return self.by_experts != self.by_users or self.shards_gradients

    def by_user(self, step: Step, args: tuple[Any, Any], mesh: Mesh | None = None) -> Any:
        """The step jitted as a user writes it; without a mesh of devices, it can only be lowered."""
        return jitted(self.user_step(step, args), args, self.pins(args, self.mesh), mesh or self.mesh)

    def by_expert(self, step: Step, args: tuple[Any, Any], mesh: Mesh | None = None) -> Any:
        """The step jitted as an expert writes it; as `by_user`."""
        return jitted(self.expert_step(step, args), args, self.pins(args, self.mesh), mesh or self.mesh)

    def user_step(self, step: Step, args: tuple[Any, Any]) -> Step:
        """The step with the user's constraints."""
        return step if self.by_users is None else self.by_users.in_step(step, self.mesh, args[1])

    def expert_step(self, step: Step, args: tuple[Any, Any]) -> Step:
        """The step with the expert's constraints."""
        run = step if self.by_experts is None else self.by_experts.in_step(step, self.mesh, args[1])
        return _with_sharded_gradients(run, self.pins(args, self.mesh), self.mesh) if self.shards_gradients else run


def recipes(num_gpus: int, args: tuple[Any, Any]) -> list[Recipe]:
    """All recipes that divide on exactly this number of GPUs."""
    return [one for one in _all(num_gpus) if _applies(one, args)]


def gpu_counts(num_gpus: int) -> list[int]:
    """The numbers of GPUs to use out of `num_gpus`: all, then halves."""
    return [num_gpus >> n for n in range(num_gpus.bit_length()) if num_gpus % (1 << n) == 0]


def _all(num_gpus: int) -> Iterator[Recipe]:
    whole = MeshShape((DATA,), (num_gpus,))
    if num_gpus == 1:
        yield Recipe("one GPU", "one GPU", whole, pinned.data_parallel)
        return
    batch = batch_only(DATA)
    yield Recipe("data parallel", "data parallel", whole, pinned.data_parallel, by_experts=batch)
    yield Recipe("ZeRO-1", "ZeRO-1", whole, pinned.zero1, by_experts=batch, shards_gradients=True)
    yield Recipe("FSDP", "FSDP", whole, pinned.fsdp, by_experts=batch)
    local = MeshShape((DATA, FSDP), (max(num_gpus // GPUS_PER_HOST, 1), min(num_gpus, GPUS_PER_HOST)))
    both = batch_only(DATA, FSDP)
    if num_gpus > GPUS_PER_HOST:
        yield Recipe("HSDP", "HSDP", local, pinned.fsdp, by_experts=both, shards_gradients=True)
    rules = _maxtext(DATA, FSDP)
    yield Recipe("MaxText rules", "MaxText rules", local, maxtext_rules.maxtext, rules, rules)
    for inner in _INNER:
        if num_gpus % inner == 0 and inner <= num_gpus:
            yield from _grids(num_gpus // inner, inner)


def _grids(outer: int, inner: int) -> Iterator[Recipe]:
    grid, sequence = f"{outer}x{inner}", sequence_tensor()
    mesh = MeshShape((DATA, MODEL), (outer, inner))
    plain = "tensor parallel" if outer == 1 else f"data x tensor {grid}"
    yield Recipe("tensor parallel", plain, mesh, pinned.tensor_parallel, by_experts=tensor())
    yield Recipe("TP + SP", f"TP + SP {grid}", mesh, pinned.sequence_tensor_parallel, sequence, sequence)
    if outer > 1:
        name = f"FSDP x TP + SP {grid}"
        yield Recipe("FSDP x TP + SP", name, mesh, pinned.fsdp_tensor_parallel, sequence, sequence)
        name = f"MaxText rules {grid}"
        over, rules = _maxtext_mesh(outer, inner), _maxtext(DATA, FSDP)
        yield Recipe("MaxText rules", name, over, maxtext_rules.maxtext, rules, rules)
    batch = ((DATA, MODEL),)
    split = Activations(residual=batch, column=batch, logits=((DATA,), (), (MODEL,)))
    yield Recipe("vocabulary split", f"vocabulary split {grid}", mesh, pinned.vocabulary_split, split, split)
    context, keys = MeshShape((DATA, CONTEXT), (outer, inner)), gathered_keys()
    yield Recipe("context parallel", f"context parallel {grid}", context, pinned.context_parallel, keys, keys)
    expert = MeshShape((DATA, EXPERT), (outer, inner))
    sent = exchanged(batch_only(DATA, EXPERT))
    yield Recipe("expert parallel", f"expert parallel {grid}", expert, pinned.expert_parallel, sent, sent)
    yield from _expert_grids(outer, inner)


def _expert_grids(outer: int, inner: int) -> Iterator[Recipe]:
    """Expert parallelism with tensor or context parallelism inside: an example is split, too. The two fill one host or two."""
    with_tensor = exchanged(sequence_tensor(DATA, EXPERT), MODEL)
    with_context = exchanged(gathered_keys(DATA, EXPERT), CONTEXT)
    for size in _INNER:
        if outer % size or not min(outer * inner, GPUS_PER_HOST) <= size * inner <= 2 * GPUS_PER_HOST:
            continue
        sizes = (outer // size, size, inner)
        grid = "x".join(map(str, sizes))
        for kind, axis, kept in (("EP x TP + SP", MODEL, with_tensor), ("EP x CP", CONTEXT, with_context)):
            mesh = MeshShape((DATA, EXPERT, axis), sizes)
            yield Recipe(kind, f"{kind} {grid}", mesh, pinned.expert_parallel, kept, kept)


def _maxtext_mesh(outer: int, inner: int) -> MeshShape:
    """MaxText's mesh: hosts on `data`; within a host, `fsdp` and `tensor`."""
    within = min(outer, max(GPUS_PER_HOST // inner, 1))
    return MeshShape((DATA, FSDP, TENSOR), (outer // within, within, inner))


def _maxtext(*batch: str) -> Activations:
    """MaxText's constraints by its rules: `activation_batch`, `activation_embed`, `activation_mlp`, `activation_heads`."""
    whole, tensor = (), (TENSOR,)
    return Activations(
        residual=(batch, whole, tensor),
        column=(batch, whole, tensor),
        logits=(batch, whole, tensor),
        query=(batch, whole, tensor, whole),
        key=(batch, whole, tensor, whole),
        weights=(batch, tensor, whole, whole),
    )


def _applies(recipe: Recipe, args: tuple[Any, Any]) -> bool:
    """Whether the batch divides, and the recipe shards something of this model."""
    try:
        found = recipe.pins(args, recipe.mesh)
    except ValueError:
        return False
    state, axes = [path for path, _ in pinned.leaves(args[0])], recipe.mesh.axis_names
    if EXPERT in axes and not any(map(roles.is_expert, state)):
        return False
    if recipe.kind == "vocabulary split":
        return any(roles.vocabulary_dim(path, ()) is not None for path in state)
    if CONTEXT in axes:
        arrays = [leaf for _, leaf in pinned.leaves(args[1]) if leaf.ndim > 1]
        return bool(arrays) and all(leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in arrays)
    inner = MODEL if MODEL in axes else TENSOR
    if inner not in axes:
        return True
    return any(path.startswith("state/params") and inner in _axes(spec) for path, spec in found.items())


def _axes(spec: Any) -> set[str]:
    return {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}


def _with_sharded_gradients(step: Step, pins: Pins, mesh: MeshShape) -> Step:
    """The step with gradients constrained to the sharding of the optimizer state, before the optimizer reads them."""
    over = abstract_mesh(mesh)
    shardings = {path.split("/mu/", 1)[1]: NamedSharding(over, spec) for path, spec in pins.items() if "/mu/" in path}

    def constrained(path: Any, gradient: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return jax.lax.with_sharding_constraint(gradient, shardings[name])

    def sharded_step(state: Any, batch: Any) -> Any:
        own = state.tx

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return own.update(jax.tree_util.tree_map_with_path(constrained, updates), state, params)

        state, loss = step(state.replace(tx=optax.GradientTransformation(own.init, update)), batch)
        return state.replace(tx=own), loss

    sharded_step.__name__ = sharded_step.__qualname__ = getattr(step, "__name__", "step")
    return sharded_step
