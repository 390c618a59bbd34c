"""Compare two traced pieces, so that equal pieces of a submesh are compiled once."""

from __future__ import annotations

import re
from typing import Any

import jax


def is_same_program(one: Any, other: Any) -> bool:
    """Whether two traced pieces with equal arguments and devices are the same program. Programs with Python
    callbacks or with constants outside their text count as different, because their text does not show the
    difference."""
    if jax.config.jax_use_simplified_jaxpr_constants:
        return False
    texts = [without_module_name(traced.lower().as_text()) for traced in (one, other)]
    return texts[0] == texts[1] and "callback" not in texts[0]


def without_module_name(text: str) -> str:
    """A program's text without the name of its module, in which equal pieces differ."""
    return _MODULE_NAME.sub("module", text, count=1)


_MODULE_NAME = re.compile(r"module @\S+")
