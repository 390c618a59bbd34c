"""Split a plan's gain over sharding by hand into devices, combiner, kernels and sharding.

In: the rows of one model in one setting. Out: `Split`. Each factor compares the fastest of two sets of programs, of which
the second has one thing more; `parts.py` lists the sets. Plain Python: no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

#: Memory of a GPU; a program that needs more does not run.
MEMORY_BYTES = 80e9
OWN = "autopar"
#: Ways to write a program by hand; rows of the earlier version have experts' programs.
HAND = ("user", "expert", "variant", "tuned")
FACTORS = ("sharding", "kernels", "combiner", "devices")


@dataclass(frozen=True, slots=True)
class Split:
    """Factors of the gain over the best user's program on all GPUs; their product is the gain.

    Args:
        over_tuned: best tuned expert's seconds over the plan's: the gain that is left when a hand has everything.
    """

    sharding: float
    kernels: float
    combiner: float
    devices: float
    over_tuned: float

    @property
    def gain(self) -> float:
        return self.sharding * self.kernels * self.combiner * self.devices


def split(case: Sequence[Row]) -> Split | None:
    """The split of one case; None if the plan or all programs by hand lack a time or the memory."""
    own, sets = best(case, OWN), [_fastest(case, allowed) for allowed in _SETS]
    if own is None or math.inf in sets[1:]:
        return None
    on_all, users, constrained, combined, tuned = sets
    return Split(
        sharding=users / constrained * tuned / own["step_s"],
        kernels=combined / tuned,
        combiner=constrained / combined,
        devices=1.0 if on_all == math.inf else on_all / users,
        over_tuned=tuned / own["step_s"],
    )


def mean(splits: Sequence[Split]) -> Split:
    """Geometric means of every factor."""

    def of(name: str) -> float:
        return math.exp(sum(math.log(getattr(one, name)) for one in splits) / len(splits))

    return Split(**{name: of(name) for name in (*FACTORS, "over_tuned")})


def best(case: Iterable[Row], *ways: str) -> Row | None:
    """The fastest program that fits, among those written in one of these ways."""
    of_these = [row for row in case if row["way"] in ways and fits(row)]
    return min(of_these, key=lambda row: (row["step_s"], row["way"] != "tuned"), default=None)


def fits(row: Row) -> bool:
    """Whether the program runs, and its time is known."""
    return not row["failed"] and row["step_s"] is not None and row["peak_bytes"] <= MEMORY_BYTES


def is_current(case: Iterable[Row]) -> bool:
    """Whether the rows are of this version: timed by the replay, with tuned recipes."""
    return any("kind" in row for row in case)


def variant_text(row: Row) -> str:
    """What a program by hand has besides the user's shardings."""
    parts = [name.replace("_", " ") for name in ("constraints", "kernels", "early_reductions") if row.get(name)]
    parts += [f"combine {row['limit_mib']} MiB"] if row.get("limit_mib") else []
    return ", ".join(parts) or "as the user's"


def _fastest(case: Iterable[Row], allowed: tuple[str, ...]) -> float:
    """Seconds of the fastest program by hand that has nothing but what is allowed; infinity if there is none."""
    rows = [row for row in case if row["way"] in HAND and fits(row) and _extras(row) <= set(allowed)]
    return min((row["step_s"] for row in rows), default=math.inf)


def _extras(row: Row) -> set[str]:
    """What a program has besides a user's shardings on all GPUs."""
    flags = ("constraints", "limit_mib", "kernels")
    return {flag for flag in flags if row.get(flag)} | ({"devices"} if row["gpus_used"] < row["gpus"] else set())


_SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("devices",),
    ("devices", "constraints"),
    ("devices", "constraints", "limit_mib"),
    ("devices", "constraints", "limit_mib", "kernels"),
)
