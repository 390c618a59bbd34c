"""Fit the free constants of the replay's GEMMs and collectives to XLA's measured tables.

The residual is the log of predicted over measured time, with a loss that grows linearly for outliers. Each constant has
a value that is expected from the hardware; a weak residual keeps those that the table does not determine near it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from autopar.xla_replay.collective_time import collective_seconds
from autopar.xla_replay.gemm_time import gemm_seconds
from autopar.xla_replay.rates import GemmRates, LinkRates, ReplayRates
from benchmarks.replay.xla_tables import Collective, Gemm

#: Profile, and the name that XLA's tables have for it.
DEVICES = {"h100-sxm": "sm_90", "b200": "sm_100_B200"}
#: Blocks of GEMM constants that are fitted. The f8 column of sm_90 is left out: `tables` shows that it is not an H100's.
FITTED_DTYPES = {"h100-sxm": ("bf16", "f32"), "b200": ("bf16", "f32", "f8")}
#: Block of `ReplayRates.gemm`: XLA's names of the dtypes, bytes of an element of the operands and the result.
GEMM_DTYPES = {
    "bf16": (("bf16xbf16->bf16",), (2, 2, 2)),
    "f32": (("f32xf32->f32",), (4, 4, 4)),
    "f8": (("f8e4m3fnxf8e4m3fn->bf16", "f8e4m3fnxf8e5m2->bf16", "f8e5m2xf8e4m3fn->bf16"), (1, 1, 2)),
}


@dataclass(frozen=True, slots=True)
class Free:
    """A free constant: what the hardware suggests, how far the log may be from it before it costs, its upper bound."""

    expected: float
    spread: float = 1.0
    at_most: float = np.inf


GEMM_CONSTANTS = {
    "efficiency": Free(0.85, 0.3, 1.0),
    "launch_s": Free(4.5e-6),
    "fill_s": Free(0.6e-6),
    "k_latency_s": Free(1.3e-9),
    "load_bytes_per_clock": Free(64.0),
    "hbm_efficiency": Free(0.85, 0.3, 1.0),
    "store_cost": Free(0.6),
    "split_s": Free(1.5e-6),
}
COLLECTIVE_CONSTANTS = {
    "launch_s": Free(11e-6),
    "skew_s": Free(3e-6),
    "latency_scale": Free(0.8),
    "efficiency": Free(0.93, 0.1, 1.0),
    "chunk_s": Free(0.3e-6),
    "copy_bytes_per_s": Free(800e9),
    "reduce_bytes_per_s": Free(600e9),
    "exchange_bytes_per_s": Free(800e9),
    "send_bytes_per_s": Free(500e9),
    "exchange_start_s": Free(8e-6),
    "exchange_chunk_s": Free(2e-6),
    "channel_bytes_per_s": Free(130e9),
    "channel_share": Free(0.6, 0.3, 1.0),
    "nvls_efficiency": Free(0.5, 0.5, 1.0),
}
_OUTLIER = 0.05
#: Weight of the expected values next to one row.
_PRIOR = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured time. `shape` is what a fold of the cross-validation holds out together."""

    kind: str
    shape: tuple[int, ...]
    seconds: float
    row: Gemm | Collective


def gemm_samples(rows: Sequence[Gemm], dtype: str, *, every_pair: bool = True) -> list[Sample]:
    """The rows of the dtypes that share a block of rates."""
    names = GEMM_DTYPES[dtype][0] if every_pair else GEMM_DTYPES[dtype][0][:1]
    return [
        Sample(name, row.shape, row.flops / row.rates[name], row) for row in rows for name in names if name in row.rates
    ]


def collective_samples(rows: Sequence[Collective]) -> list[Sample]:
    """All rows; a fold holds out sizes, with every kind and number of devices."""
    return [Sample(row.kind, (row.num_bytes,), row.seconds, row) for row in rows]


def predict_gemms(rates: ReplayRates, gemm: GemmRates, dtype: str, samples: Sequence[Sample]) -> Any:
    """Seconds of each sample, by rates that may not be those of the profile.

    XLA measures a plain dot, whose right operand is not k-major.
    """
    batch, m, n, k = np.array([sample.shape for sample in samples], float).T
    return gemm_seconds(rates.device, gemm, batch, m, n, k, GEMM_DTYPES[dtype][1], rhs_k_major=False)


def predict_collectives(rates: ReplayRates, link: LinkRates, samples: Sequence[Sample]) -> Any:
    """Seconds of each sample, by link constants that may not be those of the profile."""
    rates = dataclasses.replace(rates, link=link)
    rows = [sample.row for sample in samples]
    groups: dict[tuple[str, str], list[int]] = {}
    for index, row in enumerate(rows):
        assert isinstance(row, Collective)
        groups.setdefault((row.kind, row.pattern), []).append(index)
    seconds = np.zeros(len(rows))
    for (kind, pattern), indices in groups.items():
        num_bytes = np.array([samples[index].shape[0] for index in indices], float)
        local = np.array([samples[index].row.num_devices for index in indices], float)  # type: ignore[union-attr]
        one: Any = collective_seconds(
            rates,
            kind,
            num_bytes,
            local,
            np.ones_like(local),
            pattern=pattern or "shift",  # type: ignore[arg-type]
        )
        seconds[indices] = one
    return seconds


def fit_gemms(rates: ReplayRates, dtype: str, samples: Sequence[Sample], start: GemmRates | None = None) -> GemmRates:
    """The GEMM constants of a dtype that fit best; `start` has those that are not fitted, by default the profile's."""
    start = rates.gemm[dtype] if start is None else start
    free = GEMM_CONSTANTS | ({"reorder_cost": Free(1.0)} if start.reorder_cost > 0 else {})
    return _fit(start, free, samples, lambda gemm: predict_gemms(rates, gemm, dtype, samples))


def fit_collectives(rates: ReplayRates, samples: Sequence[Sample]) -> LinkRates:
    """The link constants that fit best."""
    return _fit(rates.link, COLLECTIVE_CONSTANTS, samples, lambda link: predict_collectives(rates, link, samples))


def _fit(start: Any, free: Mapping[str, Free], samples: Sequence[Sample], predict: Any) -> Any:
    measured = np.log([sample.seconds for sample in samples])
    expected = np.log([one.expected for one in free.values()])
    spread = np.array([one.spread for one in free.values()])
    most = np.log([one.at_most for one in free.values()])

    def constants(logs: Any) -> Any:
        return dataclasses.replace(
            start, **{name: float(value) for name, value in zip(free, np.exp(logs), strict=True)}
        )

    def residuals(logs: Any) -> Any:
        rows = np.log(predict(constants(logs))) - measured
        return np.concatenate([rows, _PRIOR * (logs - expected) / spread])

    found = least_squares(
        residuals,
        np.minimum(expected, most - 1e-3),
        bounds=(np.full_like(most, -np.inf), most),
        loss="soft_l1",
        f_scale=_OUTLIER,
        diff_step=1e-3,
        max_nfev=80,
    )
    return constants(found.x)
