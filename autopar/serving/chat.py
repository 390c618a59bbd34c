"""Make a prompt from a chat by the checkpoint's template, and find tool calls in the reply.

In: messages and tools as in OpenAI's API, the template of a model's folder. Out: `ChatTemplate`, from messages to a prompt; `ToolCalls`,
from text to the calls in it. Templates come with checkpoints, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from autopar.errors import ModelError
from autopar.serving.limits import RequestError

_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        source: Jinja's text. variables: what templates read besides the messages, such as `bos_token`.

    Raises:
        ModelError: the text is not a template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self.source, self._variables = source, dict(variables)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(
                f"the chat template is not valid Jinja: {error}. Copy it again from where it came from"
            ) from None

    @classmethod
    def read(cls, folder: Path, given: Path | None = None) -> ChatTemplate | None:
        """The template of a model's folder; None if it has none.

        Args:
            given: a file with a template that replaces the folder's.
        """
        variables: dict[str, Any] = {}
        source: Any = None
        config = folder / "tokenizer_config.json"
        if config.is_file():
            try:
                fields = json.loads(config.read_text(encoding="utf-8"))
                variables = {name: _token(fields[name]) for name in ("bos_token", "eos_token") if fields.get(name)}
                source = fields.get("chat_template")
            except (OSError, ValueError, AttributeError) as error:
                raise ModelError(f"{config} cannot be read ({error}). Copy it again from where it came from") from None
        if isinstance(source, list):  # several, by name
            source = next((each["template"] for each in source if each.get("name") == "default"), None)
        file = given or folder / "chat_template.jinja"
        if given is not None or file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except OSError as error:
                raise ModelError(f"the chat template {file} cannot be read: {error.strerror}") from None
        return None if source is None else cls(source, {"bos_token": "", "eos_token": "", **variables})

    def prompt(self, messages: Sequence[Any], tools: Sequence[Any] | None, options: Mapping[str, Any]) -> str:
        """The prompt of a chat, up to where the assistant's reply begins.

        Args:
            options: further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: a message is not one, or the template refuses the messages.
        """
        given = {
            **self._variables,
            **options,
            "messages": [_message(each) for each in messages],
            "tools": tools or None,
        }
        try:
            return self._template.render(given | {"add_generation_prompt": True})
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise RequestError(400, f"the model's chat template refuses these messages: {error}", "messages") from None


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _token(value: Any) -> str:
    return value["content"] if isinstance(value, Mapping) else value


def _message(message: Any) -> dict[str, Any]:
    """A message as templates read it: text in one piece, arguments of tool calls as objects."""
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise RequestError(400, f"a message needs a 'role', one of {', '.join(_ROLES)}", "messages")
    read = {name: value for name, value in message.items() if value is not None}
    content = read.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise RequestError(400, "a message has parts that are not text: this model reads text only", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(400, "the 'content' of a message must be a text, or a list of texts", "messages")
    read["content"] = content
    calls = read.get("tool_calls")
    if calls is not None:
        try:
            read["tool_calls"] = [{**call, "function": _with_object(call["function"])} for call in calls]
        except (TypeError, KeyError):
            raise RequestError(400, "the 'tool_calls' of a message are not as in a reply", "messages") from None
    return read


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except (TypeError, ValueError, KeyError, RecursionError):
        return dict(function)


# -- tool calls ----------------------------------------------------------------------------------

#: The texts between which models write tool calls in JSON: Qwen's and Hermes', Mistral's, LLaMA's.
_MARKS = (("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", ""), ("<|python_tag|>", ""), ("", ""))


@dataclass(eq=False)
class ToolCalls:
    """Finds tool calls in a text that comes in pieces.

    Args:
        names: the names of the tools. A call of another one is text.

    Attributes:
        calls: the calls found, as in a reply of OpenAI's API.
    """

    names: frozenset[str]
    calls: list[dict[str, Any]] = field(default_factory=list)
    _withheld: str = ""
    _is_call: bool = False

    def add(self, text: str) -> str:
        """Add a piece of text, and return what is certainly no part of a call."""
        self._withheld += text
        if self._is_call:
            return ""
        starts = [at for mark, _ in _MARKS if mark and (at := self._withheld.find(mark)) >= 0]
        if starts or self._withheld.lstrip().startswith("{"):
            at = min(starts, default=0)
            shown, self._withheld, self._is_call = self._withheld[:at], self._withheld[at:], True
            return shown
        keep = 0 if self._withheld.strip() else len(self._withheld)
        for mark, _ in _MARKS:
            for num in range(min(len(mark) - 1, len(self._withheld)), keep, -1):
                if mark.startswith(self._withheld[-num:]):
                    keep = num
                    break
        cut = len(self._withheld) - keep
        shown, self._withheld = self._withheld[:cut], self._withheld[cut:]
        return shown

    def end(self) -> str:
        """Read the calls at the end of the text, and return the text that is left if there are none."""
        for opens, closes in _MARKS:
            if opens not in self._withheld:
                continue
            parts = self._withheld.split(opens)[1:] if opens else [self._withheld]
            calls = [call for part in parts for call in self._read(part.split(closes)[0] if closes else part)]
            if calls:
                self.calls, self._withheld = calls, ""
                break
        rest, self._withheld = self._withheld, ""
        return rest

    def _read(self, text: str) -> list[dict[str, Any]]:
        """The calls in a JSON text, of one call or a list."""
        try:
            found = json.loads(text.strip())
        except (ValueError, RecursionError):
            return []
        calls: list[dict[str, Any]] = []
        for call in found if isinstance(found, list) else [found]:
            arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
            if arguments is None or call.get("name") not in self.names:
                return []
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            function = {"name": call["name"], "arguments": written}
            calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
        return calls
