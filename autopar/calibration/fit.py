"""Fit cost coefficients to timings by non-negative least squares of relative errors, with cross-validation.

In: `Sample`s, each a time and its counts (launches, FLOPs, bytes, hops). Out: a `Fit`, seconds per count. No JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

#: Number of folds of the cross-validation.
NUM_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing.

    Args:
        group: samples of a group are fitted together, e.g. `matmul float32` or `all-reduce`.
        name: size of the operation, e.g. `512x512x512`.
        counts: counts of one repetition, e.g. `{"launch": 1, "flops": 2.7e8, "bytes": 3.1e6}`.
        seconds: seconds of one repetition: the median of the runs, without the dispatch of the program.
        spread: interquartile range of the runs divided by their median.
        repetitions: repetitions of the operation in one run.
        runs_s: wall-clock seconds of each run, with dispatch.
    """

    group: str
    name: str
    counts: Mapping[str, float] = field(hash=False)
    seconds: float
    spread: float = 0.0
    repetitions: int = 1
    runs_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """A linear model of a group's seconds: the sum of coefficient x count.

    Args:
        seconds_per: non-negative coefficient of each term.
        mean_error, worst_error: relative error on held-out samples (5-fold cross-validation); None for too few samples.
        median_spread: median spread of the samples, a lower bound of the error to expect.
    """

    group: str
    seconds_per: Mapping[str, float] = field(hash=False)
    num_samples: int
    mean_error: float | None
    worst_error: float | None
    median_spread: float

    def seconds(self, counts: Mapping[str, float]) -> float:
        """The predicted seconds."""
        return sum(each * counts.get(term, 0.0) for term, each in self.seconds_per.items())


def fit(group: str, samples: Sequence[Sample], terms: Sequence[str]) -> Fit | None:
    """Fit `samples` by the `terms` of their counts; None where there are fewer samples than terms.

    >>> times = [Sample("copy", str(n), {"launch": 1, "bytes": n}, 1e-6 + n / 1e9) for n in (1e3, 1e4, 1e5, 1e6, 1e7)]
    >>> found = fit("copy", times, ("launch", "bytes"))
    >>> f"{found.seconds_per['launch']:.1e} {1 / found.seconds_per['bytes']:.1e} {found.mean_error:.3f}"
    '1.0e-06 1.0e+09 0.000'
    """
    if len(samples) < len(terms):
        return None
    counts = np.array([[sample.counts.get(term, 0.0) for term in terms] for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples], dtype=float)
    errors = _held_out_errors(counts, seconds)
    return Fit(
        group=group,
        seconds_per=dict(zip(terms, map(float, _solve(counts, seconds)), strict=True)),
        num_samples=len(samples),
        mean_error=None if errors is None else float(errors.mean()),
        worst_error=None if errors is None else float(errors.max()),
        median_spread=float(np.median([sample.spread for sample in samples])),
    )


def _held_out_errors(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray | None:
    """Relative error of each sample under the fit of the other folds; None for too few samples."""
    # The remaining four fifths of the samples have to determine every coefficient.
    if len(seconds) < max(NUM_FOLDS, 2 * counts.shape[1]):
        return None
    order = np.random.default_rng(0).permutation(len(seconds))
    errors = np.empty(len(seconds))
    for held_out in np.array_split(order, NUM_FOLDS):
        training = np.setdiff1d(order, held_out)
        predicted = counts[held_out] @ _solve(counts[training], seconds[training])
        errors[held_out] = np.abs(predicted / seconds[held_out] - 1)
    return errors


def _solve(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The non-negative coefficients with the least sum of squared relative errors.

    The search over all subsets of the few terms is exact: at the optimum, the positive coefficients solve the
    unconstrained problem in their own columns.
    """
    relative = counts / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(float).tiny)
    best, least = np.zeros(counts.shape[1]), np.inf
    for size in range(1, counts.shape[1] + 1):
        for chosen in itertools.combinations(range(counts.shape[1]), size):
            columns = list(chosen)
            found = np.linalg.lstsq(relative[:, columns] / scale[columns], np.ones(len(seconds)), rcond=None)[0]
            if (found < 0).any():
                continue
            coefficients = np.zeros(counts.shape[1])
            coefficients[columns] = found / scale[columns]
            loss = float(np.square(relative @ coefficients - 1).sum())
            if loss < least:
                best, least = coefficients, loss
    return best
