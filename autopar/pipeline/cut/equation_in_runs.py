"""Write an equation of a step once per run of tokens.

In: an equation, its sharding rule, and its operands in runs of rows (`token_rows`). Out: the equations of the runs. The rule
says which dims are rows, which are columns of keys, and what is summed over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import MicrobatchError
from autopar.frontend.equations import Atom, Equation
from autopar.pipeline.cut.left_out import LeftOut
from autopar.pipeline.cut.token_rows import Rows, Run, TokenRows, factor_at, places_of
from autopar.rules.factors import DimFactors, Rule
from autopar.rules.table import traits_of
from autopar.transforms.microbatch.batch_dims import Factor, Place
from autopar.transforms.microbatch.resize import is_as_written, resized
from autopar.transforms.microbatch.slices import COMBINE

#: First row, row after the last, time, and slice of some rows.
Span = tuple[int, int, int, int]


class OtherTokensError(MicrobatchError):
    """Slices do not add up to the tokens that the model sees."""

    def __init__(self, lengths: Sequence[int], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(
            f"slices of {list(lengths)} tokens make {sum(lengths)} tokens, but the model has {num_tokens}: give lengths that add"
            " up to these"
        )


class _Factors:
    """Finds the loops of an equation over tokens.

    Args:
        rows: operands in runs, by position.
        starts: operands that are data with tokens, which meet state here, and their dims of tokens.
    """

    def __init__(
        self, slicing: TokenRows, equation: Equation, rule: Rule, rows: dict[int, Rows], starts: dict[int, Place]
    ) -> None:
        self.slicing, self.equation, self.rule = slicing, equation, rule
        self.rows, self.starts = rows, starts
        self.trace = slicing.trace

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
            traits = traits_of(equation.primitive)
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
                    if known is None and (traits.adds or traits.scales) and slicing.rules.is_mask(w):
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


class InRuns(_Factors):
    """Writes one equation once per run."""

    def write(self) -> bool:
        """Returns whether the equation could be written."""
        found = self._factors()
        if found is None:
            return False
        self.row, self.column, self.cause = found
        slicing, n = self.slicing, self.slicing.n
        scatters = traits_of(self.equation.primitive).scatters_sum
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
        return self.equation.is_rematerialized or traits_of(self.equation.primitive).lays_out

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
        slicing.tag(time)
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
            value, _ = slicing.whole(atom)
            slicing.tag(time)
            for place in places_of(self.row, self.rule, dims):
                value = slicing.cut(value, place, self.size, start, stop)
        elif factor_at(self.rule, dims, one.place, one.size) == self.row:
            value, _ = slicing.fetch(atom, start, stop)
            slicing.tag(time)
        else:
            value, _ = slicing.fetch(atom, 0, stop)
            return value
        if self.column is not None and (one is None or one.columns is None):
            slicing.tag(time)
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
                    slicing.tag(time)
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
