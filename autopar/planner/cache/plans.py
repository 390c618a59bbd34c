"""Cache plans on disk, so that a second start of a program does not plan again.

In: a program and planning options. Out: `PlanEntry`, which reads the cached plan of the same program, options and
planner version, or stores a new plan. Entries are written atomically, so processes may write concurrently. A damaged or
stale entry is logged, and the step is planned again. A cache that cannot be read or written is logged, and not used.
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

#: The number of plans in a folder; the least recently used are deleted first.
MOST_PLANS = 200
#: The format name in an entry's header; a file with another one counts as damaged.
_FORMAT = "autopar-kept-plan 1"

_log = logging.getLogger(__name__)

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A context that logs cache hits and misses at debug level only, for programs that the user has not written."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def _say(level: int, text: str, *about: Any) -> None:
    _log.log(logging.DEBUG if _is_quiet.get() else level, text, *about)


class KeptPlan(Placement, Protocol):
    """The interface of a cached plan: a dataclass, of one program or of a pipeline."""

    @property
    def outcome(self) -> Any: ...


P = TypeVar("P", bound=KeptPlan)


def default_folder() -> Path:
    """The cache folder of this platform: `$XDG_CACHE_HOME/autopar`, by default `~/.cache/autopar`.

    Raises:
        RuntimeError: the user has no home folder.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "autopar"
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "autopar"


def folder_of(cache: bool | str | os.PathLike[str] | None) -> Path | None:
    """The folder of the option `cache`: the default folder for True, none for False or None."""
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
    """The cache entry of a program.

    Args:
        path: the file of the entry; None if the plan is not cached.
        load: builds a plan from JSON types.
    """

    program: Program
    path: Path | None
    key: PlanKey | None
    load: Callable[[Any], P]

    def read(self) -> P | None:
        """The cached plan; None if there is none."""
        if self.path is None or self.key is None:
            return None
        found = _read(self.path, self.program, self.load)
        if found is None:
            _say_if_stale(self.path, self.key, self.program.signature.name)
        else:
            name = self.program.signature.name
            _say(logging.INFO, "the plan of `%s` was kept from an earlier start (%s)", name, self.path)
        return found

    def keep(self, plan: P) -> None:
        """Write a plan to the cache, unless the user interrupted the solver, which then returned its best so far."""
        if self.path is not None and self.key is not None and plan.outcome.status != Status.INTERRUPTED.value:
            _write(self.path, plan, self.program, self.key)


def entry_of(
    program: Program, request: Mapping[str, Any], folder: Path | None, load: Callable[[Any], P]
) -> PlanEntry[P]:
    """The cache entry of a program.

    Args:
        request: all planning options, resolved.
        folder: the cache folder, created if needed; None disables the cache.
        load: builds a plan from JSON types.
    """
    if folder is None:
        return PlanEntry(program, None, None, load)
    try:
        key = key_of(program, request)
    except UnkeyedError as what:
        _say(
            logging.INFO,
            "the plan of `%s` is not cached: %s, which cannot be part of a cache key",
            program.signature.name,
            what,
        )
        return PlanEntry(program, None, None, load)
    return PlanEntry(program, folder / "plans" / f"{key.name}.plan", key, load)


def _read(path: Path, program: Program, read: Callable[[Any], P]) -> P | None:
    """The plan of an entry; None if there is none or it is damaged."""
    try:
        found = read_kept(path, _FORMAT)
        if found is None:
            return None
        about, body = found
        lines = {old: program.as_traced.forms[-1].graph.nodes[node].source for old, node in about["sources"]}
        plan = _with_lines(read(json.loads(body)), lines)
        if plan.program.name != program.signature.name or len(plan.inputs) != len(program.graph.inputs):
            raise ValueError("it is of another program")
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError, PlanFileError) as error:
        _say_damaged(path, program, error)
        return None
    return replace(plan, in_tree=program.trace.in_tree, out_tree=program.trace.out_tree)  # type: ignore[type-var]


def _say_damaged(path: Path, program: Program, error: Exception) -> None:
    _log.warning("the plan kept for `%s` is damaged (%s: %s): planning again", program.signature.name, path, error)


def _say_if_stale(path: Path, key: PlanKey, name: str) -> None:
    """Log what changed in the planner if another version of it cached a plan for the same program and options."""
    others = sorted({*path.parent.glob(f"{key.of_any_planner}*.plan")} - {path}, key=last_used)
    if not others:
        return
    try:
        with others[-1].open(encoding="utf-8") as file:
            before = json.loads(file.readline())["versions"]
        moved = [f"{one} {before[one]} -> {now}" for one, now in key.versions.items() if before.get(one, now) != now]
    except (OSError, ValueError, KeyError, TypeError):
        return
    what = ", ".join(moved) or "autopar's code, Python or a registered rule has changed"
    _say(logging.WARNING, "the plan kept for `%s` is stale (%s): planning again", name, what)


def _write(path: Path, plan: KeptPlan, program: Program, key: PlanKey) -> None:
    body = json.dumps(plan.to_json(), allow_nan=False).encode()
    nodes = program.as_traced.forms[-1].graph.nodes
    sources = {node.source: n for n, node in reversed([*enumerate(nodes)]) if node.source}
    about = {"versions": dict(key.versions), "sources": [*sources.items()]}
    try:
        write_kept(path, _FORMAT, body, about, MOST_PLANS)
    except OSError as error:
        _log.warning(
            "the plan of `%s` cannot be kept in %s (%s): give another folder as `cache=`, or `cache=False`",
            plan.program.name,
            path.parent,
            error.strerror,
        )


def _with_lines(plan: P, lines: Mapping[str, str]) -> P:
    """A plan with current source lines: a line added above the model moves all of them."""
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
