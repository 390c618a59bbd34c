"""Rewrite a trace so that its backward pass recomputes forward values.

In: `Trace`, and the segments to rematerialize. Out: `Trace` with the same inputs, outputs and results. All equations
that follow read the recomputed values. Random bits come out the same, because their keys are values.

A recomputation reads its operands through a barrier, so XLA neither merges it with the forward pass nor runs it
earlier. The barrier also waits for gradients that the backward pass has just computed, including parameter gradients.
Otherwise XLA's scheduler would delay the matmuls of parameter gradients until they hide a collective, and the values
recomputed for all layers would be live at once.

If the forward and the backward pass are loops, recomputed values are not stacked. The backward loop's body computes
them from the values that are stacked and from those that both loops receive. Stacks that are no longer read are
dropped.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.frontend.accumulators import sums_of
from autopar.frontend.equations import REMATERIALIZED, Atom, Equation, Nest, Piece, Region, substituted
from autopar.frontend.trace import Rewritten, Trace
from autopar.frontend.trace_builder import TraceBuilder, piece_of
from autopar.jax_interop import compat as jax_compat
from autopar.plans.records import RematSegment
from autopar.rules.table import traits_of

#: A gradient of at most this many elements may be ready long before the others.
_FEW = 64


def recompute(trace: Trace, agains: Sequence[RematSegment]) -> Trace:
    """The trace with some of its equations recomputed."""
    return _Rewriting(trace, agains).run() if agains else trace


@dataclass(slots=True)
class _Body:
    """The state of the rewriting within one body: for each value, the value that replaces it from here on."""

    renamed: dict[int, int] = field(default_factory=dict)
    #: The replacements before the first recomputation; None until then.
    forward: dict[int, int] | None = None
    #: Values made in this body so far, and whether the backward pass makes them.
    made: dict[int, bool] = field(default_factory=dict)
    #: Values of the backward pass that were made since the last recomputation, and those made before it.
    fresh: list[int] = field(default_factory=list)
    older: list[int] = field(default_factory=list)
    #: Equations of the backward pass with a single result, by that result.
    producers: dict[int, Equation] = field(default_factory=dict)
    last: int | None = None


class _Rewriting:
    """Rewrites the equations; the one mutable object of this module."""

    def __init__(self, trace: Trace, agains: Sequence[RematSegment]) -> None:
        self.trace, self.builder = trace, TraceBuilder(trace)
        self.avals = self.builder.avals
        #: By the position where a loop begins: pieces to add to its inputs and outputs.
        self.entering: dict[int, list[Equation]] = defaultdict(list)
        self.leaving: dict[int, list[Equation]] = defaultdict(list)
        self.accumulated = _accumulated(trace)
        self.returned = {atom for atom in trace.outputs if isinstance(atom, int)}
        #: Values to keep live, by the position of the equation that makes the last of them.
        self.holding: dict[int, list[int]] = defaultdict(list)
        self.agains: dict[int, list[RematSegment]] = defaultdict(list)
        for one in agains:
            kept = tuple(v for v in one.kept if v not in self.accumulated)
            self.agains[one.before].append(replace(one, kept=kept))
            held = kept if one.onward is None else (*kept, one.onward)
            if kept and len(held) > 1:  # a single value needs no barrier
                self.holding[max(trace.producers[v] for v in held)].extend(held)

    def run(self) -> Trace:
        """Rewrite the whole trace."""
        self._add_pieces()
        body = _Body(made=dict.fromkeys((*self.trace.inputs, *self.builder.constants), False))
        self._span(0, len(self.trace.equations), body)
        made = self.builder.finish(substituted(self.trace.outputs, body.renamed))
        return replace(made, rewritten=tuple(self._moved(self.builder.origins_of(made))))

    # -- one body ----------------------------------------------------------------------------

    def _span(self, start: int, stop: int, body: _Body) -> None:
        for n, _, region in self.trace.walk(start, stop):
            for again in self.agains[n]:
                self._again(again, self.trace.equations[n:stop], body)
            if region is not None:
                self._region(region, body)
                continue
            new = self._copied(n, body.renamed)
            self.builder.add(new)
            self._note(new, body)
            self._hold(self.holding[n], new, body)

    def _hold(self, values: Sequence[int], like: Equation, body: _Body) -> None:
        """Add a barrier: all these values are computed before any of them is read from here on."""
        now = dict.fromkeys(body.renamed.get(value, value) for value in values)
        for at, new in self._barrier(now, like, body).items():
            _rename(body.renamed, at, new)

    def _barrier(self, values: Iterable[int], like: Equation, body: _Body) -> dict[int, int]:
        """Append a barrier named as another equation; returns its results by operand."""
        behind: dict[int, int] = {}
        pieces: list[Equation] = []
        for value in values:
            if hasattr(self.avals[value], "shape"):
                new = behind[value] = self.builder.like(value)
                repeat = self.builder.repeats[new]
                pieces.append(replace(like, operands=(value,), results=(new,), repeat=repeat, piece="barrier"))
        if pieces:
            self.builder.add(Nest("barrier", like.source, pieces))
        for piece in pieces:
            self._note(piece, body)
        return behind

    def _region(self, region: Region, body: _Body) -> None:
        start, sections = region.enter[0], list[_Body]()
        enter = [self._copied(n, body.renamed) for n in range(*region.enter)]
        enter += [piece.reading(body.renamed) for piece in self.entering[start]]

        def write(span: tuple[int, int]) -> None:
            sections.append(_Body(made={v: piece.phase == "backward" for piece in enter for v in piece.results}))
            self._span(*span, sections[-1])

        written = self.builder.sections(region.sections, write)
        leave = [self._left(self.trace.equations[n], sections) for n in range(*region.exit)]
        for new, n in zip(leave, range(*region.exit), strict=True):
            self.builder.mark(new, n)
        leave += [self._left(piece, sections) for piece in self.leaving[start]]
        self.builder.add(Nest(region.kind, region.source, enter, written, leave))
        for piece in enter if region.kind == "barrier" else leave:
            self._note(piece, body)

    def _left(self, piece: Equation, bodies: Sequence[_Body]) -> Equation:
        """An output piece that reads its operands' latest replacements, but forward values from before the first
        recomputation, so that users outside do not wait for it."""

        def standing_for(atom: Atom, body: _Body) -> Atom:
            if not isinstance(atom, int):
                return atom
            ended = body.renamed if body.forward is None or body.made.get(atom, False) else body.forward
            return ended.get(atom, atom)

        of = bodies if piece.piece == "exit_branch" else [bodies[0 if piece.piece == "predicate" else -1]]
        return replace(piece, operands=tuple(itertools.starmap(standing_for, zip(piece.operands, of, strict=True))))

    def _copied(self, n: int, renamed: dict[int, int]) -> Equation:
        new = self.trace.equations[n].reading(renamed)
        self.builder.mark(new, n)
        return new

    def _note(self, equation: Equation, body: _Body) -> None:
        if len(equation.results) == 1 and equation.phase == "backward":
            body.producers[equation.results[0]] = equation
        for value in equation.results:
            body.made[value] = equation.phase == "backward"
            if math.prod(getattr(self.avals[value], "shape", ())) > _FEW:
                body.last = value
                if body.made[value] and value < len(self.trace.avals):
                    body.fresh.append(value)

    # -- what is computed again ----------------------------------------------------------------

    def _again(self, again: RematSegment, following: Sequence[Equation], body: _Body) -> None:
        """Append the barrier and the recomputed equations; later equations of this body read their results."""
        body.forward = dict(body.renamed) if body.forward is None else body.forward
        here, like = self.here.get(id(again), {}), following[0]
        sources = [self.trace.equations[n] for n in again.nodes]
        reread = (*again.regathered, *again.kept)
        read = dict.fromkeys((*_read_of_others(sources), *reread))
        now = {v: body.renamed.get(here.get(v, v), here.get(v, v)) for v in read}
        made = [*body.older, *body.fresh] if again.prompt else body.older
        body.older, body.fresh = ([] if again.prompt else body.fresh), []
        waiting = [v for v in made if self._is_read_from(again.before, v) and v not in self.accumulated]
        if (gradient := self._gradient(following, body)) is not None:
            waiting.append(gradient)
        made_from = {v: self._as_made(v, body) for v in waiting}
        gradients = dict.fromkeys(source for source, _ in made_from.values())
        barred = self._barrier(dict.fromkeys((*now.values(), *gradients)), like, body)
        known = {v: barred.get(at, at) for v, at in now.items()}
        renewed = {now[v] for v in reread}
        for equation in sources:
            stack = equation.name_stack.extend(REMATERIALIZED)
            clone = self.builder.copy(equation, known, phase=like.phase, name_stack=stack)
            known.update(zip(equation.results, clone.results, strict=True))
            self._append(clone, body)
        for equation in sources:
            for value in equation.results:
                body.renamed[here.get(value, value)] = known[value]
        for at in (*renewed, *gradients):
            if at in barred:
                _rename(body.renamed, at, barred[at])
        for value, (source, chain) in made_from.items():
            at = barred.get(source, source)
            for equation in chain:
                clone = self.builder.copy(equation, {source: at})
                (source,), (at,) = equation.results, clone.results
                self._append(clone, body)
            if chain:
                _rename(body.renamed, value, at)

    def _append(self, equation: Equation, body: _Body) -> None:
        self.builder.add(equation)
        self._note(equation, body)

    def _is_read_from(self, n: int, value: int) -> bool:
        """Whether the step returns a value, or an equation from position `n` on reads it."""
        return self.trace.users.get(value, (-1,))[-1] >= n or value in self.returned

    def _as_made(self, value: int, body: _Body) -> tuple[int, list[Equation]]:
        """A value before its layout changes, and their equations, which are part of the kernels that read the value."""
        chain: list[Equation] = []
        while (producer := body.producers.get(value)) is not None and traits_of(producer.primitive).lays_out:
            source = producer.operands[0]
            if not isinstance(source, int) or not body.made.get(source, False) or source in self.accumulated:
                break
            if math.prod(self.avals[source].shape) <= _FEW:
                break
            chain.insert(0, producer)
            value = source
        return value, chain

    def _gradient(self, following: Sequence[Equation], body: _Body) -> int | None:
        """The value of the backward pass that the following equations read first; at its start, the value made last."""
        for least in (_FEW, 0):
            for value in (body.renamed.get(v, v) for equation in following for v in equation.reads):
                if not body.made.get(value, False) or value in self.accumulated:
                    continue
                if hasattr(self.avals[value], "shape") and math.prod(self.avals[value].shape) > least:
                    return value
        return body.last

    # -- loops -------------------------------------------------------------------------------

    def _add_pieces(self) -> None:
        """Add pieces to backward loops for the operands of recomputed nodes that their bodies do not have."""
        #: By the id of a `RematSegment`: for a value of the forward body, the same value in the backward body.
        self.here: dict[int, dict[int, int]] = {}
        of_loop: dict[int, dict[int, int]] = {}
        for again in (one for ones in self.agains.values() for one in ones if one.nodes):
            forward, backward = self._loop_around(again.nodes[0]), self._loop_around(again.before)
            if forward is None or backward is None or forward is backward:
                continue
            here = of_loop.setdefault(backward.enter[0], self._given(forward, backward))
            self.here[id(again)] = here
            for value in (*_read_of_others([self.trace.equations[n] for n in again.nodes]), *again.regathered):
                if value not in here:
                    here[value] = self._give(value, forward, backward)

    def _given(self, forward: Region, backward: Region) -> dict[int, int]:
        """Values of the forward body that the backward body has too: stacked values, and inputs of both loops."""
        equations = self.trace.equations
        stacked = {p.results[0]: v for p in equations[slice(*forward.exit)] if p.stacks for v in p.reads}
        given = {(p.piece, v): p.results[0] for p in equations[slice(*forward.enter)] for v in p.reads}
        here: dict[int, int] = {}
        for piece in equations[slice(*backward.enter)]:
            for operand in piece.reads:
                if piece.takes_slice and operand in stacked:
                    here[stacked[operand]] = piece.results[0]
                elif piece.piece in ("enter_slice", "enter_const") and (piece.piece, operand) in given:
                    here[given[piece.piece, operand]] = piece.results[0]
        return here

    def _give(self, value: int, forward: Region, backward: Region) -> int:
        """Bring a forward value into the backward body: as an input if it is one of the forward loop, else stacked."""
        inner, repeat = self.builder.like(value), self.builder.repeats[value]
        n = self.trace.producers.get(value)
        entered = None if n is None or n not in range(*forward.enter) else self.trace.equations[n]
        if entered is not None and entered.piece is not None and entered.piece != "enter_carry":
            self._enter(backward, entered.piece, entered.operands[0], inner, entered.repeat)
            return inner
        length = int(forward.source.params["length"])
        stack = self.builder.new(jax_compat.stacked(self.avals[value], length), repeat / length)
        first = self.trace.equations[forward.enter[0]]
        leave = piece_of(first, first.source, "exit_stack", value, stack, repeat)
        self.leaving[forward.enter[0]].append(leave)
        self._enter(backward, "enter_slice", stack, inner, repeat)
        return inner

    def _enter(self, loop: Region, piece: Piece, operand: Atom, result: int, repeat: float) -> None:
        """Add an input piece to a loop, named as its first piece."""
        first = self.trace.equations[loop.enter[0]]
        self.entering[loop.enter[0]].append(piece_of(first, first.source, piece, operand, result, repeat))

    def _loop_around(self, position: int) -> Region | None:
        """The innermost loop around an equation; None if there is none, or if a branch is further out."""
        around = [r for r in self.trace.regions if any(position in range(*span) for span in r.sections)]
        outwards = sorted(around, key=lambda region: region.enter[0])
        loops = list(itertools.takewhile(lambda region: region.kind == "scan", outwards))
        return loops[-1] if loops else None

    # -- what sees dims as two -----------------------------------------------------------------

    def _moved(self, origins: Sequence[int | None]) -> Iterator[Rewritten]:
        """Equations that replaced equations of the program, at their new positions; dropped if any of them is gone."""
        new = {origin: n for n, origin in enumerate(origins) if origin is not None}
        for one in self.trace.rewritten:
            places = [new.get(n) for n in range(one.start, one.stop)]
            start = places[0]
            if start is not None and places == list(range(start, start + len(places))):
                yield replace(one, start=start, stop=start + len(places))


def _accumulated(trace: Trace) -> frozenset[int]:
    """Carries that loops only add to.

    Behind a barrier such a carry could not stay unreduced over devices, and would be all-reduced in each iteration.
    """
    found = set[int]()
    for region in (region for region in trace.regions if region.kind == "scan"):
        for enter, leave in sums_of(trace, region):
            found.update(trace.equations[enter].results)
            found.update(trace.equations[leave].reads)
    return frozenset(found)


def _rename(renamed: dict[int, int], value: int, new: int) -> None:
    """Replace a value by another from here on, also where it already replaces others."""
    for old, at in list(renamed.items()):
        if at == value:
            renamed[old] = new
    renamed[value] = new


def _read_of_others(equations: Sequence[Equation]) -> Iterable[int]:
    """Values that these equations read and do not make, each once."""
    own = {value for equation in equations for value in equation.results}
    return dict.fromkeys(v for equation in equations for v in equation.reads if v not in own)
