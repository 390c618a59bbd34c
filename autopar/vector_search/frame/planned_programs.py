"""The programs of an index: each planned when first asked for, with the corpus lying as it wants.

In: how a key is made a function and the shapes of its arguments. Out: the planned program of a key, and the corpus's
arrays as that program takes them. The corpus lies as the first program's plan says; where another is faster in another
layout, it is held in that one too if the memory budget allows, and else planned for the layout there is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from jax.sharding import NamedSharding

from autopar.api.planned_function import Planned
from autopar.jax_interop.partition_spec import partition_spec
from autopar.vector_search.data.placement import Place
from autopar.vector_search.frame.device_corpus import Arrays, Held

#: A function to plan, and the shapes of its arguments.
Step = tuple[Callable[..., Any], tuple[Any, ...]]

Key = TypeVar("Key", bound=Hashable)


class Programs(Generic[Key]):
    """The programs of one corpus.

    Args:
        step: of a key, the function to plan and the shapes of its arguments: queries, the corpus, and whatever else a
            search brings along.
        home: the key whose plan says how the corpus lies.
        num_arrays: of the corpus: they come after the queries, which are one.
    """

    def __init__(self, step: Callable[[Key], Step], home: Key, num_arrays: int, place: Place) -> None:
        self._step, self._place = step, place
        self._corpus = slice(1, 1 + num_arrays)
        self._home_key, self._home = home, self._planned(home)
        self.made: dict[Key, tuple[Planned, Arrays]] = {}
        self._held: Held | None = None

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """How the corpus lies first."""
        return self._home.shardings[self._corpus]

    @property
    def held(self) -> Held:
        """The corpus on the devices."""
        assert self._held is not None, "nothing is held yet"
        return self._held

    def hold(self, corpus: Sequence[Any]) -> None:
        """Lay out the corpus's arrays, of the host or of any device."""
        self._held = Held(corpus, self.shardings, self._place.budget_bytes)

    def of(self, key: Key, *, as_it_lies: bool = False) -> tuple[Planned, Arrays]:
        """The program of a search, and the corpus as it takes it.

        Args:
            as_it_lies: plan a new one for the first layout, as for a program that is run but a few times.
        """
        if key not in self.made:
            best = None if as_it_lies else self._as_is_best(key)
            self.made[key] = best or (self._planned(key, self._pins()), self.held.layouts[0])
        return self.made[key]

    def _as_is_best(self, key: Key) -> tuple[Planned, Arrays] | None:
        """None where there is no room for one layout more."""
        program = self._home if key == self._home_key else self._planned(key)
        corpus = self.held.at(program.shardings[self._corpus], program.plan.prediction.peak_bytes)
        return None if corpus is None else (program, corpus)

    def _pins(self) -> Mapping[str, Any]:
        inputs = self._home.plan.inputs[self._corpus]
        return {"pin": {t.path: partition_spec(t.sharding) for t in inputs}, "mesh": self._home.mesh}

    def _planned(self, key: Key, more: Mapping[str, Any] = MappingProxyType({})) -> Planned:
        function, arguments = self._step(key)
        return Planned.of(function, arguments, {**self._place.options, **more})
