"""Print tables and JSON, show progress, refuse options, and restrict JAX to CPUs.

In: a renderer, data, names of options. Out: text on standard output, a progress bar on standard error, or a `TargetError`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from autopar.errors import TargetError

if TYPE_CHECKING:
    from rich.console import Console

#: Options whose flag differs from their name.
_SPELLED = {"target": "TARGET", "block_bytes": "--block", "run_step": "--run"}


def show(draw: Callable[[Console], None]) -> None:
    """Print tables in the terminal's width; print plain text of a fixed width to a pipe."""
    from autopar.system.text_tables import new_console, plain_text

    console = new_console(highlight=False)
    if console.is_terminal:
        draw(console)
    else:
        print(plain_text(draw))


def print_json(data: Any) -> None:
    """Print JSON for programs: all rows, plain finite numbers."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_result(options: argparse.Namespace, result: Any) -> None:
    """Print a result as JSON with `--json`, else as text."""
    if options.json:
        print_json(result.to_json())
    else:
        print(result)


def output(options: argparse.Namespace, to_json: Callable[[], Any], draw: Callable[[Console], None]) -> None:
    """Print a result as JSON with `--json`, else as tables."""
    if options.json:
        print_json(to_json())
    else:
        show(draw)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, float], None] | None]:
    """Show a progress bar on standard error while planning, and remove it afterwards; a pipe gets none."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("start", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)


def given(options: argparse.Namespace, names: Iterable[str], *, empty: bool = False) -> list[str]:
    """The options that the user gave.

    Args:
        names: options; a command need not have all of them.
        empty: whether an option given as an empty text counts.
    """
    unset = (None, False, []) if empty else (None, False, [], "")
    return [name for name in names if getattr(options, name, None) not in unset]


def flags(names: Iterable[str]) -> str:
    """Options as flags.

    >>> flags(["target", "memory_budget"])
    'TARGET, --memory-budget'
    """
    return ", ".join(_SPELLED.get(name, f"--{name.replace('_', '-')}") for name in names)


def refuse(useless: list[str], why: str, or_else: str = "") -> None:
    """Refuse options that have no effect.

    Args:
        useless: names of the given options without effect.
        why: the reason, the start of the error.
        or_else: another way out, the end of the error.

    Raises:
        TargetError: there are such options.
    """
    if useless:
        raise TargetError(f"{why}: drop {flags(useless)}{or_else}")


def use_cpu_only() -> None:
    """Restrict JAX to CPUs. Commands call it where the options describe the target devices in full, so that planning needs no
    accelerator of this machine."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "jax" in sys.modules:  # it has read the environment already
        jax = sys.modules["jax"]
        if not jax.config.jax_platforms:
            jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
