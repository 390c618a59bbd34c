"""Compute the key of a plan in the cache: digests of the program, the request and the planner.

In: a traced program, planning options. Out: `PlanKey`. The key covers everything that planning reads, including the contents of
the hardware profile, registered rules and collectives, and autopar's own code. It contains no source lines, memory addresses or
set orders, so it is the same in every process.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autopar.cost.user_collectives import registered_functions
from autopar.ir.graph import Graph
from autopar.planner.cache.function_text import function_text
from autopar.rules.user_rules import registered_texts
from autopar.system.source_paths import PACKAGE
from autopar.transforms.program import Program
from autopar.version import versions_of

#: Packages whose versions a plan depends on, in addition to autopar's own code.
_PACKAGES = ("jax", "jaxlib", "ortools", "numba", "numpy")


class UnkeyedError(Exception):
    """An option has no text that is the same in every process, such as a user's own solver."""


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Digests of the program, the request and the planner; and the package versions in the planner's digest."""

    program: str
    request: str
    planner: str
    versions: Mapping[str, str]

    @property
    def name(self) -> str:
        """The three digests as one text."""
        return f"{self.program}-{self.request}-{self.planner}"

    @property
    def prefix(self) -> str:
        """The beginning of the name, which plans of the same request by other planner versions share."""
        return f"{self.program}-{self.request}-"


def key_of(program: Program, options: Mapping[str, Any]) -> PlanKey:
    """The key of a program's plan.

    Args:
        options: all planning options with their defaults resolved: meshes, hardware profile, pins, budget, ...

    Raises:
        UnkeyedError: an option cannot be described; with its name.
    """
    traced = program.as_traced
    graphs = [_digest("\n".join(_lines(form.graph))) for form in traced.forms]
    described = (traced.signature.name, traced.carried_arguments, traced.donated, *graphs)
    planner, versions = planner_digest()
    return PlanKey(
        program=_digest(repr(described)),
        request=digest_of(options),
        planner=planner,
        versions=versions,
    )


def planner_digest(packages: Sequence[str] = ()) -> tuple[str, Mapping[str, str]]:
    """A digest of everything besides program and request that determines a plan; and the package versions in it.

    Args:
        packages: further packages whose versions are part of the digest.
    """
    versions = versions_of((*_PACKAGES, *packages))
    collectives = [(name, like, *map(function_text, given)) for name, like, *given in registered_functions()]
    parts = (sorted(versions.items()), platform.python_version(), _own_code(), registered_texts(), collectives)
    return _digest(repr(parts)), versions


def digest_of(options: Mapping[str, Any]) -> str:
    """A digest of options.

    Raises:
        UnkeyedError: an option cannot be described; with its name.
    """
    return _digest(repr(sorted((name, _described(name, value)) for name, value in options.items())))


def _lines(graph: Graph) -> Iterator[str]:
    """A graph as text, without source lines."""
    for value in graph.values:
        yield repr((value.shape, value.dtype, value.itemsize, value.repeat))
    for node in graph.nodes:
        parts = (node.primitive, node.operands, node.results, sorted(node.params.items()))
        yield repr((*parts, node.path, node.phase, node.effect, node.repeat))
    rest = (graph.inputs, graph.input_paths, graph.outputs, graph.output_paths, graph.constants, graph.carried)
    yield repr((*rest, graph.loops, graph.barriers))


def _described(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, PartitionSpec):
        return f"P{tuple(value)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_described(name, item) for item in value)})"
    if isinstance(value, Mapping):
        items = sorted((str(key), _described(name, item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if is_dataclass(value) and not isinstance(value, type):
        own = [f"{field.name}={_described(name, getattr(value, field.name))}" for field in fields(value)]
        return f"{type(value).__qualname__}({', '.join(own)})"
    raise UnkeyedError(f"`{name}` is a {type(value).__name__}")


@functools.lru_cache(maxsize=1)
def _own_code() -> str:
    """A digest of autopar's own files, so that any change of the code invalidates the cache."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(file.relative_to(PACKAGE)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]
