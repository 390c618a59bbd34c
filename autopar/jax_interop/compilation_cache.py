"""Cache compiled steps on disk with JAX's compilation cache.

In: a folder for one program. Out: a context in which this thread's compiles use the folder. The rest of the process keeps
JAX's setting. If the user has set `jax_compilation_cache_dir`, that folder is used instead. JAX keeps programs that took
at least `jax_persistent_cache_min_compile_time_secs` (one second) to compile. They are machine code, so files that other
users may have written are not run, by the rule of `checksummed_file`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from autopar.jax_interop import compilation
from autopar.system.checksummed_file import make_private, refuse_of_others, refuse_status_of_others

#: Number of programs' folders to keep; the least recently used are deleted first.
MOST_PROGRAMS = 50

#: Seconds within which another process may still be writing an entry.
_JUST_NOW_S = 60.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def compiled_kept_in(folder: Path | None) -> Iterator[None]:
    """Use a folder as the compilation cache inside the `with` block.

    Args:
        folder: folder for one program, next to those of other programs; None for no cache.
    """
    users_own = jax.config.jax_compilation_cache_dir
    if folder is None or users_own or not jax.config.jax_enable_compilation_cache or not _opened(folder):
        yield
        return
    _drop_unusable(folder)
    _prune(folder.parent)
    try:
        with compilation.compiled_programs_in(str(folder)):
            yield
    finally:
        _close_to_others(folder)


def _opened(folder: Path) -> bool:
    way_out = "give another folder as `cache=`, or `cache=False`"
    try:
        make_private(folder)
        refuse_of_others(folder)
        os.utime(folder)  # mark it as used
    except OSError as error:
        _log.warning("compiled steps cannot be kept in %s (%s): %s", folder.parent, error.strerror, way_out)
        return False
    except ValueError as error:
        _log.warning("compiled steps are not kept in %s (%s), or %s", folder, error, way_out)
        return False
    return os.access(folder, os.W_OK)


def _drop_unusable(folder: Path) -> None:
    """Delete entries that others may have written, and damaged entries.

    JAX writes entries in place, so a killed process leaves a truncated entry, which JAX never overwrites.
    """
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(OSError):
            try:
                refuse_status_of_others(entry.lstat(), "it")
            except ValueError as error:
                entry.unlink()
                _log.warning("the compiled step kept in %s is not used (%s): it is compiled again", entry, error)
                continue
            being_written = time.time() - entry.stat().st_mtime < _JUST_NOW_S
            if not being_written and not compilation.is_compiled_program(entry.read_bytes()):
                entry.unlink()
                _log.warning("a compiled step kept in %s is damaged: it is compiled again", entry)


def _close_to_others(folder: Path) -> None:
    """Remove other users' access to the entries.

    JAX writes entries with the process's umask, which may let a group write them. All entries are this user's: earlier
    ones were checked, and nobody else can write the folder.
    """
    for entry in folder.glob("*"):
        with contextlib.suppress(OSError):
            entry.chmod(0o600)


def _prune(programs: Path) -> None:
    def last_used(path: Path) -> float:
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
        return 0.0

    folders = sorted(programs.iterdir(), key=last_used)
    for folder in folders[: max(0, len(folders) - MOST_PROGRAMS)]:
        shutil.rmtree(folder, ignore_errors=True)
