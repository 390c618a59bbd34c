"""Track which arrays autopar made, so that a step donates only those.

In: a step's arguments, and the arrays that its calls return.
Out: the flattened arguments if autopar made every donated one; a mark on each array that autopar made.

A call has hundreds of arrays and must touch as few as possible. Usually the state that a step returned comes back to it
unchanged. So the step keeps the list of returned arrays and compares identities; it marks arrays only if that fails.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

#: The attribute of arrays made by a step, its `init` or a restored checkpoint: later calls may reuse their memory. Its
#: value is a number that no other array has.
_OWN = "_autopar_own"
_NUMBERS = itertools.count()

#: The most pairs of arrays to compare per call; with more, as for many frozen weights, arrays are marked instead.
_MOST_PAIRS = 4096

#: The types that `jax.jit` takes as one array.
_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def make_own(leaves: Iterable[Any]) -> None:
    """Allow later calls to reuse the memory of arrays."""
    arrays = (leaf for leaf in leaves if isinstance(leaf, jax.Array))
    deque(map(setattr, arrays, itertools.repeat(_OWN), _NUMBERS), maxlen=0)


def is_own(leaf: Any) -> bool:
    """Whether autopar made an array rather than the user. Call `mark_returned` before."""
    return hasattr(leaf, _OWN)


def mark_returned() -> None:
    """Mark the returned arrays of all steps that are not marked yet."""
    for arguments in list(_ARGUMENTS):
        arguments.mark_returned()


class OwnArguments:
    """The arguments of a step, some of them donated.

    Args:
        in_tree: the pytree structure of all arguments, a tuple.
        structs: the shape and dtype of each array.
        donated: the positions of donated arrays.
        carried: the position of the output that replaces an array in the next call, by the array's position.
        may_take: whether donated arrays that the user made may be overwritten, by the user's option.
    """

    def __init__(
        self,
        in_tree: Any,
        structs: Sequence[jax.ShapeDtypeStruct],
        donated: Sequence[int],
        carried: dict[int, int],
        *,
        may_take: bool,
    ) -> None:
        self._in_tree = in_tree
        self._donated = items(donated)
        pairs = _possible_aliases(structs, donated)
        self._possible_aliases = items(sorted({other for other, _ in pairs}))
        self._pairs = items([other for other, _ in pairs]), items([own for _, own in pairs])
        keys = [i for i in donated if jax.numpy.issubdtype(structs[i].dtype, jax.dtypes.extended)]
        self._keys = items(keys)  # JAX 0.10 crashes if it gets deleted key arrays
        self._marks = _identities if may_take else _own_marks
        self._renewed = items([carried[position] for position in donated if position in carried])
        # The state that the last call returned: a weak reference to its largest array, and the other arrays.
        self._returned: tuple[weakref.ref[Any], tuple[Any, ...]] | None = None
        self._first: int | None = None
        if donated and set(donated) <= carried.keys() and len(pairs) <= _MOST_PAIRS:
            sizes = [(structs[position].size, position) for position in donated]
            first = max(sizes)[1]
            rest = [position for position in donated if position != first]
            self._first, self._rest = first, items(rest)
            self._renewed_first, self._renewed_rest = carried[first], items([carried[position] for position in rest])
            _ARGUMENTS.add(self)

    def flattened(self, args: Sequence[Any]) -> list[Any] | None:
        """The leaves of the arguments. None unless autopar made every donated array, and each is alive and passed once.

        XLA rejects an array that is passed twice only after some devices may have reused its shards.
        """
        try:
            leaves = self._in_tree.flatten_up_to(tuple(args))
        except (ValueError, TypeError):  # another pytree structure
            return None
        if not all(issubclass(kind, _ARRAYS) for kind in set(map(type, leaves))):
            return None
        if not self._are_returned(leaves):
            mark_returned()
            donated = self._donated(leaves)
            marks = set(self._marks(donated))
            if (
                None in marks
                or len(marks) < len(donated)
                or not marks.isdisjoint(self._marks(self._possible_aliases(leaves)))
            ):
                return None
        return None if any(key.is_deleted() for key in self._keys(leaves)) else leaves

    def returned(self, results: Sequence[Any]) -> None:
        """Record the arrays of a call's results that replace donated arguments.

        The largest is kept by a weak reference: once the user drops the state, the other arrays are released too.
        """
        if self._first is None:
            make_own(self._renewed(results))
        else:
            largest = weakref.ref(results[self._renewed_first], self._drop)
            self._returned = largest, self._renewed_rest(results)

    def mark_returned(self) -> None:
        """Mark the state that was returned last and release it."""
        returned, self._returned = self._returned, None
        if returned is not None:
            make_own([returned[0](), *returned[1]])

    def _are_returned(self, leaves: Sequence[Any]) -> bool:
        """Whether the donated arrays are those that the last call returned, each passed once."""
        returned = self._returned
        if returned is None or self._first is None:
            return False
        same = leaves[self._first] is returned[0]() and all(map(operator.is_, self._rest(leaves), returned[1]))
        others, own = self._pairs
        return same and not any(map(operator.is_, others(leaves), own(leaves)))

    def _drop(self, largest: weakref.ref[Any], is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        returned = self._returned
        if returned is not None and returned[0] is largest and not is_finalizing():  # modules are gone at exit
            self.mark_returned()


#: The arguments in use, whose returned state may be unmarked.
_ARGUMENTS = weakref.WeakSet[OwnArguments]()


def _possible_aliases(structs: Sequence[jax.ShapeDtypeStruct], donated: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of an array that is not donated and a donated one of equal shape and dtype: they may be the same array."""
    kinds = [(struct.shape, struct.dtype) for struct in structs]
    own = defaultdict[Any, list[int]](list)
    for position in donated:
        own[kinds[position]].append(position)
    others = sorted(set(range(len(structs))) - set(donated))
    return [(other, position) for other in others for position in own.get(kinds[other], ())]


def _own_marks(leaves: Iterable[Any]) -> Iterable[int | None]:
    """The mark of each array that autopar made; None for the user's arrays."""
    return map(getattr, leaves, itertools.repeat(_OWN), itertools.repeat(None))


def _identities(leaves: Iterable[Any]) -> Iterable[int]:
    return map(id, leaves)


def items(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks the items at these positions of a list."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: tuple(values[position] for position in positions)
