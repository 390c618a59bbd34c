"""Fit the replay's GEMM and collective constants to the measured tables in XLA's CUDA plugin.

`python scripts/fit_replay_rates.py` prints the constants and the error on the rows that they are fitted to; `--write`
puts them into `cost_models/replay`. Errors on held-out shapes are those of `python -m benchmarks.run replay`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from autopar.xla_replay import rates as replay_rates  # noqa: E402
from benchmarks.replay import fit, xla_tables  # noqa: E402

FOLDER = ROOT / "cost_models" / "replay"


def main() -> None:
    """Print the constants; with `--write`, put them into the profiles."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    binary = xla_tables.plugin()
    for profile, device in fit.DEVICES.items():
        rates = replay_rates.load(profile)
        found: dict[str, Mapping[str, float]] = {}
        gemms = xla_tables.read_gemms(binary, device)
        for dtype in fit.FITTED_DTYPES[profile]:
            samples = fit.gemm_samples(gemms, dtype)
            gemm = fit.fit_gemms(rates, dtype, samples)
            found[f"gemm.{dtype}"] = _constants(gemm, fit.GEMM_CONSTANTS)
            _print(profile, f"gemm.{dtype}", found, samples, fit.predict_gemms(rates, gemm, dtype, samples))
        collectives = fit.collective_samples(xla_tables.read_collectives(binary, device))
        link = fit.fit_collectives(rates, collectives)
        found["link"] = _constants(link, fit.COLLECTIVE_CONSTANTS)
        _print(profile, "link", found, collectives, fit.predict_collectives(rates, link, collectives))
        if options.write:
            _write(FOLDER / f"{profile}.toml", found)


def _constants(of: Any, names: Mapping[str, fit.Free]) -> dict[str, float]:
    return {name: float(f"{getattr(of, name):.3g}") for name in names}


def _print(
    profile: str, block: str, found: Mapping[str, Mapping[str, float]], samples: Sequence[fit.Sample], predicted: Any
) -> None:
    errors = np.abs(predicted / np.array([sample.seconds for sample in samples]) - 1)
    print(
        f"# {profile}: {len(samples)} rows, median error {np.median(errors):.1%}, 9 of 10 below {np.quantile(errors, 0.9):.1%}"
    )
    print(f"[{block}]")
    for name, value in found[block].items():
        print(f"{name} = {value:.3g}")


def _write(path: Path, found: Mapping[str, Mapping[str, float]]) -> None:
    """Replace the values of the fitted keys, which the file must have."""
    left = {(block, name) for block, constants in found.items() for name in constants}
    block, lines = "", []
    for line in path.read_text(encoding="utf-8").splitlines():
        if header := re.fullmatch(r"\[([\w.]+)\]", line):
            block = header[1]
        key = line.partition(" = ")[0]
        if (block, key) in left:
            left.remove((block, key))
            line = f"{key} = {found[block][key]:.3g}"
        lines.append(line)
    assert not left, f"{path} lacks {left}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
