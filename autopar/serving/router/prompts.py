"""Read from a request what its route depends on: the blocks of its prompt, and how many tokens it takes.

In: a model's name, the JSON of a request. Out: `Prompt`. A block has as many bytes as some 64 tokens of text, and its key is a hash of
it and of all blocks before it, so equal keys mean equal prefixes. A router has no tokenizer: it counts bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

BLOCK_TOKENS = 64
_BYTES_PER_TOKEN = 4
_MOST_BLOCKS = 4096
#: Where the text of a request is, besides the messages of a chat.
_FIELDS = ("prompt", "input", "text_1")


class Prompt(NamedTuple):
    """A prompt.

    Args:
        blocks: the keys of its full blocks, in order.
        num_tokens: about how many tokens the prompts have. num_new: the tokens to generate, if the request says so.
    """

    blocks: tuple[bytes, ...]
    num_tokens: int
    num_new: int | None


def prompt_of(model: str, body: Mapping[str, Any]) -> Prompt:
    """The prompt of a request. One that is not valid has no blocks: the server refuses it.

    >>> body = {"prompt": "x" * 1000, "max_tokens": 5}
    >>> [len(prompt_of("a", body).blocks), *prompt_of("a", body)[1:]]
    [3, 250, 5]
    """
    texts = _texts(body)
    first, size = texts[0], BLOCK_TOKENS * _BYTES_PER_TOKEN
    key, blocks = hashlib.blake2b(model.encode("utf-8", "replace"), digest_size=16).digest(), list[bytes]()
    for start in range(0, min(len(first) - size + 1, _MOST_BLOCKS * size), size):
        key = hashlib.blake2b(key + first[start : start + size], digest_size=16).digest()
        blocks.append(key)
    num_tokens = sum(max(1, len(each) // _BYTES_PER_TOKEN) for each in texts)
    return Prompt(tuple(blocks), num_tokens, _num_new(body))


def _num_new(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            choices = body.get("n")
            return value * (choices if isinstance(choices, int) and 0 < choices < 1000 else 1)
    return None


def _texts(body: Mapping[str, Any]) -> list[bytes]:
    """The text of each prompt, or its tokens as text."""
    if "messages" in body:  # templates put tools before messages
        return [_text([body.get("tools"), body["messages"]])]
    value = next((body[name] for name in _FIELDS if name in body), "")
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    return [_text(each) for each in several]


def _text(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace")
