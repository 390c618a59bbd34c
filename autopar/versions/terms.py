"""Let workers push what is no update of an array: terms from which the server makes the next version of all arrays of a shard.

In: the kinds of the terms, and a function from arrays and terms to arrays. Out: `TermsUpdate`, a server's update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.errors import StoreError
from autopar.versions.server_update import Pushed, Weights


@dataclass(frozen=True, slots=True)
class Taken:
    """What a push may have for one key.

    Args:
        place: the device or sharding to which it is moved.
        may_wait: whether a policy may hold it back (`largest`); then it counts as zero.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    place: Any
    may_wait: bool = True


@dataclass(frozen=True, slots=True)
class TermsUpdate:
    """An update from terms.

    Args:
        takes: by key of a term; no key of the weights.
        function: from the weights, the state, and each worker's terms, in the order of the workers, to the new weights and state.
        first_state: from the weights, the state before the first update.
    """

    takes: Mapping[str, Taken]
    function: Callable[[Weights, Any, Sequence[Mapping[str, jax.Array]]], tuple[Weights, Any]]
    first_state: Callable[[Weights], Any] = lambda weights: None

    def init(self, weights: Weights) -> Any:
        twice = sorted(weights.keys() & self.takes.keys())
        if twice:
            raise StoreError(f"{twice[0]!r} is the key of an array and of a term: give terms other keys")
        return self.first_state(weights)

    def apply(self, weights: Weights, state: Any, updates: Sequence[Mapping[str, Pushed]]) -> tuple[Weights, Any]:
        terms = [
            {key: one.whole for key, one in update.items() if one.whole is not None} for update in updates if update
        ]
        return self.function(weights, state, terms)
