"""Build HTML elements as trees, with all text escaped. In: names, attributes, children. Out: HTML."""

from __future__ import annotations

import json
from typing import Any, TypeAlias
from xml.etree import ElementTree

from autopar.system.units import without_controls

Element: TypeAlias = ElementTree.Element
Child: TypeAlias = "Element | str | None"


def el(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Element:
    """An element. An attribute that is None or False is left out, True is written without a value; `_` in a name is `-`,
    and one at the end is dropped: `class_="row"`, `data_shape="8,8"`.
    """
    made = ElementTree.Element(name)
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        made.set(key.rstrip("_").replace("_", "-"), "" if value is True else _text(value))
    add(made, *children)
    return made


def add(parent: Element, *children: Child) -> Element:
    """Append children to an element, and return it."""
    for child in children:
        if child is None:
            continue
        if not isinstance(child, str):
            parent.append(child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + child
        else:
            parent.text = (parent.text or "") + child
    return parent


def svg(width: float, height: float, *children: Child, **attributes: str | float | bool | None) -> Element:
    """An SVG that is stretched to its container, with strokes of constant width."""
    made = el("svg", *children, preserveAspectRatio="none", aria_hidden="true", **attributes)
    made.set("viewBox", f"0 0 {_text(width)} {_text(height)}")
    return made


def data(name: str, value: Any) -> Element:
    """JSON for the page's script."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return el("script", text.replace("<", "\\u003c"), type="application/json", id=name)


def fitting(text: str) -> Element:
    """A label of a bar, which is hidden where the bar is too narrow for it."""
    return el("span", text, class_="fits")


def in_code(text: str) -> list[Child]:
    """Text with its `quoted` parts set as code."""
    return [el("code", part) if n % 2 else part for n, part in enumerate(text.split("`"))]


def written(element: Element) -> str:
    """The element as HTML text."""
    return without_controls(ElementTree.tostring(element, encoding="unicode", method="html"))


def percent(part: float, whole: float) -> str:
    """A share as a CSS length.

    >>> percent(1, 3), percent(0, 0)
    ('33.333%', '0%')
    """
    return f"{round(100 * part / whole, 3):g}%" if whole else "0%"


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"
