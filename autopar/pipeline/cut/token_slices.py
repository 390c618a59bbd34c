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
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import lax

from autopar.errors import MicrobatchError
from autopar.frontend.equations import Atom, Equation, Nest, Region, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.ir.graph import Graph
from autopar.pipeline.cut.known_masks import KnownMasks
from autopar.pipeline.cut.layer_slices import LayerSlices
from autopar.pipeline.cut.left_out import LeftOut, LeftOutRules
from autopar.rules.factors import DimFactors, Rule
from autopar.transforms.microbatch.batch_dims import Batch, Factor, Place, Places, leading_dim
from autopar.transforms.microbatch.errors import Refusals
from autopar.transforms.microbatch.resize import is_as_written, resized
from autopar.transforms.microbatch.slices import COMBINE


@dataclass(frozen=True, slots=True)
class Run:
    """Some rows of a value, from `start` to before `stop`, that are made at one time.

    Args:
        turn: the slice that the tokens of these rows belong to.
    """

    start: int
    stop: int
    atom: Atom
    time: int
    turn: int


@dataclass(frozen=True, slots=True)
class Rows:
    """A value in runs of rows.

    Args:
        place: the dim of its rows.
        size: the number of rows.
        columns: the dim of keys, of which each run has those before its own end; None if it has none.
        left_out: what is known of the columns that runs do not have.
        cause: the equation that made tokens meet, if it has columns.
    """

    place: Place
    size: int
    runs: tuple[Run, ...]
    columns: Place | None = None
    left_out: LeftOut = "anything"
    cause: int | None = None

    def times(self) -> np.ndarray:
        """The time of each row."""
        return self._of_rows([run.time for run in self.runs])

    def turns(self) -> np.ndarray:
        """The slice of each row."""
        return self._of_rows([run.turn for run in self.runs])

    def _of_rows(self, values: Sequence[int]) -> np.ndarray:
        return np.repeat(values, [run.stop - run.start for run in self.runs])


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


class OtherTokensError(MicrobatchError):
    """Slices do not add up to the tokens that the model sees."""

    def __init__(self, lengths: Sequence[int], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(
            f"slices of {list(lengths)} tokens make {sum(lengths)} tokens, but the model has {num_tokens}: give lengths that add"
            " up to these"
        )


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
        self.trace, self.graph, self.lengths = trace, graph, tuple(lengths)
        self.count = len(self.lengths)
        self.ends = np.cumsum(self.lengths)
        self.places = Places(graph)
        self.builder = TraceBuilder(trace)
        self.rules = LeftOutRules(KnownMasks(trace))
        self.rows: dict[int, Rows] = {}
        self.wholes: dict[int, Atom] = {}
        self.time: dict[int, int] = {}  # of whole values
        self.cause: dict[int, int] = {}  # whole value -> the equation in which its tokens met
        self.fetched: dict[Any, tuple[Atom, int]] = {}
        _, positions = _token_dim(trace, graph)
        #: Data with tokens that is computed whole, and its dims of tokens.
        self.tokens: dict[int, frozenset[Place]] = {trace.inputs[p]: frozenset({Place(1)}) for p in positions}
        carried = {position for position, _ in graph.carried}
        self.of_state = {v for position, v in enumerate(trace.inputs) if position in carried}
        self.n = 0
        self.like = trace.equations[0]

    def run(self) -> Trace:
        """Write the whole step."""
        if min(self.lengths, default=0) < 1:
            raise MicrobatchError(f"slices of {list(self.lengths)} tokens: give at least one token to each slice")
        items = items_of(self.trace.equations, self.trace.regions)
        for (n, _, region), item in zip(self.trace.walk(), items, strict=True):
            self.n, self.like = n, self.trace.equations[n]
            if isinstance(item, Equation):
                self._equation(item)
            else:
                assert region is not None
                self._region(region, item)
        if not self.rows:
            raise MicrobatchError(
                "no operation of the step runs over the tokens of its batch: pass tokens of the shape (examples, tokens),"
                " or choose another schedule"
            )
        self.n = len(self.trace.equations) - 1
        return self.builder.finish(outputs=[self._whole(atom)[0] for atom in self.trace.outputs])

    # -- equations -----------------------------------------------------------------------------

    def _region(self, region: Region, nest: Nest) -> None:
        reads = [atom for piece in nest.enter for atom in piece.operands]
        time = self._time_of_whole(reads, [r for piece in nest.exit or nest.enter for r in piece.results])
        self._tag(time)
        if nest.kind == "barrier" and any(atom in self.rows for atom in reads):
            for piece in nest.enter:  # rows pass by themselves, in any order
                (atom,), (value,) = piece.operands, piece.results
                if isinstance(atom, int) and atom in self.rows:
                    self.rows[value] = self.rows[atom]
                else:
                    self.wholes[value], self.time[value] = self._whole(atom)
                    self._inherit(value, [atom])
            return
        sliced = self._slice_of(time)
        given = {id(e): replace(e.reading(lambda v: self._whole(v)[0]), token_slice=sliced) for e in nest.enter}
        self.builder.add(replace(nest, enter=[given[id(e)] for e in nest.enter]))

    def _equation(self, equation: Equation) -> None:
        rows = {i: self.rows[v] for i, v in enumerate(equation.operands) if isinstance(v, int) and v in self.rows}
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
        atoms = [self._whole(atom)[0] for atom in equation.operands]
        self.builder.add(replace(equation, operands=tuple(atoms), token_slice=self._slice_of(time)))
        if any(v in self.tokens for v in equation.reads) and not any(v in self.of_state for v in equation.reads):
            self._pass_tokens(equation)

    def _time_of_whole(self, atoms: Iterable[Atom], results: Iterable[int]) -> int:
        atoms = list(atoms)
        meets = any(isinstance(v, int) and v in self.rows for v in atoms)
        time = max([self.base, *(self._whole(atom)[1] for atom in atoms)])
        self._tag(time)
        for value in results:
            self.time[value] = time
            if meets:
                self.cause[value] = self.n
            else:
                self._inherit(value, atoms)
        return time

    def _inherit(self, value: int, atoms: Iterable[Atom]) -> None:
        causes = [self.cause[v] for v in atoms if isinstance(v, int) and v in self.cause]
        if causes:
            self.cause[value] = causes[0]

    def _pass_tokens(self, equation: Equation) -> None:
        """Find the dims of tokens of data computed from data."""
        rule = self.places.rules[self.n]
        found: set[Place] = set()
        for i, value in enumerate(equation.operands):
            for place in self.tokens.get(value, ()) if isinstance(value, int) else ():
                shape, result = self.trace.avals[value].shape, self.trace.avals[equation.results[0]].shape
                factor = rule and factor_at(rule, rule.operands[i], place, shape[place.dim] // place.minor)
                if rule and factor:
                    found.update(places_of(factor, rule, rule.results[0]))
                elif len(shape) == len(result) and result[place.dim] > 1 and equation.primitive in _CUTS:
                    found.add(place)
        if found:
            self.tokens[equation.results[0]] = frozenset(found)

    def _along(self, equation: Equation, rows: dict[int, Rows]) -> bool:
        """Write an equation that cuts or pads the dim of rows. Returns whether it was written."""
        one = rows.get(0)
        if one is None or one.columns is not None or one.place.minor != 1 or equation.primitive not in ("slice", "pad"):
            return False
        (value,), dim = equation.results, one.place.dim
        before, after = self.trace.avals[equation.operands[0]].shape[dim], self.trace.avals[value].shape[dim]  # type: ignore[index]
        params = equation.source.params
        if before != one.size or before == after:
            return False
        if equation.primitive == "slice":
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
                atom, time = self._fetch(equation.operands[0], start - first, stop - first)
                change = self._on_other_dims(equation, dim)
                key = "along", dim, equation.params_text
                runs.append(
                    Run(start, stop, *self._written(key, [atom, *equation.operands[1:]], change, time), run.turn)
                )
        shape = list(self.trace.avals[value].shape)
        for start, stop in ((0, first), (before + first, after)):
            if start < stop:  # padding, which is ready at any time
                shape[dim] = stop - start
                change = functools.partial(_filled, shape=tuple(shape))
                made = self._written(("fill", *shape), [equation.operands[1]], change, 0)
                runs.append(Run(start, stop, *made, self.turn_of(start)))
        runs.sort(key=lambda run: run.start)
        self.rows[value] = Rows(one.place, after, tuple(runs))
        return True

    def _written(self, key: Any, atoms: Sequence[Atom], change: Any, time: int) -> tuple[Atom, int]:
        """Write a function of values at a time, or at the first at which the equation may run."""
        time = max([time, self.base, *(self.time.get(v, 0) for v in atoms if isinstance(v, int))])
        self._tag(time)
        return self.builder.write(self.like, key, [self._whole(atom)[0] for atom in atoms], change, 1.0)[0], time

    def _on_other_dims(self, equation: Equation, dim: int) -> Callable[[list[Any]], list[Any]]:
        """An equation that cuts or pads, along all dims but one."""
        params = equation.source.params
        if equation.primitive == "pad":
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
        rule = self.places.rules[self.n]
        if rule is None:
            return False
        return _InRuns(self, equation, rule, rows, starts).write()

    # -- values --------------------------------------------------------------------------------

    @property
    def base(self) -> int:
        """The first time at which the equation may run."""
        return self.count if self.like.phase == "backward" else 0

    def turn_of(self, row: int) -> int:
        """The slice of a row, counted from the first token."""
        return min(int(np.searchsorted(self.ends, row, side="right")), self.count - 1)

    def _slice_of(self, time: int) -> int:
        return time if time < self.count else 2 * self.count - 1 - time

    def _tag(self, time: int) -> None:
        self.like = replace(self.trace.equations[self.n], token_slice=self._slice_of(time))

    def _whole(self, atom: Atom) -> tuple[Atom, int]:
        """A value as a whole, and its time."""
        if not isinstance(atom, int):
            return atom, 0
        if atom in self.rows and atom not in self.wholes:
            one = self.rows[atom]
            if one.columns is not None:
                raise self.looks_ahead(one.cause)
            self.wholes[atom], self.time[atom] = self._fetch(atom, 0, one.size)
        return self.wholes.get(atom, atom), self.time.get(atom, 0)

    def _fetch(self, value: Atom, start: int, stop: int) -> tuple[Atom, int]:
        """Some rows of a value in runs, and their time."""
        assert isinstance(value, int)
        one = self.rows[value]
        exact = next((run for run in one.runs if (run.start, run.stop) == (start, stop)), None)
        if exact is not None:
            return exact.atom, exact.time
        if one.columns is not None:
            raise self.looks_ahead(one.cause)
        key = value, start, stop, self.base
        if key not in self.fetched:
            self.fetched[key] = self._assembled(one, start, stop)
        return self.fetched[key]

    def _assembled(self, one: Rows, start: int, stop: int) -> tuple[Atom, int]:
        pieces = [run for run in one.runs if run.start < stop and start < run.stop]
        time = max(self.base, *(run.time for run in pieces))
        self._tag(time)
        parts: list[Atom] = []
        for run in pieces:
            first, last = max(start, run.start), min(stop, run.stop)
            parts.append(self.cut(run.atom, one.place, run.stop - run.start, first - run.start, last - run.start))
        if len(parts) == 1:
            return parts[0], time
        bounds = tuple((max(start, run.start) - start, min(stop, run.stop) - start) for run in pieces)
        slices = LayerSlices(stop - start, bounds)
        whole = self.builder.avals[parts[0]].shape if isinstance(parts[0], int) else ()
        first = bounds[0][1] - bounds[0][0]
        dim = one.place.dim
        shape = (*whole[:dim], whole[dim] // first * (stop - start), *whole[dim + 1 :])
        key = "join", one.place, bounds
        (made,) = self.builder.write(self.like, key, parts, lambda v: [slices.assembled(v, one.place, shape)], 1.0)
        return made, time

    def cut(self, atom: Atom, place: Place, size: int, start: int, stop: int) -> Atom:
        """Some rows of an array of `size` rows."""
        if (start, stop) == (0, size):
            return atom
        slices = LayerSlices(size, ((start, stop),))
        key = "cut", place, size, start, stop
        return self.builder.write(self.like, key, [atom], lambda v: [slices.cut(v[0], place, (start, stop))], 1.0)[0]

    # -- refusals ------------------------------------------------------------------------------

    def looks_ahead(self, n: int | None) -> MicrobatchError:
        """The error of an operation in which tokens meet later ones."""
        n = self.n if n is None else n
        where = Refusals(self.graph, self.places, Batch(0, (), {}), False).of(n)
        return MicrobatchError(
            f"the step cannot run in slices of tokens: {where} looks ahead: a token's result depends"
            " on later tokens, or nothing proves that it does not. A causal mask proves it where it sets later scores to -inf,"
            " or, if no row is wholly masked, to -1e4 or less. Otherwise choose another schedule than 'terapipe'"
        )


def _filled(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    return [lax.broadcast_in_dim(values[0], shape, ())]


#: First row, row after the last, time, and slice of some rows.
Span = tuple[int, int, int, int]
#: Primitives that rearrange or convert elements.
_REARRANGE = frozenset(
    {"reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy", "broadcast_in_dim"}
)
#: Primitives that cut data along its tokens.
_CUTS = frozenset({"slice", "pad", "concatenate", "dynamic_slice", "gather"})


class _InRuns:
    """Writes one equation once per run."""

    def __init__(
        self, slicing: _Slicing, equation: Equation, rule: Rule, rows: dict[int, Rows], starts: dict[int, Place]
    ) -> None:
        self.slicing, self.equation, self.rule = slicing, equation, rule
        self.rows, self.starts = rows, starts
        self.trace = slicing.trace

    def write(self) -> bool:
        """Returns whether the equation could be written."""
        found = self._factors()
        if found is None:
            return False
        self.row, self.column, self.cause = found
        slicing, n = self.slicing, self.slicing.n
        scatters = self.equation.primitive == "scatter-add"
        if not scatters and not slicing.places.separable(n, self.row):
            return False
        if self.column is not None and not slicing.places.separable(n, self.column):
            return False
        self.size = self._size(self.row)
        if self.column is not None and self._size(self.column) != self.size:
            raise slicing.looks_ahead(self.cause)
        kind, over = self._reduction(self.row), self.column and self._reduction(self.column)
        self.state = self._left_out() if self.column is not None else "anything"
        if over is not None and not _may_sum(over, self.state):
            raise slicing.looks_ahead(self.cause)
        if kind is None and any(self._place(self.row, i) is None for i in range(len(self.equation.results))):
            return False
        if scatters and (0 in self.rows or self.column is not None):
            return False
        runs = self._runs()
        if kind is None:
            made = [self._one(start, stop, time) for start, stop, time, _ in runs]
            for i, value in enumerate(self.equation.results):
                place = self._place(self.row, i)
                assert place is not None
                columns = self._place(self.column, i) if self.column is not None and over is None else None
                own = tuple(Run(*run[:2], one[i], *run[2:]) for run, one in zip(runs, made, strict=True))
                slicing.rows[value] = Rows(place, self.size, own, columns, self.state, columns and self.cause)
            self._check_ahead(runs)
            return True
        in_time = sorted(runs, key=lambda run: run[2])
        if self.column is not None and over is None:
            return self._sum_by_columns(kind, in_time)
        self._sum(kind, in_time, chained=scatters)
        return True

    # -- factors -------------------------------------------------------------------------------

    def _factors(self) -> tuple[Factor, Factor | None, int | None] | None:
        """The factor of rows, that of columns if tokens meet, and the equation in which they met first."""
        primary: dict[int, Factor] = {}
        columns: set[Factor] = set()
        cause: int | None = None
        for i, one in self.rows.items():
            factor = factor_at(self.rule, self.rule.operands[i], one.place, one.size)
            if factor is None:
                return None
            primary[i] = factor
            if one.columns is not None:
                column = factor_at(self.rule, self.rule.operands[i], one.columns, one.size)
                if column is None:
                    raise self.slicing.looks_ahead(one.cause)
                columns.add(column)
                cause = one.cause
        for i, place in self.starts.items():
            aval = self.trace.avals[self.equation.operands[i]]  # type: ignore[index]
            factor = factor_at(self.rule, self.rule.operands[i], place, aval.shape[place.dim] // place.minor)
            if factor is None:
                return None
            primary[i] = factor
        both = set(primary.values())
        if len(columns) > 1 or len(both - columns) > 1 + (not columns):
            return None
        if columns:
            (column,) = columns
            rows = both - columns
            return (next(iter(rows)), column, cause) if len(rows) == 1 else None
        if len(both) == 1:
            return next(iter(both)), None, None
        row, column = self._oriented(sorted(primary.items()))
        return row, column, self.slicing.n

    def _oriented(self, operands: Sequence[tuple[int, Factor]]) -> tuple[Factor, Factor]:
        """Rows and columns of tokens that meet: a sum or a maximum is taken over the columns first, or the value meets one
        whose rows are known."""
        one, other = operands[0][1], operands[1][1]
        (value,) = self.equation.results
        dims = {value: (self._place(one, 0), self._place(other, 0))}
        slicing = self.slicing
        for n in range(slicing.n + 1, len(self.trace.equations)):
            equation, rule = self.trace.equations[n], slicing.places.rules[n]
            for i, v in enumerate(equation.operands):
                if not isinstance(v, int) or v not in dims or rule is None:
                    continue
                found = [p and factor_at(rule, rule.operands[i], p, self._size(one)) for p in dims[v]]  # type: ignore[index]
                if None in found:
                    continue
                for j, w in enumerate(equation.operands):
                    known = slicing.rows.get(w) if isinstance(w, int) else None
                    if known is not None and known.columns is not None and j != i:
                        row = factor_at(rule, rule.operands[j], known.place, known.size)
                        return (one, other) if row == found[0] else (other, one)
                    if known is None and equation.primitive in ("add", "mul") and slicing.rules.is_mask(w):
                        at = [next(iter(places_of(f, rule, rule.operands[j])), None) for f in found if f]
                        if at[0] and at[1] and slicing.rules.is_mask(w, (at[0].dim, at[1].dim)):
                            return one, other
                        if at[0] and at[1] and slicing.rules.is_mask(w, (at[1].dim, at[0].dim)):
                            return other, one
                reduced = [bool(f and rule.factors[f.index].reduction) for f in found]
                if any(reduced):
                    return (one, other) if reduced[1] else (other, one)
                for r, result in enumerate(equation.results):
                    at = [next(iter(places_of(f, rule, rule.results[r])), None) if f else None for f in found]
                    if None not in at:
                        dims[result] = (at[0], at[1])
        return one, other

    def _size(self, factor: Factor) -> int:
        for i, one in self.rows.items():
            if factor in (
                factor_at(self.rule, self.rule.operands[i], one.place, one.size),
                one.columns and factor_at(self.rule, self.rule.operands[i], one.columns, one.size),
            ):
                return one.size
        i, place = next(iter(self.starts.items()))
        return self.trace.avals[self.equation.operands[i]].shape[place.dim] // place.minor  # type: ignore[index]

    def _reduction(self, factor: Factor) -> str | None:
        return self.rule.factors[factor.index].reduction

    def _place(self, factor: Factor, result: int) -> Place | None:
        """The dim of a result that is a factor; None if it is none or several."""
        found = list(places_of(factor, self.rule, self.rule.results[result]))
        return found[0] if len(found) == 1 else None

    # -- runs ----------------------------------------------------------------------------------

    def _runs(self) -> list[Span]:
        """The runs of rows: first row, row after the last, and time."""
        slicing, count, base = self.slicing, self.slicing.count, self.slicing.base
        times, turns, follows = np.full(self.size, base), np.zeros(self.size, int), False
        for i, one in self.rows.items():
            if factor_at(self.rule, self.rule.operands[i], one.place, one.size) == self.row:
                own = one.times()
                times = np.maximum(times, own)
                turns = np.maximum(turns, one.turns())
                follows |= bool(own.max() >= count)
        if self.starts:
            if not slicing.rows and self.size != int(slicing.ends[-1]):  # labels may be fewer than the first tokens
                raise OtherTokensError(slicing.lengths, self.size)
            turns = np.array([slicing.turn_of(row) for row in range(self.size)])
            times = np.maximum(times, turns)
        for v in self.equation.reads:
            if v not in slicing.rows:
                times = np.maximum(times, slicing.time.get(v, 0))
        if base and not follows and not self._is_flexible():  # a row's backward pass begins when its slice has its turn
            times = np.maximum(times, 2 * count - 1 - turns)
        if self.column is not None:
            times = np.maximum(times, self._key_times(times, turns))
        cuts = [0, *(np.flatnonzero(np.diff(times) | np.diff(turns)) + 1), self.size]
        return [(int(a), int(b), int(times[a]), int(turns[a])) for a, b in itertools.pairwise(cuts)]

    def _is_flexible(self) -> bool:
        """Whether an equation of the backward pass prepares forward values for it, and may run before its turn."""
        return self.equation.is_rematerialized or self.equation.primitive in _REARRANGE

    def _key_times(self, times: np.ndarray, turns: np.ndarray) -> np.ndarray:
        """For each row, the time of the keys that its run reads."""
        found = np.zeros(self.size, int)
        for i, one in self.rows.items():
            if factor_at(self.rule, self.rule.operands[i], one.place, one.size) == self.column:
                cuts = [0, *(np.flatnonzero(np.diff(times) | np.diff(turns)) + 1), self.size]
                until = np.maximum.accumulate(one.times())
                for a, b in itertools.pairwise(cuts):
                    found[a:b] = np.maximum(found[a:b], until[b - 1])
        return found

    def _check_ahead(self, runs: Sequence[Span]) -> None:
        """Refuse a forward value all of whose rows wait for the last slice."""
        slicing = self.slicing
        if slicing.count == 1 or {time for _, _, time, _ in runs} != {slicing.count - 1}:
            return
        if any(one.times().min() < slicing.count - 1 for one in self.rows.values()) or self.starts:
            late = [
                v for v in self.equation.reads if v not in slicing.rows and slicing.time.get(v, 0) == slicing.count - 1
            ]
            raise slicing.looks_ahead(next((slicing.cause[v] for v in late if v in slicing.cause), None))

    # -- one run -------------------------------------------------------------------------------

    def _one(self, start: int, stop: int, time: int, first: Atom | None = None) -> Sequence[Atom]:
        """The results of an equation for a run. `first` replaces the first operand."""
        slicing, equation = self.slicing, self.equation
        operands: list[Atom] = []
        for i, atom in enumerate(equation.operands):
            if i == 0 and first is not None:
                operands.append(first)
            elif isinstance(atom, int):
                operands.append(self._operand(i, atom, start, stop, time))
            else:
                operands.append(atom)
        slicing._tag(time)
        whole = [self.trace.avals[a].shape if isinstance(a, int) else () for a in equation.operands]
        shapes = [
            self._local(self.trace.avals[v].shape, self.rule.results[r], start, stop)
            for r, v in enumerate(equation.results)
        ]
        if is_as_written(equation.source):
            types = {
                v: self.trace.avals[v].update(shape=shape) for v, shape in zip(equation.results, shapes, strict=True)
            }
            like = replace(equation, operands=tuple(operands), token_slice=slicing.like.token_slice)
            new = slicing.builder.copy(like, {}, types=types.__getitem__)
            slicing.builder.add(new)
            return new.results
        key = "run", equation.params_text, repr(whole), repr(shapes)
        made = slicing.builder.write(
            slicing.like, key, operands, lambda values: resized(equation.source, values, whole, shapes), 1.0
        )
        found = [slicing.builder.avals[one].shape for one in made if isinstance(one, int)]
        assert found == shapes, f"{equation.primitive} made {found}, not {shapes}"
        return made

    def _operand(self, i: int, atom: int, start: int, stop: int, time: int) -> Atom:
        slicing, dims = self.slicing, self.rule.operands[i]
        one = self.rows.get(i)
        if one is None:
            value, _ = slicing._whole(atom)
            slicing._tag(time)
            for place in places_of(self.row, self.rule, dims):
                value = slicing.cut(value, place, self.size, start, stop)
        elif factor_at(self.rule, dims, one.place, one.size) == self.row:
            value, _ = slicing._fetch(atom, start, stop)
            slicing._tag(time)
        else:
            value, _ = slicing._fetch(atom, 0, stop)
            return value
        if self.column is not None and (one is None or one.columns is None):
            slicing._tag(time)
            for place in places_of(self.column, self.rule, dims):
                value = slicing.cut(value, place, self.size, 0, stop)
        return value

    def _local(self, shape: tuple[int, ...], dims: DimFactors, start: int, stop: int) -> tuple[int, ...]:
        sizes = list(shape)
        for place in places_of(self.row, self.rule, dims):
            sizes[place.dim] = sizes[place.dim] // self.size * (stop - start)
        for place in places_of(self.column, self.rule, dims) if self.column is not None else ():
            sizes[place.dim] = sizes[place.dim] // self.size * stop
        return tuple(sizes)

    # -- sums ----------------------------------------------------------------------------------

    def _sum(self, kind: str, runs: Sequence[Span], *, chained: bool) -> None:
        """A reduction over rows: the terms of runs are added up one after the other."""
        slicing, total = self.slicing, None
        for start, stop, time, _ in runs:
            if chained:  # it adds to its first operand
                total = self._one(start, stop, time, None if total is None else total[0])
                continue
            terms = self._one(start, stop, time)
            total = terms if total is None else [self._combined(kind, a, b) for a, b in zip(total, terms, strict=True)]
        assert total is not None
        for value, atom in zip(self.equation.results, total, strict=True):
            slicing.wholes[value], slicing.time[value], slicing.cause[value] = atom, runs[-1][2], slicing.n

    def _sum_by_columns(self, kind: str, runs: Sequence[Span]) -> bool:
        """A reduction over rows of a value with columns, such as the gradient of keys: the columns become rows."""
        if kind != "sum" or self.state != "zero":
            raise self.slicing.looks_ahead(self.cause)
        (value,) = self.equation.results
        assert self.column is not None
        place = self._place(self.column, 0)
        if place is None:
            return False
        slicing = self.slicing
        totals: dict[tuple[int, int], tuple[Atom, int, int]] = {}
        for start, stop, time, _ in runs:
            (term,) = self._one(start, stop, time)
            for first, last, _, turn in runs:
                if last <= stop:
                    slicing._tag(time)
                    part = slicing.cut(term, place, stop, first, last)
                    known = totals.get((first, last))
                    totals[first, last] = (self._combined("sum", known[0], part) if known else part), time, turn
        own = tuple(Run(*bounds, *made) for bounds, made in sorted(totals.items()))
        slicing.rows[value] = Rows(place, self.size, own)
        return True

    def _combined(self, kind: str, one: Atom, other: Atom) -> Atom:
        return self.slicing.builder.write(
            self.slicing.like, ("combine", kind), [one, other], lambda values: [COMBINE[kind](*values)], 1.0
        )[0]

    # -- what is left out ----------------------------------------------------------------------

    def _left_out(self) -> LeftOut:
        """What is known of the columns that runs of the product of operands do not have."""
        assert self.column is not None
        states: list[LeftOut | None] = []
        sides: list[tuple[int, int] | None] = []
        for i, dims in enumerate(self.rule.operands):
            one = self.rows.get(i)
            states.append(one.left_out if one is not None and one.columns is not None else None)
            both = [next(iter(places_of(f, self.rule, dims)), None) for f in (self.row, self.column)]
            sides.append((both[0].dim, both[1].dim) if both[0] and both[1] else None)
        return self.slicing.rules.of(self.equation, states, sides)


def _may_sum(kind: str, state: LeftOut) -> bool:
    return state == "zero" if kind == "sum" else state == "low" if kind == "max" else False


def factor_at(rule: Rule, dims: DimFactors, place: Place, size: int) -> Factor | None:
    """The factor that a place is, or is a part of."""
    low = 1
    for index in reversed(dims[place.dim]) if place.dim < len(dims) else ():
        high = low * rule.factors[index].size
        if low <= place.minor and place.minor * size <= high:
            return Factor(index, place.minor // low) if place.minor % low == 0 else None
        low = high
    return None


def places_of(factor: Factor, rule: Rule, dims: DimFactors) -> Iterator[Place]:
    """The dims of a tensor that contain a factor."""
    for d, names in enumerate(dims):
        if factor.index in names:
            inner = names[names.index(factor.index) + 1 :]
            yield Place(d, factor.minor * int(np.prod([rule.factors[i].size for i in inner], dtype=int)))
