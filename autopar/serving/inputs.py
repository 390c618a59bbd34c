"""Read which model a request is for, and its texts.

In: the JSON of a request. Out: a `ServedModel`; prompts, which are texts or lists of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.serving import fields
from autopar.serving.limits import RequestError
from autopar.serving.models import Models, ServedModel

_MOST_PROMPTS = 256


def model_of(models: Models, body: Mapping[str, Any]) -> ServedModel:
    """The model that a request names; the only one if it names none.

    Raises:
        RequestError: there is none, or it serves no requests now.
    """
    model = only_or_named(models, body)
    model.check_ready()
    return model


def only_or_named(models: Models, body: Mapping[str, Any]) -> ServedModel:
    """As above, also of a model that sleeps or has failed."""
    if body.get("model") is None and len(models.by_name) == 1:
        return next(iter(models.by_name.values()))
    return models.find(fields.text(body, "model"))


def prompts_of(body: Mapping[str, Any], name: str) -> list[Any]:
    """The prompts in a field: a text, tokens, or several of them."""
    value = body.get(name)
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    is_valid = all(
        isinstance(each, str)
        or (isinstance(each, list) and each and all(isinstance(one, int) and not isinstance(one, bool) for one in each))
        for each in several
    )
    if not is_valid or len(several) > _MOST_PROMPTS:
        raise RequestError(
            400, f"{name!r} must be a text, a list of tokens, or at most {_MOST_PROMPTS} of either", name
        )
    return several
