"""Divide a trace into straight-line sections, and follow values from a forward loop to its backward loop.

In: a `Trace`. Out: `Sections`: the section of each equation, and for each value its origin. A residual that one loop stacks and
another loop with as many iterations reads again is, in each iteration, one value; a constant of a loop is the value outside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.frontend.equations import Region
from autopar.frontend.trace import Trace


@dataclass(frozen=True)
class Sections:
    """The sections of a trace."""

    trace: Trace

    @cached_property
    def _found(self) -> tuple[Sequence[int], Mapping[int, Region]]:
        section_of, loops, count = [0] * len(self.trace.equations), dict[int, Region](), 0
        for region in sorted(self.trace.regions, key=lambda one: one.enter):  # outer regions come first
            for start, stop in region.sections:
                count += 1
                section_of[start:stop] = [count] * (stop - start)
                if region.kind == "scan":
                    loops[count] = region
        return section_of, loops

    def section_of(self, n: int) -> int:
        """The section of an equation: 0 outside all regions. The pieces of a region belong to the section around it."""
        return self._found[0][n]

    def loop(self, section: int) -> Region | None:
        """The loop whose body a section is; None if it is not the body of a `scan`."""
        return self._found[1].get(section)

    @cached_property
    def _origins(self) -> Mapping[int, int]:
        """The origin of each value that enters a loop, one step back."""
        found: dict[int, int] = {}
        for region in self.trace.regions:
            for n in range(*region.enter) if region.kind == "scan" else ():
                equation = self.trace.equations[n]
                (operand,), (inside,) = equation.operands, equation.results
                if not isinstance(operand, int):
                    continue
                if equation.takes_constant:
                    found[inside] = operand
                elif equation.takes_slice and (stacked := self._stacked_as(operand, n)) is not None:
                    found[inside] = stacked
        return found

    def _stacked_as(self, stack: int, entering: int) -> int | None:
        """The value that a loop next to this one stacks, with as many iterations."""
        made = self.trace.producers.get(stack)
        if made is None or not self.trace.equations[made].stacks:
            return None
        (value,) = self.trace.equations[made].operands
        lengths = [self.trace.equations[n].source.params["length"] for n in (made, entering)]
        same = lengths[0] == lengths[1] and self.section_of(made) == self.section_of(entering)
        return value if same and isinstance(value, int) else None

    def origin(self, value: int) -> int:
        """The value in the section that makes it."""
        while value in self._origins:
            value = self._origins[value]
        return value

    def producer(self, value: int) -> int | None:
        """The equation that makes a value's origin; None for an input or a constant."""
        return self.trace.producers.get(self.origin(value))

    def reads(self, n: int) -> list[int]:
        """The origins of the values that an equation reads."""
        return [self.origin(value) for value in self.trace.equations[n].reads]

    @cached_property
    def _names(self) -> Mapping[int, Sequence[int]]:
        """The values in other sections that have an origin."""
        names: dict[int, list[int]] = defaultdict(list)
        for value in self._origins:
            names[self.origin(value)].append(value)
        return names

    def users(self, origin: int) -> Iterator[int]:
        """The equations that read an origin, in any section, except pieces that only pass it on. An output counts as a piece."""
        for value in (origin, *self._names.get(origin, ())):
            for n in self.trace.users.get(value, ()):
                if not self._passes_on(n):
                    yield n

    def _passes_on(self, n: int) -> bool:
        """Whether a piece passes a value to loops in which it has the same origin, and to nothing else."""
        equation = self.trace.equations[n]
        if equation.takes_constant:
            return equation.results[0] in self._origins
        if not equation.stacks or equation.results[0] in self._outputs:
            return False
        readers = [self.trace.equations[one] for one in self.trace.users.get(equation.results[0], ())]
        return all(one.takes_slice and one.results[0] in self._origins for one in readers)

    @cached_property
    def _outputs(self) -> frozenset[int]:
        return frozenset(atom for atom in self.trace.outputs if isinstance(atom, int))

    def is_output(self, origin: int) -> bool:
        """Whether a value is an output of the step."""
        return origin in self._outputs

    def here(self, origin: int, section: int) -> int | None:
        """The value with this origin that can be read in a section; None if there is none."""
        made = self.trace.producers.get(origin)
        is_made_here = made is not None and self.section_of(made) == section
        return origin if is_made_here else self._entered(origin, section)

    def _entered(self, origin: int, section: int) -> int | None:
        region = self.loop(section)
        if region is None:
            return origin if section == 0 else None
        entered = [self.trace.equations[n].results[0] for n in range(*region.enter)]
        return next((value for value in entered if self.origin(value) == origin), None)
