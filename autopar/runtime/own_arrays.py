"""Know which arrays a step may donate as they are: those that autopar made.

In: a step's arguments, and the arrays that its calls return. Out: the arguments' arrays, flattened, where every donated one
is autopar's; a mark on each array that autopar made.

A call looks at hundreds of arrays, so it must touch as few as it can. The state that a step returned comes back to it as it
is, as a rule: so the step keeps the list of its arrays and compares identities. It marks them only where that fails.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

#: What an array carries that a step, its `init` or a restored checkpoint made: later calls may take its memory over. Its
#: value is a number that no other array has.
_OWN = "_autopar_own"
_NUMBERS = itertools.count()

#: Pairs of arrays that are compared at a call; where there are more, as of many frozen weights, arrays are marked.
_MOST_PAIRS = 4096

#: What `jax.jit` takes as one array.
_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def make_own(leaves: Iterable[Any]) -> None:
    """Let later calls take the memory of arrays over."""
    arrays = (leaf for leaf in leaves if isinstance(leaf, jax.Array))
    deque(map(setattr, arrays, itertools.repeat(_OWN), _NUMBERS), maxlen=0)


def is_own(leaf: Any) -> bool:
    """Whether autopar made an array, and not the user; after `mark_returned`."""
    return hasattr(leaf, _OWN)


def mark_returned() -> None:
    """Mark the arrays that steps have returned and have not marked yet."""
    for arguments in list(_ARGUMENTS):
        arguments.mark_returned()


class OwnArguments:
    """The arguments of a step, some of which are donated.

    Args:
        in_tree: of all arguments, a tuple. structs: shape and dtype of each array.
        donated: positions of the arrays that a call donates. carried: by position of an array, that of the output that
            takes its place in the next call.
        may_take: whether arrays that the user made may be donated, because the user said so.
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
        pairs = _alike(structs, donated)
        self._alike = items(sorted({other for other, _ in pairs}))
        self._pairs = items([other for other, _ in pairs]), items([own for _, own in pairs])
        keys = [i for i in donated if jax.numpy.issubdtype(structs[i].dtype, jax.dtypes.extended)]
        self._keys = items(keys)  # which JAX 0.10 does not survive being given when they are deleted
        self._marks = _identities if may_take else _own_marks
        self._renewed = items([carried[position] for position in donated if position in carried])
        # Of the state that was returned last: its largest array, by a weak reference, and all others.
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
        """The arrays of the arguments; None unless every donated one is autopar's, there, and stands at one place.

        Of an array at two places XLA may have taken some devices' parts by the time it refuses it.
        """
        try:
            leaves = self._in_tree.flatten_up_to(tuple(args))
        except (ValueError, TypeError):  # another structure
            return None
        if not all(issubclass(kind, _ARRAYS) for kind in set(map(type, leaves))):
            return None
        if not self._are_returned(leaves):
            mark_returned()
            donated = self._donated(leaves)
            marks = set(self._marks(donated))
            if None in marks or len(marks) < len(donated) or not marks.isdisjoint(self._marks(self._alike(leaves))):
                return None
        return None if any(key.is_deleted() for key in self._keys(leaves)) else leaves

    def returned(self, results: Sequence[Any]) -> None:
        """The arrays of a call's results: what takes the place of donated arguments is autopar's.

        The largest of them is kept by a weak reference: once the user has dropped the state, no other is kept either.
        """
        if self._first is None:
            make_own(self._renewed(results))
        else:
            largest = weakref.ref(results[self._renewed_first], self._drop)
            self._returned = largest, self._renewed_rest(results)

    def mark_returned(self) -> None:
        """Mark the state that was returned last, in place of keeping it."""
        returned, self._returned = self._returned, None
        if returned is not None:
            make_own([returned[0](), *returned[1]])

    def _are_returned(self, leaves: Sequence[Any]) -> bool:
        """Whether the donated arrays are those that the last call returned, and stand nowhere else."""
        returned = self._returned
        if returned is None or self._first is None:
            return False
        same = leaves[self._first] is returned[0]() and all(map(operator.is_, self._rest(leaves), returned[1]))
        others, own = self._pairs
        return same and not any(map(operator.is_, others(leaves), own(leaves)))

    def _drop(self, largest: weakref.ref[Any]) -> None:
        returned = self._returned
        if returned is not None and returned[0] is largest:
            self.mark_returned()


#: Of arguments in use, those whose returned state may be unmarked.
_ARGUMENTS = weakref.WeakSet[OwnArguments]()


def _alike(structs: Sequence[jax.ShapeDtypeStruct], donated: Sequence[int]) -> list[tuple[int, int]]:
    """Arrays that are not donated, each with every donated one that has its shape and dtype: they may be the same array."""
    kinds = [(struct.shape, struct.dtype) for struct in structs]
    own = defaultdict[Any, list[int]](list)
    for position in donated:
        own[kinds[position]].append(position)
    others = sorted(set(range(len(structs))) - set(donated))
    return [(other, position) for other in others for position in own.get(kinds[other], ())]


def _own_marks(leaves: Iterable[Any]) -> Iterable[int | None]:
    """What tells an array that autopar made from all others; None of one that the user made."""
    return map(getattr, leaves, itertools.repeat(_OWN), itertools.repeat(None))


def _identities(leaves: Iterable[Any]) -> Iterable[int]:
    return map(id, leaves)


def items(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Of a list, what stands at these positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: tuple(values[position] for position in positions)
