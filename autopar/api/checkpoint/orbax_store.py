"""Write and read numbered checkpoints by orbax, each atomically.

In: a folder, nested dicts of arrays, and JSON values. Out: the same values, with arrays read straight into the
requested shardings: each process reads the shards of its own devices. Nothing here depends on plans. All processes of a
`jax.distributed` run must call it together, as orbax requires. Only this module and `orbax_arrays` import orbax.
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

#: What the arrays of a checkpoint are called in it, and what is known of them only while they are written; every other
#: part is JSON.
STATE, DIGESTS = "state", "digests"


def folder_of(directory: Any) -> Any:
    """Convert a folder to a path that orbax accepts: an absolute path, or a bucket's (`gs://...`)."""
    text = str(directory)
    return epath.Path(text) if "://" in text else epath.Path(Path(text).expanduser().absolute())


def steps(folder: Any) -> list[int]:
    """The numbers of the complete checkpoints, in order."""
    if not folder.is_dir():
        return []
    return sorted(found.step for found in ocp.step.standard_name_format().find_all(folder))


def place(folder: Any, step: int) -> Any:
    """The folder of one checkpoint."""
    return folder / str(step)


class _LaterHandler(ocp.AsyncCheckpointHandler):
    """Write JSON values of each process that are computed while the arrays are written."""

    async def async_save(self, directory: Any, args: _LaterSave) -> list[Any]:
        async def write() -> None:
            text = json.dumps(args.item())
            (directory / f"process_{jax.process_index()}").write_text(text)

        return [future.CommitFutureAwaitingContractedSignals(write(), name="autopar_digests")]

    def save(self, directory: Any, args: _LaterSave) -> None:
        raise NotImplementedError("it is always written in the background")

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise NotImplementedError("`read_digests` reads it")


@ocp.args.register_with_handler(_LaterHandler, for_save=True, for_restore=True)  # orbax asks for both
@dataclass
class _LaterSave(ocp.args.CheckpointArgs):
    item: Callable[[], Any]


class Writer:
    """Write checkpoints in the background. Opening a writer deletes what killed writers left, so a folder must have one
    writer at a time."""

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
        """Start to write a checkpoint. After it returns, the arrays may be changed or donated.

        Args:
            state: nested dicts of arrays.
            parts: JSON values by name.
            digests: returns this process's array digests as JSON types; it is called in the background and may block.
        """
        items: dict[str, Any] = {name: ocp.args.JsonSave(part) for name, part in parts.items()}
        items |= {STATE: self._save(dict(state)), DIGESTS: _LaterSave(digests)}
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Until all that was started is written. Raises what went wrong."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for all writes, and end the threads."""
        self._manager.close()


def _handlers() -> Any:
    """The registry of handlers for runs with several processes."""
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    of_state, of_parts = handler_of_state(), ocp.JsonCheckpointHandler()
    for args in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        found.add(STATE, args, of_state)
    for args in (ocp.args.JsonSave, ocp.args.JsonRestore):
        found.add(None, args, of_parts)
    found.add(DIGESTS, _LaterSave, _LaterHandler())
    return found


def read_part(folder: Any, step: int, name: str) -> Any:
    """Read a JSON value of a checkpoint.

    Raises:
        OSError: it does not exist.
        ValueError: it is damaged.
    """
    return json.loads((place(folder, step) / name / "metadata").read_text())


def has_part(folder: Any, step: int, name: str) -> bool:
    """Whether a checkpoint has a JSON value of this name."""
    return (place(folder, step) / name / "metadata").exists()


def read_digests(folder: Any, step: int) -> list[Any]:
    """Read the array digests of all processes.

    Raises:
        OSError: they do not exist.
        ValueError: it is damaged.
    """
    files = sorted((place(folder, step) / DIGESTS).glob("process_*"))
    return [one for file in files for one in json.loads(file.read_text())]


def files_of(folder: Any, step: int, keys: Sequence[str]) -> list[str]:
    """The files with the values of an array, as far as they can be found."""
    at = str(place(folder, step) / STATE)
    root = tensorstore.KvStore.open(f"{at if '://' in at else f'file://{at}'}/").result()
    name = f"{'.'.join(keys)}/".encode()
    versions = tensorstore.ocdbt.dump(root).result()["versions"]
    found = _values(root, versions[-1]["root"]["location"], b"")
    return sorted({file for key, file in found if key.startswith(name)})


def _values(root: Any, location: str, prefix: bytes) -> Iterator[tuple[bytes, str]]:
    """Keys and files below a node of tensorstore's B-tree."""
    for entry in tensorstore.ocdbt.dump(root, location).result()["entries"]:
        if "indirect_value" in entry:
            _, *path, _, _ = entry["indirect_value"].split(":")
            yield prefix + entry["key"], f"{STATE}/{''.join(path)}"
        elif "location" in entry:
            yield from _values(root, entry["location"], prefix + entry["key"][: entry["subtree_common_prefix_length"]])


def read_state(folder: Any, step: int, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the arrays.

    Args:
        wanted: nested dicts of `jax.ShapeDtypeStruct`s with shardings; the keys must be those that were written.
    """
    at, target = place(folder, step) / STATE, dict(wanted)
    if jax.process_count() > 1:
        args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
        with ocp.Checkpointer(handler_of_state()) as reader:
            return reader.restore(at, args=args)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        return reader.restore(at, args=ocp.args.StandardRestore(target))
