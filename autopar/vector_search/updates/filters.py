"""Find the slots that a user's filter allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.updates.snapshot import Snapshot

#: Which vectors may be returned: a function of their metadata, or their ids.
Filter = Callable[[NDArray[Any]], ArrayLike] | ArrayLike


def allowed_slots(snapshot: Snapshot, filter: Filter) -> NDArray[np.bool_]:
    """bool `[num_slots]`: the slots whose vectors live, and which the filter allows.

    Raises:
        SearchError: the filter, or what it returns, is of the wrong type or shape.
    """
    num = snapshot.num_slots
    is_live = snapshot.is_live(np.arange(num))
    if isinstance(filter, Callable):
        chosen = np.asarray(filter(snapshot.metadata[:num]))
        if chosen.shape != (num,) or chosen.dtype != np.bool_:
            raise SearchError(
                f"`filter` returned {chosen.dtype} of shape {chosen.shape}: return one bool for each of the {num:,} rows of"
                " metadata that it got"
            )
        return is_live & chosen
    wanted = np.asarray(filter)
    if wanted.ndim != 1 or (wanted.size and not np.issubdtype(wanted.dtype, np.integer)):
        raise SearchError(
            f"`filter` is {wanted.dtype} of shape {wanted.shape}: give the ids that may be returned, or a function of the"
            " metadata"
        )
    return is_live & np.isin(snapshot.ids[:num], wanted)
