"""Make a row of results: the measured value, and its gate."""

from __future__ import annotations

Row = dict[str, str | float | bool]


def row(what: str, value: float, unit: str = "", *, at_most: float | None = None, at_least: float | None = None) -> Row:
    """One measured value.

    Args:
        at_most, at_least: its gate, if it has one.
    """
    gate = "" if at_most is None else f"<= {at_most:,g}"
    met: bool | str = "" if at_most is None else value <= at_most
    if at_least is not None:
        gate, met = f">= {at_least:,g}", value >= at_least
    return {"what": what, "value": value, "unit": unit, "gate": gate, "met": met}
