"""Write replies in the form of OpenAI's API, as a whole or as server-sent events.

In: choices and what new tokens add to them. Out: `Completion` and `Chat`, two forms of a reply.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from autopar.serving.chat import ToolCalls
from autopar.serving.choice_text import ChoiceText, Delta, TokenLogprob, token_bytes


class Form(Protocol):
    """A form of replies."""

    def opening(self, num_choices: int) -> list[str]:
        """The choices of the first event, in JSON."""
        ...

    def pieces(self, choice: int, delta: Delta) -> list[str]:
        """The choices of further events, in JSON, for new tokens."""
        ...

    def whole(self, choices: Sequence[ChoiceText]) -> list[dict[str, Any]]:
        """All choices of a reply."""
        ...


class Reply:
    """One reply.

    Args:
        name: its id. kind: its object type, and that of its events. model: the model's name.
    """

    def __init__(self, name: str, kind: tuple[str, str], model: str) -> None:
        self.head = {"id": name, "object": kind[0], "created": int(time.time()), "model": model}
        event = json.dumps({**self.head, "object": kind[1]}, ensure_ascii=False)
        self._event = f"data: {event[:-1]}, "

    def event(self, choice: str) -> str:
        """An event with one choice, given in JSON."""
        return f'{self._event}"choices": [{choice}]}}\n\n'

    def usage_event(self, usage: dict[str, Any]) -> str:
        """The event with the counts of tokens."""
        return f'{self._event}"choices": [], "usage": {json.dumps(usage)}}}\n\n'


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[ChoiceText]) -> dict[str, Any]:
    """The counts of tokens of a reply."""
    num_prompt, num_new = sum(map(len, prompts)), sum(len(each.tokens) for each in choices)
    per_prompt = max(1, len(choices) // max(1, len(prompts)))
    cached = sum(each.generation.num_cached for each in choices[::per_prompt])
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Completion:
    """Replies of `/v1/completions`.

    Args:
        echo: the prompts' texts, to begin each choice with. scored: the prompts' tokens, if their logprobs are in the reply.
    """

    kind = ("text_completion", "text_completion")

    def __init__(
        self,
        tokenizer: Any,
        *,
        echo: Sequence[str] | None,
        has_tokens: bool,
        scored: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._tokenizer, self._echo, self._has_tokens, self._scored = tokenizer, echo, has_tokens, scored
        self._offsets: dict[int, int] = {}

    def opening(self, num_choices: int) -> list[str]:
        """The prompts, if they are echoed."""
        if self._echo is None:
            return []
        each = num_choices // len(self._echo)
        return [
            json.dumps({"index": number, "text": self._echo[number // each], "logprobs": None, "finish_reason": None})
            for number in range(num_choices)
        ]

    def pieces(self, choice: int, delta: Delta) -> list[str]:
        """One event."""
        if not (delta.text or delta.finish or delta.logprobs or (self._has_tokens and delta.tokens)):
            return []
        if not delta.logprobs and not self._has_tokens:
            finish = "null" if delta.finish is None else f'"{delta.finish}"'
            return [
                f'{{"index": {choice}, "text": {json.dumps(delta.text)}, "logprobs": null, "finish_reason": {finish}}}'
            ]
        return [json.dumps(self._choice(choice, delta.text, delta.tokens, delta.logprobs, delta.finish))]

    def whole(self, choices: Sequence[ChoiceText]) -> list[dict[str, Any]]:
        """The choices."""
        echo = self._echo or [""]
        each = max(1, len(choices) // len(echo))
        made: list[dict[str, Any]] = []
        for number, one in enumerate(choices):
            prompt = number // each
            logprobs = one.logprobs
            if self._scored is not None:
                logprobs = [*_of_prompt(self._scored[prompt], choices[prompt * each]), *logprobs]
            made.append(self._choice(number, echo[prompt] + one.text, one.tokens, logprobs, one.finish))
        return made

    def _choice(
        self, number: int, text: str, tokens: list[int], logprobs: list[TokenLogprob], finish: str | None
    ) -> dict[str, Any]:
        made: dict[str, Any] = {"index": number, "text": text, "logprobs": None, "finish_reason": finish}
        if logprobs:
            made["logprobs"] = self._logprobs(number, logprobs)
        if self._has_tokens:
            made["token_ids"] = tokens
        return made

    def _logprobs(self, number: int, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        texts = [_text_of(self._tokenizer, each.token) for each in logprobs]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offsets.get(number, 0))
            self._offsets[number] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [
                None if each.logprob is None else {_text_of(self._tokenizer, token): p for token, p in each.best}
                for each in logprobs
            ],
            "text_offset": offsets,
        }


def _of_prompt(prompt: tuple[int, ...], choice: ChoiceText) -> list[TokenLogprob]:
    """The logprobs of a prompt's tokens, with the most probable token in the place of each. The first follows none."""
    scores = choice.generation.prompt_scores
    made = [TokenLogprob(prompt[0], None)]
    for at, token in enumerate(prompt[1:], 1):
        logprob, best, best_logprob = scores[at]
        made.append(TokenLogprob(token, logprob, tuple({best: best_logprob, token: logprob}.items())))
    return made


class Chat:
    """Replies of `/v1/chat/completions`.

    Args:
        tools: the names of the tools that the model may call.
    """

    kind = ("chat.completion", "chat.completion.chunk")

    def __init__(self, tokenizer: Any, tools: frozenset[str], *, has_tokens: bool) -> None:
        self._tokenizer, self._tools, self._has_tokens = tokenizer, tools, has_tokens
        self._finders: dict[int, ToolCalls] = {}

    def opening(self, num_choices: int) -> list[str]:
        """The role of each message."""
        return [_chunk(number, {"role": "assistant", "content": ""}) for number in range(num_choices)]

    def pieces(self, choice: int, delta: Delta) -> list[str]:
        """An event for text, one for each tool call, and one for the end."""
        text, calls = delta.text, []
        if self._tools:
            finder = self._finders.setdefault(choice, ToolCalls(self._tools))
            text = finder.add(text)
            if delta.finish is not None:
                text += finder.end()
                calls = finder.calls
        content = self._contents(delta.logprobs)
        made = (
            [_chunk(choice, {"content": text}, content, tokens=delta.tokens if self._has_tokens else None)]
            if text or content
            else []
        )
        made += [_chunk(choice, {"tool_calls": [{"index": at, **call}]}) for at, call in enumerate(calls)]
        if delta.finish is not None:
            made.append(_chunk(choice, {}, finish="tool_calls" if calls else delta.finish))
        return made

    def whole(self, choices: Sequence[ChoiceText]) -> list[dict[str, Any]]:
        """The choices."""
        return [self._choice(number, each) for number, each in enumerate(choices)]

    def _choice(self, number: int, choice: ChoiceText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        finish = choice.finish
        if self._tools:
            finder = ToolCalls(self._tools)
            text = finder.add(choice.text) + finder.end()
            if finder.calls:
                message |= {"content": text or None, "tool_calls": finder.calls}
                finish = "tool_calls"
        content = self._contents(choice.logprobs)
        made: dict[str, Any] = {"index": number, "message": message, "finish_reason": finish}
        made["logprobs"] = None if content is None else {"content": content, "refusal": None}
        if self._has_tokens:
            made["token_ids"] = choice.tokens
        return made

    def _contents(self, logprobs: list[TokenLogprob]) -> list[dict[str, Any]] | None:
        if not logprobs:
            return None
        return [
            {**self._named(each.token, each.logprob), "top_logprobs": [self._named(*one) for one in each.best]}
            for each in logprobs
        ]

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = b"" if self._tokenizer is None else token_bytes(self._tokenizer, token)
        return {"token": _text_of(self._tokenizer, token), "logprob": logprob, "bytes": list(data)}


def _chunk(
    choice: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None, tokens: list[int] | None = None
) -> str:
    made: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish}
    if logprobs is not None:
        made["logprobs"] = {"content": logprobs, "refusal": None}
    if tokens is not None:
        made["token_ids"] = tokens
    return json.dumps(made)


def _text_of(tokenizer: Any, token: int) -> str:
    return str(token) if tokenizer is None else token_bytes(tokenizer, token).decode(errors="replace")
