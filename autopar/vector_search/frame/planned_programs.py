"""Plan and cache the programs of an index, with the corpus in the layout that each plan chooses.

In: a function from a key to a step and the shapes of its arguments. Out: the planned program of a key, and the corpus
in that program's layout. The plan of the default key determines the first layout. A program whose best layout differs
gets a further copy of the corpus, if the memory budget allows; otherwise it is planned for the first layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from jax.sharding import NamedSharding

from autopar.api.planned_function import Planned
from autopar.jax_interop.partition_spec import partition_spec
from autopar.vector_search.data.placement import Place
from autopar.vector_search.frame.device_corpus import Arrays, DeviceCorpus

#: A function to plan, and the shapes of its arguments.
Step = tuple[Callable[..., Any], tuple[Any, ...]]

Key = TypeVar("Key", bound=Hashable)


class Programs(Generic[Key]):
    """The programs of one corpus.

    Args:
        step: maps a key to the function to plan and the shapes of its arguments: queries, corpus, further inputs.
        default: key whose plan determines the first layout.
        num_arrays: number of the corpus's arrays; they follow the queries, a single array.
    """

    def __init__(self, step: Callable[[Key], Step], default: Key, num_arrays: int, place: Place) -> None:
        self._step, self._place = step, place
        self._arrays = slice(1, 1 + num_arrays)
        self._default_key, self._default = default, self._planned(default)
        self.planned: dict[Key, tuple[Planned, Arrays]] = {}
        self._corpus: DeviceCorpus | None = None

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """The shardings of the first layout."""
        return self._default.shardings[self._arrays]

    @property
    def corpus(self) -> DeviceCorpus:
        """The corpus on the devices."""
        assert self._corpus is not None, "the corpus is not placed yet"
        return self._corpus

    def place(self, corpus: Sequence[Any]) -> None:
        """Place the corpus's arrays, from the host or any device, in the first layout."""
        self._corpus = DeviceCorpus(corpus, self.shardings, self._place.budget_bytes)

    def get(self, key: Key, *, keep_layout: bool = False) -> tuple[Planned, Arrays]:
        """The planned program of a key, and the corpus in its layout.

        Args:
            keep_layout: plan a new program for the first layout, as for one that runs only a few times.
        """
        if key not in self.planned:
            best = None if keep_layout else self._in_best_layout(key)
            self.planned[key] = best or (self._planned(key, self._pins()), self.corpus.layouts[0])
        return self.planned[key]

    def _in_best_layout(self, key: Key) -> tuple[Planned, Arrays] | None:
        """The program in its best layout; None if the memory budget has no space for a further layout."""
        program = self._default if key == self._default_key else self._planned(key)
        corpus = self.corpus.in_layout(program.shardings[self._arrays], program.plan.prediction.peak_bytes)
        return None if corpus is None else (program, corpus)

    def _pins(self) -> Mapping[str, Any]:
        inputs = self._default.plan.inputs[self._arrays]
        return {"pin": {t.path: partition_spec(t.sharding) for t in inputs}, "mesh": self._default.mesh}

    def _planned(self, key: Key, more: Mapping[str, Any] = MappingProxyType({})) -> Planned:
        function, arguments = self._step(key)
        return Planned.of(function, arguments, {**self._place.options, **more})
