"""Encode the records of a plan as JSON, and decode them with a check of every field.

In: frozen dataclasses or JSON types. Out: JSON types or frozen dataclasses. Decoders are composed from type annotations,
so this module knows no field of a plan. Reading a file never runs code from it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import numbers
import os
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from autopar.errors import AutoparError, PlanFileError
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.system.atomic_file import write_whole
from autopar.version import __version__

#: A figure that is infinite if nothing fits, such as a mesh's step time. All other figures of a plan are finite.
MaybeInfinite: TypeAlias = Annotated[float, "may be infinite"]
#: Largest figure in a plan, in any unit: sums and products of a few stay finite.
_MOST = 1e30
#: Largest integer in a plan: all smaller ones are exact as floats.
_MOST_WHOLE = 2**53
#: Largest mesh: reports take time and memory per device.
_MOST_DEVICES = 10**6


class WrongFieldError(Exception):
    """A field that cannot be read; each enclosing decoder prepends its part of the field's path to `place`."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(place, problem)
        self.place, self.problem = place, problem

    def __str__(self) -> str:
        return f"its field `{self.place.lstrip('.')}` {self.problem}"


_T = TypeVar("_T")


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file atomically; an existing file stays until the new one is complete.

    Raises:
        PlanFileError: the file cannot be written.
    """
    try:
        write_whole(text, path)
    except OSError as error:
        raise PlanFileError(
            f"cannot write to {os.fspath(path)!r}: {error.strerror}. Choose a path in a folder that"
            " exists and can be written to."
        ) from error


def read_document(
    data: Any,
    name: str,
    migrations: Sequence[Callable[[dict[str, Any]], dict[str, Any]]],
    decode: Callable[[dict[str, Any]], _T],
) -> _T:
    """Read a plan from JSON types.

    Args:
        data: content of the file.
        name: expected value of its `format` field.
        migrations: functions from each version to the next, from version 1 on; the current version is their number
            plus one.
        decode: function that decodes the fields of the current version.

    Raises:
        PlanFileError: a field is missing, unknown, ill-typed or inconsistent; the message names it.
    """
    if not isinstance(data, dict) or data.get("format") != name:
        raise PlanFileError(f'it is not a plan: a plan is a JSON object with "format": "{name}"')
    number, today = data.get("version"), len(migrations) + 1
    if type(number) is not int or number < 1:
        raise PlanFileError(f"it is of version {number!r}: versions are whole numbers from 1 on")
    if number > today:
        raise PlanFileError(
            f"it is of version {number}, which a later autopar wrote; this one ({__version__}) reads versions 1 to {today}."
            " Upgrade autopar"
        )
    body = {k: v for k, v in data.items() if k not in ("format", "version")}
    try:
        for migrate in migrations[number - 1 :]:
            body = migrate(body)
        return decode(body)
    except WrongFieldError as wrong:
        raise PlanFileError(str(wrong)) from None


def as_it_is(body: dict[str, Any]) -> dict[str, Any]:
    """The identity migration, for new fields with defaults."""
    return body


def without(field: str, of: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A migration that drops `field` from the record in the plan's field `of`."""

    def migrate(body: dict[str, Any]) -> dict[str, Any]:
        record = body.get(of)
        if isinstance(record, dict):  # the decoder reports anything else
            return {**body, of: {name: item for name, item in record.items() if name != field}}
        return body

    return migrate


def reworded(texts: Mapping[str, str], field: str, of: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A migration that replaces old texts of `field` in the record in the plan's field `of` by new ones."""

    def migrate(body: dict[str, Any]) -> dict[str, Any]:
        record = body.get(of)
        if isinstance(record, dict) and isinstance(text := record.get(field), str):
            return {**body, of: {**record, field: texts.get(text, text)}}
        return body

    return migrate


def renamed(names: Mapping[str, str], *, of: Collection[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A migration that renames fields of the plan, of its records and of its columns of numbers.

    Args:
        names: new ones by old ones.
        of: fields whose records have renamed fields; others hold names of the user's.
    """

    def in_record(record: Any) -> Any:
        if isinstance(record, list):
            return [in_record(item) for item in record]
        if isinstance(record, dict):
            return {names.get(name, name): in_record(item) for name, item in record.items()}
        return record

    def in_column(name: str) -> str:
        return ".".join(names.get(part, part) for part in name.split("."))

    def migrate(body: dict[str, Any]) -> dict[str, Any]:
        found = {names.get(name, name): in_record(item) if name in of else item for name, item in body.items()}
        numbers = body.get("numbers")
        if isinstance(numbers, dict):  # other types are the decoder's business
            found["numbers"] = {
                in_column(name): in_record(item) if name.partition(".")[0] in of else item
                for name, item in numbers.items()
            }
        return found

    return migrate


def encode(value: Any) -> Any:
    """Convert to JSON types. Infinity becomes "inf"; fields at their default and uncompared fields are left out."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, TensorSharding):
        spec = [axes[0] if len(axes) == 1 else list(axes) or None for axes in value.dims]
        return {"spec": spec, "unreduced": list(value.unreduced)} if value.unreduced else spec
    if isinstance(value, MeshShape):
        return [list(pair) for pair in zip(value.axis_names, value.axis_sizes, strict=True)]
    if is_dataclass(value):
        pairs = ((f, getattr(value, f.name)) for f in fields(value) if f.compare)
        return {f.name: encode(item) for f, item in pairs if f.default is MISSING or item != f.default}
    if isinstance(value, Mapping):
        return {key: encode(value[key]) for key in sorted(value)}
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if math.isfinite(value) else str(float(value))


_Decoder: TypeAlias = Callable[[Any], Any]


@functools.lru_cache(maxsize=256)
def decoder(hint: Any) -> _Decoder:
    """The checking decoder of a type annotation, cached so that a large plan loads fast."""
    if hint is TensorSharding:
        return _decode_sharding
    if hint is MeshShape:
        return _decode_mesh
    if is_dataclass(hint):
        return _record_decoder(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _decode_maybe_infinite
    if origin is Literal:
        return functools.partial(_decode_word, arguments)
    if origin in (Union, types.UnionType):  # only `X | None` occurs
        one = decoder(arguments[0])
        return lambda data: None if data is None else one(data)
    if origin is tuple and arguments[-1] is ...:
        return functools.partial(_decode_items, decoder(arguments[0]))
    if origin is tuple:
        return functools.partial(_decode_row, tuple(map(decoder, arguments)))
    if origin is dict:
        return functools.partial(_decode_mapping, decoder(arguments[1]))
    return functools.partial(_decode_scalar, hint)


def _decode_scalar(hint: type, data: Any) -> Any:
    if hint is float:
        return _decode_float(data)
    if type(data) is not hint:
        kinds = {str: "a text", int: "a whole number", bool: "true or false"}
        raise WrongFieldError("", f"must be {kinds[hint]}, not {_short(data)}")
    if hint is int and abs(data) > _MOST_WHOLE:
        raise WrongFieldError("", f"must be a whole number of at most 2^53, not {_short(data)}")
    return data


def _decode_float(data: Any) -> float:
    if type(data) in (int, float) and abs(data) <= _MOST:
        return float(data)
    what = "a number"
    if type(data) in (int, float) or data in ("inf", "-inf", "nan"):
        what = f"a finite number of at most {_MOST:g}"
    raise WrongFieldError("", f"must be {what}, not {_short(data)}")


def _decode_maybe_infinite(data: Any) -> float:
    return math.inf if data == "inf" else _decode_float(data)


def _decode_word(known: tuple[str, ...], data: Any) -> str:
    if data not in known:
        raise WrongFieldError("", f"must be one of {', '.join(known)}, not {_short(data)}")
    return data


def _decode_items(one: _Decoder, data: Any) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise WrongFieldError("", f"must be a list, not {_short(data)}")
    out: list[Any] = []
    try:
        for item in data:
            out.append(one(item))
    except WrongFieldError as wrong:
        raise WrongFieldError(f"[{len(out)}]{wrong.place}", wrong.problem) from None
    return tuple(out)


def _decode_row(columns: tuple[_Decoder, ...], data: Any) -> tuple[Any, ...]:
    if not isinstance(data, list) or len(data) != len(columns):
        raise WrongFieldError("", f"must be a list of {len(columns)}, not {_short(data)}")
    return tuple(column(item) for column, item in zip(columns, data, strict=True))


def _decode_mapping(one: _Decoder, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise WrongFieldError("", f"must be an object, not {_short(data)}")
    return {key: one(item) for key, item in data.items()}


def _decode_sharding(data: Any) -> TensorSharding:
    unreduced: Any = []
    spec = data
    if isinstance(data, dict) and set(data) == {"spec", "unreduced"}:
        spec, unreduced = data["spec"], data["unreduced"]
    if isinstance(spec, list) and isinstance(unreduced, list):
        entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in spec)
        with contextlib.suppress(TypeError):  # an unhashable entry
            return _sharding(entries, tuple(unreduced))
    raise WrongFieldError("", f'must be a sharding such as ["data", null], not {_short(data)}')


@functools.lru_cache(maxsize=4096)
def _sharding(entries: tuple[Any, ...], unreduced: tuple[Any, ...]) -> TensorSharding:
    """Decode and check a sharding, cached because a plan repeats a few shardings thousands of times."""
    dims = tuple(() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in entries)
    if not all(isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes) for axes in (*dims, unreduced)):
        raise TypeError
    return TensorSharding(dims, unreduced)


def _decode_mesh(data: Any) -> MeshShape:
    pairs = decoder(tuple[tuple[str, int], ...])(data)
    try:
        mesh = MeshShape(tuple(name for name, _ in pairs), tuple(size for _, size in pairs))
    except AutoparError as error:
        raise WrongFieldError("", f"is not a mesh: {error}") from None
    if mesh.num_devices > _MOST_DEVICES:
        raise WrongFieldError("", f"is of {mesh.num_devices:,} devices, more than {_MOST_DEVICES:,}")
    return mesh


def _record_decoder(record: Any) -> _Decoder:
    hints = get_type_hints(record, include_extras=True)
    decoders = {f.name: decoder(hints[f.name]) for f in fields(record) if f.compare}
    required = {f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING}

    def decode(data: Any) -> Any:
        if not isinstance(data, dict):
            raise WrongFieldError("", f"must be an object, not {_short(data)}")
        for name in sorted(required - data.keys()):
            raise WrongFieldError(f".{name}", "is missing")
        values: dict[str, Any] = {}
        for name, item in data.items():
            if name not in decoders:
                raise WrongFieldError(f".{name}", "is unknown")
            try:
                values[name] = decoders[name](item)
            except WrongFieldError as wrong:
                raise WrongFieldError(f".{name}{wrong.place}", wrong.problem) from None
        try:
            return record(**values)
        except AutoparError as error:
            raise WrongFieldError("", f"cannot be: {error}") from None

    return decode


def _short(data: Any) -> str:
    text = json.dumps(data)
    return text if len(text) <= 40 else text[:37] + "..."
