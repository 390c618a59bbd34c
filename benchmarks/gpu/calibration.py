"""Run `autopar calibrate` on these devices, and compare each constant with the profile's.

In: a setting. Out: a record with all samples and fits, and `constants`: the profile's constants that were measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.calibration.calibrate import calibrated
from autopar.calibration.calibration import profile_table, to_json
from autopar.calibration.probes import Sizes
from autopar.hardware.profile import load
from benchmarks.gpu.setting import Record, Setting

TINY = Sizes(
    products=((32, 32, 32), (64, 64, 64), (64, 128, 32)),
    elements=(1 << 14, 1 << 15),
    cached_elements=(1 << 10,),
    launches=(4, 16),
    payload_bytes=(1 << 10, 1 << 14),
    copy_bytes=(1 << 10, 1 << 16),
    convolutions=((1, 8, 8, 3), (1, 8, 8, 1)),
    attention=((1, 16, 2, 8),),
    dtypes=("bfloat16", "float32"),
)
#: Profile to compare with if the device has none: the first that plans are made for.
_NEAREST = "h100-sxm"
#: Share of a piece's time for measuring; the rest is for JAX's start and the fits.
_SHARE = 0.75


def calibration(setting: Setting) -> Record:
    """Measure, fit, and compare."""
    base = load(setting.profile or _NEAREST)
    found = calibrated(
        base,
        _SHARE * setting.seconds,
        command="python -m benchmarks.gpu --only calibration",
        sizes=TINY if setting.is_tiny else None,
    )
    table = profile_table(found, f"{base.name}-measured")
    record = to_json(found, table)
    for sample in record["samples"]:
        del sample["runs_s"]  # the median and the spread remain
    stated = dict(_numbers(profile_table(replace(found, samples=(), fits=()), base.name)))
    measured = {key: value for key, value in _numbers(table) if value != stated[key]}
    record["constants"] = [
        {
            "constant": key,
            "profile": stated[key],
            "measured": value,
            "ratio": value / stated[key] if stated[key] else None,
        }
        for key, value in measured.items()
        if not key.startswith("operations.")  # scaled to the vector rate, not measured separately
    ]
    return record


def _numbers(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of nested tables, by its path."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", float(value)
