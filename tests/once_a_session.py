"""Share results between tests and between the two test processes; the first test that needs a result makes it.

In: a name that covers everything that a result depends on, and a function that makes it. Out: the result, which must be
picklable data. Results are kept in a folder of this session, which `conftest` creates and removes.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

#: The environment's name for the folder; processes that a test starts have it too.
FOLDER = "AUTOPAR_TESTS_RESULTS"


def once_a_session(name: str, make: Callable[[], Result]) -> Result:
    """Make a result, or take what was made under this name before.

    Args:
        name: a file's name. Two that ask for it at the same time may both make it.
    """
    if FOLDER not in os.environ:
        return make()
    kept = Path(os.environ[FOLDER], name)
    if kept.exists():
        return pickle.loads(kept.read_bytes())
    made = make()
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        pickle.dump(made, file)
    Path(file.name).replace(kept)  # whole, or not there
    return made
