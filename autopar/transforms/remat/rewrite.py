"""A trace in which forward values are computed again in the backward pass.

In: `Trace`, and what is computed again, where. Out: `Trace` of the same inputs, outputs and numbers. What is computed
again reads its operands through a barrier, together with what the backward pass has just made: so the compiler takes it
for new, and runs it no earlier. Without the gradients of parameters among these, XLA's scheduler would put their
products off to where they hide a collective, and what one layer computes again for them would wait with all other
layers'. All that follows reads the new values. Random bits come out the same, since their keys are values.

Between the loop of a forward pass and that of its backward pass, what is computed again is not stacked: the backward
loop's body computes it of what is, and of what the forward loop's body is given. What is then read by nothing is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.frontend.accumulators import Sums
from autopar.frontend.equations import Equation, Item, Nest, items_of, laid, without_dead
from autopar.frontend.trace import Rewritten, Trace
from autopar.jax_interop import compat as jax_compat
from autopar.plans.records import Again
from autopar.rules.table import traits_of

#: A gradient of so few elements may be known long before the others.
_FEW = 64


def recompute(trace: Trace, agains: Sequence[Again]) -> Trace:
    """The trace with some of its equations computed again."""
    return _Rewriting(trace, agains).run() if agains else trace


@dataclass(slots=True)
class _Body:
    """What is known where the pass stands in one body: by value, what stands for it from here on."""

    renamed: dict[int, int] = field(default_factory=dict)
    #: The same before anything was computed again; None until then.
    forward: dict[int, int] | None = None
    #: Values made in this body so far, and whether in the backward pass.
    made: dict[int, bool] = field(default_factory=dict)
    #: Of those of the backward pass, the ones made since anything was last computed again, and those made before.
    fresh: list[int] = field(default_factory=list)
    older: list[int] = field(default_factory=list)
    #: Equations of the backward pass, by what they make alone.
    makers: dict[int, Equation] = field(default_factory=dict)
    last: int | None = None


class _Rewriting:
    """Builds the new list; the one mutable object of this module."""

    def __init__(self, trace: Trace, agains: Sequence[Again]) -> None:
        self.trace = trace
        self.avals, self.repeats = list(trace.avals), list(trace.repeats)
        self.items = items_of(trace.equations, trace.regions)
        self.position = {id(equation): n for n, equation in enumerate(trace.equations)}
        #: Of a loop, by its place: pieces to add where it is entered and left.
        self.entering: dict[int, list[Equation]] = {}
        self.leaving: dict[int, list[Equation]] = {}
        self.last_read = [-1] * len(trace.avals)
        for n, equation in enumerate(trace.equations):
            for atom in equation.operands:
                if isinstance(atom, int):
                    self.last_read[atom] = n
        for atom in trace.outputs:
            if isinstance(atom, int):
                self.last_read[atom] = len(trace.equations)
        self.accumulated = _accumulated(trace)
        #: By the position of the equation behind which they are all made, values to hold from there on.
        self.holding: dict[int, list[int]] = {}
        self.agains: dict[int, list[Again]] = {}
        for one in agains:
            kept = tuple(v for v in one.kept if v not in self.accumulated)
            self.agains.setdefault(one.before, []).append(replace(one, kept=kept))
            held = kept if one.onward is None else (*kept, one.onward)
            if kept and len(held) > 1:  # one alone waits for no other
                self.holding.setdefault(max(trace.producers[v] for v in held), []).extend(held)
        self.was: dict[int, int] = {}  # id of a new equation -> position of the one it stands for
        self.keep: list[Equation] = []  # so that no id is given twice

    def run(self) -> Trace:
        """The whole trace anew."""
        self._add_pieces()
        body = _Body(made=dict.fromkeys((*self.trace.inputs, *dict(self.trace.constants)), False))
        items = self._items(self.items, body)
        outputs = tuple(body.renamed.get(a, a) if isinstance(a, int) else a for a in self.trace.outputs)
        live = {v for v in outputs if isinstance(v, int)}
        equations, regions = laid(without_dead(items, live))
        return replace(
            self.trace,
            equations=equations,
            regions=regions,
            avals=tuple(self.avals),
            repeats=tuple(self.repeats),
            outputs=outputs,
            constants=tuple((v, constant) for v, constant in self.trace.constants if v in live),
            rewritten=tuple(self._moved(equations)),
        )

    # -- one body ----------------------------------------------------------------------------

    def _items(self, items: Iterable[Item], body: _Body) -> list[Item]:
        out: list[Item] = []
        items = list(items)
        for at, item in enumerate(items):
            first = item if isinstance(item, Equation) else next(_equations([item]))
            for again in self.agains.get(self.position[id(first)], ()):
                out += self._again(again, items[at:], body)
            if isinstance(item, Equation):
                new = self._reading(item, body)
                out.append(new)
                self._note(new, body)
                out += self._held(self.holding.get(self.position[id(item)], ()), new, body)
            else:
                out.append(self._nest(item, body))
        return out

    def _held(self, values: Sequence[int], like: Equation, body: _Body) -> list[Item]:
        """A barrier of values that must all be made before any of them is read from here on."""
        now = {value: body.renamed.get(value, value) for value in dict.fromkeys(values)}
        pieces = {at: self._piece(at, like) for at in now.values() if _can_be_barred(self.avals[at])}
        for at, piece in pieces.items():
            _rename(body.renamed, at, piece.results[0])
            self._note(piece, body)
        return [Nest("barrier", like.source, list(pieces.values()), [], [])] if pieces else []

    def _piece(self, value: int, like: Equation) -> Equation:
        """One value's part of a barrier, named as another equation."""
        new = self._new(value)
        return replace(
            like, source=like.source, operands=(value,), results=(new,), repeat=self.repeats[new], piece="barrier"
        )

    def _nest(self, nest: Nest, body: _Body) -> Nest:
        enter = [self._reading(piece, body) for piece in nest.enter]
        added = self.entering.get(id(nest), [])
        enter += [self._reading(piece, body) for piece in added]
        sections = []
        for section in nest.sections:
            inner = _Body(made={v: piece.phase == "backward" for piece in enter for v in piece.results})
            items = self._items(section, inner)
            sections.append((items, inner))
        exits = []
        for piece in [*nest.exit, *self.leaving.get(id(nest), [])]:
            exits.append(self._left(nest, piece, [inner for _, inner in sections]))
        new = Nest(nest.kind, nest.source, enter, [items for items, _ in sections], exits)
        for piece in enter if nest.kind == "barrier" else exits:
            self._note(piece, body)
        return new

    def _left(self, nest: Nest, piece: Equation, inners: Sequence[_Body]) -> Equation:
        """A piece that comes out, reading what stands for its operands where its section ends; of the forward pass,
        where that ends: who reads it outside need not wait for what is computed again."""

        def body_of(i: int) -> _Body:
            if piece.piece == "exit_branch":
                return inners[i]
            return inners[0] if piece.piece == "predicate" else inners[-1]

        def standing_for(value: int, body: _Body) -> int:
            ended = body.renamed if body.forward is None or body.made.get(value, False) else body.forward
            return ended.get(value, value)

        operands = tuple(standing_for(a, body_of(i)) if isinstance(a, int) else a for i, a in enumerate(piece.operands))
        return self._standing_for(piece, replace(piece, operands=operands))

    def _reading(self, equation: Equation, body: _Body) -> Equation:
        operands = tuple(body.renamed.get(a, a) if isinstance(a, int) else a for a in equation.operands)
        return self._standing_for(equation, replace(equation, operands=operands))

    def _standing_for(self, old: Equation, new: Equation) -> Equation:
        if id(old) in self.position:
            self.was[id(new)] = self.position[id(old)]
            self.keep.append(new)
        return new

    def _note(self, equation: Equation, body: _Body) -> None:
        if len(equation.results) == 1 and equation.phase == "backward":
            body.makers[equation.results[0]] = equation
        for value in equation.results:
            body.made[value] = equation.phase == "backward"
            if math.prod(getattr(self.avals[value], "shape", ())) > _FEW:
                body.last = value
                if body.made[value] and value < len(self.trace.avals):
                    body.fresh.append(value)

    # -- what is computed again ----------------------------------------------------------------

    def _again(self, again: Again, following: Sequence[Item], body: _Body) -> list[Item]:
        """The barrier, and the equations behind it; what follows in this body reads their results."""
        body.forward = dict(body.renamed) if body.forward is None else body.forward
        here = self._known_here(again)
        sources = [self.trace.equations[n] for n in again.nodes]
        own = {value for equation in sources for value in equation.results}
        read = dict.fromkeys(v for equation in sources for v in equation.reads if v not in own)
        anew = (*again.renewed, *again.kept)
        read |= dict.fromkeys(anew)
        now = {v: body.renamed.get(here.get(v, v), here.get(v, v)) for v in read}
        outside = dict.fromkeys(now.values())
        like = next(_equations(following))
        made = [*body.older, *body.fresh] if again.prompt else body.older
        body.older, body.fresh = ([] if again.prompt else body.fresh), []
        waiting = [v for v in made if self.last_read[v] >= again.before and v not in self.accumulated]
        if (gradient := self._gradient(following, body)) is not None:
            waiting.append(gradient)
        made_from = {v: self._as_made(v, body) for v in waiting}
        gradients = dict.fromkeys(source for source, _ in made_from.values())
        pieces = [self._piece(v, like) for v in (outside | gradients) if _can_be_barred(self.avals[v])]
        barred = {piece.operands[0]: piece.results[0] for piece in pieces if isinstance(piece.operands[0], int)}
        renewed = {now[v] for v in anew}
        known = {v: barred.get(at, at) for v, at in now.items()}
        out: list[Item] = [Nest("barrier", like.source, pieces, [], [])] if pieces else []
        for piece in pieces:
            self._note(piece, body)
        for equation in sources:
            results = []
            for value in equation.results:
                known[value] = self._new(value)
                results.append(known[value])
            operands = tuple(known[a] if isinstance(a, int) else a for a in equation.operands)
            clone = replace(
                equation,
                operands=operands,
                results=tuple(results),
                phase=like.phase,
                name_stack=equation.name_stack.extend("rematted_computation"),
            )
            out.append(clone)
            self._note(clone, body)
        for equation in sources:
            for value in equation.results:
                body.renamed[here.get(value, value)] = known[value]
        for at in (*renewed, *gradients):
            if at in barred:
                _rename(body.renamed, at, barred[at])
        for value, (source, chain) in made_from.items():
            at = barred.get(source, source)
            for equation in chain:
                last, at = at, self._new(equation.results[0])
                clone = replace(equation, operands=(last,), results=(at,))
                out.append(clone)
                self._note(clone, body)
            if chain:
                _rename(body.renamed, value, at)
        return out

    def _as_made(self, value: int, body: _Body) -> tuple[int, list[Equation]]:
        """What a value was before it was laid out anew, and the equations that do that: part of the kernels that read it."""
        chain: list[Equation] = []
        while (maker := body.makers.get(value)) is not None and traits_of(maker.primitive).lays_out:
            source = maker.operands[0]
            if not isinstance(source, int) or not body.made.get(source, False) or source in self.accumulated:
                break
            if math.prod(self.avals[source].shape) <= _FEW:
                break
            chain.insert(0, maker)
            value = source
        return value, chain

    def _gradient(self, following: Sequence[Item], body: _Body) -> int | None:
        """What the backward pass has made that what follows reads first; at its start, what was made last."""
        for least in (_FEW, 0):
            for equation in _equations(following):
                for atom in equation.operands:
                    value = body.renamed.get(atom, atom) if isinstance(atom, int) else None
                    if value is None or not body.made.get(value, False) or value in self.accumulated:
                        continue
                    if not _can_be_barred(self.avals[value]):
                        continue
                    if math.prod(self.avals[value].shape) > least:
                        return value
        return body.last

    def _new(self, value: int) -> int:
        self.avals.append(self.avals[value])
        self.repeats.append(self.repeats[value])
        return len(self.avals) - 1

    # -- loops -------------------------------------------------------------------------------

    def _add_pieces(self) -> None:
        """What a backward loop's body must be given besides what it is: pieces for it."""
        self.here: dict[int, dict[int, int]] = {}  # by backward loop
        self.loop_of: dict[int, tuple[Nest, Nest]] = {}  # of an Again, by its id
        for again in (one for ones in self.agains.values() for one in ones):
            first = again.nodes[0] if again.nodes else None
            if first is None:
                continue
            forward, backward = self._loop_around(first), self._loop_around(again.before)
            if forward is None or backward is None or forward is backward:
                continue
            self.loop_of[id(again)] = (forward, backward)
            here = self.here.setdefault(id(backward), self._given(forward, backward))
            own = {v for n in again.nodes for v in self.trace.equations[n].results}
            needed = dict.fromkeys(
                a for n in again.nodes for a in self.trace.equations[n].operands if isinstance(a, int) and a not in own
            )
            for value in [*needed, *again.renewed]:
                if value not in here:
                    here[value] = self._give(value, forward, backward)

    def _known_here(self, again: Again) -> dict[int, int]:
        """By value of the forward body, what it is in the body where it is computed again."""
        loops = self.loop_of.get(id(again))
        return {} if loops is None else self.here[id(loops[1])]

    def _given(self, forward: Nest, backward: Nest) -> dict[int, int]:
        """What both bodies have: what is stacked, and what both are given."""
        stacked = {p.results[0]: v for p in forward.exit if p.piece == "exit_stack" for v in p.reads}
        given = {(p.piece, v): p.results[0] for p in forward.enter for v in p.reads}
        here: dict[int, int] = {}
        for piece in backward.enter:
            for operand in piece.reads:
                if piece.piece == "enter_slice" and operand in stacked:
                    here[stacked[operand]] = piece.results[0]
                elif piece.piece in ("enter_slice", "enter_const") and (piece.piece, operand) in given:
                    here[given[piece.piece, operand]] = piece.results[0]
        return here

    def _give(self, value: int, forward: Nest, backward: Nest) -> int:
        """A value of the forward body for the backward body: given to it as to the other, or stacked."""
        piece = next((p for p in forward.enter if p.results == (value,) and p.piece != "enter_carry"), None)
        inner, like = self._new(value), backward.enter[0]
        if piece is not None:
            self._add(self.entering, backward, replace(piece, results=(inner,)), like)
            return inner
        stack = len(self.avals)
        length = int(forward.source.params["length"])
        self.avals.append(jax_compat.stacked(self.avals[value], length))
        self.repeats.append(self.repeats[value] / length)
        once = replace(like, repeat=self.repeats[value])
        leave = replace(once, operands=(value,), results=(stack,), piece="exit_stack")
        self._add(self.leaving, forward, leave, forward.enter[0])
        self._add(
            self.entering, backward, replace(once, operands=(stack,), results=(inner,), piece="enter_slice"), like
        )
        return inner

    def _add(self, table: dict[int, list[Equation]], nest: Nest, piece: Equation, like: Equation) -> None:
        """A piece more of a loop, named as another of its pieces."""
        named = replace(piece, source=like.source, name_stack=like.name_stack, path=like.path, phase=like.phase)
        table.setdefault(id(nest), []).append(named)

    def _loop_around(self, position: int) -> Nest | None:
        """The innermost loop in whose body an equation stands."""
        equation = self.trace.equations[position]
        found: Nest | None = None
        items: Sequence[Item] = self.items
        while True:
            nest = next(
                (i for i in items if not isinstance(i, Equation) and _holds(i, equation) and i.kind == "scan"), None
            )
            if nest is None:
                return found
            found = nest
            items = [item for section in nest.sections for item in section]

    # -- what sees dims as two -----------------------------------------------------------------

    def _moved(self, equations: Sequence[Equation]) -> Iterator[Rewritten]:
        """Equations that stand for others still do, where all of them are left."""
        new = {self.was[id(equation)]: n for n, equation in enumerate(equations) if id(equation) in self.was}
        for one in self.trace.rewritten:
            places = [new.get(n) for n in range(one.start, one.stop)]
            start = places[0]
            if start is not None and places == list(range(start, start + len(places))):
                yield replace(one, start=start, stop=start + len(places))


def _accumulated(trace: Trace) -> frozenset[int]:
    """What loops only add to, from trip to trip. Read through a barrier it could not stay pending over devices, and
    would be summed in each trip."""
    sums, found = Sums(trace.equations), set[int]()
    for region in (region for region in trace.regions if region.kind == "scan"):
        enters, leaves = (
            [n for n in range(*span) if trace.equations[n].piece == piece]
            for span, piece in ((region.enter, "enter_carry"), (region.exit, "exit_carry"))
        )
        for enter, leave in sums.of(region, list(zip(enters, leaves, strict=True))):
            found.update(trace.equations[enter].results)
            found.update(trace.equations[leave].reads)
    return frozenset(found)


def _rename(renamed: dict[int, int], value: int, new: int) -> None:
    """What stands for a value now stands for all that it stood for."""
    for old, at in list(renamed.items()):
        if at == value:
            renamed[old] = new
    renamed[value] = new


def _can_be_barred(aval: Any) -> bool:
    return hasattr(aval, "shape")


def _equations(items: Iterable[Item]) -> Iterator[Equation]:
    """All equations, of regions too, in order."""
    for item in items:
        if isinstance(item, Equation):
            yield item
            continue
        yield from item.enter
        for section in item.sections:
            yield from _equations(section)
        yield from item.exit


def _holds(nest: Nest, equation: Equation) -> bool:
    return any(one is equation for section in nest.sections for one in _equations(section))
