"""Draw the pictures of `docs/schedules.md`, into `docs/images/schedules/`.

Usage, from the repository root: `.venv/bin/python scripts/draw_schedules.py`. `tests/test_schedules.py` fails if the
pictures there differ from this script's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopar.pipeline.draw.svg import timeline_svg
from autopar.pipeline.schedule.kind import PipelineShape
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import SCHEDULES, build, unmet
from autopar.pipeline.schedule.tasks import Schedule, Task
from autopar.pipeline.schedule.token_slices import terapipe

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "schedules"
NUM_SUBMESHES, NUM_MICROBATCHES, VIRTUAL, NUM_SLICES = 4, 8, 2, 4
#: Seconds of a submesh's work on one microbatch. A backward pass is the sum of its two parts.
SECONDS = {"forward": 1e-3, "backward": 2e-3, "input": 1e-3, "weight": 1e-3, "update": 1e-3}


def pictures() -> dict[str, str]:
    """An SVG for each schedule's name, all for the same work."""
    drawn = {}
    for name, kind in SCHEDULES.items():
        one_each = unmet(kind, PipelineShape(NUM_SUBMESHES, NUM_MICROBATCHES)) is None
        virtual = 1 if one_each else VIRTUAL
        drawn_kind = terapipe((1,) * NUM_SLICES) if kind.token_slices else kind
        built = build(drawn_kind, NUM_SUBMESHES, NUM_MICROBATCHES, virtual=virtual)

        def seconds(task: Task, virtual: int = virtual, built: Schedule = built) -> float:
            return SECONDS[task.phase] / virtual * (1 if task.phase == "update" else built.share(task))

        drawn[name] = timeline_svg(replace(simulate(built, seconds), title=name))
    return drawn


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
