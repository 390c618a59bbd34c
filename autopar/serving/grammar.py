"""Constrain what a model generates to a JSON schema, by llguidance.

In: a schema, a tokenizer. Out: `Grammars`, which makes the `Constraint` of a request. llguidance follows the text in the grammar, and
computes which tokens may come next; the engine passes this mask to the program. A token that would leave the schema has the
probability 0, so what ends with the model's own end is valid, whatever the model.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.inference import Engine
from autopar.serving.choice_text import token_bytes
from autopar.serving.limits import RequestError

#: JSON is written on one line: white space of any length would let a model write nothing else.
_DEFAULTS = {"whitespace_flexible": False}


class JsonConstraint:
    """The state of one text in a grammar (`Constraint`).

    Args:
        matcher: of llguidance.

    Attributes:
        error: why the grammar has failed, such as a limit of its size. Then no token may follow, and the request ends alone.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.error = ""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """See `Constraint`."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            mask[:] = 0

    def fill_after(self, draft: Sequence[int], masks: NDArray[np.int32]) -> None:
        """See `Constraint`."""
        num = self.num_allowed(draft)
        for number, token in enumerate(draft[:num]):
            self._matcher.consume_token(token)
            self.fill(masks[number])
        if num:
            self._matcher.rollback(num)

    def num_allowed(self, draft: Sequence[int]) -> int:
        """See `Constraint`."""
        return self._matcher.validate_tokens(list(draft)) if draft else 0

    def forced(self) -> list[int]:
        """See `Constraint`."""
        return self._matcher.compute_ff_tokens()

    def accept(self, tokens: list[int]) -> None:
        """See `Constraint`."""
        self._matcher.consume_tokens(tokens)


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, engine: Engine) -> None:
        tokenizer, num = engine.tokenizer, engine.runner.served.model.config.vocab_size
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = min(engine.stop_tokens), None
        special = {at for at, each in tokenizer.get_added_tokens_decoder().items() if each.special}
        self.special_token_ids = sorted(special | set(engine.stop_tokens))
        self.tokens = [b"" if token in special else token_bytes(tokenizer, token) for token in range(num)]

    def __call__(self, text: bytes | str) -> list[int]:
        written = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(written, add_special_tokens=False).ids


class Grammars:
    """The constraints of one model.

    Args:
        engine: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokenizer: Any = None

    def of_schema(self, schema: Any, param: str) -> JsonConstraint:
        """A constraint to the JSON texts that a schema describes.

        Args:
            param: the field of the request that has the schema.

        Raises:
            RequestError: the model cannot be constrained, or the schema is not valid or not supported.
        """
        library = self._library()
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_DEFAULTS)
        except ValueError as error:
            raise RequestError(400, f"the JSON schema is not valid: {error}", param) from None
        if problem := library.LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise RequestError(400, f"the JSON schema is not valid, or not supported: {problem}", param)
        return JsonConstraint(library.LLMatcher(self._tokenizer, grammar, log_level=0))

    def _library(self) -> Any:
        engine = self._engine
        if engine.tokenizer is None or not engine.stop_tokens:
            raise RequestError(
                400, "the model has no tokenizer, or no token that ends a text: its text cannot be constrained"
            )
        try:
            library = importlib.import_module("llguidance")
        except ModuleNotFoundError:
            raise RequestError(
                501, "the server has no `llguidance`: autopar's extra `serve` is not installed"
            ) from None
        if self._tokenizer is None:
            wrapper = library.TokenizerWrapper(_Vocabulary(engine))
            stops = sorted(engine.stop_tokens)
            num = engine.runner.served.model.config.vocab_size
            self._tokenizer = library.LLTokenizer(wrapper, n_vocab=num, eos_token=stops)
        return library


def schema_of(response_format: Any) -> Any:
    """The schema of a `response_format`; None if it allows any text.

    Raises:
        RequestError: it is none of those of OpenAI's API.
    """
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    given = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(given, Mapping) or not isinstance(given.get("schema"), dict | bool):
        raise RequestError(
            400,
            "'response_format' must have the type 'text', 'json_object', or 'json_schema' with a 'schema'",
            "response_format",
        )
    return given["schema"]


def schema_of_tools(tools: list[dict[str, Any]], choice: Any) -> Any:
    """The schema of a call of one of the tools, if a call is required; else None.

    Args:
        choice: `tool_choice`: "auto", "none", "required", or an object that names a tool.

    Raises:
        RequestError: it names no tool that is given.
    """
    if choice in (None, "auto", "none"):
        return None
    functions = [each["function"] for each in tools]
    if choice != "required":
        named = choice.get("function") if isinstance(choice, Mapping) else None
        name = named.get("name") if isinstance(named, Mapping) else None
        functions = [each for each in functions if each["name"] == name]
    if not functions:
        raise RequestError(
            400, "'tool_choice' must be 'auto', 'none', 'required', or name one of the tools", "tool_choice"
        )
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": each["name"]}, "arguments": each.get("parameters") or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}
