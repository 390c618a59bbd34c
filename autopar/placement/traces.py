"""Make, read and write traces of requests: Poisson arrivals, Gamma bursts, and recorded requests.

In: traffic of models, or a CSV file. Out: `Trace`, one array per column. The intervals between the requests of a model have a
Gamma distribution, whose coefficient of variation (CV) is its burstiness: 1 is a Poisson process, and at 8 most requests come
in bursts (Li et al., AlpaServe, OSDI 2023, section 6.2).
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlacementError

_MOST_TOKENS, _MOST_SECONDS = 10**9, 1e12
COLUMNS = ("arrival_s", "model", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of one model.

    Args:
        rate_per_s: the average number of requests per second.
        cv: the coefficient of variation of the intervals between requests; 1 is a Poisson process.
        prompt_tokens, output_tokens: the tokens of each request.

    Raises:
        PlacementError: a field is invalid; the message names it.
    """

    model: str
    rate_per_s: float
    cv: float = 1.0
    prompt_tokens: int = 1000
    output_tokens: int = 200

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "cv"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlacementError(f"model {self.model!r}: {name} is {value!r}: give a positive number")
        for name in ("prompt_tokens", "output_tokens"):
            if not 1 <= getattr(self, name) <= _MOST_TOKENS:
                raise PlacementError(
                    f"model {self.model!r}: {name} is {getattr(self, name)!r}: give at least 1 and at most {_MOST_TOKENS:,}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    Args:
        models: the names of the models.
        arrival_s: float64 `[n]`, sorted, from 0 on. model: int32 `[n]`, the index of each request's model in `models`.
        prompt_tokens, output_tokens: int32 `[n]`, at least 1.
        duration_s: the seconds of the trace, at least the last arrival.
    """

    models: tuple[str, ...]
    arrival_s: NDArray[np.float64]
    model: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    duration_s: float

    @property
    def num_requests(self) -> int:
        return int(self.arrival_s.size)

    def rates_per_s(self) -> dict[str, float]:
        """The average number of requests per second of each model."""
        counts = np.bincount(self.model, minlength=len(self.models))
        return {name: count / self.duration_s for name, count in zip(self.models, counts.tolist(), strict=True)}

    def within(self, start_s: float, end_s: float) -> Trace:
        """The requests that arrive from `start_s` to before `end_s`, as a trace that begins at 0."""
        first, last = np.searchsorted(self.arrival_s, (start_s, end_s))
        part = slice(int(first), int(last))
        columns = (self.model[part], self.prompt_tokens[part], self.output_tokens[part])
        return Trace(self.models, self.arrival_s[part] - start_s, *columns, end_s - start_s)

    def of_models(self, names: Iterable[str]) -> Trace:
        """The requests of some models."""
        is_own = np.isin(self.model, [self.models.index(name) for name in names])
        columns = (self.model[is_own], self.prompt_tokens[is_own], self.output_tokens[is_own])
        return Trace(self.models, self.arrival_s[is_own], *columns, duration_s=self.duration_s)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the requests as CSV with the columns of `COLUMNS`."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            columns = (self.arrival_s, self.model, self.prompt_tokens, self.output_tokens)
            for arrival, model, prompt, output in zip(*(each.tolist() for each in columns), strict=True):
                writer.writerow((repr(arrival), self.models[model], prompt, output))

    @classmethod
    def read(cls, path: str | os.PathLike[str], models: Sequence[str] | None = None) -> Trace:
        """Read recorded requests from CSV with the columns of `COLUMNS`, in any order. The first arrival becomes second 0.

        Args:
            models: the models that may occur; by default those of the file.

        Raises:
            PlacementError: the file cannot be read, a column is missing, or a row is invalid; the text has its line.
        """
        try:
            with Path(path).open(newline="", encoding="utf-8-sig") as file:
                rows = _rows(csv.DictReader(file), str(path), models)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise PlacementError(f"the trace {path} cannot be read: {reason}") from None
        if not rows:
            raise PlacementError(f"the trace {path} has no requests: record some, or leave the trace out")
        rows.sort(key=lambda row: row[0])
        names = tuple(models) if models is not None else tuple(dict.fromkeys(row[1] for row in rows))
        index = {name: number for number, name in enumerate(names)}
        arrival = np.array([row[0] for row in rows])
        arrival -= arrival[0]
        columns = np.array([(index[name], prompt, output) for _, name, prompt, output in rows], np.int32).T
        # One more mean interval, so that a rate is not too high by one request.
        duration = float(arrival[-1]) * (1 + 1 / max(1, len(rows) - 1)) or 1.0
        return cls(names, arrival, columns[0], columns[1], columns[2], duration)


def _rows(reader: csv.DictReader[str], path: str, models: Sequence[str] | None) -> list[tuple[float, str, int, int]]:
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise PlacementError(
            f"the trace {path} lacks the column {missing[0]!r}: its first line must be {','.join(COLUMNS)}"
        )
    rows: list[tuple[float, str, int, int]] = []
    for row in reader:
        where = f"the trace {path}, line {reader.line_num}"
        name = row["model"]
        if not name or (models is not None and name not in models):
            known = "" if models is None else f"; the models are {', '.join(models)}"
            raise PlacementError(f"{where}: the model is {name!r}: name one{known}")
        try:
            arrival, prompt, output = float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])
        except (TypeError, ValueError):
            raise PlacementError(
                f"{where}: arrival_s, prompt_tokens and output_tokens are {row['arrival_s']!r}, {row['prompt_tokens']!r} and"
                f" {row['output_tokens']!r}: give a number of seconds and two integers"
            ) from None
        if not abs(arrival) <= _MOST_SECONDS or not 1 <= prompt <= _MOST_TOKENS or not 1 <= output <= _MOST_TOKENS:
            raise PlacementError(
                f"{where}: arrival_s={arrival}, prompt_tokens={prompt}, output_tokens={output}: the first must be finite and"
                f" at most {_MOST_SECONDS:g}, and both numbers of tokens at least 1 and at most {_MOST_TOKENS:,}"
            )
        rows.append((arrival, name, prompt, output))
    return rows


def synthetic_trace(traffic: Sequence[Traffic], duration_s: float, seed: int = 0) -> Trace:
    """Draw a trace. A model's arrivals depend on the seed and its place in `traffic` alone.

    Args:
        duration_s: the seconds of the trace.

    Raises:
        PlacementError: no request arrives, a model is given twice, or the duration is not positive.
    """
    names = tuple(each.model for each in traffic)
    if len(set(names)) < len(names):
        raise PlacementError(f"traffic is given twice for a model: {', '.join(names)}")
    if seed < 0:
        raise PlacementError(f"the seed of a trace is {seed}: give 0 or more")
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise PlacementError(f"the duration of a trace is {duration_s!r} s: give a positive number")
    arrivals = [_arrivals(each, duration_s, np.random.default_rng((seed, n))) for n, each in enumerate(traffic)]
    arrival = np.concatenate([np.zeros(0), *arrivals])
    if not arrival.size:
        raise PlacementError(
            f"no request arrives in {duration_s:g} s at {[each.rate_per_s for each in traffic]} requests per second: take a"
            " longer trace"
        )
    model = np.repeat(np.arange(len(traffic)), [each.size for each in arrivals])
    order = np.argsort(arrival, kind="stable")
    tokens = np.array([(each.prompt_tokens, each.output_tokens) for each in traffic], np.int32)[model[order]]
    return Trace(names, arrival[order], model[order].astype(np.int32), tokens[:, 0], tokens[:, 1], float(duration_s))


def _arrivals(traffic: Traffic, duration_s: float, random: np.random.Generator) -> NDArray[np.float64]:
    """The arrivals of a renewal process with Gamma intervals."""
    shape = 1 / traffic.cv**2
    scale = 1 / (shape * traffic.rate_per_s)
    # The first interval is cut at a random time, so that the rate is right from the start.
    arrivals: list[NDArray[np.float64]] = []
    warm_up = 20 * max(1.0, traffic.cv**2) / traffic.rate_per_s
    at, end = 0.0, warm_up + duration_s
    while at < end:
        num = max(16, int(1.2 * (end - at) * traffic.rate_per_s))
        times = at + np.cumsum(random.gamma(shape, scale, num))
        arrivals.append(times)
        at = float(times[-1])
    every = np.concatenate(arrivals) - warm_up
    return every[(every >= 0) & (every < duration_s)]
