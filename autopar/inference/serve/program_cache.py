"""Cache the compiled programs of a served model on disk, so that the next start traces, plans and compiles nothing.

In: the model, its sizes, and the planning options. Out: the selected attention backend, the plans and the compiled programs
of an earlier start, if there was one. The file's name is a digest of every input: sizes and options, the devices, JAX's
settings and compiler, and autopar's own code. A damaged file is reported, and its programs are compiled again. A file that
other users could have written is never loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.api.planned_function import Compiled
from autopar.errors import PlanFileError
from autopar.inference.schedule.requests import Shape
from autopar.inference.serve.layout import Key, Layout, Served
from autopar.jax_interop.serialized_executable import deserialized, place_key, serialized
from autopar.planner.cache.key import UnkeyedError, digest_of, planner_digest
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.system.checksummed_file import read_kept, write_kept

#: The number of models whose programs a folder holds, some megabytes each. The least recently used are deleted first.
MAX_MODELS = 30
_FORMAT = "autopar-kept-programs 1"

_log = logging.getLogger(__name__)


class DamagedError(Exception):
    """A cached program that cannot be loaded, although its file has the right checksum."""


@dataclass(frozen=True, slots=True)
class CachedProgram:
    """One cached program: its plan, and the serialized executable."""

    plan: Plan
    mesh: Mesh
    data: bytes

    def compiled(self) -> Compiled:
        """Load the program on the devices.

        Raises:
            DamagedError: the bytes are not a program.
        """
        try:
            return Compiled(self.plan, self.mesh, deserialized(self.data, list(self.mesh.devices.flat)))
        except ValueError as error:
            raise DamagedError(error) from error


@dataclass(frozen=True, slots=True)
class ProgramCache:
    """The cache file of one model's programs.

    Args:
        path: the file; None if nothing is cached.
        mesh: the user's mesh; None if the mesh is made of the visible devices.
    """

    path: Path | None
    mesh: Mesh | None

    @classmethod
    def of(cls, folder: Path | None, served: Served, options: Mapping[str, Any]) -> ProgramCache:
        """The cache file of a served model.

        Args:
            folder: the folder of the cache; None turns it off.
            served: the model and its sizes. Its `attention` is not part of the key: the requested backend is in `options`.
            options: the planning options, with defaults filled in.
        """
        given = options["mesh"] if isinstance(options["mesh"], Mesh) else None
        if folder is None or not jax.config.jax_enable_compilation_cache or jax.process_count() > 1:
            return cls(None, given)
        devices = jax.devices() if given is None else list(given.devices.flat)
        mesh = str(options["mesh"]) if given is None else (given.axis_names, given.devices.shape, str(given.axis_types))
        leaves = jax.tree_util.tree_flatten_with_path(served.params)[0]
        inputs = {
            **options,
            "mesh": mesh,
            "config": served.model.config,
            "params": [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in leaves],
            "options": served.options,
            "page_size": served.page_size,
            "dtype": str(jax.numpy.dtype(served.dtype)),
            "place": place_key(devices),
        }
        try:
            return cls(
                folder / "served" / f"{digest_of(inputs)}-{planner_digest(('flax', 'ml_dtypes'))[0]}.programs", given
            )
        except UnkeyedError:
            return cls(None, given)

    def read(self) -> tuple[str, Layout[CachedProgram]] | None:
        """Read the attention backend and the programs; None if there are none, or none that can be used."""
        try:
            found = None if self.path is None else read_kept(self.path, _FORMAT, runs=True)
            return None if found is None else self._parsed(found[1])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, PlanFileError) as error:
            self.warn_damaged(error)
            return None

    def _parsed(self, body: bytes) -> tuple[str, Layout[CachedProgram]]:
        line, _, blobs = body.partition(b"\n")
        header = json.loads(line)
        programs: dict[Key, CachedProgram] = {}
        for key, (plan_size, data_size) in _with_keys(header["programs"]):
            plan = Plan.from_json(json.loads(blobs[:plan_size]))
            mesh = self.mesh or execute.make_mesh(plan.mesh)
            programs[key] = CachedProgram(plan, mesh, blobs[plan_size : plan_size + data_size])
            blobs = blobs[plan_size + data_size :]
        return header["attention"], Layout(header["num_pages"], header["page_bytes"], programs)

    def warn_damaged(self, error: Exception) -> None:
        """Log why the cached programs cannot be used."""
        _log.warning("the programs cached in %s cannot be used (%s): they are compiled again", self.path, error)

    def write(self, attention: str, layout: Layout[Compiled]) -> None:
        """Write the programs. A failure is logged."""
        if self.path is None:
            return
        parts: list[tuple[bytes, bytes]] = []
        try:
            for program in layout.programs.values():
                parts.append((json.dumps(program.plan.to_json()).encode(), serialized(program.run)))
        except ValueError as error:
            _log.info("the compiled programs of the model are not cached: %s", error)
            return
        sizes = [[len(plan), len(data)] for plan, data in parts]
        keys = [list(key) if isinstance(key, Shape) else key for key in layout.programs]
        header = {
            "attention": attention,
            "num_pages": layout.num_pages,
            "page_bytes": layout.page_bytes,
            "programs": list(zip(keys, sizes, strict=True)),
        }
        body = b"".join([json.dumps(header).encode(), b"\n", *(each for part in parts for each in part)])
        try:
            write_kept(self.path, _FORMAT, body, {}, MAX_MODELS)
        except OSError as error:
            _log.warning(
                "the compiled programs cannot be cached in %s (%s): give another folder as `cache=`, or `cache=False`",
                self.path.parent,
                error.strerror,
            )


def _with_keys(programs: Any) -> Iterator[tuple[Key, tuple[int, int]]]:
    for key, (plan_size, data_size) in programs:
        yield Shape(*key) if isinstance(key, list) else key, (plan_size, data_size)
