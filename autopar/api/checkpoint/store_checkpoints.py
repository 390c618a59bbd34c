"""Save and restore versioned stores, steps that workers run, and streams: weights, optimizer state, clocks, pushes that are not applied,
which examples were computed, and batches in flight.

In: a folder; a `VersionedStore`, a `WorkersStep` or a `StreamedStep`. Out: `StoreCheckpoints`: numbered saves by orbax, written whole or not at all, with a
digest of every array.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex, overload

import jax

from autopar.api.checkpoint import state_tree as checkpoint_state
from autopar.api.checkpoint.background_writes import BackgroundWrites
from autopar.api.checkpoint.folder import ABOUT, EXTRA, CheckpointFolder, about_of, digest, store
from autopar.api.checkpoint.state_tree import Leaf
from autopar.api.streamed_step import StreamedStep
from autopar.api.workers.step import WorkersStep
from autopar.errors import CheckpointError
from autopar.versions.snapshot import Name, Snapshot
from autopar.versions.store import VersionedStore

#: The JSON part with clocks and names.
_STORE = "store"


class StoreCheckpoints:
    """Numbered checkpoints of a store, of a step that workers run, or of batches in flight through stages, in one folder.

        with autopar.StoreCheckpoints("run") as checkpoints:
            for number, loss in enumerate(step.stream(state, batches)):
                if number % 100 == 99:
                    checkpoints.save(number, step)

    Args:
        directory: a path, or a bucket's (`gs://...`); it is created at the first save.
        keep: the number of newest checkpoints to keep; None keeps all.

    Raises:
        CheckpointError: `keep` or the directory is invalid.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 3) -> None:
        if jax.process_count() > 1:
            raise CheckpointError("`StoreCheckpoints` are of one process: the server saves what it serves")
        self._saved = CheckpointFolder(directory)
        self._writes = BackgroundWrites(self._saved, keep)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the complete checkpoints, in order."""
        return self._saved.steps

    @property
    def latest(self) -> int | None:
        """The newest complete checkpoint, or None."""
        self.wait()
        return self._saved.latest

    def extra(self, at: int | None = None) -> Any:
        """The `extra` of a checkpoint; None where there is none."""
        self.wait()
        return self._saved.extra(self._saved.existing(at))

    def save(
        self,
        number: SupportsIndex,
        what: VersionedStore | WorkersStep | StreamedStep,
        *,
        extra: Any = None,
        wait: bool = False,
    ) -> None:
        """Save. Arrays are copied to the host, and then written in the background. Workers of a step finish the iteration that they
        compute, and wait for the copy.

        The write is atomic: if the process is killed, the previous checkpoint is the latest.

        Args:
            number: it must exceed that of every checkpoint.
            what: a store, or a step whose workers run, or with batches in flight.
            extra: JSON types.
            wait: return only when everything is written.

        Raises:
            CheckpointError: the number is taken, or the folder cannot be written to. A failure in the background is raised by the
                next call.
        """
        self.wait()
        number, latest = operator.index(number), self._saved.latest
        if number < 0 or (latest is not None and number <= latest):
            after = f"a number above {latest}, which is there" if latest is not None else "0 or more"
            raise CheckpointError(f"checkpoint {number} cannot be saved to {self._saved.directory!r}: give {after}")
        snapshot = what.snapshot()
        names = {_on_disk(n, name): list(name) for n, name in enumerate(snapshot.arrays)}
        arrays = dict(zip(names, snapshot.arrays.values(), strict=True))
        leaves = checkpoint_state.leaves_of(arrays)
        parts: dict[str, Any] = {_STORE: {"about": dict(snapshot.about), "names": names}}
        parts |= {} if extra is None else {EXTRA: extra}
        parts[ABOUT] = about_of([_STORE], leaves, {name: digest(part) for name, part in parts.items()})
        self._writes.write(number, checkpoint_state.stored(arrays), leaves, parts)
        if wait:
            self.wait()

    @overload
    def restore(self, what: VersionedStore, *, at: int | None = None) -> None: ...
    @overload
    def restore(
        self, what: WorkersStep | StreamedStep, *args: Any, at: int | None = None, **kwargs: Any
    ) -> tuple[Any, int]: ...
    def restore(self, what: Any, *args: Any, at: int | None = None, **kwargs: Any) -> Any:
        """Restore into a store that was made with the same arguments, or into the same step.

        Args:
            args, kwargs: for a step its arguments, of which only shapes are read.
            at: the number of a checkpoint; by default the latest.

        Returns:
            For a step, the state and the number of the first batch that is needed: see `WorkersStep.resume` and
            `StreamedStep.resume`.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
            StoreError: it is of another store or step.
        """
        self.wait()
        snapshot = self._read(self._saved.existing(at))
        if isinstance(what, VersionedStore):
            what.load(snapshot)
            return None
        return what.resume(snapshot, *args, **kwargs)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writes.wait()

    def close(self) -> None:
        """Wait for all saves, and end the background threads; a `with` block does it."""
        self._writes.close()

    def __enter__(self) -> StoreCheckpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, number: int) -> Snapshot:
        about = self._saved.about(number)
        if not store().has_part(self._saved.path, number, _STORE):
            raise CheckpointError(
                f"checkpoint {number} in {self._saved.directory!r} is of a step's state, which `autopar.Checkpoints` restores"
            )
        part = self._saved.part(number, _STORE)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        try:
            target = {leaf.keys[0]: _struct(leaf, device) for leaf in about["leaves"]}
            names: Mapping[str, Name] = {name: tuple(part["names"][name]) for name in target}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._saved.damaged(number, f"what it says of its arrays cannot be read ({error})") from error
        arrays = self._saved.arrays(number, about, target)
        return Snapshot({names[n]: array for n, array in zip(target, arrays, strict=True)}, part["about"])


def _on_disk(number: int, name: Name) -> str:
    """A name of an array that any file system takes."""
    return f"{number:05d}_" + re.sub(r"[^A-Za-z0-9]+", "_", "_".join(map(str, name)))[:100]


def _struct(leaf: Leaf, device: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jax.numpy.dtype(leaf.dtype), sharding=device)
