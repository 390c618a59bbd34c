"""Read and append the records of pieces.

In: a folder. Out: the newest record of each piece; a record appended to its file.

A record names the card, the number of GPUs, JAX's version and a hash of the sources: the package, its data, and what
measures. A piece is not measured again if a record agrees in all of these. The newest record is reported in any case.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from benchmarks.gpu.setting import Record
from benchmarks.machine import ROOT, fingerprint

FOLDER = ROOT / "benchmarks" / "results" / "gpu"
_MEASURES_WITH = (
    *("zoo/training.py", "zoo/diffusion.py", "zoo/expert_layer.py", "synthetic_vectors.py", "timing.py"),
    *("baselines/jitted.py", "baselines/pinned.py"),
)
#: Files of this folder that measure nothing.
_ONLY_READ = frozenset(["report.py", "aligned.py", "replayed.py"])

#: Piece, card, number of GPUs, JAX version, hash of the sources.
Key = tuple[str, str, int, str, str]


@functools.cache
def sources() -> str:
    """A hash of the measuring sources, taken at the start."""
    here = Path(__file__).parent
    own = sorted(path for path in here.glob("*.py") if path.name not in _ONLY_READ)
    return fingerprint(*own, *(here.parent / each for each in _MEASURES_WITH))


def key(record: Record) -> Key:
    """The key of a record."""
    host = record["host"]
    return record["piece"], host["card"], host["num_devices"], host["versions"]["jax"], record["sources"]


def read(folder: Path) -> list[Record]:
    """All records, oldest first in each file. A truncated line is left out."""
    found: list[Record] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def add(folder: Path, record: Record) -> None:
    """Append a record to its card's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(record['host'])}.jsonl"
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("ab") as file:
        file.write((b"\n" if cut_off else b"") + json.dumps(record).encode() + b"\n")


def slug(host: Record) -> str:
    """A file name for a host's GPUs.

    >>> slug({"card": "NVIDIA H100 80GB HBM3", "num_devices": 1})
    'nvidia-h100-80gb-hbm3-x1'
    """
    return f"{re.sub(r'[^a-z0-9]+', '-', host['card'].lower()).strip('-')}-x{host['num_devices']}"


def newest(records: list[Record]) -> dict[tuple[str, str, int], Record]:
    """For each piece, card and number of GPUs, the last measurement, or the last error if there is none."""
    found: dict[tuple[str, str, int], Record] = {}
    for record in records:
        of = key(record)[:3]
        if "found" in record or "found" not in found.get(of, {}):
            found[of] = record
    return found
