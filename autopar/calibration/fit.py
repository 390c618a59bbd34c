"""Coefficients from timings: least squares in relative error, with the error that it has on samples it has not seen.

In: `Sample`s, each a time and the counts it is made of (launches, FLOPs, bytes, hops). Out: a `Fit`, seconds per
count. Numbers only: no JAX, no device. A time is a sum of non-negative parts, so no coefficient is negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

#: Parts that the samples are divided into for the cross-validation.
NUM_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One thing that was timed.

    Args:
        group: what it is fitted with, e.g. `matmul float32` or `all-reduce`.
        name: what it is, e.g. `512x512x512`.
        counts: how much of each term one repetition takes, e.g. `{"launch": 1, "flops": 2.7e8, "bytes": 3.1e6}`.
        seconds: of one repetition; the median of the runs, less the dispatch of the program.
        spread: interquartile range of the runs over their median.
        repetitions: how often one run repeats it.
        runs_s: each run as the clock showed it, dispatch included.
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
    """Seconds of a group as a sum of coefficient x count.

    Args:
        seconds_per: coefficient of each term, at least 0.
        mean_error, worst_error: relative, of samples that the fit had not seen (5-fold cross-validation); None where
            there are too few samples to leave any out.
        median_spread: the median spread of the samples, below which no error can be expected to fall.
    """

    group: str
    seconds_per: Mapping[str, float] = field(hash=False)
    num_samples: int
    mean_error: float | None
    worst_error: float | None
    median_spread: float

    def seconds(self, counts: Mapping[str, float]) -> float:
        """Seconds that the fit predicts."""
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
    """Relative error of each sample under the fit of the other folds."""
    # A fold takes a fifth of the samples away, and what remains must still settle every coefficient.
    if len(seconds) < max(NUM_FOLDS, 2 * counts.shape[1]):
        return None
    order = np.random.default_rng(0).permutation(len(seconds))
    errors = np.empty(len(seconds))
    for held in np.array_split(order, NUM_FOLDS):
        seen = np.setdiff1d(order, held)
        predicted = counts[held] @ _solve(counts[seen], seconds[seen])
        errors[held] = np.abs(predicted / seconds[held] - 1)
    return errors


def _solve(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients of at least 0 with the least sum of squared relative errors.

    With a handful of terms every subset can be tried, which is exact: at the optimum the positive coefficients solve
    the unconstrained problem of their own columns.
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
