"""Define how an index kind searches, `Method`, and build the step that the planner plans for it.

In: a `Method` and the key of a search. Out: the function to plan and the shapes of its arguments.
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

#: Maximum queries of one program; larger batches run in chunks.
AT_ONCE = 1024


class Method(Protocol):
    """How one index kind searches.

    Args:
        kind: its name in `build`.
        metric: metric of its vectors.
        refined: candidates per neighbour that are re-ranked by the vectors; 0: scores are exact.
        usual: effort that the first layout is planned for.
        most: effort beyond which results do not change.
        details, settings: entries for `stats`, and for the index file.
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
        limit: Any = None,
    ) -> Best:
        """The program to plan.

        Args:
            arrays: arrays of this kind.
            allowed: bool `[n]`, vectors that may be returned.
            left_out: vectors that each query excludes: itself and its duplicates, if the query is a vector of the
                corpus.
            limit: int32, a smaller effort, whose results are returned; only given if `measured_with` is not None.
        """
        ...

    def efforts(self, arrays: Any, sample: NDArray[Any], truth: NDArray[Any], recall_target: float) -> Sequence[int]:
        """Increasing efforts to try for a recall target.

        Args:
            sample: queries.
            truth: positions of the true neighbours, `[num_queries, k]`.
        """
        ...

    def measured_with(self, effort: int) -> int | None:
        """The effort of a program that measures recall at this effort or a smaller one, its `limit`; None: recall is
        measured by the program of this effort."""
        ...

    def enough(self, k: int) -> int:
        """The least effort that finds k vectors with good recall."""
        ...

    def num_compared(self, effort: int) -> float:
        """Number of vectors that a query is compared with."""
        ...

    def saved(self, arrays: Any) -> dict[str, NDArray[Any]]:
        """Arrays for the index file, in addition to the vectors."""
        ...


@dataclass(frozen=True, slots=True)
class Search:
    """The key of a program: number of queries, k, effort, and whether it takes a filter, exclusions and a limit."""

    num_queries: int
    k: int
    effort: int
    is_filtered: bool = False
    leaves_out: bool = False
    is_limited: bool = False

    @property
    def measures(self) -> bool:
        """Whether it runs at build time only."""
        return self.leaves_out or self.is_limited


def step_of(method: Method, search: Search, arrays: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Step:
    """Build the step to plan, and the shapes of its arguments: queries, arrays, filter, exclusions, limit.

    Args:
        arrays: shapes of the kind's arrays.
        shape, dtype: shape `[n, d]` and dtype of the vectors.
    """

    def step(
        queries: jax.Array,
        arrays: Any,
        allowed: jax.Array | None,
        left_out: LeftOut | None,
        limit: jax.Array | None = None,
    ) -> Any:
        more = {} if limit is None else {"limit": limit}
        best = method.search(queries, arrays, allowed, left_out, k=search.k, effort=search.effort, **more)
        return distances_of(best.scores, queries, method.metric), best.positions

    step.__qualname__ = f"{method.kind}_search"
    struct = jax.ShapeDtypeStruct
    arguments = (
        struct((search.num_queries, shape[1]), dtype),
        arrays,
        struct(shape[:1], np.bool_) if search.is_filtered else None,
        LeftOut(struct(shape[:1], np.int32), struct((search.num_queries,), np.int32)) if search.leaves_out else None,
    )
    return step, (*arguments, struct((), np.int32)) if search.is_limited else arguments
