"""Turn a step's arguments into global arrays for a plan.

In: a process's host arrays, or its share of a batch.
Out: the same pytrees of global arrays with the planned shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from autopar.errors import BatchError
from autopar.frontend.pytree_paths import leaf_paths
from autopar.plans.records import Placement, TensorPlan
from autopar.runtime.distributed.exchange import among_processes
from autopar.runtime.distributed.local_batch import Gather, Place, is_global, lay_out, on_host


class OwnRows(Protocol):
    """What a process gives of each argument, where that is no equal part."""

    def problem(self, position: int, tensor: TensorPlan, array: Any) -> str | None:
        """Why an array does not fit an input of the step; None if it fits."""
        ...

    def taken(self, position: int, tensor: TensorPlan, array: Any) -> Any:
        """The argument of the step."""
        ...


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a step: its name, the range of its leaves, and its pytree structure."""

    name: str
    start: int
    stop: int
    tree: Any


@dataclass(slots=True)
class Arguments:
    """The arguments of a planned step.

    Args:
        shardings: the sharding of each array.
        gathers: a function that makes `Place.gather` from a sharding, for a pipelined step over several processes.
        own_rows: for a step whose microbatches are dealt to processes.
    """

    step: str
    plan: Placement
    shardings: Sequence[NamedSharding]
    gathers: Callable[[NamedSharding], Gather] | None = None
    own_rows: OwnRows | None = None
    _places: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def whole(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """All arguments as global arrays. Host arrays must be equal on every process.

        Raises:
            BatchError: on every process; the text names the differing arrays and processes.
        """
        leaves, tree = jax.tree.flatten(tuple(args))
        exchange = among_processes()
        if exchange is None or self.own_rows is not None or all(map(is_global, leaves)):
            return tuple(args)
        places = [place for argument in self._arguments() for place in self._places_of(argument)]
        what = f"the arguments of `{self.step}`"
        return jax.tree.unflatten(tree, lay_out(places, leaves, exchange, what, shares=False, check=True))

    def takes(self, batch: Any, name: str | None) -> list[tuple[Argument, list[Any]]]:
        """The arguments with a batch's pytree structure, except carried ones, and the batch's leaves; or the argument
        of this name."""
        carried = {position for position, _ in self.plan.carried}
        matches = []
        for argument in self._arguments():
            if argument.name != name if name is not None else carried & set(range(argument.start, argument.stop)):
                continue
            leaves = dict(zip(leaf_paths(batch, argument.name), jax.tree.leaves(batch), strict=True))
            paths = [tensor.path for tensor in self.plan.inputs[argument.start : argument.stop]]
            if set(leaves) == set(paths):
                matches.append((argument, [leaves[path] for path in paths]))
        return matches

    def fits(self, argument: Argument, leaves: Sequence[Any]) -> bool:
        """Whether leaves have the planned shapes and dtypes, as shares or as whole arrays."""
        try:
            arrays = [on_host(leaf, argument.name) for leaf in leaves]
        except BatchError:
            return False
        if self.own_rows is not None:
            return not self._problems(argument, arrays)
        pairs = zip(self._places_of(argument), arrays, strict=True)
        return all(is_global(array) or place.problem(array, shares=True) is None for place, array in pairs)

    def laid_out(self, argument: Argument, leaves: Sequence[Any]) -> Any:
        """An argument from this process's share or from the whole; its first use is compared between processes."""
        if self.own_rows is not None:
            given = [on_host(leaf, argument.name) for leaf in leaves]
            problems = self._problems(argument, given)
            if problems:
                raise BatchError(f"a `{argument.name}` of `{self.step}`: {'; '.join(problems)}")
            taken = [self.own_rows.taken(*one) for one in self._numbered(argument, given)]
            return jax.tree.unflatten(argument.tree, taken)
        exchange, places = among_processes(), self._places_of(argument)
        what = f"the first `{argument.name}` of `{self.step}`"
        first = argument.name not in self._checked
        arrays = lay_out(places, leaves, exchange, what, shares=True, check=first)
        self._checked.add(argument.name)
        return jax.tree.unflatten(argument.tree, arrays)

    def _numbered(self, argument: Argument, arrays: Sequence[Any]) -> Iterator[tuple[int, TensorPlan, Any]]:
        """Each array of an argument, with its position and its tensor."""
        positions = range(argument.start, argument.stop)
        return zip(positions, self.plan.inputs[argument.start : argument.stop], arrays, strict=True)

    def _problems(self, argument: Argument, arrays: Sequence[Any]) -> list[str]:
        assert self.own_rows is not None
        found = [self.own_rows.problem(*one) for one in self._numbered(argument, arrays)]
        return [problem for problem in found if problem is not None]

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
    """Make a batch global by the plan with its shapes.

    Args:
        planned: the plans of the step, newest first.
        name: the argument's name; None if its pytree structure identifies it.

    Raises:
        BatchError: the batch matches no argument or several, or its shapes differ from the plan's.
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
            f"`shard_batch` cannot identify the argument of `{one.step}`: {', '.join(sorted(names))} fit. Name it, as in"
            f" `shard_batch(…, argument={argument.name!r})`"
        )
    return one.laid_out(argument, leaves)
