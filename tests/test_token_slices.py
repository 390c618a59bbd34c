"""TeraPipe's slices of tokens: their choice against brute force, and their order."""

import itertools
import math

import numpy as np
import pytest

from autopar.errors import ScheduleError
from autopar.pipeline.partition.token_slices import best_slices, step_s
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Task
from autopar.pipeline.schedule.token_slices import terapipe


def _random_table(rng: np.random.Generator, num_units: int) -> np.ndarray:
    """Seconds of slices, from few distinct values so that there are ties, with some slices left out."""
    table = rng.integers(1, 30, (num_units + 1, num_units + 1)).astype(float)
    table[rng.random(table.shape) < 0.1] = math.inf
    return table


def _by_brute_force(tables: dict[int, np.ndarray], num_examples: int, num_stages: int) -> float:
    """The least T over all microbatches and all slices of each."""
    best = math.inf
    for count in range(1, num_examples + 1):
        for sizes in itertools.combinations_with_replacement(sorted(tables), count):
            if sum(sizes) != num_examples:
                continue
            ways = []
            for size in sizes:
                num_units = len(tables[size]) - 1
                cuts = itertools.product((False, True), repeat=num_units - 1)
                bounds = [(0, *(i + 1 for i, cut in enumerate(one) if cut), num_units) for one in cuts]
                ways.append([[tables[size][pair] for pair in itertools.pairwise(one)] for one in bounds])
            for way in itertools.product(*ways):
                every = [t for parts in way for t in parts]
                best = best if math.isinf(max(every)) else min(best, step_s(every, num_stages))
    return best


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_dynamic_program_equals_brute_force(first: int):
    """On 200 random tables, of one to four token units, one or two sizes of microbatches and one to twelve stages."""
    for seed in range(first, first + 50):
        rng = np.random.default_rng(seed)
        num_units, num_examples = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        sizes = sorted({1, int(rng.integers(1, num_examples + 1))}) if seed % 5 else [int(rng.integers(1, 3))]
        tables = {size: _random_table(rng, num_units) for size in sizes}
        num_stages = int(rng.integers(1, 13))
        found, truth = best_slices(tables, num_examples, num_stages), _by_brute_force(tables, num_examples, num_stages)
        assert (math.inf if found is None else found.seconds) == truth, seed
        if found is not None:
            assert sum(size for size, _ in found.microbatches) == num_examples
            assert all(ends[-1] == num_units for _, ends in found.microbatches)


@pytest.mark.parametrize("num_stages", [1, 2, 7])
def test_the_dynamic_program_prices_what_the_simulator_runs(num_stages: int):
    """T is the simulated makespan of parts of unequal seconds, forward and backward apart."""
    seconds = [3, 1, 2, 3, 1, 2]  # two microbatches of three slices
    kind = terapipe((2, 1, 2))
    timeline = simulate(build(kind, num_stages, 2), lambda task: seconds[task.microbatch] * (task.phase != "update"))
    assert timeline.makespan_s == 2 * step_s(seconds, num_stages)


@pytest.mark.parametrize(("p", "m", "n"), list(itertools.product((2, 3, 8), (1, 2, 5), (1, 2, 4))))
def test_the_bubble_of_equal_slices(p: int, m: int, n: int):
    timeline = simulate(
        build(terapipe((4,) * n), p, m), lambda task: {"forward": 1, "backward": 2, "update": 0}[task.phase]
    )
    assert timeline.makespan_s == 3 * (n * m + p - 1)


def test_slices_wait_for_each_other():
    needs = build(terapipe((1, 2, 3)), 2, 2).needs
    assert Task(1, 0, "forward") in needs[Task(1, 1, "forward")]
    assert Task(1, 2, "forward") not in needs[Task(1, 3, "forward")]  # another microbatch
    assert Task(0, 2, "backward") in needs[Task(0, 1, "backward")]
    assert Task(0, 3, "backward") not in needs[Task(0, 2, "backward")]


def test_a_number_of_slices_that_is_not_positive():
    with pytest.raises(ScheduleError, match=r"slices of \[4, 0\] tokens: give one slice or more"):
        terapipe((4, 0))
