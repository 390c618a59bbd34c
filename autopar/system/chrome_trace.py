"""Write events in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing load.

In: names, places and times in microseconds. Out: events and a trace as JSON types.
"""

from __future__ import annotations

from typing import Any


def trace_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A complete trace."""
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def slice_of(
    name: str, kind: str, place: tuple[int, int], times_us: tuple[float, float], about: dict[str, Any]
) -> dict[str, Any]:
    """A slice: something that runs for a while.

    Args:
        place: process and thread.
        times_us: start and duration.
    """
    where = {"pid": place[0], "tid": place[1], "ts": times_us[0], "dur": times_us[1]}
    return {"ph": "X", "name": name, "cat": kind, **where, "args": about}


def named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """The name of a process or a thread: `what` is `process_name` or `thread_name`."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
