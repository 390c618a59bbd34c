"""Run the microbenchmarks of a calibration on the devices of this process, and time them.

In: devices, sizes, a rough profile, a time budget. Out: `Sample`s.

A program repeats its operation in a dependent chain, often enough to take ten times its dispatch. The dispatch of an
empty program is subtracted. Programs are compiled and run twice as a warm-up. Then each runs once per round, so that a
disturbance affects all programs equally. The first round is a warm-up too: other programs have run since. A program
whose times agree runs in few rounds. The sample is the median of the rounds.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from autopar.calibration.fit import Sample
from autopar.calibration.layer_probes import attention_points, convolution_points
from autopar.calibration.probes import (
    Point,
    Sizes,
    collective_points,
    copy_points,
    empty_program,
    launch_points,
    matmul_points,
    memory_points,
    reduction_points,
    wide_matmul_points,
)
from autopar.hardware.profile import HardwareProfile

Progress = Callable[[str, float], None]

_MOST_ROUNDS = 25
#: With this many rounds, a program whose times spread by less than this share runs no more.
_ENOUGH_ROUNDS, _SMALL_SPREAD = 5, 0.03
#: A loop first copies its carried values; several repetitions amortize that.
_FEWEST_REPETITIONS = 4
_FEWEST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Skipped:
    """A benchmark without a sample, and the reason."""

    group: str
    name: str
    reason: str


def measure(
    devices: Sequence[Any], sizes: Sizes, base: HardwareProfile, seconds: float, progress: Progress | None = None
) -> tuple[tuple[Sample, ...], tuple[Skipped, ...]]:
    """Run all benchmarks of `sizes` within an approximate time budget.

    Args:
        base: rough profile of the devices; it determines the number of repetitions, never a result.
        seconds: time budget.
        progress: callback with the current stage and the elapsed fraction of the time budget.
    """
    start, report = time.perf_counter(), progress or (lambda stage, fraction: None)
    sweeps = [
        ("launch", 0.05, launch_points(devices, sizes)),
        ("memory bandwidth", 0.15, memory_points(devices, sizes, base)),
        ("matrix products", 0.3, matmul_points(devices, sizes, base)),
        ("matrix products with wide results", 0.05, wide_matmul_points(devices, sizes, base)),
        ("reductions", 0.05, reduction_points(devices, sizes, base)),
        ("convolutions", 0.15, convolution_points(devices, sizes, base)),
        ("attention", 0.2, attention_points(devices, sizes, base)),
        ("collectives", 0.3 if len(devices) > 1 else 0.0, collective_points(devices, sizes, base)),
        ("copies between host and device", 0.05, copy_points(devices, sizes)),
    ]
    samples: list[Sample] = []
    skipped: list[Skipped] = []
    for position, (stage, weight, points) in enumerate(sweeps):
        if not weight:
            continue
        now = time.perf_counter() - start
        # Time that a sweep does not use goes to the later ones.
        share = (seconds - now) * weight / sum(w for _, w, _ in sweeps[position:])
        report_progress = partial(_report_progress, report, stage, start, seconds)
        found, left_out = _sweep(devices, points, max(share, 0.0), report_progress)
        samples += found
        skipped += left_out
        gc.collect()  # free the arrays of this sweep before the next allocates its own
    return tuple(samples), tuple(skipped)


def _report_progress(report: Progress, stage: str, start: float, seconds: float) -> None:
    report(stage, min(1.0, (time.perf_counter() - start) / seconds))


def _sweep(
    devices: Sequence[Any], points: Iterable[Point], seconds: float, report_progress: Callable[[], None]
) -> tuple[list[Sample], list[Skipped]]:
    """Compile all benchmarks of a sweep, then run them in rounds until the time is up."""
    start = time.perf_counter()
    empty = empty_program(devices)
    least_s = max(2e-3, 10 * min(_timed(empty) for _ in range(5)))
    built: list[tuple[Point, int, Callable[[], object] | Skipped]] = []
    # Compiles run side by side, since they leave the devices idle most of the time. Nothing runs meanwhile: a compile breaks
    # off the capture of a CUDA graph, and collectives of two programs at once would wait for each other.
    with ThreadPoolExecutor(_num_compilers()) as pool:
        for one in pool.map(partial(_build, least_s, start + 0.6 * seconds), count(), points):
            built.append(one)
            report_progress()
    ready: list[tuple[Point, int, Callable[[], object]]] = []
    skipped: list[Skipped] = []
    for point, repetitions, call in built:
        found = call if isinstance(call, Skipped) else _warmed_up(point, call, max(0.25 * seconds, 1.0))
        if isinstance(found, Skipped):
            skipped.append(found)
        else:
            ready.append((point, repetitions, found))
    runs = _rounds([empty, *(call for _, _, call in ready)], start + seconds, report_progress)
    dispatch_s = float(np.median(runs[0]))
    samples = []
    for (point, repetitions, _), times in zip(ready, runs[1:], strict=True):
        net = (float(np.median(times)) - (0.0 if point.with_dispatch else dispatch_s)) / repetitions
        if math.isnan(net):
            skipped.append(Skipped(point.group, point.name, "failed when run again"))
        elif net > 0:
            samples.append(_sample(point, repetitions, times, net))
        else:
            skipped.append(Skipped(point.group, point.name, "shorter than the dispatch"))
    return samples, skipped


def _build(
    least_s: float, deadline: float, number: int, point: Point
) -> tuple[Point, int, Callable[[], object] | Skipped]:
    """Compile a benchmark; the first of a sweep whatever the time, so that each has one."""
    if number and time.perf_counter() > deadline:
        return point, 0, Skipped(point.group, point.name, "no time left")
    repetitions = min(point.most, max(_FEWEST_REPETITIONS, round(least_s / point.guess_s)))
    try:
        return point, repetitions, point.make(repetitions)
    except Exception as error:  # a device may not support a dtype or lack memory; the calibration goes on
        return point, 0, _failed(point, error)


def _warmed_up(point: Point, call: Callable[[], object], most_s: float) -> Callable[[], object] | Skipped:
    """Run a benchmark twice; it is skipped if it fails or takes longer than `most_s`."""
    try:
        call()
        took = _timed(call)
    except Exception as error:  # as above
        return _failed(point, error)
    return Skipped(point.group, point.name, f"one run takes {took:.1f} s") if took > most_s else call


def _failed(point: Point, error: Exception) -> Skipped:
    return Skipped(point.group, point.name, f"{type(error).__name__}: {error}"[:200])


def _num_compilers() -> int:
    # XLA's compiler has threads of its own.
    return max(1, (os.cpu_count() or 1) // 4)


def _rounds(
    calls: Sequence[Callable[[], object]], deadline: float, report_progress: Callable[[], None]
) -> list[list[float]]:
    """The times of each call; without those of the first round, which is a warm-up."""
    runs: list[list[float]] = [[] for _ in calls]
    for number in range(1 + _MOST_ROUNDS):
        if number > _FEWEST_ROUNDS and time.perf_counter() > deadline:
            break
        for call, times in zip(calls, runs, strict=True):
            if number > _ENOUGH_ROUNDS and _spread(times[1:]) < _SMALL_SPREAD:
                continue
            try:
                times.append(_timed(call))
            except RuntimeError:  # out of memory since later programs have allocated theirs
                times.append(math.nan)
        report_progress()
    return [times[1:] for times in runs]


def _spread(times: Sequence[float]) -> float:
    """The interquartile range as a share of the median."""
    low, middle, high = np.percentile(times, (25, 50, 75))
    return float((high - low) / middle)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _sample(point: Point, repetitions: int, times: Sequence[float], seconds: float) -> Sample:
    rounded = tuple(float(f"{t:.4g}") for t in times)
    return Sample(point.group, point.name, point.counts, seconds, round(_spread(times), 4), repetitions, rounded)
