"""Match values that the backward pass recomputes with the forward values that they equal.

In: a step's flow. Out: for each value that the backward pass computes by the same operations from the same values as in
the forward pass, that forward value: its alias. A layer that reads a value recomputed in another layer may read its
alias instead, which it received in the forward pass. So each layer recomputes only its own values, even if one
`jax.checkpoint` covers several layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from autopar.frontend.equations import Equation, Item, LiteralOperand, items_of
from autopar.pipeline.cut.flow import Flow


def aliases_of(flow: Flow) -> dict[int, int]:
    """Recomputed value of the backward pass -> its alias."""
    if not any(region.kind == "barrier" for region in flow.trace.regions):
        return {}  # nothing is recomputed
    names = _Names()
    names.read(items_of(flow.trace.equations, flow.trace.regions))
    again = {v for i in flow.backward for v in flow.units[i].results}
    first: dict[int, int] = {}
    for i in sorted(flow.inside - flow.backward):
        for value in flow.units[i].results:
            first.setdefault(names.of(value), value)
    return {v: first[names.of(v)] for v in again if names.of(v) in first}


class _Names:
    """Gives equal names to values computed by equal operations; the one mutable object of this module."""

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}
        self.names: dict[int, int] = {}

    def of(self, value: int) -> int:
        """The name of a value; a name of its own if its producer is unknown."""
        if value not in self.names:
            self.names[value] = self._name(("value", value))
        return self.names[value]

    def read(self, items: Iterable[Item]) -> None:
        """Name the results of these equations."""
        for item in items:
            if isinstance(item, Equation):
                if item.effects:
                    continue
                self._give(item.results, (item.primitive, item.params_text, self._atoms(item.operands)))
            elif item.kind == "barrier":
                for piece in item.enter:
                    self.names[piece.results[0]] = self.of(_value(piece))
            elif item.kind == "scan":
                carries: list[Hashable] = []
                for piece in item.enter:
                    about = (piece.piece, self._atoms(piece.operands))
                    if piece.piece == "enter_carry":
                        carries.append(about)
                        about = ("carry", len(carries))
                    elif piece.takes_constant:
                        about = ("const", about)
                    self._give(piece.results, about)
                self.read(item.sections[0])
                params = item.source.params
                leaves = [piece for piece in item.exit if piece.piece == "exit_carry"]
                nexts = tuple(self._atoms(piece.operands) for piece in leaves)
                loop = ("scan", params["length"], params["reverse"], tuple(carries), nexts)
                for piece in item.exit:
                    self._give(piece.results, (loop, piece.piece, self._atoms(piece.operands)))

    def _give(self, values: Sequence[int], made: Hashable) -> None:
        for i, value in enumerate(values):
            self.names[value] = self._name((made, i))

    def _atoms(self, atoms: Iterable[int | LiteralOperand]) -> tuple[Any, ...]:
        return tuple(self.of(atom) if isinstance(atom, int) else repr(atom.value) for atom in atoms)

    def _name(self, about: Hashable) -> int:
        return self.known.setdefault(about, len(self.known))


def _value(piece: Equation) -> int:
    (atom,) = piece.operands
    assert isinstance(atom, int)
    return atom
