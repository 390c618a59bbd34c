"""Write tasks as text, for files.

In: tasks. Out: a line such as "F0.0 I0.0 W0.0 U0.0": the phase, the stage, and the microbatch. `tasks_of` is the inverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from autopar.errors import ScheduleError
from autopar.pipeline.schedule.tasks import Phase, Task

_LETTERS: Mapping[Phase, str] = MappingProxyType(
    {"forward": "F", "backward": "B", "input": "I", "weight": "W", "update": "U"}
)
_PHASES: Mapping[str, Phase] = {letter: phase for phase, letter in _LETTERS.items()}
_TASK = re.compile(r"([FBIWU])(\d{1,9})\.(\d{1,9})", re.ASCII)


def text_of(tasks: Iterable[Task]) -> str:
    """Tasks as a line of text.

    >>> text_of([Task(0, 1, "forward"), Task(0, 1, "backward")])
    'F0.1 B0.1'
    """
    return " ".join(f"{_LETTERS[task.phase]}{task.stage}.{task.microbatch}" for task in tasks)


def tasks_of(text: str) -> tuple[Task, ...]:
    """The tasks of a line of text.

    Raises:
        ScheduleError: a word is no task.
    """
    found = []
    for word in text.split():
        match = _TASK.fullmatch(word)
        if match is None:
            raise ScheduleError(f"{word[:40]!r} is no task: write the phase, the stage and the microbatch, as in F0.1")
        found.append(Task(int(match[2]), int(match[3]), _PHASES[match[1]]))
    return tuple(found)
