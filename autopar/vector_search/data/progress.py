"""Show a progress bar while an index is built.

In: whether to show it. Out: a function that reports the current stage and the completed fraction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Takes the name of the current stage, and the completed fraction of the build.
Report = Callable[[str, float], None]


@contextmanager
def progress_bar(show: bool | None) -> Iterator[Report]:
    """Show a progress bar on standard error.

    Args:
        show: None: only if standard error is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda stage, fraction: None
        return
    columns = (TextColumn("build"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)
