"""Translate renamed command lines of version 0, for one release.

In: arguments. Out: the arguments in the current spelling, and the new command line for a warning.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

_Arguments = list[str]


def modern(argv: Sequence[str]) -> tuple[_Arguments, str | None]:
    """The current spelling of a command line.

    Returns:
        The arguments, and the command line for a warning; None where the spelling is current.

    >>> modern(["plan", "--for", "search", "--corpus", "1e9x100:int8"])
    (['estimate', 'search', '--corpus', '1e9x100:int8'], 'autopar estimate search --corpus 1e9x100:int8')
    >>> modern(["verify", "train.py:make"])
    (['verify', 'train.py:make'], None)
    """
    rewrite = _REWRITES.get(argv[0]) if argv else None
    renamed = rewrite(list(argv[1:])) if rewrite is not None else None
    if renamed is None:
        return list(argv), None
    return renamed, shlex.join(["autopar", *renamed])


def _plan(rest: _Arguments) -> _Arguments | None:
    kind, others = _taken(rest, "--for")
    if kind is not None:
        return ["estimate", kind, *others]
    if not any(part == "--compare" or part.startswith("--compare=") for part in rest):
        return None
    names, others = _taken(rest, "--compare")
    if not names or names.startswith("-"):  # without hardware: compare device counts
        return ["compare", *(part for part in rest if part not in ("--compare", "--compare="))]
    most, others = _taken(others, "--devices")
    return ["compare", *others, "--hardware", names, *([] if most is None else ["--max-devices", most])]


def _explain(rest: _Arguments) -> _Arguments | None:
    if "--collectives" in rest:
        return ["estimate", "collectives", *(part for part in rest if part != "--collectives")]
    path, others = _taken(rest, "--why")
    if path is None:
        return None
    target, others = _taken(others, "--of")
    if target is None:
        return ["why", path, *others]
    plan = next((part for part in others if not part.startswith("-")), None)
    if plan is None:
        return None  # the parser reports the missing plan
    return ["why", path, target, "--plan", plan, *(part for part in others if part != plan)]


def _verify(rest: _Arguments) -> _Arguments | None:
    if "--as-is" not in rest:
        return None
    return ["diagnose", *(part for part in rest if part != "--as-is")]


def _taken(rest: _Arguments, option: str) -> tuple[str | None, _Arguments]:
    """An option's value, and the other arguments."""
    for n, part in enumerate(rest):
        if part.startswith(f"{option}="):
            return part.partition("=")[2], rest[:n] + rest[n + 1 :]
        if part == option and n + 1 < len(rest):
            return rest[n + 1], rest[:n] + rest[n + 2 :]
    return None, rest


_REWRITES: dict[str, Callable[[_Arguments], _Arguments | None]] = {
    "plan": _plan,
    "explain": _explain,
    "verify": _verify,
}
