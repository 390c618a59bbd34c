"""Run a function whose parameters are in host memory: copy each to the device before the piece that reads it, and drop it after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autopar.errors import OptionError
from autopar.jax_interop import compat as jax_compat
from autopar.versions.host_memory import pieces as cutting
from autopar.versions.host_memory.memory_kinds import device_sharding, host_sharding


@dataclass(frozen=True, slots=True)
class Streaming:
    """How a function streams its parameters.

    Args:
        order: paths of the parameters in the order of their first use.
        num_pieces: into which the function is cut.
        copied_bytes: of parameters to the device in one call; what two neighbouring pieces share is copied once.
        peak_bytes: the most parameter bytes on the device at one time.
    """

    order: tuple[str, ...]
    num_pieces: int
    copied_bytes: int
    peak_bytes: int


def stream_parameters(
    function: Callable[..., Any],
    *,
    budget_bytes: int | None = None,
    results: Literal["device", "host"] = "device",
    on_piece: Callable[[int], None] | None = None,
) -> StreamedFunction:
    """Run a function with few of its parameters on the device at one time (experimental).

    The first argument, a pytree of arrays, has the parameters; those in pinned host memory are copied to the device when the trace says
    that they are read next, while the piece of the function before is running. A gradient reads them again in the backward pass, in the
    opposite order. Loops (`scan`) read the whole of what they read: give layers parameters of their own.

    Args:
        function: of arrays; it is traced, and need not be compiled. Its pieces are.
        budget_bytes: for parameters on a device; None for the least with which pieces and copies overlap, twice what one operation
            reads.
        results: "host" moves each result to host memory when it is made, as gradients that are pushed to a store there.
        on_piece: called with the number of a piece that has run, while the parameters of the next one are there.

    Raises:
        OptionError: an argument that cannot be.
    """
    if not callable(function):
        raise OptionError(
            f"`function` is a {type(function).__name__}: give a function of the parameters and other arguments"
        )
    if results not in ("device", "host"):
        raise OptionError(f'`results` is {results!r}: give "device" or "host"')
    if budget_bytes is not None and (
        not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool) or budget_bytes < 1
    ):
        raise OptionError(f"`budget_bytes` is {budget_bytes!r}: give a number of bytes, or None")
    return StreamedFunction(function, budget_bytes, results, on_piece)


class StreamedFunction:
    """A function that streams its parameters; call it as the function itself. It is traced once for each kind of arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        budget_bytes: int | None,
        results: str,
        on_piece: Callable[[int], None] | None,
    ) -> None:
        self._function, self._budget_bytes = function, budget_bytes
        self._results, self._on_piece = results, on_piece
        self._cut: dict[Any, tuple[cutting.Pieces, list[Callable[..., Any]], Any]] = {}

    def __call__(self, parameters: Any, *args: Any) -> Any:
        """The results of the function."""
        leaves = jax.tree.leaves(parameters)
        for leaf in leaves:
            if not isinstance(leaf, jax.Array):
                raise OptionError(
                    f"a parameter is a {type(leaf).__name__}: put it in host memory by `jax.device_put` first"
                )
        found, programs, out_tree = self._pieces(parameters, args)
        rest = jax.tree.leaves(args)
        own = dict(zip(found.inputs, leaves, strict=False))
        values = dict(zip(found.inputs[len(leaves) :], rest, strict=True)) | dict(found.constants)
        there: dict[int, jax.Array] = {}
        back = host_sharding(leaves[0]) if self._results == "host" and leaves else None
        for number, (piece, program) in enumerate(zip(found.pieces, programs, strict=True)):
            following = found.pieces[number + 1].parameters if number + 1 < len(found.pieces) else []
            for one in dict.fromkeys([*piece.parameters, *following]):
                if one not in there:
                    there[one] = jax.device_put(own[one], device_sharding(own[one]))
            made = program([there[one] for one in piece.parameters], [values[one] for one in piece.reads])
            jax.block_until_ready(made)  # else the copies of all pieces would start at once
            values |= dict(zip(piece.makes, made, strict=True))
            if back is not None:
                values |= {one: jax.device_put(values[one], back) for one in piece.finishes}
            del made
            for one in piece.dies:
                values.pop(one, None)
            there = {one: array for one, array in there.items() if one in following}
            if self._on_piece is not None:
                self._on_piece(number)
        results = [
            jnp.asarray(one.value if isinstance(one, cutting.Literal) else values.get(one, own.get(one)))
            for one in found.outputs
        ]
        return jax.tree.unflatten(out_tree, results)

    def streaming(self, parameters: Any, *args: Any) -> Streaming:
        """How a call with these arguments, or `jax.ShapeDtypeStruct`s, streams its parameters."""
        found, _, _ = self._pieces(parameters, args)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)]
        sizes = dict(zip(found.inputs, map(_num_bytes, jax.tree.leaves(parameters)), strict=False))
        names = dict(zip(found.inputs, paths, strict=False))
        sets = [set(piece.parameters) for piece in found.pieces]
        pairs = [a | b for a, b in zip(sets, [*sets[1:], set[int]()], strict=True)]
        copied = [a - b for a, b in zip(sets, [set[int](), *sets[:-1]], strict=True)]
        return Streaming(
            tuple(names[one] for one in found.first_uses),
            len(found.pieces),
            sum(sizes[one] for new in copied for one in new),
            max((sum(sizes[one] for one in pair) for pair in pairs), default=0),
        )

    def _pieces(self, parameters: Any, args: Sequence[Any]) -> tuple[cutting.Pieces, list[Callable[..., Any]], Any]:
        structs = jax.tree.map(jax_compat.shape_struct, (parameters, *args))
        key = (
            jax.tree.structure(structs),
            *((one.shape, one.dtype, one.weak_type) for one in jax.tree.leaves(structs)),
        )
        if key not in self._cut:
            traced = jax.make_jaxpr(self._function, return_shape=True)(*structs)
            num_parameters = len(jax.tree.leaves(parameters))
            leaves = jax.tree.leaves(structs)
            sizes = [_num_bytes(leaf) if number < num_parameters else None for number, leaf in enumerate(leaves)]
            found = cutting.cut(traced[0], sizes, self._budget_bytes)
            self._cut[key] = found, [_program(piece) for piece in found.pieces], jax.tree.structure(traced[1])
        return self._cut[key]


def _program(piece: cutting.Piece) -> Callable[..., Any]:
    """A piece as a compiled function from its parameters and other values to what it makes."""

    def run(parameters: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        values = dict(zip([*piece.parameters, *piece.reads], [*parameters, *others], strict=True))
        for equation in piece.equations:
            operands = [one.value if isinstance(one, cutting.Literal) else values[one] for one in equation.operands]
            values |= dict(zip(equation.results, jax_compat.bind(equation.source, operands), strict=True))
        return [values[one] for one in piece.makes]

    return jax.jit(run)


def _num_bytes(leaf: Any) -> int:
    return int(leaf.size * leaf.dtype.itemsize)
