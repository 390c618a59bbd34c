"""Store numbered checkpoints in one folder through orbax; each exists whole or not at all.

In: a folder, nested dicts of arrays, and JSON values. Out: the same read back, with the requested shardings: each
process reads the parts of its own devices. This module does not depend on plans. All processes of a `jax.distributed`
run call it together, as orbax requires.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from orbax.checkpoint import future

from autopar.api.checkpoint.orbax_arrays import handler_of_state

#: The items of a checkpoint that are not JSON: the arrays, and their digests, which are known only while they are
#: written.
STATE, DIGESTS = "state", "digests"


def folder_of(directory: Any) -> Any:
    """The absolute path, or the bucket's URL (`gs://...`), that orbax takes."""
    text = str(directory)
    return epath.Path(text) if "://" in text else epath.Path(Path(text).expanduser().absolute())


def steps(folder: Any) -> list[int]:
    """The numbers of complete checkpoints, in order."""
    if not folder.is_dir():
        return []
    return sorted(found.step for found in ocp.step.standard_name_format().find_all(folder))


def place(folder: Any, step: int) -> Any:
    """The folder of one checkpoint."""
    return folder / str(step)


class _LaterHandler(ocp.AsyncCheckpointHandler):
    """Writes JSON of this process that becomes known only while the arrays are written."""

    async def async_save(self, directory: Any, args: _LaterSave) -> list[Any]:
        async def write() -> None:
            text = json.dumps(args.item())
            (directory / f"process_{jax.process_index()}").write_text(text)

        return [future.CommitFutureAwaitingContractedSignals(write(), name="autopar_digests")]

    def save(self, directory: Any, args: _LaterSave) -> None:
        raise NotImplementedError("digests are always written in the background")

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError("`read_digests` reads the digests")


@ocp.args.register_with_handler(_LaterHandler, for_save=True, for_restore=True)  # orbax requires both
@dataclass
class _LaterSave(ocp.args.CheckpointArgs):
    item: Callable[[], Any]


class Writer:
    """Writes checkpoints in the background. It removes what killed writers left behind, so there must be only one
    writer."""

    def __init__(self, folder: Any, keep: int | None) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
        several = jax.process_count() > 1
        self._manager = ocp.CheckpointManager(
            folder, options=options, handler_registry=_handlers() if several else None
        )
        self._save = ocp.args.PyTreeSave if several else ocp.args.StandardSave

    def write(
        self, step: int, state: Mapping[str, Any], parts: Mapping[str, Any], digests: Callable[[], Sequence[Any]]
    ) -> None:
        """Start to write a checkpoint. After the call, the arrays may be changed or donated.

        Args:
            state: nested dicts of arrays.
            parts: JSON values by name.
            digests: a function that waits for this process's digests and returns them as JSON types; called in the
                background.
        """
        items: dict[str, Any] = {name: ocp.args.JsonSave(part) for name, part in parts.items()}
        items |= {STATE: self._save(dict(state)), DIGESTS: _LaterSave(digests)}
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Wait until everything is written. Raises the error of a write that failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for all writes and end the threads."""
        self._manager.close()


def _handlers() -> Any:
    """The handlers for several processes, by item and arguments."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    of_state, of_parts = handler_of_state(), ocp.JsonCheckpointHandler()
    for args in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        registry.add(STATE, args, of_state)
    for args in (ocp.args.JsonSave, ocp.args.JsonRestore):
        registry.add(None, args, of_parts)
    registry.add(DIGESTS, _LaterSave, _LaterHandler())
    return registry


def read_part(folder: Any, step: int, name: str) -> Any:
    """Read one of the JSON values.

    Raises:
        OSError: the file is missing.
        ValueError: the file is damaged.
    """
    return json.loads((place(folder, step) / name / "metadata").read_text())


def has_part(folder: Any, step: int, name: str) -> bool:
    """Whether a checkpoint has a JSON value of this name."""
    return (place(folder, step) / name / "metadata").exists()


def read_digests(folder: Any, step: int) -> list[Any]:
    """Read the digests of all processes.

    Raises:
        OSError: a file is missing.
        ValueError: a file is damaged.
    """
    files = sorted((place(folder, step) / DIGESTS).glob("process_*"))
    return [one for file in files for one in json.loads(file.read_text())]


def files_of(folder: Any, step: int, keys: Sequence[str]) -> list[str]:
    """The files that contain an array's values, as far as they can be determined."""
    at = str(place(folder, step) / STATE)
    root = tensorstore.KvStore.open(f"{at if '://' in at else f'file://{at}'}/").result()
    name = f"{'.'.join(keys)}/".encode()
    versions = tensorstore.ocdbt.dump(root).result()["versions"]
    found = _values(root, versions[-1]["root"]["location"], b"")
    return sorted({file for key, file in found if key.startswith(name)})


def _values(root: Any, location: str, prefix: bytes) -> Iterator[tuple[bytes, str]]:
    """The keys and files below a node of tensorstore's B-tree."""
    for entry in tensorstore.ocdbt.dump(root, location).result()["entries"]:
        if "indirect_value" in entry:
            _, *path, _, _ = entry["indirect_value"].split(":")
            yield prefix + entry["key"], f"{STATE}/{''.join(path)}"
        elif "location" in entry:
            yield from _values(root, entry["location"], prefix + entry["key"][: entry["subtree_common_prefix_length"]])


def read_state(folder: Any, step: int, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the arrays.

    Args:
        wanted: nested dicts of `jax.ShapeDtypeStruct`s with shardings; the same keys as were written.
    """
    at, target = place(folder, step) / STATE, dict(wanted)
    if jax.process_count() > 1:
        args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
        with ocp.Checkpointer(handler_of_state()) as checkpointer:
            return checkpointer.restore(at, args=args)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return checkpointer.restore(at, args=ocp.args.StandardRestore(target))
