"""Find which matmul of a cone is which, by what it reads and which dims it contracts.

In: a `Cone`. Out: `Roles`. In the terms of the formula: the scores are Q K^T; the output contracts the keys of P and V; the gradient
of V contracts the queries of P and dO; those of Q and K contract what depends on dP = dO V^T with K and Q.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.rules.table import traits_of
from autopar.transforms.attention.cones import Cone
from autopar.transforms.attention.named_dims import Dim, NamedDims
from autopar.transforms.attention.sections import Sections
from autopar.transforms.attention.sources import Multiple, Sources

_T = TypeVar("_T")
#: By role of a matmul that reads the cone, the role of its other operand.
OPERAND_OF = {"out": "value", "d_value": "d_out", "d_query": "key", "d_key": "query"}


class OtherFormulaError(Exception):
    """A cone computes something other than attention."""


def require(condition: bool) -> None:
    """Refuse a cone.

    Raises:
        OtherFormulaError: the condition does not hold.
    """
    if not condition:
        raise OtherFormulaError


@dataclass(frozen=True)
class Roles:
    """The roles of matmuls and of dims.

    Args:
        scores: the matmul of queries and keys.
        operands: by role (`query`, `key`, `value`, and `d_out` in a backward pass), the origin that the matmuls read.
        sources: by operand, its sources, itself first.
        outputs: by role (`out`, `d_query`, `d_key`, `d_value`), the matmuls that compute it.
        results: by matmul in `outputs`, its result and the transposes of it which alone are read.
        batch: the dims that queries and keys share, but for the features.
        rows: the other dims of queries: positions, and query heads that share a key head.
        keys, features, values: positions of keys, and the features of queries and of values.
    """

    scores: int
    operands: Mapping[str, int]
    sources: Mapping[int, Sequence[Multiple]]
    outputs: Mapping[str, tuple[int, ...]]
    results: Mapping[int, tuple[int, ...]]
    batch: tuple[Dim, ...]
    rows: tuple[Dim, ...]
    keys: Dim
    features: Dim
    values: Dim


def roles_of(sections: Sections, cone: Cone) -> tuple[NamedDims, Roles]:
    """The names of the dims of a cone, and the roles.

    Raises:
        UnnamedDimError, OtherFormulaError: it does not compute attention.
    """
    sources = Sources(sections, cone.inside)
    read = {sections.origin(value) for n in (*cone.entries, *cone.exits) for value in sections.trace.equations[n].reads}
    chains = {value: sources.of(value) for value in read}
    results = {n: sources.last_forms(n) for n in cone.exits}
    between = {n for chain in chains.values() for value, _ in chain[:-1] if (n := sections.producer(value)) is not None}
    between |= {sections.trace.producers[value] for chain in results.values() for value in chain[1:]}
    dims = NamedDims(sections, sorted({*cone.equations, *between}))
    return dims, _Finder(dims, cone, chains, results).roles()


class _Finder:
    """Finds the roles in one cone."""

    def __init__(
        self,
        dims: NamedDims,
        cone: Cone,
        sources: Mapping[int, Sequence[Multiple]],
        results: Mapping[int, tuple[int, ...]],
    ) -> None:
        self.dims, self.cone, self.sections, self.equations = dims, cone, dims.sections, dims.trace.equations
        self.sources, self.results = sources, results
        self.operands: dict[str, int] = {}

    def roles(self) -> Roles:
        """The roles."""
        scores = self._scores()
        keys = self._one(self._summed())
        query, key = self._sides(scores, keys)
        batch = tuple(name for name in self.names(query) if name in self.names(key) and name in self._made(scores))
        rows = tuple(name for name in self.names(query) if name not in self.names(key))
        features = self._one(self.gone(scores))
        require(set(self.names(key)) == {*batch, keys, features} and bool(rows))
        self.operands = {"query": query, "key": key}
        others = [n for n in self.cone.entries if n != scores]
        outputs, values = self._outputs(self._depends_on(others), keys, rows, features)
        for n in others:
            d_out, value = self._sides(n, keys)
            self._use("d_out", d_out)
            self._use("value", value)
            values |= self.gone(n)
        features_of_values = self._one(values)
        require("out" in outputs or "d_query" in outputs)
        require(set(self.names(self.operands["value"])) == {*batch, keys, features_of_values})
        if "d_out" in self.operands:
            require(set(self.names(self.operands["d_out"])) == {*batch, *rows, features_of_values})
        used = {value: self.sources[value] for value in self.operands.values()}
        by_role = {role: tuple(at) for role, at in outputs.items()}
        return Roles(
            scores, self.operands, used, by_role, self.results, batch, rows, keys, features, features_of_values
        )

    def _outputs(
        self, of_gradient: Collection[int], keys: Dim, rows: Sequence[Dim], features: Dim
    ) -> tuple[dict[str, list[int]], set[Dim]]:
        """The matmuls that read the cone, by role; and the dims of the features of values.

        Args:
            of_gradient: the values that depend on the gradient of the probabilities.
        """
        found: dict[str, list[int]] = {}
        values = set[Dim]()
        for n in self.cone.exits:
            inner, other = self.inner(n)
            contracts_keys = self.gone(n) == {keys}
            require(contracts_keys or self.gone(n) == set(rows))
            if inner in of_gradient:
                role = "d_query" if contracts_keys else "d_key"
            else:
                role = "out" if contracts_keys else "d_value"
            found.setdefault(role, []).append(n)
            self._use(OPERAND_OF[role], other)
            own = {name for name in self.names(other) if name not in self.names(inner)}
            require(len(own) == 1)
            if role in ("out", "d_value"):
                values |= own
            else:
                require(own == {features})
        return found, values

    def _scores(self) -> int:
        """The only matmul on which the exponential depends."""
        known, above, pending = {*self.cone.inside, *self.cone.entries}, set[int](), [self.cone.exponential]
        while pending:
            n = pending.pop()
            if n not in above:
                above.add(n)
                made = (self.sections.producer(value) for value in self.sections.reads(n))
                pending += [m for m in made if m is not None and m in known]
        return self._one(above & set(self.cone.entries))

    def _summed(self) -> set[Dim]:
        """The dims over which the softmax sums the exponential."""
        exponential = self.equations[self.cone.exponential].results[0]
        sums = (self.gone(n) for n in self.cone.inside if exponential in self._without_casts(n))
        return next((names for names in sums if names), set())

    def _without_casts(self, n: int) -> set[int]:
        """The values that an equation reads, and those of which they are casts or layouts."""
        found, pending = set[int](), self.sections.reads(n)
        while pending:
            value = pending.pop()
            found.add(value)
            made = self.sections.producer(value)
            if made is not None and traits_of(self.equations[made].primitive).lays_out:
                pending += self.sections.reads(made)
        return found

    def _depends_on(self, matmuls: Sequence[int]) -> set[int]:
        """The values inside the cone that depend on the results of some matmuls."""
        found = {result for n in matmuls for result in self.equations[n].results}
        for n in self.cone.inside:
            if not found.isdisjoint(self.sections.reads(n)):
                found.update(self.equations[n].results)
        return found

    def _use(self, role: str, value: int) -> None:
        """Record the operand of a role. All matmuls must read the same source."""
        known = self.operands.setdefault(role, value)
        require(self.sources[known][-1] == self.sources[value][-1])

    def names(self, value: int) -> list[Dim]:
        """The names of a value's dims, without dims of size 1."""
        return [name for name in self.dims.names(value) if name is not None]

    def _made(self, n: int) -> list[Dim]:
        return self.names(self.equations[n].results[0])

    def gone(self, n: int) -> set[Dim]:
        """The dims that an equation reduces."""
        return {name for value in self.sections.reads(n) for name in self.names(value)} - set(self._made(n))

    def _sides(self, n: int, name: Dim) -> tuple[int, int]:
        """The operands of a matmul: first the one without a dim, then the one with it."""
        require(len(self.sections.reads(n)) == 2)
        first, second = self.sections.reads(n)
        require((name in self.names(first)) != (name in self.names(second)))
        return (second, first) if name in self.names(first) else (first, second)

    def inner(self, n: int) -> tuple[int, int]:
        """The operand of a matmul that the cone computes, and the other one."""
        made = {result for m in self.cone.inside for result in self.equations[m].results}
        require(len(self.sections.reads(n)) == 2)
        first, second = self.sections.reads(n)
        require((first in made) != (second in made))
        return (first, second) if first in made else (second, first)

    @staticmethod
    def _one(found: Collection[_T]) -> _T:
        require(len(found) == 1)
        return next(iter(found))
