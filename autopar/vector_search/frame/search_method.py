"""How one kind of index searches a part of its vectors, and the program that the planner gets of it.

In: what a kind says of itself, `Method`, and which search is asked for. Out: the function to plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric, distances_of
from autopar.vector_search.frame.planned_programs import Step
from autopar.vector_search.kernels.top_k_merge import Best, LeftOut

#: Queries of one program: more are searched one after the other.
AT_ONCE = 1024


class Method(Protocol):
    """How one kind of index searches.

    Args:
        kind: its name in `build`. metric: of its vectors.
        refined: candidates for each neighbour, which are scored again by the vectors themselves; 0: scores are exact.
        usual: an effort to plan the layout for. most: more makes no difference.
        details, settings: what `stats` tells of it, and what a file keeps.
    """

    @property
    def kind(self) -> str: ...

    @property
    def metric(self) -> Metric: ...

    @property
    def refined(self) -> int: ...

    @property
    def usual(self) -> int: ...

    @property
    def most(self) -> int: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def details(self) -> dict[str, Any]: ...

    def search(
        self,
        queries: jax.Array,
        arrays: Any,
        allowed: jax.Array | None,
        left_out: LeftOut | None,
        *,
        k: int,
        effort: int,
    ) -> Best:
        """The program to plan.

        Args:
            arrays: of this kind. allowed: bool `[n]`: which vectors may be found.
            left_out: what each query is not to find: itself and its equals, where it is one of the vectors.
        """
        ...

    def efforts(self, arrays: Any, sample: NDArray[Any], truth: NDArray[Any], recall_target: float) -> Sequence[int]:
        """Rising efforts, among which the one to reach a recall is looked for.

        Args:
            sample: queries. truth: the neighbours of each, by position, `[num_queries, k]`.
        """
        ...

    def enough(self, k: int) -> int:
        """The least effort with which k vectors can be expected, and found well."""
        ...

    def num_compared(self, effort: int) -> float:
        """How many vectors a query is compared with."""
        ...

    def saved(self, arrays: Any) -> dict[str, NDArray[Any]]:
        """What a file keeps of its arrays, beside the vectors."""
        ...


@dataclass(frozen=True, slots=True)
class Search:
    """A program: for so many queries, with this effort, with or without what a filter and a sample bring."""

    num_queries: int
    k: int
    effort: int
    is_filtered: bool = False
    leaves_out: bool = False


def step_of(method: Method, search: Search, arrays: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Step:
    """The function to plan, and the shapes of its arguments: queries, arrays, what is allowed and what is left out.

    Args:
        arrays: shapes of a kind's. shape, dtype: of the vectors, `[n, d]`.
    """

    def step(queries: jax.Array, arrays: Any, allowed: jax.Array | None, left_out: LeftOut | None) -> Any:
        best = method.search(queries, arrays, allowed, left_out, k=search.k, effort=search.effort)
        return distances_of(best.scores, queries, method.metric), best.positions

    step.__qualname__ = f"{method.kind}_search"
    struct = jax.ShapeDtypeStruct
    return step, (
        struct((search.num_queries, shape[1]), dtype),
        arrays,
        struct(shape[:1], np.bool_) if search.is_filtered else None,
        LeftOut(struct(shape[:1], np.int32), struct((search.num_queries,), np.int32)) if search.leaves_out else None,
    )
