"""Keep the keeper's state on disk, so that a new keeper takes over."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ProcessError
from autopar.membership.records import Place
from autopar.system.atomic_file import write_whole

_STATE, _TOKEN = "keeper.json", "token"


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
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ProcessError(f"the keeper's folder {folder} cannot be made: {error.strerror}") from error

    def token(self) -> str:
        """The token of the job, which every connection has to give; made at the first call."""
        path = self.folder / _TOKEN
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(16))
        return path.read_text().strip()

    def read(self) -> Saved | None:
        """The state of the last keeper; None if there was none, or its job has ended.

        Raises:
            ProcessError: the file is damaged.
        """
        path = self.folder / _STATE
        if not path.exists():
            return None
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            places = {name: Place.from_json(place) for name, place in data["places"].items()}
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
