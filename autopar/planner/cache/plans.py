"""Plans kept on disk, so that a second start of a program plans nothing.

In: a program and the options of planning. Out: `PlanEntry`: its plan, from the folder of the cache, where one is there that
was made of the same by the same; else the place where it is kept once it is made. An entry appears whole or not at all, so processes may
write at once. One that is damaged is made anew, and said; so is it said where versions have moved on. A cache that
cannot be read or written is said, and does without.
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

#: How many plans a folder holds; those that were used longest ago go first.
MOST_PLANS = 200
#: What an entry says it is; a file of another is damaged.
_FORMAT = "autopar-kept-plan 1"

_log = logging.getLogger(__name__)

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """While entered, it is not said whence each plan comes: of a program that a user has not written, and never named."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def _say(level: int, text: str, *about: Any) -> None:
    _log.log(logging.DEBUG if _is_quiet.get() else level, text, *about)


class KeptPlan(Placement, Protocol):
    """What is asked of a plan that is kept: a dataclass, of one program or of several."""

    @property
    def outcome(self) -> Any: ...


P = TypeVar("P", bound=KeptPlan)


def default_folder() -> Path:
    """Where caches go on this platform: `$XDG_CACHE_HOME/autopar`, which is `~/.cache/autopar`.

    Raises:
        RuntimeError: there is no home.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "autopar"
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "autopar"


def folder_of(cache: bool | str | os.PathLike[str] | None) -> Path | None:
    """The folder that a `cache=` means: True is the default one, False or None is none."""
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
    """A program's place in a cache.

    Args:
        path: of the entry; None where the plan is not kept.
        load: a plan from JSON types.
    """

    program: Program
    path: Path | None
    key: PlanKey | None
    load: Callable[[Any], P]

    def read(self) -> P | None:
        """The plan, where it is there."""
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
    """The place of a program's plan.

    Args:
        request: all options of planning, as they were understood.
        folder: of the cache; made where it is not there; None for none.
        load: such a plan from JSON types.
    """
    if folder is None:
        return PlanEntry(program, None, None, load)
    try:
        key = key_of(program, request)
    except UnkeyedError as what:
        _say(
            logging.INFO,
            "the plan of `%s` is not kept: %s, which a cache cannot tell from another",
            program.signature.name,
            what,
        )
        return PlanEntry(program, None, None, load)
    return PlanEntry(program, folder / "plans" / f"{key.name}.plan", key, load)


def _read(path: Path, program: Program, read: Callable[[Any], P]) -> P | None:
    """The plan of an entry; None where there is none, or none that can be used."""
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
    _log.warning("the plan kept for `%s` is damaged (%s: %s): it is made anew", program.signature.name, path, error)


def _say_if_stale(path: Path, key: PlanKey, name: str) -> None:
    """Say which version has moved on where plans of the same were made by others."""
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
    _say(logging.WARNING, "the plan kept for `%s` is stale (%s): it is made anew", name, what)


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
    """A plan with the user's lines where they are now: a line added above the model moves them all."""
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
