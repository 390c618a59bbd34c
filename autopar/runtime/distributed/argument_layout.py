"""A step's arguments, laid out for one plan.

In: what a user has on this process: host arrays, a share of a batch. Out: the same pytrees of global arrays, as the
planned step takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.errors import BatchError
from autopar.frontend.pytree_paths import leaf_paths
from autopar.plans.records import Placement
from autopar.runtime.distributed.exchange import among_processes
from autopar.runtime.distributed.local_batch import Gather, Place, is_global, lay_out, on_host


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a step: its name, its leaves among all, its pytree."""

    name: str
    start: int
    stop: int
    tree: Any


@dataclass(slots=True)
class Arguments:
    """Of a planned step.

    Args:
        shardings: of each array.
        gathers: what brings shares of an array to where it lies, of a step in stages over several processes.
    """

    step: str
    plan: Placement
    shardings: Sequence[NamedSharding]
    gathers: Callable[[NamedSharding], Gather] | None = None
    _places: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def whole(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """All arguments, those on the host spread over the mesh; they must be equal on every process.

        Raises:
            BatchError: on every process, naming what is not, and where.
        """
        leaves, tree = jax.tree.flatten(tuple(args))
        exchange = among_processes()
        if exchange is None or all(map(is_global, leaves)):
            return tuple(args)
        places = [place for argument in self._arguments() for place in self._places_of(argument)]
        what = f"the arguments of `{self.step}`"
        return jax.tree.unflatten(tree, lay_out(places, leaves, exchange, what, shares=False, check=True))

    def takes(self, batch: Any, name: str | None) -> list[tuple[Argument, list[Any]]]:
        """The arguments that have a batch's pytree, and its leaves in their order; all but the carried, or the one of
        this name."""
        carried = {position for position, _ in self.plan.carried}
        found = []
        for argument in self._arguments():
            if argument.name != name if name is not None else carried & set(range(argument.start, argument.stop)):
                continue
            leaves = dict(zip(leaf_paths(batch, argument.name), jax.tree.leaves(batch), strict=True))
            paths = [tensor.path for tensor in self.plan.inputs[argument.start : argument.stop]]
            if set(leaves) == set(paths):
                found.append((argument, [leaves[path] for path in paths]))
        return found

    def fits(self, argument: Argument, leaves: Sequence[Any]) -> bool:
        """Whether these have the shapes and dtypes of the plan, as shares or whole."""
        try:
            arrays = [on_host(leaf, argument.name) for leaf in leaves]
        except BatchError:
            return False
        pairs = zip(self._places_of(argument), arrays, strict=True)
        return all(is_global(array) or place.problem(array, shares=True) is None for place, array in pairs)

    def laid_out(self, argument: Argument, leaves: Sequence[Any]) -> Any:
        """An argument of this process's share or the whole; the first is held against the other processes'."""
        exchange, places = among_processes(), self._places_of(argument)
        what = f"the first `{argument.name}` of `{self.step}`"
        first = argument.name not in self._checked
        arrays = lay_out(places, leaves, exchange, what, shares=True, check=first)
        self._checked.add(argument.name)
        return jax.tree.unflatten(argument.tree, arrays)

    def names(self) -> list[str]:
        return [argument.name for argument in self._arguments()]

    def _arguments(self) -> Iterator[Argument]:
        start = 0
        for tree in self.plan.in_tree.children():
            stop = start + tree.num_leaves
            if stop > start:
                yield Argument(self.plan.inputs[start].path.split("/", 1)[0], start, stop, tree)
            start = stop

    def _places_of(self, argument: Argument) -> tuple[Place, ...]:
        if argument.name not in self._places:
            own = slice(argument.start, argument.stop)
            pairs = zip(self.plan.inputs[own], self.shardings[own], strict=True)
            gathers = self.gathers or (lambda sharding: None)
            self._places[argument.name] = tuple(
                Place.of(tensor, sharding, gathers(sharding)) for tensor, sharding in pairs
            )
        return self._places[argument.name]


def shard_batch(planned: Sequence[Arguments], batch: Any, name: str | None) -> Any:
    """A batch laid out by the plan whose shapes it has.

    Args:
        planned: the step's, newest first.
        name: of the argument that it is; None where its pytree tells.

    Raises:
        BatchError: where it is no argument's, or several arguments', or has other shapes than the plan.
    """
    candidates = [(one, *taken) for one in planned for taken in one.takes(batch, name)]
    fitting = [(one, argument, leaves) for one, argument, leaves in candidates if one.fits(argument, leaves)]
    best = fitting or candidates
    newest = planned[0]
    if not best:
        given = ", ".join(f"`{path}`" for path in leaf_paths(batch, name or "batch")[:6]) or "nothing"
        what = f"the argument `{name}`" if name is not None else "any argument but the carried state"
        raise BatchError(
            f"`shard_batch` got {given}, which are not the paths of {what} of `{newest.step}`. It takes"
            f" {', '.join(newest.names())}: give one whole argument at a time, and its name as `argument=` where it is"
            " not the only one"
        )
    one, argument, leaves = best[0]
    names = {other.name for of, other, _ in best if of is one}
    if len(names) > 1:
        raise BatchError(
            f"`shard_batch` cannot tell which argument of `{one.step}` this is: {', '.join(sorted(names))}. Say it, as in"
            f" `shard_batch(…, argument={argument.name!r})`"
        )
    return one.laid_out(argument, leaves)
