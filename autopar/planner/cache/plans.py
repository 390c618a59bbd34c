"""Cache plans on disk, so that the second start of a program needs no planning.

In: a program, planning options. Out: `PlanEntry`, which reads and writes the plan of the same program, options and planner. An
entry is written atomically, so several processes may write it. Damaged and outdated entries are logged and planned again. If the
cache cannot be read or written, a warning is logged and planning goes on without it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from autopar.errors import PlanFileError
from autopar.planner.cache.key import PlanKey, UnkeyedError, key_of
from autopar.plans.json_codec import decoder, encode
from autopar.plans.records import Placement
from autopar.solve.problem import Status
from autopar.system.checksummed_file import last_used, read_kept, write_kept
from autopar.transforms.program import Program

#: Maximum number of plans in a folder; the least recently used ones are deleted.
MOST_PLANS = 200
#: The format in an entry's header; an entry with another header counts as damaged.
_FORMAT = "autopar-kept-plan 1"

_log = logging.getLogger(__name__)

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Log cache hits and misses at debug level only, for programs that the user did not write, such as initialization."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def _log_at(level: int, text: str, *args: Any) -> None:
    _log.log(logging.DEBUG if _is_quiet.get() else level, text, *args)


class KeptPlan(Placement, Protocol):
    """A plan that can be cached: a dataclass, for one program or for pipeline stages."""

    @property
    def outcome(self) -> Any: ...


P = TypeVar("P", bound=KeptPlan)


def default_folder() -> Path:
    """The default cache folder of this platform: `$XDG_CACHE_HOME/autopar`, by default `~/.cache/autopar`.

    Raises:
        RuntimeError: the user has no home folder.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "autopar"
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "autopar"


def folder_of(cache: bool | str | os.PathLike[str] | None) -> Path | None:
    """The folder of a `cache=` option: True is the default folder; for False and None there is no cache."""
    if cache is None or cache is False:
        return None
    if cache is not True:
        return Path(cache).expanduser().absolute()
    try:
        return default_folder()
    except RuntimeError:  # a user without a home
        return None


@dataclass(frozen=True, slots=True)
class PlanEntry(Generic[P]):
    """The entry of a program in the plan cache.

    Args:
        path: the file of the entry; None where the plan is not cached.
        load: decodes a plan from JSON types.
    """

    program: Program
    path: Path | None
    key: PlanKey | None
    load: Callable[[Any], P]

    def read(self) -> P | None:
        """The cached plan; None where there is none."""
        if self.path is None or self.key is None:
            return None
        found = _read(self.path, self.program, self.load)
        if found is None:
            _warn_if_stale(self.path, self.key, self.program.signature.name)
        else:
            name = self.program.signature.name
            _log_at(logging.INFO, "loaded the plan of `%s` from the cache (%s)", name, self.path)
        return found

    def keep(self, plan: P) -> None:
        """Write a plan to the cache, unless the user interrupted the solver."""
        if self.path is not None and self.key is not None and plan.outcome.status != Status.INTERRUPTED.value:
            _write(self.path, plan, self.program, self.key)


def entry_of(
    program: Program, request: Mapping[str, Any], folder: Path | None, load: Callable[[Any], P]
) -> PlanEntry[P]:
    """The cache entry of a program's plan.

    Args:
        request: all planning options, with their defaults resolved.
        folder: the folder of the cache, which is created if needed; None for no cache.
        load: decodes a plan from JSON types.
    """
    if folder is None:
        return PlanEntry(program, None, None, load)
    try:
        key = key_of(program, request)
    except UnkeyedError as error:
        _log_at(
            logging.INFO,
            "the plan of `%s` is not cached: %s, which the cache cannot identify in another process",
            program.signature.name,
            error,
        )
        return PlanEntry(program, None, None, load)
    return PlanEntry(program, folder / "plans" / f"{key.name}.plan", key, load)


def _read(path: Path, program: Program, read: Callable[[Any], P]) -> P | None:
    """The plan of an entry; None where there is no entry, or it is damaged."""
    try:
        found = read_kept(path, _FORMAT)
        if found is None:
            return None
        about, body = found
        lines = {old: program.as_traced.forms[-1].graph.nodes[node].source for old, node in about["sources"]}
        plan = _with_lines(read(json.loads(body)), lines)
        if plan.program.name != program.signature.name or len(plan.inputs) != len(program.graph.inputs):
            raise ValueError("it is the plan of another program")
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError, PlanFileError) as error:
        _warn_damaged(path, program, error)
        return None
    return replace(plan, in_tree=program.trace.in_tree, out_tree=program.trace.out_tree)  # type: ignore[type-var]


def _warn_damaged(path: Path, program: Program, error: Exception) -> None:
    _log.warning("the cached plan of `%s` is damaged (%s: %s): planning again", program.signature.name, path, error)


def _warn_if_stale(path: Path, key: PlanKey, name: str) -> None:
    """If other planner versions have cached plans of the same request, log which versions have changed."""
    others = sorted({*path.parent.glob(f"{key.prefix}*.plan")} - {path}, key=last_used)
    if not others:
        return
    try:
        with others[-1].open(encoding="utf-8") as file:
            before = json.loads(file.readline())["versions"]
        changed = [f"{one} {before[one]} -> {now}" for one, now in key.versions.items() if before.get(one, now) != now]
    except (OSError, ValueError, KeyError, TypeError):
        return
    reason = ", ".join(changed) or "autopar's code, Python or a registered rule has changed"
    _log_at(logging.WARNING, "the cached plan of `%s` is stale (%s): planning again", name, reason)


def _write(path: Path, plan: KeptPlan, program: Program, key: PlanKey) -> None:
    body = json.dumps(plan.to_json(), allow_nan=False).encode()
    nodes = program.as_traced.forms[-1].graph.nodes
    sources = {node.source: n for n, node in reversed([*enumerate(nodes)]) if node.source}
    about = {"versions": dict(key.versions), "sources": [*sources.items()]}
    try:
        write_kept(path, _FORMAT, body, about, MOST_PLANS)
    except OSError as error:
        _log.warning(
            "the plan of `%s` cannot be cached in %s (%s): give another folder as `cache=`, or `cache=False`",
            plan.program.name,
            path.parent,
            error.strerror,
        )


def _with_lines(plan: P, lines: Mapping[str, str]) -> P:
    """A plan with the current source lines of the user's code: a line added above the model changes them all.

    Args:
        lines: current source line by the line in the plan.
    """
    moved = {old: new for old, new in lines.items() if old != new}
    return decoder(type(plan))(_replaced(encode(plan), moved)) if moved else plan


def _replaced(value: Any, moved: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        if value in moved:
            return moved[value]
        for old in sorted((old for old in moved if old in value), key=len, reverse=True):  # within a note
            return value.replace(old, moved[old])
        return value
    if isinstance(value, list):
        return [_replaced(item, moved) for item in value]
    if isinstance(value, dict):
        return {key: _replaced(item, moved) for key, item in value.items()}
    return value
