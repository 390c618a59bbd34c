"""Convert objects that a step mutates (Flax NNX modules, optimizers, metrics) to arrays and back.

Flax's split and merge preserve the identity of shared objects across arguments: split outside, merge inside the traced
function, split inside, merge outside. The last merge updates the user's own objects.

In: objects.
Out: for each object, a mapping from the paths of its variables to their values. A variable that several objects share
is in the first one's mapping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from autopar.errors import StepSignatureError
from autopar.frontend.libraries import nnx

_TAG = "autopar"


@dataclass(frozen=True, slots=True)
class Graph:
    """The static part of objects, hashable.

    Args:
        definition: Flax's definition: references, static attributes, and metadata.
        order: the object's number and the path of each value.
    """

    definition: Any
    order: tuple[tuple[int, str], ...]


class Objects:
    """The objects of one call. While it is open, it remembers their identities."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._tag: str | None = None
        self._variables: dict[tuple[int, str], Any] = {}
        self.graph: Graph | None = None

    def __enter__(self) -> Objects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def split(self, objects: Sequence[Any]) -> list[dict[str, Any]]:
        """The values of each of the user's objects.

        Raises:
            StepSignatureError: an attribute that is not an array is not hashable.
        """
        if not objects:
            return []
        self._tag = _TAG
        self._open.enter_context(_library().update_context(_TAG))
        self.graph, values = self._split(objects)
        try:
            hash(self.graph)
        except TypeError as error:
            kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in objects))
            raise StepSignatureError(
                f"an attribute of the modules given ({kinds}) is not an array and cannot be hashed ({error}), but is part of"
                " the key of a plan. Make it a tuple or a frozen dataclass, or wrap arrays in `nnx.data`"
            ) from None
        return values

    def variable(self, number: int, path: str) -> Any:
        """The user's variable at a path of an object."""
        return self._variables[number, path]

    def merge_inside(self, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Objects inside the traced function, with these values."""
        return [] if self.graph is None else self._merge(self.graph, values, True, self._tag)

    def split_inside(self, objects: Sequence[Any]) -> tuple[Graph | None, list[dict[str, Any]]]:
        """The values of the objects inside the traced function, including new ones in its result."""
        return self._split(objects) if objects else (None, [])

    def merge(self, graph: Graph, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The user's own objects with new values, and new objects that the step made."""
        return self._merge(graph, values, False, self._tag)

    def merge_new(self, graph: Graph, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Build new objects with these values. The user's objects stay as they are."""
        return self._merge(graph, values, None, None)

    def _split(self, objects: Sequence[Any]) -> tuple[Graph, list[dict[str, Any]]]:
        library = _library()
        values: list[dict[str, Any]] = [{} for _ in objects]
        order: list[tuple[int, str]] = []
        with library.split_context(self._tag) as context:
            definition, flat = context.flatten(list(objects))
        for (number, *keys), held in zip(flat.paths, flat.leaves, strict=True):
            path = "/".join(str(key).replace("/", "\\/") for key in keys)
            values[number][path] = held.get_raw_value() if isinstance(held, library.Variable) else held
            order.append((number, path))
            if self.graph is None:  # the user's objects
                self._variables[number, path] = held
        return Graph(definition, tuple(order)), values

    @staticmethod
    def _merge(graph: Graph, values: Sequence[Mapping[str, Any]], inside: bool | None, tag: str | None) -> list[Any]:
        with _library().merge_context(tag, inside if tag else None) as context:
            return context.unflatten(graph.definition, [values[number][path] for number, path in graph.order])


def _library() -> Any:
    library = nnx()
    assert library is not None, "an object of flax.nnx was given"
    return library
