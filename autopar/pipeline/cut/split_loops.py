"""Split the loops of the backward pass into an input part and a weight part, each a loop of its own.

In: a step as traced. Out: the same step, in which a loop of the backward pass over layers computes what its carries need,
the cotangents that pass from layer to layer; a second loop computes the rest, the gradients of the layers' parameters.
A schedule with a split backward pass (`zb-h1`, `zb-v`) then runs the second loop later. Between the loops, values that
the second one reads of the first one are stacked; cheap values that depend on no carry are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.frontend.equations import Equation, Item, Nest, equations_of, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import LoopBuilder, TraceBuilder, piece_of
from autopar.rules.table import traits_of


def with_split_loops(trace: Trace) -> Trace:
    """The step with the loops of its backward pass split; the same trace if no loop has gradients to split off."""
    builder, is_split = TraceBuilder(trace), False
    for item in items_of(trace.equations, trace.regions):
        parts = [item] if isinstance(item, Equation) else list(_Splitting(builder, item).run())
        is_split |= len(parts) > 1
        builder.add(*parts)
    return builder.finish() if is_split else trace


class _Splitting:
    """Splits one loop."""

    def __init__(self, builder: TraceBuilder, nest: Nest) -> None:
        self.builder, self.nest = builder, nest
        self.body = nest.sections[0] if nest.sections else []
        self.producer = {value: n for n, item in enumerate(self.body) for value in _results(item)}
        #: The pieces by which values enter that are not carried.
        self.given = {one.results[0]: one for one in nest.enter if one.takes_slice or one.takes_constant}
        self.is_cheap: dict[int, bool] = {}

    def run(self) -> Iterator[Item]:
        nest = self.nest
        is_backward = nest.kind == "scan" and any(one.phase == "backward" for one in nest.enter)
        if not is_backward or nest.source.params["length"] < 2:
            yield nest
            return
        needed = self._needed()
        rest = [n for n in range(len(self.body)) if n not in needed]
        if not any(traits_of(one.primitive).contraction for n in rest for one in equations_of(self.body[n])):
            yield nest
            return
        made = {value for n in rest for value in _results(self.body[n])}
        second = LoopBuilder(nest.source)
        first_exits = [one for one in nest.exit if made.isdisjoint(one.reads)]
        env: dict[int, int] = {}
        for n in rest:
            for value in _reads(self.body[n]):
                if value not in made:
                    self._bring(value, second, first_exits, env)
            second.body.append(_reading(self.body[n], env))
        for one in nest.exit:
            if not made.isdisjoint(one.reads):
                second.stack(one, one.operands[0], one.results[0])
        first = [self.body[n] for n in sorted(needed)]
        yield Nest(nest.kind, nest.source, nest.enter, [first], first_exits)
        yield second.nest()

    def _needed(self) -> set[int]:
        """The items of the body that the carries, or effects, need."""
        found = {n for n, item in enumerate(self.body) if any(one.effects for one in equations_of(item))}
        values = [v for one in self.nest.exit if one.piece == "exit_carry" for v in one.reads]
        values += [v for n in found for v in _reads(self.body[n])]
        while values:
            n = self.producer.get(values.pop())
            if n is not None and n not in found:
                found.add(n)
                values += _reads(self.body[n])
        return found

    def _bring(self, value: int, second: LoopBuilder, first_exits: list[Equation], env: dict[int, int]) -> None:
        """Make a value of the first loop available in the second."""
        if value in env:
            return
        builder = self.builder
        if value in self.given:
            one = self.given[value]
            assert one.piece is not None
            env[value] = builder.like(value)
            second.give(one, one.piece, one.operands[0], env[value])
        elif (operand := self._behind_barrier(value)) is not None:
            self._bring(operand, second, first_exits, env)
            env[value] = env[operand]
        elif self._may_repeat(value):
            item = self.body[self.producer[value]]
            assert isinstance(item, Equation)
            for operand in item.reads:
                self._bring(operand, second, first_exits, env)
            again = builder.copy(item, env)
            env.update(zip(item.results, again.results, strict=True))
            second.body.append(again)
        else:
            aval, length = builder.avals[value], self.nest.source.params["length"]
            stack = builder.new(aval.update(shape=(length, *aval.shape)))
            like = self.nest.enter[0]
            first_exits.append(piece_of(like, self.nest.source, "exit_stack", value, stack, float(length)))
            env[value] = builder.like(value)
            second.give(like, "enter_slice", stack, env[value])

    def _behind_barrier(self, value: int) -> int | None:
        """The value that a barrier returns as this one; None if it is no barrier's."""
        item = self.body[self.producer[value]] if value in self.producer else None
        if not isinstance(item, Nest) or item.kind != "barrier":
            return None
        return next((v for one in item.enter for v in one.reads if value in one.results), None)

    def _may_repeat(self, value: int) -> bool:
        """Whether a value follows from what enters each iteration by operations that move or map elements alone."""
        if value in self.given:
            return True
        if value not in self.is_cheap:
            item = self.body[self.producer[value]] if value in self.producer else None
            traits = traits_of(item.primitive) if isinstance(item, Equation) else None
            self.is_cheap[value] = (
                traits is not None
                and isinstance(item, Equation)
                and (traits.elementwise or traits.lays_out)
                and all(map(self._may_repeat, item.reads))
            )
        return self.is_cheap[value]


def _results(item: Item) -> tuple[int, ...]:
    if isinstance(item, Equation):
        return item.results
    return tuple(v for one in item.exit or item.enter for v in one.results)  # a barrier only has entering pieces


def _reads(item: Item) -> list[int]:
    return [v for one in ([item] if isinstance(item, Equation) else item.enter) for v in one.reads]


def _reading(item: Item, env: dict[int, int]) -> Item:
    if isinstance(item, Equation):
        return item.reading(env)
    return Nest(item.kind, item.source, [one.reading(env) for one in item.enter], item.sections, item.exit)
