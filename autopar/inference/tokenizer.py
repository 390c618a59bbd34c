"""Text to tokens and back, by the `tokenizer.json` beside a checkpoint."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ModelError

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


def text_stream(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Tokens to text, one by one; "" until a character is complete."""
    stream: Any = importlib.import_module("tokenizers.decoders").DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(tokenizer, token) or ""
