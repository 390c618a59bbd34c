"""Chain the jitted programs that a piece runs.

In: a list of arrays. Out: `Link`s, each of which replaces the list or some of its arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding


@dataclass(frozen=True, slots=True)
class Link:
    """One of the jitted programs that a piece runs, one after another, over a list of arrays.

    Args:
        jitted: a function of arrays.
        out_shardings: the shardings of its results; None where XLA chooses.
        places: the positions in the list that it reads and replaces; None where it makes a new list of the whole one.
    """

    jitted: Any
    out_shardings: tuple[NamedSharding | None, ...]
    places: tuple[int, ...] | None = None

    def taken(self, flat: Sequence[Any]) -> list[Any]:
        """Its arguments."""
        return list(flat) if self.places is None else [flat[i] for i in self.places]

    def after(self, flat: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The list after it, given its results."""
        if self.places is None:
            return list(results)
        replaced = dict(zip(self.places, results, strict=True))
        return [replaced.get(i, value) for i, value in enumerate(flat)]


def resharding(shardings: Mapping[int, NamedSharding]) -> tuple[Link, ...]:
    """The program that gives some arrays of a list other shardings, by their positions; none if there are none."""
    out = tuple(shardings.values())
    return (Link(jax.jit(lambda *flat: flat, out_shardings=out), out, tuple(shardings)),) if out else ()


def run_links(links: Sequence[Link], *flat: Any) -> list[Any]:
    """The list after all programs."""
    values = list(flat)
    for one in links:
        values = one.after(values, one.jitted(*one.taken(values)))
    return values
