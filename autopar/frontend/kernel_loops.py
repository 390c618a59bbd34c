"""Find the loops of a kernel that devices can share: the grid of a Pallas kernel, the batch and heads of cuDNN attention.

In: a JAX equation.
Out: `KernelLoops`, stored in its node's parameters as plain values, from which `rules.kernels` makes a rule.

A loop over a dim of a Pallas grid can be shared if a kernel with a smaller grid and smaller arrays computes one device's
part. That holds if

- the kernel does not read its position or the size of the grid along this dim (`program_id`, `num_programs`), except for
  the position within each `step`;
- every index map moves along one dim of its array by a constant number of blocks per `step` positions of the loop, or
  not at all, and these moves cover the dim; `h // group` of grouped heads and `b * heads + h` of merged dims do;
- every result moves, because the parts of a result that stays would have to be combined;
- scratch memory passes nothing on along the loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.frontend.kernel_flops import HEADS_FIRST, scalars_of
from autopar.frontend.kernel_positions import initialized_by, is_stateful, periods_of
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop import pallas_kernel
from autopar.jax_interop.pallas_kernel import Block

#: By tensor and dim, the loops that run along the dim, major first.
Dims = tuple[tuple[tuple[int | str, ...], ...], ...]

#: The loops of a kernel: `sizes` by name; `operands` and `results` as in a rule; `shared`, the loops that devices can
#: share; `sums`, for each result, those that it is a sum over. For a Pallas kernel their names are the dims of the grid.
KernelLoops = Mapping[str, Any]

#: The parameter of a node that holds its loops. It follows from the other parameters, so the fingerprint omits it.
LOOPS = "loops"

#: The most positions of a grid at which an index map is evaluated.
_MOST_POINTS = 1 << 14


def loops_of(equation: Any) -> KernelLoops | None:
    """The loops of a kernel that devices can share; None if there are none, or JAX has changed its parameters."""
    finder = _FINDERS.get(equation.primitive.name)
    try:
        return None if finder is None else finder(equation)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def part_params(
    params: Mapping[str, Any],
    loops: KernelLoops | None,
    whole: Sequence[tuple[int, ...]],
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
) -> Mapping[str, Any]:
    """The parameters of a Pallas kernel that change where it runs on parts of its arrays.

    Args:
        whole: the shapes of the whole results.
        operands, results: the shapes of the parts.
    """
    names = () if loops is None else zip(loops["results"][0], whole[0], results[0], strict=True)
    parts = {dim[0]: size // part for dim, size, part in names if dim and size != part}
    num_inputs = params["grid_mapping"].num_inputs
    return pallas_kernel.part_of_kernel(params, parts, [*operands[len(operands) - num_inputs :], *results])


def _loops(
    sizes: Mapping[int | str, int], operands: Any, results: Sequence[Any], shared: Sequence[int | str]
) -> KernelLoops:
    names = [{name for dim in dims for name in dim} for dims in results]
    sums = tuple(tuple(name for name in shared if name not in has) for has in names)
    return {"sizes": dict(sizes), "operands": operands, "results": results, "shared": tuple(shared), "sums": sums}


# -- Pallas kernels ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Index:
    """The block index along one dim of one array.

    Args:
        array, dim: the array, inputs first, and its dim.
        num_blocks: the number of blocks of the dim; None if they do not divide it, or the index counts no blocks.
        reads: the dims of the grid that it depends on.
        values: its value at every position along these dims, in row-major order; None if it is unknown.
    """

    array: int
    dim: int
    num_blocks: int | None
    reads: tuple[int, ...]
    values: tuple[int, ...] | None


def _pallas(equation: Any) -> KernelLoops | None:
    kernel = pallas_kernel.read(equation)
    if kernel is None or is_stateful(kernel.program):
        return None
    grid = kernel.grid
    indices = [index for array, block in enumerate(kernel.blocks) for index in _indices(array, block, grid)]
    taken: dict[tuple[int, int], tuple[int, int]] = {}  # the loop and its step, by array and dim
    sizes: dict[int | str, int] = {}
    period_of = {kernel.axes[axis]: period for axis, period in periods_of(kernel.program).items()}
    for loop, size in enumerate(grid):
        period = period_of.get(loop, 1)
        if size is None or size < 2 or period == 0 or not _is_independent(kernel, loop):
            continue
        for step in (step for step in range(period, size // 2 + 1, period) if size % step == 0):
            moved = _moved(indices, grid, loop, step)
            if moved is not None and _is_shared(kernel, moved) and not moved & taken.keys():
                sizes[loop] = size // step
                taken |= dict.fromkeys(moved, (loop, step))
                break
    if not sizes:
        return None

    def dims(array: int, block: Block) -> tuple[tuple[int | str, ...], ...]:
        found: list[tuple[int | str, ...]] = []
        for dim, size in enumerate(block.shape):
            loop, _ = taken.get((array, dim), (None, 0))
            if loop is None:
                found.append(())
                continue
            rest = size // sizes[loop]  # elements of the dim per iteration, which stay together
            name = f"{rest} of {loop}"
            sizes[name] = rest
            found.append((loop, name) if rest > 1 else (loop,))
        return tuple(found)

    shared = [name for name in sizes if isinstance(name, int)]
    arrays = tuple(dims(array, block) for array, block in enumerate(kernel.blocks))
    whole = tuple(((),) * len(shape) for shape in kernel.scalars)
    return _loops(sizes, (*whole, *arrays[: kernel.num_inputs]), arrays[kernel.num_inputs :], shared)


def _is_independent(kernel: pallas_kernel.Kernel, loop: int) -> bool:
    """Whether no scratch memory passes values on along a loop: the kernel overwrites it where the dims that the grid runs
    through within one position of the loop are at their first position."""
    inner = {axis for axis, dim in enumerate(kernel.axes) if dim >= loop}
    return all(axes is not None and axes <= inner for axes in initialized_by(kernel.program, kernel.num_scratch))


def _is_shared(kernel: pallas_kernel.Kernel, moved: set[tuple[int, int]]) -> bool:
    """Whether a loop moves along at most one dim of each array, along one of each result, and along equal dims of arrays
    that share memory."""
    arrays = [array for array, _ in moved]
    if len(set(arrays)) != len(arrays) or not set(range(kernel.num_inputs, len(kernel.blocks))) <= set(arrays):
        return False
    of = dict(moved)
    return all(of.get(one) == of.get(other) for one, other in kernel.aliases)


def _moved(indices: Sequence[_Index], grid: Sequence[int | None], loop: int, step: int) -> set[tuple[int, int]] | None:
    """The array dims along which a loop moves, by a constant number of blocks per `step` positions; None if it cannot be
    divided between these."""
    found: set[tuple[int, int]] = set()
    for index in indices:
        if loop not in index.reads:
            continue
        if index.values is None:
            return None
        sizes = [grid[dim] or 1 for dim in index.reads]
        position = index.reads.index(loop)
        stride, size = math.prod(sizes[position + 1 :]), sizes[position]
        values = index.values
        shift = step * stride
        positions = [i for i in range(len(values)) if i // stride % size < size - step]
        moves = {values[i + shift] - values[i] for i in positions}
        if len(moves) != 1:
            return None
        (blocks,) = moves
        if blocks == 0:
            continue
        first = [value for i, value in enumerate(values) if i // stride % size < step]
        if blocks < 0 or index.num_blocks != blocks * (size // step) or min(first) < 0 or max(first) >= blocks:
            return None
        found.add((index.array, index.dim))
    return found


def _indices(array: int, block: Block, grid: Sequence[int | None]) -> Iterator[_Index]:
    jaxpr, _ = jax_compat.open_jaxpr(block.index_map)
    variables = list(jaxpr.invars)
    unknown = len(grid)  # stands for all operands of the index map that are no position: scalars in memory
    known: dict[Any, frozenset[int]] = {variable: frozenset([min(i, unknown)]) for i, variable in enumerate(variables)}
    known |= dict.fromkeys(jax_compat.constant_vars(jaxpr), frozenset([unknown]))

    def reads(atom: Any) -> frozenset[int]:
        return frozenset() if isinstance(atom, jax_compat.Literal) else known[atom]

    for equation in jaxpr.eqns:
        union = frozenset().union(*map(reads, equation.invars))
        known |= dict.fromkeys(equation.outvars, union)
    for dim, (atom, size, num_elements) in enumerate(zip(jaxpr.outvars, block.shape, block.sizes, strict=True)):
        found = reads(atom)
        loops = tuple(sorted(found - {unknown}))
        num_blocks = size // num_elements if num_elements and size % num_elements == 0 else None
        values = None if unknown in found else _values(jaxpr, variables, dim, loops, grid)
        yield _Index(array, dim, num_blocks, loops, values)


def _values(
    jaxpr: Any, variables: Sequence[Any], dim: int, loops: tuple[int, ...], grid: Sequence[int | None]
) -> tuple[int, ...] | None:
    """A block index at every position along some dims of the grid."""
    sizes = [grid[loop] for loop in loops]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    if loops and jaxpr.outvars[dim] is variables[loops[0]]:
        return tuple(range(known[0]))
    if math.prod(known) > _MOST_POINTS:
        return None
    found: list[int] = []
    for point in itertools.product(*map(range, known)):
        at = dict(zip(loops, point, strict=True))
        arguments = [at.get(i, 0) if i < len(grid) else None for i in range(len(variables))]
        value = scalars_of(jaxpr, arguments)[dim]
        if value is None:
            return None
        found.append(value)
    return tuple(found)


# -- cuDNN attention -----------------------------------------------------------------------------

_TOKENS = "tokens"
_QUERY, _KEY, _VALUE, _BIAS, _LENGTHS, _OFFSETS, _TABLES = 0, 1, 2, 3, (4, 5), (6, 7), (8, 9)


def _attention(equation: Any, *, backward: bool) -> KernelLoops | None:
    """The batch, and the heads of keys and values with their groups of query heads. If all query heads share one head of keys
    and values, they are split themselves, and the gradients of that head are sums over them, as is the gradient of a bias
    that has no batch or one head."""
    params = equation.params
    shapes = [tuple(variable.aval.shape) for variable in equation.invars]
    out_shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
    mask = params["mask_type"]
    by_position = params["dropout_rate"] > 0 or "ALIBI" in str(getattr(mask, "name", mask))
    if by_position or params.get("score_mod") is not None or len(shapes) != (13 if backward else 10):
        return None  # what it computes depends on a score's position in the whole
    heads = 1 if params["layout"] == HEADS_FIRST else 2
    batch, num_heads, num_groups = shapes[_QUERY][0], shapes[_QUERY][heads], shapes[_KEY][heads]
    per_group = num_heads // num_groups
    is_packed = len(shapes[_OFFSETS[0]]) == 2 and shapes[_OFFSETS[0]][1] > 2
    is_paged = len(shapes[_TABLES[0]]) == 4
    sizes: dict[int | str, int] = {"batch": batch, "heads": num_groups, "group": per_group}
    if is_packed or is_paged:
        del sizes["batch"]  # segments and pages are numbered over the batch

    def dim(size: int, *names: str) -> tuple[str, ...]:
        return names if names and size > 1 and math.prod(sizes.get(name, 0) for name in names) == size else ()

    def dims(shape: tuple[int, ...], at: int, *names: str) -> tuple[tuple[str, ...], ...]:
        """The loops of a tensor that starts with the batch and has heads at a position."""
        loops = {0: ("batch",), at: names}
        return tuple(dim(size, *loops[d]) if d in loops else () for d, size in enumerate(shape))

    queries, keys = (lambda one: dims(one, heads, "heads", "group")), (lambda one: dims(one, heads, "heads"))
    scores = lambda one: dims(one, 1, "heads", "group")  # noqa: E731  # bias and statistics
    operands: list[tuple[tuple[str, ...], ...]] = [((),) * len(shape) for shape in shapes]
    operands[_QUERY], operands[_KEY], operands[_VALUE] = queries(shapes[0]), keys(shapes[1]), keys(shapes[2])
    operands[_BIAS] = scores(shapes[_BIAS])
    for i in _LENGTHS:
        operands[i] = dims(shapes[i], 1)
    results = [queries(out_shapes[0]), *map(scores, out_shapes[1:])]
    if backward:
        operands[10:] = [scores(shapes[10]), queries(shapes[11]), queries(shapes[12])]
        results = [queries(out_shapes[0]), *map(keys, out_shapes[1:3]), *map(scores, out_shapes[3:])]
    shared = [name for name in ("batch", "heads") if sizes.get(name, 1) > 1]
    if num_groups == 1 and "group" in sizes:
        shared.append("group")
    found = _loops(sizes, tuple(operands), tuple(results), shared) if shared else None
    tokens = 3 - heads
    if found is None or shapes[_QUERY][tokens] != shapes[_KEY][tokens] or needs_whole_sequence(params, shapes):
        return found
    return _with_tokens(found, tokens, shapes[_QUERY][tokens], params, backward)


def _with_tokens(loops: KernelLoops, dim: int, size: int, params: Mapping[str, Any], backward: bool) -> KernelLoops:
    """The loops of an attention with the loop over its tokens, which is the same for queries and for keys."""

    def along(term: tuple[tuple[str, ...], ...], at: int) -> tuple[tuple[str, ...], ...]:
        return (*term[:at], (_TOKENS,), *term[at + 1 :])

    operands, results = list(loops["operands"]), list(loops["results"])
    for i in (_QUERY, _KEY, _VALUE, *((11, 12) if backward else ())):
        operands[i] = along(operands[i], dim)
    if backward:
        operands[10] = along(operands[10], 2)
        results = [along(term, dim) for term in results[:3]]
    else:
        results = [along(results[0], dim), *(along(term, 2) for term in results[1:])]
    sizes, shared = {**loops["sizes"], _TOKENS: size}, (*loops["shared"], _TOKENS)
    context = {"loop": _TOKENS, "is_causal": params["mask_type"].name == "CAUSAL", "is_backward": backward}
    return {**_loops(sizes, tuple(operands), results, shared), "context": context}


def needs_whole_sequence(params: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> str | None:
    """What an attention has that no method of context parallelism computes; None if its tokens can be split.

    Args:
        shapes: those of its operands.
    """
    mask = params["mask_type"].name
    needs = {
        "a bias": params["variadic_args"][0],
        "dropout": params["dropout_rate"] > 0,
        "a sliding window": params["sliding_window_length"] is not None,
        "a function of the scores": params.get("score_mod") is not None,
        "sequence lengths or pages": any(map(math.prod, shapes[_LENGTHS[0] : _TABLES[1] + 1])),
        f"the mask {mask}": mask not in ("NO_MASK", "CAUSAL"),
    }
    return next((name for name, is_needed in needs.items() if is_needed), None)


_FINDERS = {
    "pallas_call": _pallas,
    "dot_product_attention_fwd_wrapper": lambda equation: _attention(equation, backward=False),
    "dot_product_attention_bwd_wrapper": lambda equation: _attention(equation, backward=True),
}
