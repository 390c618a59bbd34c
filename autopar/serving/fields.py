"""Read the fields of requests: names, types, ranges. A field that is not known is refused by name.

In: the JSON of a request. Out: `Generate`, the part that completions and chat completions have in common; readers of single
fields. Errors name the field, its value and what is allowed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import InferenceError
from autopar.inference import SamplingOptions
from autopar.serving.limits import Limits, RequestError

#: Fields that change nothing here: names for accounting, hints for OpenAI's own servers.
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
#: Fields of completions and chat completions.
COMMON = frozenset(
    {"model", "n", "stream", "stream_options", "stop", "seed", "temperature", "top_p", "top_k", "logprobs", "priority"}
    | {"timeout", "return_token_ids", "response_format", "min_p", "presence_penalty", "frequency_penalty"}
    | {"repetition_penalty", "logit_bias"}
)
_MOST_STOPS = 16
_MOST_BIAS = 100.0  # as in OpenAI's API
_MOST_BIASES = 1024


@dataclass(frozen=True, slots=True)
class Generate:
    """What to generate.

    Args:
        max_tokens: None for as many as the model has room for.
        sampling: of the first choice; the others have the next seeds.
        stop: strings that end the text.
        num_best: the number of most probable tokens for each token; None without logprobs.
        timeout_s: the longest time to the end of the reply.
        schema: the JSON schema of the text; None for any text. schema_field: the field that it comes from.
    """

    n: int
    max_tokens: int | None
    sampling: SamplingOptions
    stop: tuple[str, ...]
    num_best: int | None
    stream: bool
    include_usage: bool
    priority: int
    timeout_s: float
    return_token_ids: bool
    schema: Any = None
    schema_field: str = "response_format"


def check_known(body: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuse fields that are not known. One that is null is as if it were not there."""
    for name, value in body.items():
        if name not in known and name not in IGNORED and value is not None:
            raise RequestError(400, f"the field {name!r} is not supported: leave it out", name, "unsupported_parameter")


def text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A field of text.

    Raises:
        RequestError: it is missing, or not a text.
    """
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise RequestError(400, f"the field {name!r} must be a text, but it is {_shown(value)}", name)
    return value


def whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    """A field of a whole number."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(400, f"{name!r} is {_shown(value)}: give a whole number from {least} to {most}", name)
    return value


def real(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    """A field of a number."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(400, f"{name!r} is {_shown(value)}: give a number from {least:g} to {most:g}", name)
    return float(value)


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false by default."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(400, f"{name!r} is {_shown(value)}: give true or false", name)
    return value


def generate(body: Mapping[str, Any], limits: Limits, *, max_tokens: int | None, num_best: int | None) -> Generate:
    """The fields that completions and chat completions have in common.

    Args:
        max_tokens, num_best: as in `Generate`; their fields differ.
    """
    n = whole(body, "n", 1, 1, limits.max_choices)
    seed = whole(body, "seed", -1, -(2**63), 2**63 - 1)
    temperature = real(body, "temperature", 1.0, 0.0, 100.0)
    try:
        sampling = SamplingOptions(
            temperature=temperature,
            top_k=max(0, whole(body, "top_k", 0, -1, 2**31 - 1)),
            top_p=real(body, "top_p", 1.0, 0.0, 1.0) or math.ulp(0.0),
            seed=secrets.randbits(32) if body.get("seed") is None else seed % 2**32,
            min_p=real(body, "min_p", 0.0, 0.0, 1.0),
            presence_penalty=real(body, "presence_penalty", 0.0, -2.0, 2.0),
            frequency_penalty=real(body, "frequency_penalty", 0.0, -2.0, 2.0),
            repetition_penalty=real(body, "repetition_penalty", 1.0, 0.01, 100.0),
            logit_bias=_biases(body.get("logit_bias")),
        )
    except InferenceError as error:
        raise RequestError(400, str(error)) from None
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise RequestError(400, f"'stream_options' is {_shown(options)}: give an object", "stream_options")
    return Generate(
        n=n,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=_stops(body.get("stop")),
        num_best=num_best,
        stream=flag(body, "stream"),
        include_usage=flag(options, "include_usage"),
        priority=priority(body),
        timeout_s=timeout_s(body, limits),
        return_token_ids=flag(body, "return_token_ids"),
    )


def priority(body: Mapping[str, Any]) -> int:
    """The priority of a request; lower goes first."""
    return whole(body, "priority", 0, -(2**20), 2**20)


def timeout_s(body: Mapping[str, Any], limits: Limits) -> float:
    """The seconds to the end of the reply."""
    return min(limits.timeout_s, real(body, "timeout", limits.timeout_s, 0.001, 1e6))


def _biases(value: Any) -> dict[int, float]:
    """What to add to logits, by token. The names in JSON are the tokens' numbers."""
    given = {} if value is None else value
    is_valid = isinstance(given, Mapping) and all(
        name.isascii()
        and name.isdigit()
        and len(name) < 10
        and isinstance(bias, int | float)
        and not isinstance(bias, bool)
        and abs(bias) <= _MOST_BIAS
        for name, bias in given.items()
    )
    if not is_valid or len(given) > _MOST_BIASES:
        raise RequestError(
            400,
            f"'logit_bias' is {_shown(value)}: give an object of at most {_MOST_BIASES} numbers from {-_MOST_BIAS:g} to {_MOST_BIAS:g},"
            " named by tokens",
            "logit_bias",
        )
    return {int(name): float(bias) for name, bias in given.items()}


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    is_texts = isinstance(stops, Sequence) and all(isinstance(each, str) and each for each in stops)
    if not is_texts or len(stops) > _MOST_STOPS:
        raise RequestError(400, f"'stop' is {_shown(value)}: give a text, or at most {_MOST_STOPS} texts", "stop")
    return tuple(stops)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
