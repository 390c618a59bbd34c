"""Plans kept on disk, so that a second start of a program plans nothing.

In: a program, what is asked for, and how to plan it. Out: its plan, from the folder of the cache where one is there
that was made of the same by the same; else made, and kept. An entry appears whole or not at all, so processes may
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
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from autopar.errors import PlanFileError
from autopar.planner.cache.key import PlanKey, UnkeyedError, key_of
from autopar.plans.json_codec import decoder, encode
from autopar.plans.records import Placement
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


def kept(
    program: Program, asked: Mapping[str, Any], folder: Path, make: Callable[[], P], read: Callable[[Any], P]
) -> P:
    """A program's plan, from the cache or made.

    Args:
        asked: all options of planning, as they were understood.
        folder: of the cache; made where it is not there.
        make: plans.
        read: such a plan from JSON types.
    """
    try:
        key = key_of(program, asked)
    except UnkeyedError as what:
        _say(
            logging.INFO,
            "the plan of `%s` is not kept: %s, which a cache cannot tell from another",
            program.signature.name,
            what,
        )
        return make()
    path = folder / "plans" / f"{key.name}.plan"
    found = _read(path, program, read)
    if found is not None:
        _say(logging.INFO, "the plan of `%s` was kept from an earlier start (%s)", program.signature.name, path)
        return found
    _say_if_stale(path, key, program.signature.name)
    plan = make()
    if plan.outcome.status != "interrupted":  # the user wanted no more of it
        _write(path, plan, program, key)
    return plan


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
    others = sorted({*path.parent.glob(f"{key.whatever_made_it}*.plan")} - {path}, key=last_used)
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
