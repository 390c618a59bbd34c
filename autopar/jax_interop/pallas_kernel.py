"""Read the grid and the blocks of a Pallas kernel, and make the kernel of one device's part.

In: a `pallas_call` equation.
Out: `Kernel`; the parameters of the same kernel with a smaller grid on smaller arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.jax_interop import compat as jax_compat


@dataclass(frozen=True, slots=True)
class Block:
    """One array of a kernel and its blocks.

    Args:
        shape: the shape of the whole array.
        sizes: the size of a block along each dim; None where the index map counts no blocks.
        index_map: the jaxpr from a position in the grid to the index of a block.
    """

    shape: tuple[int, ...]
    sizes: tuple[int | None, ...]
    index_map: Any


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Pallas kernel.

    Args:
        grid: the size of each dim of the grid; None where it is an operand.
        axes: the dims of the grid as the program numbers them, which are those that `vmap` has not added.
        program: the jaxpr of one position of the grid.
        num_scratch: the number of its last arguments that are scratch memory.
        scalars: the shapes of the operands before the inputs: sizes of the grid and prefetched scalars.
        blocks: the arrays, inputs first.
        aliases: pairs of an input and a result, as positions in `blocks`, that share memory.
    """

    grid: tuple[int | None, ...]
    axes: tuple[int, ...]
    program: Any
    num_scratch: int
    scalars: tuple[tuple[int, ...], ...]
    blocks: tuple[Block, ...]
    num_inputs: int
    aliases: tuple[tuple[int, int], ...]


def read(equation: Any) -> Kernel | None:
    """The kernel of a `pallas_call`; None if its grid has names or positions of its own, as on a mesh of cores."""
    params, mapping = equation.params, equation.params["grid_mapping"]
    own = (params.get("mesh"), mapping.grid_names, mapping.get_grid_indices, mapping.local_grid_env)
    if any(one is not None for one in own):
        return None
    grid = tuple(size if isinstance(size, int) else None for size in mapping.grid)
    num_scalars = grid.count(None) + mapping.num_index_operands
    return Kernel(
        grid=grid,
        axes=tuple(dim for dim in range(len(grid)) if dim not in mapping.vmapped_dims),
        program=jax_compat.open_jaxpr(params["jaxpr"])[0],
        num_scratch=mapping.num_scratch_operands,
        scalars=tuple(tuple(variable.aval.shape) for variable in equation.invars[:num_scalars]),
        blocks=tuple(_block(one) for one in mapping.block_mappings),
        num_inputs=mapping.num_inputs,
        aliases=tuple(
            (i - mapping.num_index_operands, mapping.num_inputs + o) for i, o in params["input_output_aliases"]
        ),
    )


def part_of_kernel(params: Mapping[str, Any], parts: Mapping[int, int], shapes: Sequence[tuple[int, ...]]) -> Any:
    """The parameters that change in the kernel of one device's part.

    Args:
        parts: the number of parts by dim of the grid.
        shapes: the local shapes of the arrays, inputs first.
    """
    mapping, num_parts = params["grid_mapping"], 1
    for count in parts.values():
        num_parts *= count
    blocks = tuple(
        one.replace(array_aval=one.array_aval.update(shape=shape))
        for one, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    grid = tuple(size // parts.get(dim, 1) if dim in parts else size for dim, size in enumerate(mapping.grid))
    avals = zip(params["out_avals"], shapes[mapping.num_inputs :], strict=True)
    estimate = params.get("cost_estimate")
    if estimate is not None:
        names = ("flops", "transcendentals", "bytes_accessed")
        estimate = replace(estimate, **{name: getattr(estimate, name) // num_parts for name in names})
    return {
        "grid_mapping": mapping.replace(grid=grid, block_mappings=blocks),
        "out_avals": tuple(aval.update(shape=shape) for aval, shape in avals),
        "cost_estimate": estimate,
    }


def _block(mapping: Any) -> Block:
    sizes = tuple(map(_block_size, mapping.block_shape))
    return Block(tuple(mapping.array_aval.shape), sizes, mapping.index_map_jaxpr)


def _block_size(dim: Any) -> int | None:
    """The size of a block; one that is squeezed has one element. None for an index that counts elements."""
    kind = type(dim).__name__
    return dim.block_size if kind == "Blocked" else 1 if kind == "Squeezed" else None
