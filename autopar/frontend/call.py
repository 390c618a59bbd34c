"""Represent one call of a user's step as pytrees of arrays and a pure function of them.

    Step + args, kwargs -> Call: names, trees, key, function -> Results -> Call.finish

In: a step and its arguments.
Out: `Call`. Values that are not arrays are closed over in `function` and part of `key`. Objects that the step mutates
enter as values, and their new values are returned next to the step's result. `finish` turns the computed arrays into
the step's result and mutates the user's objects as the step would.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from autopar.errors import StepSignatureError
from autopar.frontend.mutable_objects import Graph, Objects
from autopar.frontend.pytree_paths import leaf_paths
from autopar.frontend.pytrees import (
    Kept,
    Static,
    at_objects,
    is_number,
    objects_in,
    put_together,
    shape_and_dtype,
    take_apart,
    values_of_objects,
)
from autopar.frontend.sharding_metadata import Annotation, annotation_of, annotations_in
from autopar.frontend.step import Step


@dataclass(frozen=True, slots=True)
class Results:
    """The static part of a step's result, known after tracing.

    Args:
        result: the static part of what it returns.
        updated: the static part of the new values of mutated objects, by argument.
        graph: the graph of the objects of the arguments and of the result; None without objects.
    """

    result: Kept
    updated: dict[str, Kept]
    graph: Graph | None

    @property
    def is_plain(self) -> bool:
        """Whether the step returns only arrays."""
        return self.graph is None and self.result.is_plain


@dataclass(eq=False)
class Call:
    """A call that is open inside `opened`.

    Args:
        names: the names of arguments that hold arrays.
        trees: the arrays of each of these arguments.
        kept: the static part of each.
        static: the other arguments, by name.
        all_names: the names of all arguments in the step's order.
        num_positional: the number of positional arguments.
        held: the values of each object in the arguments.
        results: known after `function` has been traced.
    """

    step: Step
    names: tuple[str, ...]
    trees: tuple[Any, ...]
    kept: tuple[Kept, ...]
    static: dict[str, Static]
    all_names: tuple[str, ...]
    num_positional: int
    objects: Objects
    held: list[dict[str, Any]]
    results: Results | None = field(default=None, init=False)

    @property
    def is_plain(self) -> bool:
        """Whether the trees are the arguments themselves, all positional."""
        whole = self.num_positional == len(self.all_names) and not self.static
        return whole and all(kept.is_plain for kept in self.kept)

    @functools.cached_property
    def key(self) -> Any:
        """The key of a plan: names, structures, static values, shapes and dtypes."""
        shapes = tuple(shape_and_dtype(leaf) for tree in self.trees for leaf in jax.tree.leaves(tree))
        return self.names, self.kept, tuple(self.static.items()), self.objects.graph, shapes

    def differs_in(self, key: Any) -> str | None:
        """The arguments whose static values differ from another call's key, if all else is equal; None otherwise."""
        names, kept, static, _, shapes = key
        if (names, shapes) != (self.names, self.key[-1]) or key == self.key:
            return None
        changed = [f"`{n}`" for n, one, other in zip(names, self.kept, kept, strict=True) if one != other]
        changed += [f"`{name}`" for name, value in self.static.items() if (name, value) not in static]
        return ", ".join(changed) or "an attribute of a module"

    @property
    def input_paths(self) -> tuple[str, ...]:
        """The path of each array, such as `state/params/Dense_0/kernel`."""
        return tuple(p for n, tree in zip(self.names, self.trees, strict=True) for p in leaf_paths(tree, n))

    def output_paths(self, outputs: Any) -> tuple[str, ...]:
        """The path of each array that `function` returns; values of objects keep their input paths."""
        result, updated = self._parts(outputs)
        return (
            *leaf_paths(result, "out"),
            *(path for name in sorted(updated) for path in leaf_paths(updated[name], name)),
        )

    def updated_from(self, outputs: Any) -> tuple[tuple[int, int], ...]:
        """Pairs of leaf positions of objects' values in the arguments and in the result of `function`."""
        result, updated = self._parts(outputs)
        first = len(jax.tree.leaves(result))
        after = dict(zip(self.output_paths(outputs)[first:], enumerate(jax.tree.leaves(updated), first), strict=True))
        pairs: list[tuple[int, int]] = []
        for position, (path, leaf) in enumerate(zip(self.input_paths, jax.tree.leaves(self.trees), strict=True)):
            output, new = after.get(path, (None, None))
            if output is not None and shape_and_dtype(new) == shape_and_dtype(leaf):
                pairs.append((position, output))
        return tuple(pairs)

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of arguments whose objects the step mutates."""
        return tuple(self.results.updated) if self.results is not None else ()

    @property
    def renewed(self) -> tuple[str, ...]:
        """The names of mutated arguments without other arrays: none of their arrays is needed after the call."""
        whole = {n for n, kept in zip(self.names, self.kept, strict=True) if kept.is_of_objects}
        return tuple(name for name in self.changed if name in whole)

    def result_of(self, outputs: Any) -> Any:
        """The arrays of the step's result, from the result of `function`."""
        return self._parts(outputs)[0]

    def annotations(self) -> dict[str, Annotation]:
        """The sharding annotations in the arguments' metadata, by path."""
        found: dict[str, Annotation] = {}
        numbers = iter(range(len(self.held)))
        for name, tree, kept in zip(self.names, self.trees, self.kept, strict=True):
            found |= annotations_in(tree, name)
            annotations = at_objects(kept, (self._annotations_of(next(numbers)) for _ in range(kept.num_objects)))
            found |= dict(zip(leaf_paths(annotations, name), jax.tree.leaves(annotations), strict=True))
        return found

    def function(self, *trees: Any) -> Any:
        """The step as a pure function of pytrees of arrays. Tracing it sets `results`."""
        values = self._values(trees)
        inside = self.objects.merge_inside(values)
        given = iter(inside)
        arguments = {n: put_together(k, t, given) for n, k, t in zip(self.names, self.kept, trees, strict=True)}
        arguments |= {name: static.value for name, static in self.static.items()}
        first = self.all_names[: self.num_positional]
        result = self.step.function(
            *(arguments[name] for name in first), **{n: arguments[n] for n in self.all_names[self.num_positional :]}
        )
        made = objects_in(result)
        graph, after = self.objects.split_inside([*inside, *made])
        now = iter(after)
        updated, kept_updated = self._updated(values, [next(now) for _ in inside])
        tree, kept = take_apart(result, "out", now, is_key=False)
        self.results = Results(kept, kept_updated, graph)
        return (tree, updated) if updated else tree

    def finish(self, results: Results, outputs: Any) -> Any:
        """The step's result from the arrays that `function` returned. Updates the user's objects."""
        if results.graph is None:
            return put_together(results.result, outputs)
        tree, updated = outputs if results.updated else (outputs, {})
        values: list[dict[str, Any]] = []
        own = iter(self.held)
        for name, kept in zip(self.names, self.kept, strict=True):
            before = [next(own) for _ in range(kept.num_objects)]
            if name in updated:
                parts = kept.structure.flatten_up_to(put_together(results.updated[name], updated[name]))
                values += [part for part in parts if part is not None]
            else:
                values += before
        values += values_of_objects(results.result, tree)
        objects = iter(self.objects.merge(results.graph, values)[len(self.held) :])
        return put_together(results.result, tree, objects)

    def result_without_mutation(self, results: Results, outputs: Any) -> Any:
        """The step's result without updating the user's objects, for example with shapes instead of arrays."""
        tree = outputs[0] if results.updated else outputs
        if results.graph is None:
            return put_together(results.result, tree)
        values = [*self.held, *values_of_objects(results.result, tree)]
        objects = iter(self.objects.merge_new(results.graph, values)[len(self.held) :])
        return put_together(results.result, tree, objects)

    def rebuilt_arguments(self, trees: Sequence[Any]) -> dict[str, Any]:
        """The arguments that hold arrays, by name, with other leaves, such as shapes or values read from a file.
        User objects are replaced by new ones."""
        graph = self.objects.graph
        objects = iter([] if graph is None else self.objects.merge_new(graph, self._values(trees)))
        return {n: put_together(k, t, objects) for n, k, t in zip(self.names, self.kept, trees, strict=True)}

    def hint(self) -> str:
        """A hint for the user if tracing fails because the step needs a Python number as a constant."""
        named = [
            (path, leaf)
            for name, tree in zip(self.names, self.trees, strict=True)
            for path, leaf in zip(leaf_paths(tree, name), jax.tree.leaves(tree), strict=True)
            if is_number(leaf) and isinstance(leaf, bool | int)
        ]
        named.sort(key=lambda one: not isinstance(one[1], bool))  # booleans first
        if not named:
            return ""
        path, leaf = named[0]
        kind = type(leaf).__name__
        if path in self.names:
            way = f'name it static: `static_argnames=("{path}",)`'
        else:
            way = "give it as an argument of its own and name that in `static_argnames`, or close over it"
        return f" `{path}` is a Python {kind} ({leaf}), which is traced as an array; to branch on it or use it as a shape, {way}."

    # -- helpers -----------------------------------------------------------------------------

    def _parts(self, outputs: Any) -> tuple[Any, dict[str, Any]]:
        assert self.results is not None, "it has been traced"
        return outputs if self.results.updated else (outputs, {})

    def _values(self, trees: Sequence[Any]) -> list[dict[str, Any]]:
        return [v for kept, tree in zip(self.kept, trees, strict=True) for v in values_of_objects(kept, tree)]

    def _annotations_of(self, number: int) -> dict[str, Annotation]:
        found = {path: annotation_of(self.objects.variable(number, path)) for path in self.held[number]}
        return {path: annotation for path, annotation in found.items() if annotation is not None}

    def _updated(
        self, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Kept]]:
        """The new values of all objects of those arguments that hold a mutated object. Objects that were only read
        keep their values and are not returned."""
        updated: dict[str, Any] = {}
        kept_updated: dict[str, Kept] = {}
        position = 0
        for name, kept in zip(self.names, self.kept, strict=True):
            span = slice(position, position + kept.num_objects)
            position = span.stop
            if any(not _same(old, new) for old, new in zip(before[span], after[span], strict=True)):
                tree = at_objects(kept, iter(after[span]))
                updated[name], kept_updated[name] = take_apart(tree, name, is_key=False)
        return updated, kept_updated


@contextmanager
def opened(step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Call]:
    """Open a call of a step for as long as it is traced or run.

    Raises:
        StepSignatureError: the step does not take these arguments, or one is neither traceable nor hashable.
    """
    arguments = step.bind(args, kwargs)
    traced = [(n, v) for n, v in zip(arguments.names, arguments.values, strict=True) if n not in step.static_argnames]
    static = {
        name: _static(name, value)
        for name, value in zip(arguments.names, arguments.values, strict=True)
        if name in step.static_argnames
    }
    with Objects() as objects:
        held = objects.split([one for _, value in traced for one in objects_in(value)])
        values = iter(held)
        apart = [take_apart(value, name, values) for name, value in traced]
        yield Call(
            step=step,
            names=tuple(name for name, _ in traced),
            trees=tuple(tree for tree, _ in apart),
            kept=tuple(kept for _, kept in apart),
            static=static,
            all_names=arguments.names,
            num_positional=arguments.num_positional,
            objects=objects,
            held=held,
        )


def _static(name: str, value: Any) -> Static:
    try:
        hash(value)
    except TypeError:
        kind = type(value).__name__
        raise StepSignatureError(
            f"the static argument `{name}` is a {kind}, which cannot be hashed, but its value is part of the key of a"
            " plan. Give a tuple or a frozen dataclass; or, if it holds arrays, leave it out of `static_argnames`"
        ) from None
    return Static(value)


def _same(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether an object still holds the same values, by identity."""
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    return jax.tree.structure(before) == jax.tree.structure(after) and all(map(operator.is_, old, new))
