"""The program of `benchmarks/faults/fsdp.py`, with the number of compilations so far in each line of its log."""

from __future__ import annotations

import sys
from typing import Any

import jax
import side_by_side_programs

from benchmarks.faults import fsdp


def main() -> None:
    compiled = 0

    def count(event: str, **_: Any) -> None:
        nonlocal compiled
        compiled += event == "/jax/compilation_cache/cache_misses"

    jax.monitoring.register_event_listener(count)
    tell = fsdp.tell
    fsdp.tell = lambda log, **what: tell(log, compiled=compiled, **what)
    programs = {
        "kept": fsdp.kept,
        "kept_in_stages": fsdp.kept_in_stages,
        "kept_side_by_side": side_by_side_programs.kept,
    }
    programs[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
