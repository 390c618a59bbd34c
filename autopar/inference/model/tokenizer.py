"""Convert text to tokens and back, with the `tokenizer.json` of a checkpoint."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import InferenceError, ModelError
from autopar.system.install_command import install_command

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a model's folder, with `encode(text).ids` and `decode(ids)`.

    Raises:
        ModelError: the folder has none, it cannot be read, or the package `tokenizers` is not installed.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist, so text cannot be tokenized. Copy it from where the model came from"
            " (`AutoTokenizer.from_pretrained(...).save_pretrained(folder)` of `transformers` writes it), or give tokens"
            " instead of text"
        )
    try:
        library = importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise ModelError(
            f"the package `tokenizers`, which tokenizes text, is not installed: {install_command('inference')}"
        ) from None
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions only
        raise ModelError(f"{path} is not a tokenizer: {error}. Copy it again from where it came from") from None


def tokens_of(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int, *, special: bool = True) -> tuple[int, ...]:
    """Tokenize a text prompt, or check a prompt of tokens.

    Args:
        tokenizer: the tokenizer; None if the model has none.
        vocab_size: the size of the model's vocabulary.
        special: whether to add the special tokens that the tokenizer begins or ends a text with.

    Raises:
        InferenceError: text is given without a tokenizer, or a token is not in the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InferenceError(
                "the model's folder has no tokenizer.json, so text cannot be tokenized: give tokens as the prompt, or copy"
                " tokenizer.json from where the model came from"
            )
        return tuple(tokenizer.encode(prompt, add_special_tokens=special).ids)
    tokens = tuple(int(token) for token in prompt)
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InferenceError(f"the prompt has the token {wrong}, but the model's tokens are 0 to {vocab_size - 1}")
    return tokens


def text_stream(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return a streaming detokenizer: called with each next token, it returns new text, or "" if a character is
    incomplete."""
    stream: Any = importlib.import_module("tokenizers.decoders").DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(tokenizer, token) or ""
