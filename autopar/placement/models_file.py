"""Read the models to place, their latency bounds and their traffic from a TOML file.

In: a file with a table for each model. Out: `ModelEntry`s. An unknown key is refused by name.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import PlacementError
from autopar.inference.model.config import DecoderConfig
from autopar.inference.schedule.requests import Options
from autopar.placement.estimate_times import ServedSpec
from autopar.placement.placements import Slo, check_name
from autopar.placement.traces import Traffic

_BOUNDS = {"latency_s": float, "ttft_s": float, "tpot_s": float}
_SIZES = {"slots": int, "max_length": int, "page_size": int}
_TRAFFIC = {"rate_per_s": float, "cv": float, "prompt_tokens": int, "output_tokens": int}
_KEYS = {"config": str, "dtype": str, "quantize": str, "measured": str, **_BOUNDS, **_SIZES, "traffic": dict}
_MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of the file.

    Args:
        served: its configuration and its engine's sizes. slo: its latency bounds.
        traffic: its requests, if the file gives them. measured: a file of `measured_times`, if it names one.
        folder: where its configuration is; a file or a folder.
    """

    name: str
    served: ServedSpec
    slo: Slo
    traffic: Traffic | None
    measured: Path | None
    folder: Path


def read_models(path: str | os.PathLike[str]) -> list[ModelEntry]:
    """Read the models. Paths in the file are relative to its folder.

    Raises:
        PlacementError: the file cannot be read, or a key or a value is invalid. ModelError: a configuration is not supported.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlacementError(f"the models {path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlacementError(f"{path} is not valid TOML: {error}") from None
    if not tables:
        raise PlacementError(f'{path} has no models: add a table for each, such as [chat] with config = "Qwen3-0.6B"')
    return [_entry(name, table, Path(path)) for name, table in tables.items()]


def _entry(name: str, table: Any, path: Path) -> ModelEntry:
    check_name(name)
    where = f"{path}, [{name}]"
    if not isinstance(table, dict):
        raise PlacementError(f"{path}: {name!r} is {table!r} outside of any table: put it under the table of a model")
    values = _checked(table, _KEYS, where)
    if "config" not in values:
        raise PlacementError(f"{where} lacks `config`: give a model's folder, or a file like its config.json")
    traffic = None
    if "traffic" in values:
        found = _checked(values["traffic"], _TRAFFIC, f"{where}.traffic")
        if "rate_per_s" not in found:
            raise PlacementError(f"{where}.traffic lacks `rate_per_s`: give its requests per second")
        traffic = Traffic(model=name, **found)
    config = DecoderConfig.read(path.parent / values["config"]).quantized(values.get("quantize"))
    for size in _SIZES:
        if values.get(size, 1) < 1:
            raise PlacementError(f"{where}: {size} is {values[size]}: give at least 1")
    length = values.get("max_length", min(_MAX_LENGTH, config.max_positions))
    if length > config.max_positions:
        raise PlacementError(
            f"{where}: max_length is {length}, but the model has {config.max_positions} positions: give at most that many"
        )
    if traffic is not None and traffic.prompt_tokens + traffic.output_tokens > length:
        raise PlacementError(
            f"{where}: a request has {traffic.prompt_tokens} + {traffic.output_tokens} tokens, but max_length is {length}: make"
            " max_length larger, or requests shorter"
        )
    options = Options(num_slots=values.get("slots", 16), max_length=length)
    served = ServedSpec(
        config=config, options=options, dtype=values.get("dtype", ""), page_size=values.get("page_size", 16)
    )
    if not any(bound in values for bound in _BOUNDS):
        raise PlacementError(f"{where} has no latency bound: give at least one of {', '.join(_BOUNDS)}")
    slo = Slo(**{bound: values[bound] for bound in _BOUNDS if bound in values})
    measured = path.parent / values["measured"] if "measured" in values else None
    return ModelEntry(name, served, slo, traffic, measured, path.parent / values["config"])


def _checked(table: Mapping[str, Any], keys: Mapping[str, type], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in keys:
            raise PlacementError(f"{where}: {key!r} is no key: the keys are {', '.join(keys)}")
        kind = keys[key]
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            wanted = {float: "a number", int: "an integer", str: "a text", dict: "a table"}[kind]
            raise PlacementError(f"{where}: {key} is {value!r}, and must be {wanted}")
        found[key] = float(value) if kind is float else value
    return found
