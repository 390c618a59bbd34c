"""Write numbered checkpoints to a folder in the background.

In: a `CheckpointFolder`; the arrays and JSON parts of each checkpoint. Out: `BackgroundWrites`: one writer, made at the first
checkpoint, whose failures are raised by the next call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from autopar.api.checkpoint import state_tree as checkpoint_state
from autopar.api.checkpoint.folder import CheckpointFolder, store
from autopar.errors import CheckpointError

if TYPE_CHECKING:
    from autopar.api.checkpoint import orbax_store
    from autopar.api.checkpoint.state_tree import Leaf


class BackgroundWrites:
    """The writes to one folder.

    Args:
        keep: the number of newest checkpoints to keep; None keeps all.

    Raises:
        CheckpointError: `keep` is invalid.
    """

    def __init__(self, folder: CheckpointFolder, keep: int | None) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"`keep` is {keep!r}: give 1 or more, or None to keep all")
        self._folder, self._keep = folder, keep
        self._writer: orbax_store.Writer | None = None

    def write(self, number: int, tree: Mapping[str, Any], leaves: Sequence[Leaf], parts: Mapping[str, Any]) -> None:
        """Start to write a checkpoint. After the call, the arrays may be donated.

        Args:
            tree: the arrays, as `state_tree.stored` gives them.
            leaves: what they are.
            parts: the JSON parts by name.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            writer = self._writer = self._writer or store().Writer(self._folder.path, self._keep)
            # A thread digests the arrays while orbax copies them; both are done before the step may donate them.
            with ThreadPoolExecutor(1) as thread:
                digests = thread.submit(checkpoint_state.parts_started, tree, leaves, once=True)
                writer.write(number, tree, parts, lambda: checkpoint_state.sums_to_json(digests.result()))
        except Exception as error:
            raise self._folder.not_written(number, error) from error

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except Exception as error:
            raise self._folder.not_written(None, error) from error

    def close(self) -> None:
        """Wait, and end the background threads."""
        self.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
