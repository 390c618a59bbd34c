"""Keep the values of a step in slices of tokens: whole, or in runs of rows.

In: a step, and the tokens of each slice. Out: `TokenRows`, which writes parts and wholes of values where equations need
them, and knows when each is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.errors import MicrobatchError
from autopar.frontend.equations import Atom
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.ir.graph import Graph
from autopar.pipeline.cut.known_masks import KnownMasks
from autopar.pipeline.cut.layer_slices import LayerSlices
from autopar.pipeline.cut.left_out import LeftOut, LeftOutRules
from autopar.rules.factors import DimFactors, Rule
from autopar.transforms.microbatch.batch_dims import Batch, Factor, Place, Places
from autopar.transforms.microbatch.errors import Refusals


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


class TokenRows:
    """The values of a step that is being written in slices.

    Attributes:
        rows: values in runs. wholes: value -> its replacement as a whole, and `time`, when it is ready.
        cause: whole value -> the equation in which its tokens met.
        n, like: the equation that is being rewritten.
    """

    def __init__(self, trace: Trace, graph: Graph, lengths: Sequence[int]) -> None:
        self.trace, self.graph, self.lengths = trace, graph, tuple(lengths)
        self.count = len(self.lengths)
        self.ends = np.cumsum(self.lengths)
        self.places = Places(graph)
        self.builder = TraceBuilder(trace)
        self.rules = LeftOutRules(KnownMasks(trace))
        self.rows: dict[int, Rows] = {}
        self.wholes: dict[int, Atom] = {}
        self.time: dict[int, int] = {}
        self.cause: dict[int, int] = {}
        self._fetched: dict[Any, tuple[Atom, int]] = {}
        self.n = 0
        self.like = trace.equations[0]

    @property
    def base(self) -> int:
        """The first time at which the equation may run."""
        return self.count if self.like.phase == "backward" else 0

    def turn_of(self, row: int) -> int:
        """The slice of a row, counted from the first token."""
        return min(int(np.searchsorted(self.ends, row, side="right")), self.count - 1)

    def slice_of(self, time: int) -> int:
        """The slice of a time."""
        return time if time < self.count else 2 * self.count - 1 - time

    def tag(self, time: int) -> None:
        """Write the equations that follow at a time."""
        self.like = replace(self.trace.equations[self.n], token_slice=self.slice_of(time))

    def whole(self, atom: Atom) -> tuple[Atom, int]:
        """A value as a whole, and its time."""
        if not isinstance(atom, int):
            return atom, 0
        if atom in self.rows and atom not in self.wholes:
            one = self.rows[atom]
            if one.columns is not None:
                raise self.looks_ahead(one.cause)
            self.wholes[atom], self.time[atom] = self.fetch(atom, 0, one.size)
        return self.wholes.get(atom, atom), self.time.get(atom, 0)

    def fetch(self, value: Atom, start: int, stop: int) -> tuple[Atom, int]:
        """Some rows of a value in runs, and the time at which they are ready."""
        assert isinstance(value, int)
        one = self.rows[value]
        exact = next((run for run in one.runs if (run.start, run.stop) == (start, stop)), None)
        if exact is not None:
            return exact.atom, exact.time
        if one.columns is not None:
            raise self.looks_ahead(one.cause)
        key = value, start, stop, self.base
        if key not in self._fetched:
            self._fetched[key] = self._assembled(one, start, stop)
        return self._fetched[key]

    def _assembled(self, one: Rows, start: int, stop: int) -> tuple[Atom, int]:
        pieces = [run for run in one.runs if run.start < stop and start < run.stop]
        time = max(self.base, *(run.time for run in pieces))
        self.tag(time)
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
