"""Store compiled steps with their measured kernels, so that prices can be checked later without a GPU.

In: a model's name, its optimized HLO, and the kernels of one step in order. Out: a file for each card and model in
`results/gpu/programs/`, and the program read back.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import records
from benchmarks.gpu.setting import Record

_SUFFIX = ".json.gz"
#: What of a host's record is stored.
_OF_HOST = ("card", "num_devices", "profile", "driver", "versions", "date")


@dataclass(frozen=True, slots=True)
class Program:
    """One compiled step.

    Args:
        host: card, number of GPUs, profile, driver, versions and date of the measurement.
        model: name of the model.
        hlo: text of the optimized, scheduled HLO.
        kernels: name and mean seconds of each kernel of a step, in order of execution.
    """

    host: Record
    model: str
    hlo: str = field(repr=False)
    kernels: Sequence[tuple[str, float]] = field(repr=False)


def folder(results: Path) -> Path:
    """The folder of the programs in a folder of results."""
    return results / "programs"


def stored(results: Path = records.FOLDER) -> list[str]:
    """The names of all stored programs, `CARD-xNUMBER/MODEL`."""
    paths = sorted(folder(results).glob(f"*/*{_SUFFIX}"))
    return [path.relative_to(folder(results)).as_posix().removesuffix(_SUFFIX) for path in paths]


def path_of(name: str, results: Path = records.FOLDER) -> Path:
    """The file of a stored program."""
    return folder(results) / f"{name}{_SUFFIX}"


def save(program: Program, results: Path) -> Path:
    """Store a program in place of the earlier one of its card and model."""
    path = path_of(f"{records.slug(program.host)}/{program.model}", results)
    path.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = asdict(program) | {"host": {key: program.host[key] for key in _OF_HOST}}
    data["hlo"] = without_sources(program.hlo)
    data["kernels"] = [(name, float(f"{seconds:.6g}")) for name, seconds in program.kernels]
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(json.dumps(data).encode(), 9, mtime=0))
    part.replace(path)
    return path


def without_sources(hlo: str) -> str:
    """The text without the stack frames of instructions: paths of the measuring host, which no price needs."""
    return re.sub(r" stack_frame_id=\d+", "", re.sub(r"\nFileNames\n.*?\n\n\n", "\n\n", hlo, count=1, flags=re.DOTALL))


def load(path: Path) -> Program:
    """Read a stored program."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    return Program(**data | {"kernels": [(name, seconds) for name, seconds in data["kernels"]]})
