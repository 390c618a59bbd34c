"""Constrain activations by hand, as experts write it into a model.

In: a step of a Flax linen model, and `Activations`, the mesh axes of each kind of activation. Out: the same step with
`with_sharding_constraint` at the results of its modules, on queries, keys and attention weights, on what goes to experts,
and in the loss. The models stay as they are: Flax can intercept calls of modules, and the functions of attention and
loss are replaced while the step is traced.

Megatron-LM's sequence parallelism: between blocks `(batch, sequence over model, width)`, from norms and row-parallel
modules; `(batch, sequence, width over model)` from column-parallel ones and into row-parallel ones. What a column-parallel module reads has no
constraint of its own: with one, each of several readers would gather its input, and sum its gradient, on its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ir.mesh import MeshShape
from autopar.runtime.jit import abstract_mesh
from benchmarks.baselines import roles

#: Mesh axes of each dim. Axes that the mesh lacks, or that do not divide their dim, are left out.
Entries = tuple[tuple[str, ...], ...]

_ATTENTION, _LOSS = "dot_product_attention_weights", "softmax_cross_entropy_with_integer_labels"
#: Names of the modules that make logits; tied to an embedding, they run outside their model, without its path.
_HEADS = ("lm_head", "decoder")


@dataclass(frozen=True, slots=True)
class Activations:
    """The mesh axes of each kind of activation. None leaves it to XLA.

    Args:
        residual: `(batch, sequence, width)`: embeddings, norms, row-parallel results.
        column: the same of column-parallel results, and of what row-parallel modules read.
        logits: `(batch, sequence, vocabulary)`; the loss is then written so that it gathers no logits.
        query, key: `(batch, sequence, heads, width)`.
        weights: `(batch, heads, queries, keys)` of attention.
        experts, by_batch: `(experts, batch, capacity, width)` in the experts, and before and after them. Without the
            second, XLA gathers the tokens instead of exchanging them in an all-to-all.
        everywhere: whether all modules' results count as residuals, and of any rank, by the batch only.
        router: `(batch, sequence, experts)` of the router. The places of tokens in an expert are counted along the sequence, which is slow
            in parts.
    """

    residual: Entries | None = None
    column: Entries | None = None
    logits: Entries | None = None
    query: Entries | None = None
    key: Entries | None = None
    weights: Entries | None = None
    experts: Entries | None = None
    by_batch: Entries | None = None
    everywhere: bool = False
    router: Entries | None = None

    def in_step(self, step: Callable[..., Any], mesh: MeshShape, batch: Any) -> Callable[..., Any]:
        """The step with these constraints."""
        constraint = _Constraint(self, mesh, {leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim})

        def constrained(state: Any, batch: Any) -> Any:
            with constraint.while_traced():
                return step(state, batch)

        constrained.__name__ = constrained.__qualname__ = getattr(step, "__name__", "step")
        return constrained


def batch_only(*axes: str) -> Activations:
    """The batch over these axes at the result of every module: XLA then gathers weights rather than activations."""
    return Activations(residual=(axes,), everywhere=True)


def sequence_tensor(*batch: str) -> Activations:
    """Megatron-LM's tensor and sequence parallelism, the batch over `data` or the given axes; the logits split by vocabulary if it divides,
    else by sequence."""
    data, model, whole = batch or ("data",), ("model",), ()
    return Activations(
        residual=(data, model, whole),
        column=(data, whole, model),
        logits=(data, whole, model),
        query=(data, whole, model, whole),
        key=(data, whole, model, whole),
        weights=(data, model, whole, whole),
    )


def gathered_keys(*batch: str) -> Activations:
    """Context parallelism: all activations by sequence over `context`, keys and values gathered; the batch over `data` or the given axes."""
    data, context, whole = batch or ("data",), ("context",), ()
    residual = (data, context, whole)
    return Activations(
        residual=residual,
        column=residual,
        logits=residual,
        query=(data, context, whole, whole),
        key=(data, whole, whole, whole),
        weights=(data, whole, context, whole),
    )


def tensor(axis: str = "model") -> Activations:
    """Megatron-LM's tensor parallelism without a split sequence."""
    data, model, whole = ("data",), (axis,), ()
    return Activations(
        residual=(data, whole, whole),
        column=(data, whole, model),
        query=(data, whole, model, whole),
        key=(data, whole, model, whole),
        weights=(data, model, whole, whole),
    )


def exchanged(others: Activations, *inner: str) -> Activations:
    """Expert parallelism within another recipe: tokens are exchanged over `expert`, and an expert's are split over the recipe's inner axis,
    if it has one."""
    batch, whole = ("data", "expert"), ()
    return replace(
        others,
        experts=(("expert",), ("data",), inner, whole),
        by_batch=(whole, batch, inner, whole),
        router=(batch, whole, whole),
    )


def _by_queries(query: Entries) -> tuple[Entries, Entries, Entries]:
    """Queries, keys and weights where heads do not divide: each device has a part of the queries, and all keys."""
    batch, _, heads, width = query
    return (batch, heads, (), width), (batch, (), (), width), (batch, (), heads, ())


@dataclass(frozen=True, slots=True)
class _Constraint:
    activations: Activations
    mesh: MeshShape
    batch_sizes: Collection[int]

    @contextlib.contextmanager
    def while_traced(self) -> Iterator[None]:
        """A context in which a model is traced with the constraints."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(nn.intercept_methods(self._module))
            if self.activations.weights is not None:
                for module in [one for name, one in sys.modules.items() if ".modeling_flax_" in name]:
                    if hasattr(module, _ATTENTION):
                        original = getattr(module, _ATTENTION)
                        stack.enter_context(mock.patch.object(module, _ATTENTION, self._attention(original)))
            if self.activations.logits is not None:
                stack.enter_context(mock.patch.object(optax, _LOSS, self._loss))
            yield

    def _module(self, method: Any, given: Any, named: Any, context: nn.module.InterceptorContext) -> Any:
        module, kind = context.module, self.activations
        is_head = module.name in _HEADS and context.method_name == "__call__"
        if kind.logits is not None and is_head and isinstance(module, nn.Dense):
            return self._head(module, *given)
        path = "/".join(map(str, module.path))
        if context.method_name == "__call__" and roles.is_split_by_rows(path) and kind.column != kind.residual:
            given = (self._activation(given[0], kind.column), *given[1:])
        result = method(*given, **named)
        if context.method_name == "to_experts":
            return self.on(self.on(result, kind.by_batch), kind.experts)
        if context.method_name == "from_experts":
            return self.on(self.on(result, kind.experts), kind.by_batch)
        if context.method_name != "__call__":
            return result
        if kind.router is not None and module.name == "router":
            return self.on(result, kind.router)
        if kind.everywhere:
            return jax.tree.map(lambda leaf: self._batch(leaf, kind.residual), result)
        if roles.is_split_by_columns(path) and not roles.is_fused(f"{path}/kernel"):
            return self._activation(result, kind.column)
        is_residual = isinstance(module, nn.Embed | nn.Dense) or "Norm" in type(module).__name__
        if is_residual or roles.is_split_by_rows(path) or roles.is_fused(f"{path}/kernel"):
            return self._activation(result, kind.residual)
        return result

    def _head(self, module: nn.Dense, hidden: Any) -> Any:
        """The logits. Their kernel, and so its gradient, has their vocabulary's sharding: with that of a tied embedding,
        XLA would gather the gradient of the logits."""
        params: Any = module.variables["params"]
        kernel, entries = params["kernel"], self._logits(params["kernel"].shape[-1])
        assert entries is not None
        dtype = module.dtype or jnp.result_type(hidden, kernel)
        kernel = kernel.astype(dtype)
        if self._present(entries[-1]):
            kernel = self.on(kernel, ((), entries[-1]), uneven=True)
        logits = hidden.astype(dtype) @ kernel
        if "bias" in params:
            logits += params["bias"].astype(dtype)
        return self.on(logits, entries, uneven=True)

    def _logits(self, vocabulary: int) -> Entries | None:
        """By vocabulary. A vocabulary that does not divide is padded, or the sequence is split instead, if other
        activations are split by it."""
        kind = self.activations
        assert kind.logits is not None
        divides = vocabulary % self.mesh.sizes(self._present(kind.logits[-1])) == 0
        return kind.logits if divides or kind.residual is None or len(kind.residual) < 3 else kind.residual

    def _attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        kind = self.activations

        def weights(query: Any, key: Any, *args: Any, **options: Any) -> Any:
            of_query, of_key, of_weights = kind.query, kind.key, kind.weights
            heads = self._present(of_query[2]) if of_query else ()
            if of_query and query.shape[-2] % self.mesh.sizes(heads):
                of_query, of_key, of_weights = _by_queries(of_query)
            query, key = self.on(query, of_query), self.on(key, of_key)
            return self.on(original(query, key, *args, **options), of_weights)

        return weights

    def _loss(self, logits: Any, labels: Any, axis: int = -1) -> Any:
        """Cross-entropy that compares each place with the label instead of picking one: nothing gathers the logits."""
        assert axis in (-1, logits.ndim - 1)
        if logits.ndim == 3:  # without the constraint, the labels' sharding would be that of the loss
            entries = self._logits(logits.shape[-1])
            logits, labels = self.on(logits, entries, uneven=True), self.on(labels, (entries or ())[:2], uneven=True)
        highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        normalizer = jnp.log(jnp.exp(logits - highest).sum(-1)) + highest[..., 0]
        places = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
        return normalizer - jnp.where(places == labels[..., None], logits, 0).sum(-1)

    def _activation(self, value: Any, entries: Entries | None) -> Any:
        """A module's result. Of rank 3 it has a sequence; of other ranks, only its batch is constrained."""
        if entries is None or not isinstance(value, jax.Array) or value.ndim != 3:
            return self._batch(value, entries)
        return self.on(value, entries) if value.shape[0] in (1, *self.batch_sizes) else value

    def _batch(self, value: Any, entries: Entries | None) -> Any:
        if entries is None or not isinstance(value, jax.Array) or value.ndim < 2:
            return value
        return self.on(value, entries[:1]) if value.shape[0] in self.batch_sizes else value

    def on(self, value: Any, entries: Entries | None, *, uneven: bool = False) -> Any:
        """A value with a constraint.

        Args:
            uneven: whether XLA may pad a dim that does not divide; otherwise it stays whole.
        """
        if entries is None:
            return value
        spec = [
            axes if axes and (uneven or length % self.mesh.sizes(axes) == 0) else None
            for length, axes in zip(value.shape, map(self._present, entries), strict=False)
        ]
        return jax.lax.with_sharding_constraint(value, NamedSharding(abstract_mesh(self.mesh), PartitionSpec(*spec)))

    def _present(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in self.mesh.axis_names and self.mesh.size(axis) > 1)
