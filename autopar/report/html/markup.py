"""Build a page's elements as trees, so that text is always escaped.

In: names, attributes, children. Out: HTML.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias
from xml.etree import ElementTree

from autopar.system.units import without_controls

Element: TypeAlias = ElementTree.Element
Child: TypeAlias = "Element | str | None"


def el(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Element:
    """Build an element.

    Args:
        attributes: attributes by name. `_` stands for `-`, and a trailing `_` is dropped: `class_="row"`,
            `data_shape="8,8"`. None and False omit an attribute; True writes it without a value.
    """
    element = ElementTree.Element(name)
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        element.set(key.rstrip("_").replace("_", "-"), "" if value is True else _text(value))
    add(element, *children)
    return element


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
    """A drawing that stretches to its container."""
    drawing = el("svg", *children, preserveAspectRatio="none", aria_hidden="true", **attributes)
    drawing.set("viewBox", f"0 0 {_text(width)} {_text(height)}")
    return drawing


def data(name: str, value: Any) -> Element:
    """A script element with JSON data for the page's script."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return el("script", text.replace("<", "\\u003c"), type="application/json", id=name)


def fitting(text: str) -> Element:
    """The label of a bar; it is hidden if the bar is too narrow."""
    return el("span", text, class_="fits")


def in_code(text: str) -> list[Child]:
    """A text whose parts in backticks become code elements."""
    return [el("code", part) if n % 2 else part for n, part in enumerate(text.split("`"))]


def written(element: Element) -> str:
    """The element as HTML."""
    return without_controls(ElementTree.tostring(element, encoding="unicode", method="html"))


def percent(part: float, whole: float) -> str:
    """A ratio as a CSS length.

    >>> percent(1, 3), percent(0, 0)
    ('33.333%', '0%')
    """
    return f"{round(100 * part / whole, 3):g}%" if whole else "0%"


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"
