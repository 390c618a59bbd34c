"""A bar while an index is built.

In: whether to show one. Out: a function to say what is being done and how much of the whole is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Takes what is being done, and the fraction of the whole that is.
Report = Callable[[str, float], None]


@contextmanager
def progress_bar(show: bool | None) -> Iterator[Report]:
    """A bar on standard error.

    Args:
        show: None: where a person sees it.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda stage, fraction: None
        return
    columns = (TextColumn("build"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)
