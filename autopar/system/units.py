"""Format numbers with units, and escape text for a terminal. In: bytes, seconds; a text. Out: text safe to print."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def human_bytes(num_bytes: float) -> str:
    """Three digits and an SI unit.

    >>> human_bytes(512), human_bytes(124_480_000), human_bytes(40e9)
    ('512 B', '124 MB', '40.0 GB')
    """
    return _human(num_bytes, 1.0, ("B", "KB", "MB", "GB", "TB", "PB"))


def human_seconds(seconds: float) -> str:
    """Three digits and a unit from ns to s.

    >>> human_seconds(0), human_seconds(1.234e-5), human_seconds(0.0262), human_seconds(math.inf)
    ('0 s', '12.3 us', '26.2 ms', 'infinite')
    """
    return "0 s" if seconds == 0 else _human(seconds, 1e-9, ("ns", "us", "ms", "s"))


def human_number(value: float) -> str:
    """Three digits.

    >>> human_number(1234567.0), human_number(12.345)
    ('1,230,000', '12.3')
    """
    return f"{float(f'{value:.3g}'):,.{0 if value >= 99.95 else 1}f}"


def human_flops(flops: float) -> str:
    """Three digits and a unit.

    >>> human_flops(5.12e14)
    '512 TFLOP'
    """
    return _human(flops, 1.0, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _human(value: float, unit: float, names: Sequence[str]) -> str:
    if not math.isfinite(value):
        return "infinite"
    value, index = value / unit, 0
    while abs(value) >= 999.5 and index < len(names) - 1:
        value, index = value / 1000, index + 1
    digits = 0 if names[index] == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {names[index]}"


def printable(text: str) -> str:
    r"""A text on one line, with control and invisible characters escaped.

    >>> print(printable("gpt \x1b[2J\nx"))
    gpt \x1b[2J\nx
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


#: Control characters except new lines and tabs, bidirectional marks, and unprintable surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def without_controls(text: str) -> str:
    r"""A text of several lines with control characters escaped.

    >>> print(without_controls("gpt \x1b[2J"))
    gpt \x1b[2J
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate("KMGT", 1)}


def parse_size(text: str) -> float:
    """Bytes of `40GB` (SI), `512MiB` (binary) or a plain number of bytes.

    Raises:
        ValueError: the text is none of these, or not above zero.

    >>> parse_size("40GB"), parse_size("1.5 KiB"), parse_size("1e9")
    (40000000000.0, 1536.0, 1000000000.0)
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:[eE]\+?\d+)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise ValueError(
            f"{text!r} is not a size: write e.g. 40GB (10^9 bytes), 40GiB (2^30 bytes) or a number of bytes"
        )
    return float(match[1]) * unit
