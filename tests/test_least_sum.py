"""Sums of tables minimised over some of their axes, against the sum stored in full."""

import functools

import numpy as np
import pytest

from autopar.solve.least_sum import least_sum


def _tables(rng: np.random.Generator, shape: tuple[int, ...], number: int) -> list[np.ndarray]:
    tables = []
    for _ in range(number):
        has = rng.random(len(shape)) < 0.5
        table = rng.integers(0, 100, [n if h else 1 for n, h in zip(shape, has, strict=True)]).astype(float)
        table[rng.random(table.shape) < 0.05] = np.inf
        tables.append(table.T.copy().T if rng.random() < 0.5 else table)
    return tables


@pytest.mark.parametrize("shape", [(3, 4, 2), (7, 9, 1, 8, 6, 5), (40, 50, 45, 3), (300, 300), (2, 2, 2, 70_000)])
def test_equals_the_minimum_of_the_sum_stored_in_full(shape: tuple[int, ...]):
    rng = np.random.default_rng(0)
    for number in (1, 2, 3, 6):
        for _ in range(5):
            tables = _tables(rng, shape, number)
            total = functools.reduce(np.add, tables)
            kept = [axis for axis in range(len(shape)) if rng.random() < 0.5]
            gone = tuple(axis for axis in range(len(shape)) if axis not in kept)
            np.testing.assert_array_equal(least_sum(tables, kept), total.min(axis=gone, keepdims=True))


def test_minimises_over_all_axes_at_once_where_a_table_on_the_way_would_be_too_large():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 100, (2, 3, 3, 500, 1)), rng.integers(0, 100, (2, 3, 3, 1, 400))
    whole = rng.integers(0, 100, (2, 3, 1, 500, 400))
    tables = [t.astype(float) for t in (first, second, whole)]
    np.testing.assert_array_equal(
        least_sum(tables, [3, 4]), functools.reduce(np.add, tables).min(axis=(0, 1, 2), keepdims=True)
    )
