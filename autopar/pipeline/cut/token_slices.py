"""Cut a step into slices of tokens, for TeraPipe.

In: a step as traced, with a dim of tokens in its batch, and where slices end. Out: the same step, with each equation that
runs over tokens written once per slice. Every equation knows its slice (`Equation.token_slice`). A forward equation of
a slice reads what its slice and earlier ones made; a backward equation reads forward values, and what the backward
passes of its slice and of later ones made. So slices flow through stages one after the other, and back.

A value in slices has rows, its tokens, in *runs* of equal *times*: 0 to S - 1 for the forward passes of S slices, S to
2 S - 1 for the backward passes, those of the last slice first. A time is the maximum of those of the operands, so every
value is ready when it is read, whatever the step does to its tokens.

Scores of queries against keys meet the tokens with themselves. Their rows are cut as queries are, and each run has only the
columns of keys up to its own last row. That is exact if what is left out changes nothing: the mask sets it to so
low a number that its exponential is zero, and zeros add nothing to sums over keys. This is proven (`left_out`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax import lax

from autopar.errors import MicrobatchError
from autopar.frontend.equations import Atom, Equation, Nest, Region, items_of
from autopar.frontend.trace import Trace
from autopar.ir.graph import Graph
from autopar.pipeline.cut.equation_in_runs import InRuns, OtherTokensError
from autopar.pipeline.cut.token_rows import Rows, Run, TokenRows, factor_at, places_of
from autopar.rules.positions import CUT, CUT_OR_PAD
from autopar.transforms.microbatch.batch_dims import Place, leading_dim


def num_tokens(trace: Trace, graph: Graph) -> int:
    """The number of tokens of each example: the second dim of most of the data by bytes.

    Raises:
        MicrobatchError: no data has a second dim.
    """
    return _token_dim(trace, graph)[0]


def model_tokens(trace: Trace, graph: Graph) -> int:
    """The number of tokens that the model sees: those of the data, or fewer where some are labels only.

    Raises:
        MicrobatchError: as for `in_token_slices`.
    """
    tokens = num_tokens(trace, graph)
    try:
        in_token_slices(trace, graph, (tokens,))
    except OtherTokensError as error:
        return error.num_tokens
    return tokens


def _token_dim(trace: Trace, graph: Graph) -> tuple[int, tuple[int, ...]]:
    _, positions = leading_dim(graph)
    sizes: dict[int, float] = {}
    for position in positions:
        shape = trace.avals[trace.inputs[position]].shape
        if len(shape) > 1 and shape[1] > 1:
            sizes[shape[1]] = sizes.get(shape[1], 0.0) + float(np.prod(shape))
    if not sizes:
        raise MicrobatchError(
            "the step's batch has no dim of tokens: no array of the batch has a second dim. Pass tokens of the shape (examples,"
            " tokens), or choose another schedule"
        )
    size = max(sizes, key=lambda one: (sizes[one], one))
    found = [p for p in positions if (trace.avals[trace.inputs[p]].shape[1:2] or (0,))[0] == size]
    return size, tuple(found)


def in_token_slices(trace: Trace, graph: Graph, lengths: Sequence[int]) -> Trace:
    """The step in slices of tokens.

    Args:
        graph: the graph of the trace.
        lengths: the tokens of each slice, in order, as the model sees them: without a token that is only a label.

    Raises:
        MicrobatchError: the step's tokens look ahead, or the lengths do not add up to its tokens.
    """
    return _Slicing(trace, graph, lengths).run()


class _Slicing:
    """Writes the step in slices; the one mutable object of this module."""

    def __init__(self, trace: Trace, graph: Graph, lengths: Sequence[int]) -> None:
        self.values = TokenRows(trace, graph, lengths)
        _, positions = _token_dim(trace, graph)
        #: Data with tokens that is computed whole, and its dims of tokens.
        self.tokens: dict[int, frozenset[Place]] = {trace.inputs[p]: frozenset({Place(1)}) for p in positions}
        carried = {position for position, _ in graph.carried}
        self.of_state = {v for position, v in enumerate(trace.inputs) if position in carried}

    def run(self) -> Trace:
        """Write the whole step."""
        if min(self.values.lengths, default=0) < 1:
            raise MicrobatchError(
                f"slices of {list(self.values.lengths)} tokens: give at least one token to each slice"
            )
        items = items_of(self.values.trace.equations, self.values.trace.regions)
        for (n, _, region), item in zip(self.values.trace.walk(), items, strict=True):
            self.values.n, self.values.like = n, self.values.trace.equations[n]
            if isinstance(item, Equation):
                self._equation(item)
            else:
                assert region is not None
                self._region(region, item)
        if not self.values.rows:
            raise MicrobatchError(
                "no operation of the step runs over the tokens of its batch: pass tokens of the shape (examples, tokens),"
                " or choose another schedule"
            )
        self.values.n = len(self.values.trace.equations) - 1
        return self.values.builder.finish(outputs=[self.values.whole(atom)[0] for atom in self.values.trace.outputs])

    # -- equations -----------------------------------------------------------------------------

    def _region(self, region: Region, nest: Nest) -> None:
        reads = [atom for piece in nest.enter for atom in piece.operands]
        time = self._time_of_whole(reads, [r for piece in nest.exit or nest.enter for r in piece.results])
        self.values.tag(time)
        if nest.kind == "barrier" and any(atom in self.values.rows for atom in reads):
            for piece in nest.enter:  # rows pass by themselves, in any order
                (atom,), (value,) = piece.operands, piece.results
                if isinstance(atom, int) and atom in self.values.rows:
                    self.values.rows[value] = self.values.rows[atom]
                else:
                    self.values.wholes[value], self.values.time[value] = self.values.whole(atom)
                    self._inherit(value, [atom])
            return
        sliced = self.values.slice_of(time)
        given = {id(e): replace(e.reading(lambda v: self.values.whole(v)[0]), token_slice=sliced) for e in nest.enter}
        self.values.builder.add(replace(nest, enter=[given[id(e)] for e in nest.enter]))

    def _equation(self, equation: Equation) -> None:
        rows = {
            i: self.values.rows[v]
            for i, v in enumerate(equation.operands)
            if isinstance(v, int) and v in self.values.rows
        }
        starts = {} if rows else self._starts(equation)
        written = False
        if rows or starts:
            written = self._along(equation, rows) or self._in_runs(equation, rows, starts)
        if not written:
            self._run_whole(equation)
        if any(v in self.of_state for v in equation.reads):
            self.of_state.update(equation.results)

    def _starts(self, equation: Equation) -> dict[int, Place]:
        """Operands that are data with tokens, where they meet state."""
        if not any(v in self.of_state for v in equation.reads):
            return {}
        places = {i: self.tokens[v] for i, v in enumerate(equation.operands) if isinstance(v, int) and v in self.tokens}
        return {i: next(iter(found)) for i, found in places.items() if len(found) == 1}

    def _run_whole(self, equation: Equation) -> None:
        """Write an equation that runs on whole values."""
        time = self._time_of_whole(equation.operands, equation.results)
        atoms = [self.values.whole(atom)[0] for atom in equation.operands]
        self.values.builder.add(replace(equation, operands=tuple(atoms), token_slice=self.values.slice_of(time)))
        if any(v in self.tokens for v in equation.reads) and not any(v in self.of_state for v in equation.reads):
            self._pass_tokens(equation)

    def _time_of_whole(self, atoms: Iterable[Atom], results: Iterable[int]) -> int:
        atoms = list(atoms)
        meets = any(isinstance(v, int) and v in self.values.rows for v in atoms)
        time = max([self.values.base, *(self.values.whole(atom)[1] for atom in atoms)])
        self.values.tag(time)
        for value in results:
            self.values.time[value] = time
            if meets:
                self.values.cause[value] = self.values.n
            else:
                self._inherit(value, atoms)
        return time

    def _inherit(self, value: int, atoms: Iterable[Atom]) -> None:
        causes = [self.values.cause[v] for v in atoms if isinstance(v, int) and v in self.values.cause]
        if causes:
            self.values.cause[value] = causes[0]

    def _pass_tokens(self, equation: Equation) -> None:
        """Find the dims of tokens of data computed from data."""
        rule = self.values.places.rules[self.values.n]
        found: set[Place] = set()
        for i, value in enumerate(equation.operands):
            if not isinstance(value, int):
                continue
            for place in self.tokens.get(value, ()):
                shape, result = self.values.trace.avals[value].shape, self.values.trace.avals[equation.results[0]].shape
                factor = rule and factor_at(rule, rule.operands[i], place, shape[place.dim] // place.minor)
                if rule and factor:
                    found.update(places_of(factor, rule, rule.results[0]))
                elif len(shape) == len(result) and result[place.dim] > 1 and equation.primitive in CUT:
                    found.add(place)
        if found:
            self.tokens[equation.results[0]] = frozenset(found)

    def _along(self, equation: Equation, rows: dict[int, Rows]) -> bool:
        """Write an equation that cuts or pads the dim of rows. Returns whether it was written."""
        one = rows.get(0)
        if one is None or one.columns is not None or one.place.minor != 1 or equation.primitive not in CUT_OR_PAD:
            return False
        (value,), dim, read, avals = equation.results, one.place.dim, equation.operands[0], self.values.trace.avals
        assert isinstance(read, int)
        before, after = avals[read].shape[dim], avals[value].shape[dim]
        params = equation.source.params
        if before != one.size or before == after:
            return False
        if "padding_config" not in params:
            if params["strides"] is not None and params["strides"][dim] != 1:
                return False
            first = -params["start_indices"][dim]
        else:
            first, last, inside = params["padding_config"][dim]
            if min(first, last) < 0 or inside:
                return False
        runs: list[Run] = []
        for run in one.runs:
            start, stop = max(0, run.start + first), min(after, run.stop + first)
            if start < stop:
                atom, time = self.values.fetch(equation.operands[0], start - first, stop - first)
                change = self._on_other_dims(equation, dim)
                key = "along", dim, equation.params_text
                runs.append(
                    Run(start, stop, *self._written(key, [atom, *equation.operands[1:]], change, time), run.turn)
                )
        shape = list(self.values.trace.avals[value].shape)
        for start, stop in ((0, first), (before + first, after)):
            if start < stop:  # padding, which is ready at any time
                shape[dim] = stop - start
                change = functools.partial(_filled, shape=tuple(shape))
                made = self._written(("fill", *shape), [equation.operands[1]], change, 0)
                runs.append(Run(start, stop, *made, self.values.turn_of(start)))
        runs.sort(key=lambda run: run.start)
        self.values.rows[value] = Rows(one.place, after, tuple(runs))
        return True

    def _written(self, key: Any, atoms: Sequence[Atom], change: Any, time: int) -> tuple[Atom, int]:
        """Write a function of values at a time, or at the first at which the equation may run."""
        time = max([time, self.values.base, *(self.values.time.get(v, 0) for v in atoms if isinstance(v, int))])
        self.values.tag(time)
        return self.values.builder.write(
            self.values.like, key, [self.values.whole(atom)[0] for atom in atoms], change, 1.0
        )[0], time

    def _on_other_dims(self, equation: Equation, dim: int) -> Callable[[list[Any]], list[Any]]:
        """An equation that cuts or pads, along all dims but one."""
        params = equation.source.params
        if "padding_config" in params:
            config = [(0, 0, 0) if d == dim else one for d, one in enumerate(params["padding_config"])]
            return lambda values: [lax.pad(values[0], values[1], config)]

        def cut(values: list[Any]) -> list[Any]:
            sides = list(enumerate(values[0].shape))
            starts = [0 if d == dim else params["start_indices"][d] for d, _ in sides]
            limits = [size if d == dim else params["limit_indices"][d] for d, size in sides]
            return [lax.slice(values[0], starts, limits, params["strides"])]

        return cut

    def _in_runs(self, equation: Equation, rows: dict[int, Rows], starts: dict[int, Place]) -> bool:
        """Write an equation once per run of rows. Returns whether it was written."""
        rule = self.values.places.rules[self.values.n]
        if rule is None:
            return False
        return InRuns(self.values, equation, rule, rows, starts).write()


def _filled(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    return [lax.broadcast_in_dim(values[0], shape, ())]
