"""Read numbered checkpoints from a folder, and check that each is what was written.

In: a folder of checkpoints. Out: `CheckpointFolder`: their numbers, and the metadata, JSON parts and arrays of each. A part
that differs from what was written raises `DamagedError`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

from autopar.api.checkpoint import state_tree as checkpoint_state
from autopar.errors import CheckpointError
from autopar.runtime.distributed.exchange import among_processes
from autopar.version import __version__

#: What a checkpoint says it is, and the version of its fields.
FORMAT, VERSION = "autopar-checkpoint", 1
#: Its JSON parts: what it holds, the plan that the state was laid out by, and what the user gave along.
ABOUT, PLAN, EXTRA = "about", "plan", "extra"

_log = logging.getLogger(__name__)


class DamagedError(CheckpointError):
    """A checkpoint that differs from what was written. `why` is the reason without the way out."""

    why = ""


class CheckpointFolder:
    """The checkpoints in one folder: `directory` as text, `path` as orbax takes it."""

    def __init__(self, directory: str | Path) -> None:
        self.path = store().folder_of(directory)
        self.directory = str(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.directory!r} is a file: give a folder for the checkpoints")

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the complete checkpoints, in order."""
        return tuple(store().steps(self.path))

    @property
    def latest(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return max(self.steps, default=None)

    def existing(self, at: int | None) -> int:
        """The number of a complete checkpoint, by default the latest."""
        steps = self.steps
        if at is None and steps:
            return steps[-1]
        if at in steps and at is not None:
            return at
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        requested = "no checkpoint" if at is None else f"no checkpoint {at!r}"
        raise CheckpointError(
            f"{requested} in {self.directory!r}: {there}. Give the folder of the saved checkpoints"
            + ("" if steps else ", or start afresh with `step.init` (`restore_or_init` does whichever it is)")
        )

    def about(self, number: int) -> dict[str, Any]:
        """The metadata of a checkpoint, checked."""
        if not store().has_part(self.path, number, ABOUT):
            raise CheckpointError(
                f"checkpoint {number} in {self.directory!r} was not saved by `autopar.Checkpoints`, or is damaged."
                " One of orbax's own is restored into `step.abstract_state(create_state, ...)`, which says the shapes"
                " and shardings: `manager.restore(number, args=ocp.args.StandardRestore(abstract_state))`"
            )
        try:
            about = dict(store().read_part(self.path, number, ABOUT))
            if (about["format"], about["version"]) != (FORMAT, VERSION):
                raise ValueError(f"it is a {about['format']} of version {about['version']}")
            if about.pop("digest", None) != (digest(about) if "digests" in about else None):
                raise ValueError("it is not what was written")
            about["leaves"] = tuple(checkpoint_state.from_json(about["leaves"]))
            about["arguments"] = tuple(map(str, about["arguments"]))
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.damaged(number, f"what it says of itself cannot be read ({error})") from error
        return about

    def part(self, number: int, name: str) -> Any:
        """A JSON part of a checkpoint, checked."""
        try:
            part = store().read_part(self.path, number, name)
        except (OSError, ValueError) as error:
            raise self.damaged(number, f"its part `{name}` cannot be read ({error})") from error
        digests = self.about(number).get("digests")
        if digests is not None and digests.get(name) != digest(part):
            raise self.damaged(number, f"its part `{name}`, the file {name}/metadata, is not what was written")
        return part

    def extra(self, number: int) -> Any:
        """What the user gave along; None where there is nothing."""
        return self.part(number, EXTRA) if store().has_part(self.path, number, EXTRA) else None

    def arrays(self, number: int, about: dict[str, Any], target: Any) -> list[Any]:
        """The arrays of a checkpoint with the shardings of `target`, checked."""
        try:
            read = dict(store().read_state(self.path, number, checkpoint_state.wanted(target)))
            values = checkpoint_state.restored(read, target)
            started = checkpoint_state.parts_started(read, about["leaves"], once=False)
            found, cause = checkpoint_state.parts_to_json(started), None
        except Exception as error:
            values, found, cause = [], [], error
        why = self._why_damaged(number, about, found, cause)
        if why is not None:
            raise self.damaged(number, why) from cause
        return values

    def _why_damaged(self, number: int, about: dict[str, Any], found: Any, cause: Exception | None) -> str | None:
        """Why the arrays that were read are wrong, as a text equal in all processes; None if they are right.

        Args:
            found: the digests of this process's shards. cause: the reason why it could not read them.
        """
        if "digests" not in about:
            _log.info("checkpoint %d was saved without digests: its arrays are taken as they are", number)

        def judge(of_all: Sequence[Any]) -> str | None:
            failed = next((one["failed"] for one in of_all if one["failed"]), None)
            if failed or "digests" not in about:
                return failed
            try:
                said = store().read_digests(self.path, number)
                changed = checkpoint_state.changed(said, [one["found"] for one in of_all])
            except (OSError, TypeError, ValueError) as error:
                return f"its digests cannot be read ({error})"
            return self._changed_text(number, changed) if changed else None

        mine, processes = {"failed": cause and _first_line(cause), "found": found}, among_processes()
        if processes is None:
            return judge([mine])
        return processes.judged("restoring a checkpoint", mine, lambda given: judge([one.value for one in given]))

    def _changed_text(self, number: int, changed: Sequence[Sequence[str]]) -> str:
        try:
            files = sorted({file for keys in changed for file in store().files_of(self.path, number, keys)})
        except Exception:  # of tensorstore: where the array lies is damaged, too
            files = []
        named, where = checkpoint_state.some([f"`{'/'.join(keys)}`" for keys in changed]), checkpoint_state.some(files)
        return f"{named} is not what was written (another digest), in {where or 'its part `state`'}"

    def not_written(self, number: int | None, error: Exception) -> CheckpointError:
        """The error where a checkpoint could not be written."""
        what = "a checkpoint" if number is None else f"checkpoint {number}"
        good = f"the last good one is {self.latest}" if self.latest is not None else "there is none yet"
        return CheckpointError(
            f"{what} could not be written to {self.directory!r} ({_first_line(error)}); {good}. Give a folder that can"
            " be written to and has room"
        )

    def damaged(self, number: int, why: str, last_good: int | None = None) -> DamagedError:
        """The error where a checkpoint differs from what was written."""
        others = [str(step) for step in self.steps if step != number]
        if last_good is not None:
            way = f"the last good one is {last_good}: restore it with `at={last_good}`"
        else:
            way = f"restore another with `at=` ({', '.join(others)})" if others else "there is no other"
        error = DamagedError(f"checkpoint {number} in {self.directory!r} is damaged: {why}. Remove its folder; {way}")
        error.why = why
        return error


def about_of(arguments: Sequence[str], leaves: Sequence[Any], digests: dict[str, str]) -> dict[str, Any]:
    """The metadata of a checkpoint to write, with the digests of its other JSON parts."""
    about = {
        "format": FORMAT,
        "version": VERSION,
        "arguments": list(arguments),
        "leaves": checkpoint_state.to_json(leaves),
        "versions": {"autopar": __version__, "jax": jax.__version__},
        "digests": digests,
    }
    return about | {"digest": digest(about)}


def store() -> Any:
    """Import orbax, which takes a second, only where it is needed."""
    return import_module("autopar.api.checkpoint.orbax_store")


def digest(part: Any) -> str:
    """A digest of JSON types that does not depend on whitespace."""
    return hashlib.sha256(json.dumps(part).encode()).hexdigest()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
