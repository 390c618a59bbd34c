"""List the engines that read page files, and open a file with one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.on_disk.direct_reader import DirectEngine
from autopar.vector_search.on_disk.mapped_reader import MappedEngine
from autopar.vector_search.on_disk.readers import Engine, Reader
from autopar.vector_search.on_disk.uring_reader import UringEngine

#: Engines by name; `"auto"` takes the first that this machine and the file system have. Read-only.
READERS: Mapping[str, Engine] = MappingProxyType(
    {"uring": UringEngine(), "direct": DirectEngine(), "mmap": MappedEngine()}
)
AUTO = "auto"


def checked_reader(name: str) -> str:
    """Check the name of an engine, and that this machine has it.

    Raises:
        SearchError: an unknown name, or an engine that this machine does not have; the text says why.
    """
    if name not in (AUTO, *READERS):
        raise SearchError(f"`reader` is {name!r}: expected one of {AUTO}, {', '.join(READERS)}")
    why_not = "" if name == AUTO else READERS[name].why_not()
    if why_not:
        raise SearchError(f"`reader` is {name!r}, and {why_not}")
    return name


def open_reader(name: str, path: Path) -> tuple[str, Reader]:
    """Open a file with the engine of this name, and return the engine's name.

    Raises:
        SearchError: as `checked_reader`.
        IndexFileError: the file cannot be opened, or its file system does not have what the engine needs.
    """
    checked_reader(name)
    names = [each for each in READERS if not READERS[each].why_not()] if name == AUTO else [name]
    refused: list[str] = []
    for each in names:
        try:
            return each, READERS[each].open(path)
        except OSError as error:
            refused.append(f"reader={each!r}: {error.strerror or error}")
    raise IndexFileError(
        f"{path} cannot be opened ({'; '.join(refused)}). Check that the file exists; a file system without O_DIRECT needs"
        " reader='mmap'"
    )
