"""Lay out a plan file for review: records with stable names first, and numbers in columns at the end.

In: a plan as records, in JSON types. Out: the records without the numbers that any change shifts (values of the traced
step, positions in other lists, lines of the user's code), and these numbers as columns. An additional layer then
changes only its own records and a few long lines; an additional comment in the code changes a few lines. The inverse
reads a file and reports errors by the file's field names.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from autopar.plans.json_codec import WrongFieldError, write_text

Body: TypeAlias = dict[str, Any]
_T = TypeVar("_T")

#: Fields of the file for the columns, and for lines of code by file and function.
NUMBERS, SOURCES = "numbers", "sources"
#: Fields that consist of numbers only.
_WHOLE = ("carried", "donated")
#: The numeric fields of records.
_FIELDS = {
    "constraints": ("value", "node", "operand"),
    "decisions": ("collectives",),
    "regions": ("node",),
    "early_reductions": ("node", "operand", "values"),
    "unfused_reductions": ("nodes",),
    "rematerialized": ("segment",),
}
#: Records that name a line of code.
_NAME_A_LINE = ("decisions", "collectives", "memory.peak", "memory.at_peak")
#: Fields about the whole step, at the end of the file before the columns.
_LAST = ("memory", "trace")
_LINE = re.compile(r"(.*):(\d+)( \(.*\))?", re.DOTALL)


def in_columns(body: Body) -> Body:
    """Convert the fields of a plan to the layout of its file."""
    numbers: Body = {name: body[name] for name in _WHOLE}
    out = {name: item for name, item in body.items() if name not in (*_WHOLE, *_LAST)} | {
        name: body[name] for name in _LAST if name in body
    }
    for section, names in _FIELDS.items():
        for name in names if out.get(section) else ():
            numbers[f"{section}.{name}"] = [record.get(name) for record in out[section]]
        if section in out:
            out[section] = [{k: v for k, v in record.items() if k not in names} for record in out[section]]
    if "stages" in out:
        out["stages"] = [stage | {"plan": in_columns(stage["plan"])} for stage in out["stages"]]
    out, sources, columns = _without_sources(out)
    return out | {SOURCES: sources, NUMBERS: numbers | columns}


def reader(decode: Callable[[Body], _T], check: Callable[[_T], None]) -> Callable[[Body], _T]:
    """Make a function that reads the fields of a file.

    Args:
        decode: function that decodes records.
        check: function that raises if well-typed fields are inconsistent.
    """

    def read(body: Body) -> _T:
        try:
            plan = decode(as_records(body))
            check(plan)
        except WrongFieldError as wrong:
            raise WrongFieldError(_in_file(wrong.place) if NUMBERS in body else wrong.place, wrong.problem) from None
        return plan

    return read


def as_records(body: Body) -> Body:
    """The inverse of `in_columns`. In files of versions before 4, records contain their numbers.

    Raises:
        WrongFieldError: a column does not fit the records; the error names it.
    """
    numbers = body.get(NUMBERS, {})
    if not isinstance(numbers, dict):
        raise WrongFieldError(f".{NUMBERS}", "must be an object")
    out = {name: item for name, item in body.items() if name not in (NUMBERS, SOURCES)}
    texts = None
    for name, column in numbers.items():
        section, _, field = name.rpartition(".")
        if name in _WHOLE:
            out[name] = column
        elif field in _FIELDS.get(section, ()):
            _put_back(out, section, field, _checked(name, column))
        elif field == "source" and section in _NAME_A_LINE:
            texts = _texts(body.get(SOURCES)) if texts is None else texts
            _put_back(out, section, field, [_text(name, n, at, texts) for n, at in enumerate(_checked(name, column))])
        else:
            raise WrongFieldError(f".{NUMBERS}.{name}", "is unknown")
    if isinstance(out.get("stages"), list):
        out["stages"] = [_stage_as_records(n, stage) for n, stage in enumerate(out["stages"])]
    return out


def _stage_as_records(n: int, stage: Any) -> Any:
    if not isinstance(stage, dict) or not isinstance(stage.get("plan"), dict):
        return stage  # the decoder reports the error
    try:
        return stage | {"plan": as_records(stage["plan"])}
    except WrongFieldError as wrong:
        raise WrongFieldError(f".stages[{n}].plan{wrong.place}", wrong.problem) from None


# -- text ------------------------------------------------------------------------------------


def write_document(document: Any, path: str | os.PathLike[str]) -> None:
    """Write JSON in the format of `layout`, atomically.

    Raises:
        PlanFileError: the file cannot be written.
    """
    write_text(layout(document) + "\n", path)


def layout(value: Any, indent: int = 0, opens: int = 2) -> str:
    """Format JSON so that diffs of plans are readable.

    Objects of the outer levels and lists have one entry per line; a record in a list stays on one line. A record that
    contains a plan is laid out like a plan.

    Args:
        indent: indentation level of the surrounding text.
        opens: number of outer levels of objects with one entry per line.
    """
    if isinstance(value, dict) and value and opens > 0:
        entries = [f"{json.dumps(key)}: {_entry(key, item, indent + 1, opens - 1)}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list | str) for item in value):
        entries = [layout(item, indent + 1, 3) if _holds_a_plan(item) else _line(item) for item in value]
    else:
        return _line(value)
    return _opened("{}" if isinstance(value, dict) else "[]", entries, indent)


def _entry(name: str, item: Any, indent: int, opens: int) -> str:
    if name == NUMBERS and item:  # one line per column, however long
        return _opened("{}", [f"{json.dumps(key)}: {_line(column)}" for key, column in item.items()], indent)
    return layout(item, indent, opens)


def _opened(brackets: str, entries: Sequence[str], indent: int) -> str:
    outer = "\n" + "  " * indent
    return f"{brackets[0]}{outer}  {f',{outer}  '.join(entries)}{outer}{brackets[1]}"


def _line(item: Any) -> str:
    return json.dumps(item, allow_nan=False)


def _holds_a_plan(item: Any) -> bool:
    return isinstance(item, dict) and any(isinstance(inner, dict) and NUMBERS in inner for inner in item.values())


# -- columns ---------------------------------------------------------------------------------


def _checked(name: str, column: Any) -> list[Any]:
    if not isinstance(column, list):
        raise WrongFieldError(f".{NUMBERS}.{name}", "must be a list")
    return column


def _put_back(out: Body, section: str, field: str, column: list[Any]) -> None:
    """Add a field to records from its column; for None the field keeps its default."""
    *outer, last = section.split(".")
    holder = out
    for name in outer:
        holder[name] = dict(holder[name]) if isinstance(holder.get(name), dict) else {}
        holder = holder[name]
    found = holder.get(last)
    records = found if isinstance(found, list) else [found]
    if len(records) != len(column):
        raise WrongFieldError(f".{NUMBERS}.{section}.{field}", f"has {len(column)} entries for {len(records)} records")
    for n, (record, item) in enumerate(zip(records, column, strict=True)):
        if item is not None and isinstance(record, dict) and field in record:
            raise WrongFieldError(f".{NUMBERS}.{section}.{field}[{n}]", "is also in its record")
    whole = [
        record if item is None or not isinstance(record, dict) else record | {field: item}
        for record, item in zip(records, column, strict=True)
    ]
    holder[last] = whole if isinstance(found, list) else whole[0]


def _in_file(place: str) -> str:
    """The file's name of a field of the records: `decisions[3].collectives` is entry 3 of a column."""
    stage = re.match(r"\.?stages\[\d+\]\.plan|", place)
    prefix = stage[0] if stage else ""
    rest = place.removeprefix(prefix).lstrip(".")
    for name in _WHOLE:
        if re.match(rf"{name}\b", rest):
            return f"{prefix}.{NUMBERS}.{rest}"
    columns = [(section, name) for section, names in _FIELDS.items() for name in names]
    for section, name in (*columns, *((section, "source") for section in _NAME_A_LINE)):
        if match := re.match(rf"{re.escape(section)}((?:\[\d+\])?)\.{name}\b", rest):
            return f"{prefix}.{NUMBERS}.{section}.{name}{match[1]}{rest[match.end() :]}"
    return place


# -- lines of code ---------------------------------------------------------------------------


def _without_sources(body: Body) -> tuple[Body, Body, Body]:
    """Move lines of code out of records: the records without them, the lines by file and function, and columns of
    positions in these."""
    named = [record["source"] for section in _NAME_A_LINE for record in _records(body, section)]
    lines: dict[str, set[int | None]] = defaultdict(set)
    for text in set(filter(None, named)):
        function, line = _split(text)
        lines[function].add(line)
    sources = {
        function: sorted(lines[function], key=lambda line: -1 if line is None else line) for function in sorted(lines)
    }
    position = {text: n for n, text in enumerate(_texts(sources))}
    columns: Body = {}
    for section in _NAME_A_LINE:
        if records := _records(body, section):
            columns[f"{section}.source"] = [position.get(record["source"]) for record in records]
            body = _replaced(body, section.split("."))
    return body, sources, columns


def _records(body: Body, section: str) -> list[Body]:
    found: Any = body
    for name in section.split("."):
        found = found.get(name) if found else None
    return found if isinstance(found, list) else [found] if found else []


def _replaced(body: Body, path: Sequence[str]) -> Body:
    """`body` with `source` removed from the records at a path."""
    name, *rest = path
    item = body[name]
    if rest:
        return body | {name: _replaced(item, rest)}
    bare = [
        {k: v for k, v in record.items() if k != "source"} for record in (item if isinstance(item, list) else [item])
    ]
    return body | {name: bare if isinstance(item, list) else bare[0]}


def _split(text: str) -> tuple[str, int | None]:
    """Split `gpt.py:12 (loss)` into `gpt.py (loss)` and 12; another text has no line."""
    match = _LINE.fullmatch(text)
    if match is not None:
        function, line = match[1] + (match[3] or ""), int(match[2])
        if _with_line(function, line) == text:
            return function, line
    return text, None


def _with_line(function: str, line: int) -> str:
    file, bracket, within = function.partition(" (")
    return f"{file}:{line}{bracket}{within}"


def _texts(sources: Any) -> list[str]:
    """The texts that columns index: all lines of all functions in order; line None is a text without a line."""
    if not isinstance(sources, Mapping):
        raise WrongFieldError(f".{SOURCES}", "must be an object")
    texts: list[str] = []
    for function, lines in sources.items():
        if not isinstance(lines, list) or any(line is not None and type(line) is not int for line in lines):
            raise WrongFieldError(f".{SOURCES}.{function}", "must be a list of whole numbers")
        texts += [function if line is None else _with_line(function, line) for line in lines]
    return texts


def _text(name: str, n: int, at: Any, texts: list[str]) -> str:
    if at is None:
        return ""
    if type(at) is not int or not 0 <= at < len(texts):
        raise WrongFieldError(
            f".{NUMBERS}.{name}[{n}]", f"must be a position in `{SOURCES}`, which has {len(texts)} lines"
        )
    return texts[at]
