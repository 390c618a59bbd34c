"""Text to tokens and back, by the `tokenizer.json` beside a checkpoint."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import InferenceError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Of a model's folder: `encode(text).ids`, `decode(ids)`.

    Raises:
        ModelError: there is none, it cannot be read, or the package `tokenizers` is not installed.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} is not there, so text cannot be made into tokens. Copy it from where the model came from"
            " (`AutoTokenizer.from_pretrained(...).save_pretrained(folder)` of `transformers` writes it), or give tokens"
            " instead of text"
        )
    try:
        library = importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise ModelError(
            "text is made into tokens by the package `tokenizers`, which is not installed: pip install 'autopar[inference]'"
        ) from None
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ModelError(f"{path} is no tokenizer: {error}. Copy it again from where it came from") from None


def tokens_of(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int, *, special: bool = True) -> tuple[int, ...]:
    """Of text; tokens are checked.

    Args:
        tokenizer: None where there is none. vocab_size: tokens of the model.
        special: add those that the tokenizer begins or ends a text with.

    Raises:
        InferenceError: there is no tokenizer for text, or a token that the model does not have.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InferenceError(
                "the model's folder has no tokenizer.json, so text cannot be made into tokens: give tokens as the"
                " prompt, or copy tokenizer.json from where the model came from"
            )
        return tuple(tokenizer.encode(prompt, add_special_tokens=special).ids)
    tokens = tuple(int(token) for token in prompt)
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InferenceError(f"the prompt has the token {wrong}, and the model's are 0 to {vocab_size - 1}")
    return tokens


def text_stream(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Tokens to text, one by one; "" until a character is complete."""
    stream: Any = importlib.import_module("tokenizers.decoders").DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(tokenizer, token) or ""
