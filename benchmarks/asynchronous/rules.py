"""Count versions, delays and idle time of every asynchronous rule."""

from __future__ import annotations

from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.versions import delays_of, most_corrected, most_kept, versions_read

Row = dict[str, str | float]

UPDATES, MOST_IDLE = 200, 0.03


def rows() -> list[Row]:
    """A row for each rule and number of stages."""
    found: list[Row] = []
    for name, kind in ASYNCHRONOUS.items():
        for p in range(2, 9):
            m = p if kind.reads.needs_filled else 1
            schedule = build(kind, p, m, num_updates=UPDATES)
            reads = versions_read(schedule, kind.reads, m)
            delays = [
                [n for t, n in delays_of(reads, m).items() if t.stage == s and t.microbatch >= m * p] for s in range(p)
            ]
            idle = _idle(kind, p, m)
            found.append(
                {
                    "rule": name,
                    "stages": p,
                    "microbatches per update": m,
                    "copies": ", ".join(map(str, most_kept(schedule, reads))),
                    "delay": ", ".join(
                        f"{min(one)}" if min(one) == max(one) else f"{min(one)}-{max(one)}" for one in delays
                    ),
                    "corrected": ", ".join(map(str, most_corrected(schedule, reads))) if kind.reads.corrects else "",
                    "idle after filling": idle,
                    "holds": idle <= MOST_IDLE,
                }
            )
    return found


def _idle(kind: ScheduleKind, p: int, m: int) -> float:
    """The idle fraction of the time that one more batch takes."""
    durations = {"forward": 1, "backward": 2, "update": 0}
    ends = [simulate(build(kind, p, m, num_updates=n), lambda t: durations[t.phase]).makespan_s for n in (30, 31)]
    return 1 - 3 * m / (ends[1] - ends[0])
