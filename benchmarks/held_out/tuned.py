"""Read the list of models that were looked into. In: `tuned.toml`. Out: `Tuned`. Plain Python: no JAX."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.held_out.draw import NUM_MODELS
from benchmarks.held_out.seed import DIGITS

FILE = Path(__file__).with_name("tuned.toml")


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model that was looked into."""

    seed: str
    number: int
    reason: str


def tuned(file: Path = FILE) -> tuple[Tuned, ...]:
    """The models, in the order of the file.

    Raises:
        ValueError: an entry has no seed of eight hex digits, no number of a model, or no reason.
    """
    found = []
    for entry in tomllib.loads(file.read_text(encoding="utf-8")).get("model", []):
        seed, number, reason = (entry.get(name) for name in ("seed", "number", "reason"))
        if not re.fullmatch(rf"[0-9a-f]{{{DIGITS}}}", str(seed)):
            raise ValueError(f"{file.name}: seed {seed!r} is not {DIGITS} hex digits in quotes")
        if number not in range(1, NUM_MODELS + 1):
            raise ValueError(f"{file.name}: number {number!r} is not one of 1 to {NUM_MODELS}")
        if not reason:
            raise ValueError(f"{file.name}: model {number} of seed {seed} has no reason")
        found.append(Tuned(seed, number, reason))
    return tuple(found)
