"""One pool of bytes on the devices for the page caches of several models, whose pages differ in size.

In: the models, the bytes of each device, a mesh. Out: `KVPool`, for `Engine.open(pool=)`: two flat arrays on each device, for keys and for
values, and the `BytePool` that divides them.

Each program of a model sees the flat arrays as rows of its own pages: a reshape of each device's part, which moves nothing, inside the
compiled program. The plan has the rows; `compiled_on_pool` puts the reshapes around it. All layers of a model are in one array, so a page is
a row for each layer, one after the other (`BytePool`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.api.planned_function import Compiled, Planned, shardings_of
from autopar.errors import InferenceError
from autopar.inference.kv_cache.byte_pool import BytePool, ModelPages
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.model.checkpoint import Checkpoint
from autopar.inference.model.config import DecoderConfig
from autopar.inference.serve.page_rows import PageRows
from autopar.inference.serve.runner import PageMemory
from autopar.inference.serve.shared_pages import SharedPages
from autopar.inference.serve.swap_weights import Swapped, Swapping
from autopar.inference.serve.weights import Weights
from autopar.inference.step.step import Resident
from autopar.jax_interop.partition_spec import named_shardings
from autopar.planner.request import requested_meshes
from autopar.runtime.jit import auto_mesh, jit_options, make_mesh

#: Slabs have room for at least so many of the largest pages, and there are about so many of them.
_PAGES_OF_SLAB, _NUM_SLABS = 2, 64


class PlaceInPool(NamedTuple):
    """The place of one engine in a pool: its pages, and what it has in common with the others."""

    shared: SharedPages
    pages: ModelPages
    swapping: Swapping
    priority: int

    def take(self, weights: Weights) -> None:
        """The engine is ready; its weights are on the devices."""
        runner = weights.iterations.runner
        self.swapping.add(Swapped(weights.iterations, weights, runner.weight_bytes, self.priority))
        weights.make_room = lambda: self.swapping.make_room(runner.weight_bytes)


class KVPool:
    """Pages of several models in one pool of bytes.

    Args:
        configs: those of all models. num_bytes: of each device. mesh: that of the engines.
        page_size: tokens per page. dtype: of keys and values.
        weights_bytes: the weights of the engines that each device has at once; those of the others are in the host's memory.

    Attributes:
        shared: what the engines have in common. pages: the division of the bytes. memory: the arrays.

    Raises:
        InferenceError: the pool is too small for a few pages of each model.
    """

    def __init__(
        self,
        configs: Sequence[DecoderConfig],
        num_bytes: float,
        mesh: Mesh,
        *,
        page_size: int = 16,
        dtype: Any = jnp.bfloat16,
        weights_bytes: float = math.inf,
    ) -> None:
        self.mesh, self.page_size, self.dtype = auto_mesh(mesh), page_size, jnp.dtype(dtype)
        sizes = [self._row_size(config) for config in configs]
        pages = [size * config.num_layers for size, config in zip(sizes, configs, strict=True)]
        unit = math.lcm(*sizes)
        total = int(num_bytes) // (2 * self.dtype.itemsize) // unit * unit
        least = _PAGES_OF_SLAB * max(pages)
        slab = -(-max(least, total // _NUM_SLABS) // unit) * unit
        if total < 2 * slab:
            needed = 2 * slab * 2 * self.dtype.itemsize
            raise InferenceError(
                f"the pool has {num_bytes:,.0f} bytes on each device, and {needed:,} are needed for a few pages of these models: give it"
                " more memory, or a smaller page_size"
            )
        self._total, self._slab, self._weights_bytes = total, slab, weights_bytes
        bytes_of = self.dtype.itemsize
        self.pages = BytePool((total - slab) * bytes_of, slab * bytes_of)  # the last slab is scratch
        self.shared = SharedPages(Swapping(weights_bytes))
        place = self.flat_sharding
        empty = KVPages(*(jnp.zeros((self._parts, total), self.dtype, device=place) for _ in KVPages._fields))
        self.memory = PageMemory((empty,))

    @classmethod
    def of(
        cls,
        folders: Sequence[str | os.PathLike[str]],
        num_bytes: float,
        *,
        mesh: Any = None,
        page_size: int = 16,
        dtype: Any = None,
        weights_bytes: float = math.inf,
    ) -> KVPool:
        """A pool for models in folders.

        Args:
            mesh: as for `Engine.open`. dtype: of weights and cache; by default that of the checkpoints.

        Raises:
            InferenceError: the models differ in dtype, or the pool is too small.
        """
        found = [Checkpoint.open(folder) for folder in folders]
        dtypes = {str(each.abstract_params(dtype)["params"]["norm"]["weight"].dtype) for each in found}
        if len(dtypes) > 1:
            raise InferenceError(f"the models have the dtypes {', '.join(sorted(dtypes))}: give one `dtype` for all")
        mesh = mesh if isinstance(mesh, Mesh) else make_mesh_of(mesh)
        configs = [each.config for each in found]
        return cls(configs, num_bytes, mesh, page_size=page_size, dtype=dtypes.pop(), weights_bytes=weights_bytes)

    @property
    def _parts(self) -> int:
        return self.mesh.size

    @property
    def flat_sharding(self) -> NamedSharding:
        """Each device has its own part of the flat arrays."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def _split(self, config: DecoderConfig) -> tuple[int, int]:
        """The parts of KV heads and of a head that a device has: one of the two is split, if it divides; else all have all."""
        if config.num_kv_heads % self._parts == 0:
            return self._parts, 1
        return (1, self._parts) if config.head_dim % self._parts == 0 else (1, 1)

    def _row_size(self, config: DecoderConfig) -> int:
        """The elements of a page in one layer, on one device."""
        return self.page_size * config.num_kv_heads * config.head_dim // math.prod(self._split(config))

    def rows(self, config: DecoderConfig) -> PageRows:
        """The rows of a model's pages.

        Raises:
            InferenceError: the pool was not made for models with such pages.
        """
        size = self._row_size(config)
        if self._total % size or size * config.num_layers > self._slab:
            raise InferenceError(
                f"the pool was made for other models: a page of this one has {config.num_layers} layers of {size} elements on a device."
                " Name all models when the pool is made"
            )
        heads, parts = (self.mesh.axis_names if each > 1 else None for each in self._split(config))
        shape = (self._total // size, self.page_size, config.num_kv_heads, config.head_dim)
        return PageRows(shape, PartitionSpec(None, None, heads, parts), config.num_layers)

    def place_for(self, config: DecoderConfig, num_bytes: int, quota: float, priority: int) -> PlaceInPool:
        """A place for one more engine, whose weights have so many bytes on all devices. Others sleep if there is no room for them.

        Raises:
            InferenceError: the quotas exceed the pool, or the weights what the devices may have at once.
        """
        pages = self.pages.model(self._row_size(config) * self.dtype.itemsize, config.num_layers, quota)
        swapping = self.shared.swapping
        assert swapping is not None
        try:
            with self.shared.lock:
                swapping.make_room(-(-num_bytes // self._parts))
        except InferenceError:
            self.pages.models.remove(pages)
            raise
        return PlaceInPool(self.shared, pages, swapping, priority)

    def reserved_bytes(self) -> float:
        """The bytes that the other engines need on a device besides the pool."""
        others = sum(member.runner.layout.bytes_without_pages for member in self.shared.members)
        return min(others, self._weights_bytes)

    def compiled(self, planned: Planned, rows: PageRows) -> Compiled:
        """Compile a program on the flat arrays. See `compiled_on_pool`."""
        return compiled_on_pool(planned, rows, self.flat_sharding, self._total)


def compiled_on_pool(planned: Planned, rows: PageRows, flat: NamedSharding, total: int) -> Compiled:
    """Compile a planned program whose pages are rows, to take and to return the flat arrays in their place.

    Args:
        flat: the sharding of the flat arrays `[devices, total]`.
    """
    mesh = planned.mesh
    as_rows, as_flat = _views(mesh, rows, flat.spec, total)

    def with_pages(tree: Any, change: Any) -> Any:
        return jax.tree.map(
            lambda node: node._replace(pages=jax.tree.map(change, node.pages)) if isinstance(node, Resident) else node,
            tree,
            is_leaf=lambda node: isinstance(node, Resident),
        )

    def run(*arguments: Any) -> Any:
        return with_pages(planned.run(*with_pages(arguments, as_rows)), as_flat)

    place = NamedSharding(mesh, flat.spec)
    shape = jax.ShapeDtypeStruct((flat.mesh.size, total), _pages_dtype(planned.arguments))
    arguments = with_pages(planned.arguments, lambda _: shape)
    given = jax.tree.unflatten(jax.tree.structure(planned.arguments), list(shardings_of(planned.plan, mesh)))
    made = jax.eval_shape(run, *arguments)
    outputs = named_shardings([tensor.sharding for tensor in planned.plan.outputs], mesh)
    returned = jax.tree.unflatten(jax.tree.structure(made), outputs)
    at = next(n for n, argument in enumerate(planned.arguments) if isinstance(argument, Resident))
    jitted = jax.jit(
        run,
        in_shardings=with_pages(given, lambda _: place),
        out_shardings=with_pages(returned, lambda _: place),
        donate_argnums=at,
        **jit_options(planned.plan, mesh),
    )
    return Compiled(planned.plan, mesh, jitted.lower(*arguments).compile())


def _views(mesh: Mesh, rows: PageRows, flat: PartitionSpec, total: int) -> tuple[Any, Any]:
    """The functions from a flat array to rows and back, on each device's part."""
    local = NamedSharding(mesh, rows.spec).shard_shape(rows.shape)
    assert math.prod(local) == total, "rows fill a device's part"
    as_rows = jax.shard_map(
        lambda part: part.reshape(local), mesh=mesh, in_specs=flat, out_specs=rows.spec, check_vma=False
    )
    as_flat = jax.shard_map(
        lambda part: part.reshape(1, total), mesh=mesh, in_specs=rows.spec, out_specs=flat, check_vma=False
    )
    return as_rows, as_flat


def _pages_dtype(arguments: Sequence[Any]) -> Any:
    resident = next(argument for argument in arguments if isinstance(argument, Resident))
    return resident.pages[0].keys.dtype


def make_mesh_of(given: str | Mapping[str, int] | None) -> Mesh:
    """The mesh of the visible devices that a user names, by default one axis of all."""
    (shape,) = requested_meshes(given or f"model={jax.device_count()}", None)
    return make_mesh(shape, jax.devices()[: shape.num_devices])
