"""Represent a traced step as equations over numbered values.

In: equations and regions from `trace_builder`.
Out: `Trace`. Loops and branches are flattened, and arguments and results have pytree paths. The graph is made from a
trace, and a plan runs by replaying it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from autopar.frontend.equations import Atom, Equation, Region
from autopar.jax_interop import compat as jax_compat


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Equations that treat one dim as two, and the equation that they replace (`factoring.rewrite`).

    Args:
        start, stop: the range of the equations; the results are those of the last one.
        source: JAX's original equation; None for a reshape that converts between the two forms.
        operand_shapes: the shapes of its operands; None for a literal.
        pairs: value and first dim of each pair of dims in the trace.
    """

    start: int
    stop: int
    source: Any
    operand_shapes: tuple[tuple[int, ...] | None, ...]
    pairs: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Trace:
    """A step as equations over numbered values.

    Args:
        regions: the loops and branches among the equations.
        repeats: how often a step produces each value.
        microbatches: with gradient accumulation, the source of the region that is the loop over microbatches.
    """

    name: str
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    in_tree: Any  # the structure of the positional arguments, a tuple
    out_tree: Any
    equations: tuple[Equation, ...] = ()
    regions: tuple[Region, ...] = ()
    avals: tuple[Any, ...] = ()
    repeats: tuple[float, ...] = ()
    inputs: tuple[int, ...] = ()
    outputs: tuple[Atom, ...] = ()
    constants: tuple[tuple[int, Any], ...] = ()
    rewritten: tuple[Rewritten, ...] = ()
    microbatches: Any = None

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """The equation that produces each value."""
        return {value: n for n, equation in enumerate(self.equations) for value in equation.results}

    @cached_property
    def users(self) -> Mapping[int, list[int]]:
        """The equations that read each value, in order; an equation with the value as two operands is listed twice."""
        found: dict[int, list[int]] = defaultdict(list)
        for n, equation in enumerate(self.equations):
            for value in equation.reads:
                found[value].append(n)
        return dict(found)

    @cached_property
    def region_at(self) -> Mapping[int, Region]:
        """The regions, by their first equations."""
        return {region.enter[0]: region for region in self.regions}

    def walk(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, Region | None]]:
        """The equations and whole regions of a span, in order: [start, stop), and the region or None."""
        end = len(self.equations) if stop is None else stop
        while start < end:
            region = self.region_at.get(start)
            after = start + 1 if region is None else region.exit[1]
            yield start, after, region
            start = after

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The shapes and dtypes of the positional arguments."""
        return jax.tree.unflatten(self.in_tree, [jax_compat.shape_struct(self.avals[value]) for value in self.inputs])
