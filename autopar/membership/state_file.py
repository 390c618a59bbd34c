"""Keep the keeper's state on disk, so that a new keeper takes over."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from autopar.errors import ProcessError
from autopar.membership.records import Place
from autopar.system.atomic_file import write_whole

_STATE, _TOKEN, _LOCK = "keeper.json", "token", "lock"
#: The fewest characters of a token.
_LEAST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a keeper.

    Args:
        address: where it listens.
        generation: the number of the last generation.
        places: the places of its members, in order of their ranks; empty if none runs.
    """

    address: str
    generation: int
    places: Mapping[str, Place]


class StateFolder:
    """The folder of a job's keeper: its state and its token, readable by its owner only."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock: IO[str] | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ProcessError(f"the keeper's folder {folder} cannot be made: {error.strerror}") from error

    def lock(self) -> None:
        """Let this process alone be the keeper of this folder, until it ends.

        Raises:
            ProcessError: another process is.
        """
        self._lock = (self.folder / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ProcessError(
                f"another keeper runs with the state in {self.folder}: give another folder as --state, or end it first"
            ) from error
        except OSError:  # a file system without locks
            return

    def token(self) -> str:
        """The token of the job, which every connection has to give; made at the first call.

        Raises:
            ProcessError: the file is damaged.
        """
        path = self.folder / _TOKEN
        if not path.exists():
            own = self.folder / f"{_TOKEN}-{secrets.token_hex(8)}"
            with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(own, path)
            own.unlink()
        token = path.read_text(errors="replace").strip()
        if len(token) < _LEAST_TOKEN:
            raise ProcessError(f"the token in {path} is damaged: remove the file while nothing of the job runs")
        return token

    def read(self) -> Saved | None:
        """The state of the last keeper; None if there was none, or its job has ended.

        Raises:
            ProcessError: the file is damaged.
        """
        path = self.folder / _STATE
        if not path.exists():
            return None
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            places = {str(name): Place.from_json(place) for name, place in data["places"].items()}
            return Saved(str(data["address"]), int(data["generation"]), places)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProcessError(
                f"the keeper's state in {path} is damaged ({error}): remove the file; workers then start from the newest copies"
            ) from error

    def write(self, saved: Saved) -> None:
        """Write the state, whole or not at all."""
        places = {name: place.to_json() for name, place in saved.places.items()}
        write_whole(
            json.dumps({"address": saved.address, "generation": saved.generation, "places": places}),
            self.folder / _STATE,
        )

    def clear(self) -> None:
        """Remove the state of a job that has ended."""
        (self.folder / _STATE).unlink(missing_ok=True)
