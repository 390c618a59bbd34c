"""All programs of a served model, kept on disk: a second start traces, plans, tries and compiles nothing.

In: what is served and where, as it was asked for. Out: the attention backend that was chosen, the plans and the compiled
programs, where an earlier start left them. The name of the file is a digest of all that they come from: sizes and options,
the devices, JAX's settings and compiler, and the code of autopar itself. What is damaged is said, and made anew; what others
may have written is never run.
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

#: How many models' programs a folder holds, some megabytes each; those that were used longest ago go first.
MOST_MODELS = 30
_FORMAT = "autopar-kept-programs 1"

_log = logging.getLogger(__name__)


class DamagedError(Exception):
    """A kept program that cannot be used, although the file is as it was written."""


@dataclass(frozen=True, slots=True)
class KeptProgram:
    """One program: a plan, and bytes."""

    plan: Plan
    mesh: Mesh
    data: bytes

    def compiled(self) -> Compiled:
        """Loaded on the devices.

        Raises:
            DamagedError: the bytes are no program.
        """
        try:
            return Compiled(self.plan, self.mesh, deserialized(self.data, list(self.mesh.devices.flat)))
        except ValueError as error:
            raise DamagedError(error) from error


@dataclass(frozen=True, slots=True)
class KeptPrograms:
    """Where the programs of one model are kept, if they are.

    Args:
        path: of the file; None where nothing is kept. mesh: that was given; None where it is made of the visible devices.
    """

    path: Path | None
    mesh: Mesh | None

    @classmethod
    def of(cls, folder: Path | None, served: Served, asked: Mapping[str, Any]) -> KeptPrograms:
        """The place of what is served.

        Args:
            folder: of the cache; None keeps nothing.
            served: its `attention` is left out: what was asked for is in `asked`.
            asked: how it is to be planned, as it was understood.
        """
        given = asked["mesh"] if isinstance(asked["mesh"], Mesh) else None
        if folder is None or not jax.config.jax_enable_compilation_cache or jax.process_count() > 1:
            return cls(None, given)
        devices = jax.devices() if given is None else list(given.devices.flat)
        mesh = str(asked["mesh"]) if given is None else (given.axis_names, given.devices.shape, str(given.axis_types))
        leaves = jax.tree_util.tree_flatten_with_path(served.params)[0]
        what = {
            **asked,
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
                folder / "served" / f"{digest_of(what)}-{planner_digest(('flax', 'ml_dtypes'))[0]}.programs", given
            )
        except UnkeyedError:
            return cls(None, given)

    def read(self) -> tuple[str, Layout[KeptProgram]] | None:
        """The attention backend and the programs; None where there are none, or none that can be used."""
        try:
            found = None if self.path is None else read_kept(self.path, _FORMAT, runs=True)
            return None if found is None else self._parsed(found[1])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, PlanFileError) as error:
            self.say_damaged(error)
            return None

    def _parsed(self, body: bytes) -> tuple[str, Layout[KeptProgram]]:
        line, _, blobs = body.partition(b"\n")
        about = json.loads(line)
        programs: dict[Key, KeptProgram] = {}
        for key, (plan_size, data_size) in _with_keys(about["programs"]):
            plan = Plan.from_json(json.loads(blobs[:plan_size]))
            mesh = self.mesh or execute.make_mesh(plan.mesh)
            programs[key] = KeptProgram(plan, mesh, blobs[plan_size : plan_size + data_size])
            blobs = blobs[plan_size + data_size :]
        return about["attention"], Layout(about["num_pages"], about["page_bytes"], programs)

    def say_damaged(self, error: Exception) -> None:
        """That what is there cannot be used, and why."""
        _log.warning("the programs kept in %s cannot be used (%s): they are made anew", self.path, error)

    def write(self, attention: str, layout: Layout[Compiled]) -> None:
        """Keep them; where that cannot be, it is said."""
        if self.path is None:
            return
        parts: list[tuple[bytes, bytes]] = []
        try:
            for program in layout.programs.values():
                parts.append((json.dumps(program.plan.to_json()).encode(), serialized(program.run)))
        except ValueError as error:
            _log.info("the compiled programs of the model are not kept: %s", error)
            return
        sizes = [[len(plan), len(data)] for plan, data in parts]
        keys = [key if key == "copy" else list(key) for key in layout.programs]
        about = {
            "attention": attention,
            "num_pages": layout.num_pages,
            "page_bytes": layout.page_bytes,
            "programs": list(zip(keys, sizes, strict=True)),
        }
        body = b"".join([json.dumps(about).encode(), b"\n", *(each for part in parts for each in part)])
        try:
            write_kept(self.path, _FORMAT, body, {}, MOST_MODELS)
        except OSError as error:
            _log.warning(
                "the compiled programs cannot be kept in %s (%s): give another folder as `cache=`, or `cache=False`",
                self.path.parent,
                error.strerror,
            )


def _with_keys(programs: Any) -> Iterator[tuple[Key, tuple[int, int]]]:
    for key, (plan_size, data_size) in programs:
        yield "copy" if key == "copy" else Shape(*key), (plan_size, data_size)
