"""Fit compact formulas to the lookup tables of XLA's latency estimator.

JAX's CUDA plugin wheel contains measured matmuls and collectives of several GPUs. This script reads them from the
installed wheel each time and never copies them: it keeps only the coefficients of `autopar.xla_model.latency_estimator`, a handful
per dtype and kind, with their error on held-out rows (5-fold cross-validation).

`python scripts/fit_xla_tables.py` prints the fits, the errors, and the `[xla_estimator]` tables of the profiles;
`--write` also updates the section of `cost_models/accuracy.md`.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autopar.calibration.fit import Fit, Sample, fit  # noqa: E402
from benchmarks.replay.xla_tables import Collective, Gemm, plugin, read_collectives, read_gemms  # noqa: E402

MODELS = ROOT / "cost_models" / "hardware"
ACCURACY = MODELS.parent / "accuracy.md"
HEADING = "## XLA's latency estimator"
#: Profile -> its names in XLA's tables of matmuls and of collectives.
DEVICES = {"h100-sxm": ("sm_90", "sm_90"), "b200": ("sm_100_B200", "sm_100_B200")}
#: Dtype of `EstimatorProfile.gemms` -> XLA's name, and bytes per element of an operand and of the result.
DTYPES = {
    "bfloat16": ("bf16xbf16->bf16", 2, 2),
    "float32": ("f32xf32->f32", 4, 4),
    "float8": ("f8e4m3fnxf8e4m3fn->bf16", 1, 2),
}
#: The smallest collectives are fitted separately, by each kind's mean for both sizes: they are all latency, and mostly
#: noise. The table's first row is several times as slow as the next, as if the links had to wake.
TINY_BYTES, SMALL_BYTES = 1 << 10, 16 << 10
GEMM_TERMS = {
    "launch": "launch_s",
    "flops": "s_per_flop",
    "input bytes": "s_per_input_byte",
    "output bytes": "s_per_output_byte",
    "waves": "s_per_wave",
}
COLLECTIVE_TERMS = ("launch", "root bytes", "bytes")


# -- fits ------------------------------------------------------------------------------------


def gemm_samples(rows: Sequence[Gemm], dtype: str, num_cores: int) -> list[Sample]:
    """The terms of `kernels.gemm_seconds` for each row."""
    name, in_size, out_size = DTYPES[dtype]
    samples = []
    for row in rows:
        outputs, flops = row.batch * row.m * row.n, 2.0 * row.batch * row.m * row.n * row.k
        counts = {
            "launch": 1.0,
            "flops": flops,
            "input bytes": row.batch * (row.m + row.n) * row.k * in_size,
            "output bytes": outputs * out_size,
            "waves": row.k * math.ceil(outputs / (128 * 128) / num_cores),
        }
        label = f"{row.batch}x{row.m}x{row.n}x{row.k}"
        samples.append(Sample(f"gemm {dtype}", label, counts, flops / row.rates[name]))
    return samples


def collective_samples(rows: Sequence[Collective]) -> dict[tuple[str, int], list[Sample]]:
    """The terms of `kernels.collective_seconds` for each row but the smallest, by kind and devices.

    Permutes are measured over 4 and 8 pairs; they have one fit, since XLA ignores the number of devices in the ring.
    """
    groups = defaultdict(list)
    for row in rows:
        if SMALL_BYTES < row.num_bytes <= 1 << 30:
            key = _group(row)
            counts = {"launch": 1.0, "root bytes": math.sqrt(row.num_bytes), "bytes": float(row.num_bytes)}
            groups[key].append(Sample(f"{key[0]} {key[1]}", str(row.num_bytes), counts, row.seconds))
    return dict(groups)


def small_seconds(rows: Sequence[Collective], least: int, most: int) -> dict[tuple[str, int], float]:
    """Mean seconds of the rows of these sizes, by kind and devices."""
    groups = defaultdict(list)
    for row in rows:
        if least <= row.num_bytes <= most:
            groups[_group(row)].append(row.seconds)
    return {key: sum(seconds) / len(seconds) for key, seconds in groups.items()}


def _group(row: Collective) -> tuple[str, int]:
    return row.kind, 8 if row.kind == "collective-permute" else row.num_devices


def main() -> None:
    """Print everything; with `--write`, also update the section on accuracy."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    binary = plugin()
    lines = []
    for profile, (products, collectives) in DEVICES.items():
        target = tomllib.loads((MODELS / f"{profile}.toml").read_text(encoding="utf-8"))["xla_target"]
        print(f"# {profile}")
        rows = read_gemms(binary, products)
        for dtype in DTYPES:
            found = _fit(gemm_samples(rows, dtype, target["core_count"]), tuple(GEMM_TERMS))
            lines.append(_row(profile, found))
            print(f"[xla_estimator.gemms.{dtype}]")
            for term, key in GEMM_TERMS.items():
                print(f"{key} = {found.seconds_per[term]:.4g}")
        print("[xla_estimator.collectives]")
        measured = read_collectives(binary, collectives)
        groups = collective_samples(measured)
        tiny = small_seconds(measured, 0, TINY_BYTES)
        small = small_seconds(measured, TINY_BYTES + 1, SMALL_BYTES)
        by_kind = defaultdict(dict)
        for (kind, num_devices), samples in sorted(groups.items()):
            found = _fit(samples, COLLECTIVE_TERMS)
            lines.append(_row(profile, found))
            coefficients = [found.seconds_per[term] for term in COLLECTIVE_TERMS]
            by_kind[kind][num_devices] = [*coefficients, small[kind, num_devices], tiny[kind, num_devices]]
        for kind, fits in by_kind.items():
            inner = ", ".join(f"{n} = [{', '.join(f'{c:.4g}' for c in each)}]" for n, each in fits.items())
            print(f"{kind} = {{ {inner} }}")
    print("\n".join(lines))
    if options.write:
        _write(lines)


def _fit(samples: Sequence[Sample], terms: tuple[str, ...]) -> Fit:
    found = fit(samples[0].group, samples, terms)
    assert found is not None
    return found


def _row(profile: str, of: Fit) -> str:
    assert of.mean_error is not None and of.worst_error is not None
    return f"| {profile} | {of.group} | {of.num_samples} | {of.mean_error:.1%} | {of.worst_error:.0%} |"


def _write(lines: Sequence[str]) -> None:
    about = (
        "Not what a GPU takes, but what XLA's scheduler believes it takes: the `[xla_estimator]` of the profiles, fitted",
        f"to the tables of measured products and collectives in the CUDA plugin of JAX {version('jaxlib')}",
        "(`scripts/fit_xla_tables.py`). Errors are of rows that the fit had not seen (5-fold cross-validation). Neighbouring",
        "rows of the table itself differ by up to a factor of two where collectives are small, and by half where float32",
        "products are.",
        "",
        "| profile | fit | rows | mean error | worst |",
        "|---|---|---|---|---|",
    )
    write_section(ACCURACY, HEADING, [*about, *lines])


def write_section(file: Path, heading: str, lines: Sequence[str]) -> None:
    """Replace a section of a page, or add it at the end."""
    text = file.read_text(encoding="utf-8")
    start = text.find(heading + "\n")
    start = len(text) if start < 0 else start
    end = text.find("\n## ", start + 1)
    rest = "" if end < 0 else text[end:]
    file.write_text("\n".join([text[:start].rstrip(), "", heading, "", *lines, ""]) + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
