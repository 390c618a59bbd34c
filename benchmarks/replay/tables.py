"""GEMM and collective formulas of the replay compared with XLA's measured tables, on shapes that the fit has not seen.

Five folds. A fold holds out whole shapes: a GEMM's (batch, m, n, k) with all its dtypes; a collective's size in bytes
with all its kinds and numbers of devices. The constants are fitted to the other folds, and no row is looked up.

Targets: median error at most 10 %, nine of ten rows below 30 %, Kendall's tau at least 0.9.

Two notes on the tables themselves, each with its evidence in the rows:

- **f8 of sm_90.** Bounded by an H100's peak, the formula misses the large GEMMs by up to a factor of two: the table is
  faster than the datasheet's dense peak. Fitted with the peaks and the memory bandwidth of a B200 the same rows agree
  as well as any other column. So the column is not an H100's, and the replay takes no constant from it. Both are shown.
- **Small collectives.** Below 1 MiB the table's times jump by up to ten times between neighbouring sizes, down as often
  as up. "Contradicted" rows are those that must be left out, kind by kind and group by group, for any time that grows
  with the bytes to be within 10 % of the rest. All rows are counted first; the rest is shown next to it. The
  row "growing curves" is a reference: a curve of its own for each kind and group, bound only to grow with the bytes, and
  fitted to the very rows that it is compared with.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import kendalltau

from autopar.xla_replay import rates as replay_rates
from autopar.xla_replay.rates import ReplayRates
from benchmarks.replay import fit, xla_tables
from benchmarks.replay.fit import Sample
from benchmarks.replay.xla_tables import Collective

NUM_FOLDS = 5
MEDIAN_TARGET, NINTH_DECILE_TARGET, TAU_TARGET = 0.1, 0.3, 0.9
#: How near a growing time must be to a row that is not contradicted.
_TOLERANCE = 0.1
_LARGE_BYTES = 1 << 20

Record = dict[str, Any]
#: Measured and predicted seconds.
Pairs = tuple[Any, Any]


def rows() -> list[Record]:
    """One row for each part of the tables."""
    binary = xla_tables.plugin()
    found: list[Record] = []
    gemms: list[Pairs] = []
    every_gemm: list[Pairs] = []
    collectives: list[Pairs] = []
    consistent: list[Pairs] = []
    for profile, device in fit.DEVICES.items():
        rates = replay_rates.load(profile)
        per_dtype = _gemms(rates, xla_tables.read_gemms(binary, device))
        found += [_row("GEMM", profile, name, pairs) for name, pairs in per_dtype.items()]
        sound = [pairs for name, pairs in per_dtype.items() if name in fit.FITTED_DTYPES[profile]]
        found.append(_row("GEMM", profile, f"all of {', '.join(fit.FITTED_DTYPES[profile])}", _joined(sound)))
        whole = _joined([pairs for name, pairs in per_dtype.items() if name != AS_B200])
        if len(sound) < len(per_dtype):
            found.append(_row("GEMM", profile, "every row", whole))
        gemms += sound
        every_gemm.append(whole)
        samples = fit.collective_samples(xla_tables.read_collectives(binary, device))
        pairs = held_out(samples, lambda train, test, rates=rates: _collectives(rates, train, test))
        kept = consistent_rows(samples)
        found += [
            _row("collective", profile, kind, _chosen(pairs, [sample.kind == kind for sample in samples]))
            for kind in sorted({sample.kind for sample in samples})
        ]
        found.append(_row("collective", profile, "every row", pairs))
        found.append(_row("collective", profile, "growing curves, not held out", _growing_curves(samples)))
        found.append(_row("collective", profile, "without contradicted rows", _chosen(pairs, kept)))
        large = [sample.shape[0] >= _LARGE_BYTES for sample in samples]
        found.append(_row("collective", profile, "1 MiB and more", _chosen(pairs, large)))
        collectives.append(pairs)
        consistent.append(_chosen(pairs, kept))
    found.append(_row("GEMM", "both", "all fitted dtypes", _joined(gemms)))
    found.append(_row("GEMM", "both", "every row", _joined(every_gemm)))
    found.append(_row("collective", "both", "every row", _joined(collectives)))
    found.append(_row("collective", "both", "without contradicted rows", _joined(consistent)))
    return found


#: Rows of the f8 column of sm_90.
BOUNDED, AS_B200 = "f8, at most an H100's peak", "f8, with a B200's peaks"


def _gemms(rates: ReplayRates, table: Sequence[xla_tables.Gemm]) -> dict[str, Pairs]:
    """Held-out predictions by dtype; of the f8 column of sm_90 in two ways."""
    found = {}
    for dtype in fit.GEMM_DTYPES:
        samples = fit.gemm_samples(table, dtype)
        if dtype in fit.FITTED_DTYPES[rates.name]:
            found[dtype] = held_out(samples, lambda train, test, dtype=dtype: _gemm(rates, dtype, train, test))
            continue
        for name, profile in ((BOUNDED, rates.name), (AS_B200, "b200")):
            other = replay_rates.load(profile)
            start = dataclasses.replace(other.gemm[dtype], reorder_cost=1.0)
            found[name] = held_out(
                samples, lambda train, test, other=other, start=start: _gemm(other, "f8", train, test, start)
            )
    return found


def _gemm(rates: ReplayRates, dtype: str, train: Sequence[Sample], test: Sequence[Sample], start: Any = None) -> Any:
    return fit.predict_gemms(rates, fit.fit_gemms(rates, dtype, train, start), dtype, test)


def _collectives(rates: ReplayRates, train: Sequence[Sample], test: Sequence[Sample]) -> Any:
    return fit.predict_collectives(rates, fit.fit_collectives(rates, train), test)


def held_out(samples: Sequence[Sample], predict: Callable[[Sequence[Sample], Sequence[Sample]], Any]) -> Pairs:
    """Measured and predicted seconds of each sample, predicted by the other folds.

    Args:
        predict: function of the samples to fit to and those to predict.
    """
    shapes = sorted({sample.shape for sample in samples})
    fold_of = dict(zip(shapes, np.random.default_rng(0).permutation(len(shapes)) % NUM_FOLDS, strict=True))
    measured = np.array([sample.seconds for sample in samples])
    predicted = np.zeros(len(samples))
    for fold in range(NUM_FOLDS):
        test = np.array([fold_of[sample.shape] == fold for sample in samples])
        train = [sample for sample, out in zip(samples, test, strict=True) if not out]
        predicted[test] = predict(train, [sample for sample, out in zip(samples, test, strict=True) if out])
    return measured, predicted


def consistent_rows(samples: Sequence[Sample], tolerance: float = _TOLERANCE) -> list[bool]:
    """Whether each row is in the largest set that some time, growing with the bytes, meets within the tolerance."""
    kept = [False] * len(samples)
    for group in _by_size(samples):
        best: dict[float, list[int]] = {0.0: []}  # by the least time that the next row may have
        for index in group:
            seconds = samples[index].seconds
            for least, chosen in list(best.items()):
                if least <= seconds * (1 + tolerance):
                    at = max(least, seconds * (1 - tolerance))
                    if len(best.get(at, ())) <= len(chosen):
                        best[at] = [*chosen, index]
        for index in max(best.values(), key=len):
            kept[index] = True
    return kept


def _growing_curves(samples: Sequence[Sample]) -> Pairs:
    """The nearest times, by the squared log, that grow with the bytes in each group."""
    measured = np.array([sample.seconds for sample in samples])
    nearest = np.zeros(len(samples))
    for group in _by_size(samples):
        curve: Any = isotonic_regression(np.log(measured[group]))
        nearest[group] = np.exp(curve.x) * (1 + 1e-6 * np.arange(len(group)))  # no ties, which Kendall's tau punishes
    return measured, nearest


def _by_size(samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of each kind, pattern and number of devices, by rising size."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        assert isinstance(sample.row, Collective)
        groups[sample.kind, sample.row.pattern, sample.row.num_devices].append(index)
    return [sorted(group, key=lambda index: samples[index].shape) for group in groups.values()]


def _row(table: str, device: str, part: str, pairs: Pairs) -> Record:
    measured, predicted = pairs
    errors = np.abs(predicted / measured - 1)
    median, ninth = float(np.median(errors)), float(np.quantile(errors, 0.9))
    found: Any = kendalltau(measured, predicted)
    tau = float(found.statistic)
    return {
        "table": table,
        "device": device,
        "part": part,
        "rows": len(measured),
        "median_error": round(median, 4),
        "ninth_decile_error": round(ninth, 4),
        "kendall_tau": round(tau, 4),
        "meets_target": median <= MEDIAN_TARGET and ninth <= NINTH_DECILE_TARGET and tau >= TAU_TARGET,
    }


def _chosen(pairs: Pairs, which: Sequence[bool]) -> Pairs:
    mask = np.array(which)
    return pairs[0][mask], pairs[1][mask]


def _joined(pairs: Sequence[Pairs]) -> Pairs:
    return np.concatenate([one[0] for one in pairs]), np.concatenate([one[1] for one in pairs])


if __name__ == "__main__":
    for row in rows():
        print(row)
