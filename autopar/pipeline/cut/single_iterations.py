"""Replace loops of one iteration by their bodies.

In: a step whose loops over layers were cut after each iteration. Out: the same step without these loops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jax import lax

from autopar.frontend.equations import Atom, Equation, Item, Nest, items_of
from autopar.frontend.trace_builder import TraceBuilder
from autopar.pipeline.cut.unroll_layers import Unstacked


def without_single_iterations(step: Unstacked) -> Unstacked:
    """The step without loops of one iteration."""
    return _Inlining(step).run()


class _Inlining:
    """Writes the step; the one mutable object of this module."""

    def __init__(self, step: Unstacked) -> None:
        self.step, self.builder = step, TraceBuilder(step.trace)
        self.env: dict[int, Atom] = {}
        self.single: dict[int, Atom] = {}  # stack of one element -> the element

    def run(self) -> Unstacked:
        """Rewrite the whole trace."""
        trace = self.step.trace
        self._items(items_of(trace.equations, trace.regions))
        outputs = [self._of(atom) for atom in trace.outputs]
        made = self.builder.finish(outputs=outputs)
        return replace(self.step, trace=made, origins=tuple((n, 0) for n in range(len(made.equations))))

    def _of(self, atom: Atom) -> Atom:
        return self.env.get(atom, atom) if isinstance(atom, int) else atom

    def _items(self, items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, Equation):
                self.builder.add(item.reading(self.env))
            elif item.kind == "scan" and item.source.params["length"] == 1:
                self._body(item)
            else:
                enter = [piece.reading(self.env) for piece in item.enter]
                self.builder.add(replace(item, enter=enter))

    def _body(self, nest: Nest) -> None:
        for piece in nest.enter:
            stack, value = self._of(piece.operands[0]), piece.results[0]
            if not piece.takes_slice:
                self.env[value] = stack
            elif isinstance(stack, int) and stack in self.single:
                self.env[value] = self.single[stack]
            else:
                self._reshaped(piece, value, stack, self.builder.avals[value].shape)
        self._items(nest.sections[0])
        for piece in nest.exit:
            (result,), atom = piece.results, self._of(piece.operands[0])
            if piece.stacks:
                self._reshaped(piece, result, atom, self.builder.avals[result].shape)
                made = self.env[result]
                assert isinstance(made, int)
                self.single[made] = atom
            else:
                self.env[result] = atom

    def _reshaped(self, like: Equation, value: int, atom: Atom, shape: tuple[int, ...]) -> None:
        function = lambda arrays: [lax.reshape(arrays[0], shape)]  # noqa: E731
        (self.env[value],) = self.builder.write(like, ("reshape", shape), [atom], function, 1.0)
