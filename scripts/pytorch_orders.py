"""Print digests of the orders that PyTorch's schedule generators give, for `tests/test_schedules.py`.

Usage: `python scripts/pytorch_orders.py`, where PyTorch 2.9 and autopar are installed. A whole backward pass counts as its
input part and its weight part, and a pair of tasks as one after the other.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

#: Schedule, PyTorch's class, and numbers of stages on each submesh.
CLASSES = {
    "interleaved": ("ScheduleInterleaved1F1B", (2, 3, 4)),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", (2, 3, 4)),
    "zb-v": ("ScheduleZBVZeroBubble", (2,)),
    "dualpipe-v": ("ScheduleDualPipeV", (2,)),
}
SUBMESHES = range(2, 17)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 24, 31, 32, 48, 64)
_LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def shapes(name: str) -> Iterator[tuple[int, int, int]]:
    """The numbers of submeshes, microbatches and stages on each submesh for which PyTorch has the schedule."""
    for p in SUBMESHES:
        for m in MICROBATCHES:
            is_whole = m % max(1, m // p) == 0
            if (name == "dualpipe-v" and m < 2 * p) or (name.startswith("interleaved") and not is_whole):
                continue
            yield from ((p, m, v) for v in CLASSES[name][1])


def digest(orders: Iterable[str]) -> str:
    """The digest of the tasks of all submeshes of all shapes, as text."""
    return hashlib.sha256("\n".join(orders).encode()).hexdigest()[:16]


def main() -> None:
    """Print the digest of each schedule."""
    for name in CLASSES:
        print(name, digest(text for shape in shapes(name) for text in _orders(name, *shape)))


def _orders(name: str, p: int, m: int, v: int) -> Iterator[str]:
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")

    kind = getattr(schedules, CLASSES[name][0])
    one = object.__new__(kind)  # its constructor wants stages of a model
    one.pp_group_size, one._n_microbatches, one.n_local_stages = p, m, v
    one._num_stages = one.num_stages = p * v
    one.number_of_rounds = max(1, m // p)
    one.microbatches_per_round = m // one.number_of_rounds
    for rank in range(p):
        tasks = [task for action in one._calculate_single_rank_operations(rank) for task in _tasks(action)]
        yield " ".join(_split(task) if name != "interleaved" else task for task in tasks)


def _tasks(action: Any) -> Iterator[str]:
    if action is not None and action.sub_actions:
        yield from (task for one in action.sub_actions for task in _tasks(one))
    elif action is not None:
        yield f"{_LETTERS[action.computation_type.name]}{action.stage_index}.{action.microbatch_index}"


def _split(task: str) -> str:
    return f"I{task[1:]} W{task[1:]}" if task.startswith("B") else task


if __name__ == "__main__":
    main()
