"""Read the documentation on this machine as passages with their places, and make vectors of text.

The text: docstrings of Python's standard library, found by walking its syntax trees, and what lies in /usr/share/doc.
It becomes vectors by a sentence model, where `sentence-transformers` and a model's weights are installed, and else by the
words in it: hashed, weighted by how rare they are (TF-IDF), and brought to 128 elements by an SVD. `examples/rag.py`
searches it.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

DOCUMENTATION = Path("/usr/share/doc")
#: Files of it that say what has changed or who may copy, over and over.
BORING = re.compile(r"changelog|news|copyright|license|\.(html?|png|gif|jpe?g|svg|pdf|c|h|pl|py|js|css)(\.gz)?$", re.I)
SENTENCE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
#: Characters of a passage.
SHORTEST, LONGEST = 60, 800
#: Passages of one file of documentation: else a few logs and lists are most of it.
OF_A_FILE = 40


class Passage(NamedTuple):
    """Some text, and where it stands.

    Args:
        title: what the text is about: the names of the module and of the function, and the module's first line; of
            documentation, the package.
    """

    text: str
    file: str
    line: int
    title: str = ""


# -- text ------------------------------------------------------------------------------------


def passages(limit: int, library: Path | None = None, documentation: Path = DOCUMENTATION) -> list[Passage]:
    """The first so many of the machine, each text once, in the order of the files' names: of the library, then of the
    documentation."""
    found: dict[str, Passage] = {}
    library = library or Path(sysconfig.get_paths()["stdlib"])
    for one in chain(_of_library(library), _of_documentation(documentation)):
        found.setdefault(one.text, one)
        if len(found) == limit:
            break
    return list(found.values())


def _of_library(folder: Path) -> Iterator[Passage]:
    for file in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test"}.isdisjoint(file.relative_to(folder).parts):
            yield from _of_python(file, _module_of(file.relative_to(folder)))


def _module_of(file: Path) -> str:
    """The name by which a file is imported."""
    return ".".join(part for part in file.with_suffix("").parts if part != "__init__")


def _of_python(file: Path, module: str) -> Iterator[Passage]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # written for another Python, or out of reach
    about = (ast.get_docstring(tree) or "").strip().partition("\n")[0]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text:
            name = f"{file.stem}.{node.name}: " if not isinstance(node, ast.Module) else f"{file.stem}: "
            own = "" if isinstance(node, ast.Module) else node.name
            title = f"{_words_of(f'{module}.{own}')} {about}"
            yield from _cut(text, file, node.body[0].lineno, name, title)


def _words_of(name: str) -> str:
    """A name, and the words in it."""
    words = re.sub("([a-z])([A-Z])", r"\1 \2", name)
    return name if words == name else f"{name} {words}"


def _of_documentation(folder: Path) -> Iterator[Passage]:
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.is_symlink() or BORING.search(file.name):
            continue
        try:
            raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            yield from islice(_cut(raw.decode("utf-8"), file, 1, "", file.relative_to(folder).parts[0]), OF_A_FILE)
        except (OSError, EOFError, UnicodeDecodeError):
            continue  # no text


def _cut(text: str, file: Path, line: int, name: str, title: str = "") -> Iterator[Passage]:
    """Paragraphs, joined until they say something and parted where they are long, each with the line it begins on."""
    taken, first = "", line
    for number, raw in enumerate([*text.splitlines(), ""], line):
        row = raw.strip()
        ends = not row or len(taken) + len(row) > LONGEST
        if ends and len(taken) >= SHORTEST:
            if re.search("[a-z]{3}", taken):
                yield Passage(name + taken[:LONGEST], str(file), first, title)
            taken = ""
        first = first if taken else number
        taken = f"{taken} {row}".strip()
    if taken and name:  # a docstring of a few words
        yield Passage(name + taken, str(file), first, title)


# -- vectors ---------------------------------------------------------------------------------


class Embedding(NamedTuple):
    """How text becomes vectors of length 1, `[n, d]`."""

    name: str
    vectors: Callable[[list[str]], np.ndarray]


def sentence_model() -> Embedding | None:
    """A neural model of sentences, if one is installed with its weights; nothing is fetched."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return None
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

    try:
        model = SentenceTransformer(SENTENCE_MODEL, local_files_only=True)
    except (OSError, ValueError):
        return None  # its weights are not here
    return Embedding(
        SENTENCE_MODEL, lambda texts: np.asarray(model.encode(texts, normalize_embeddings=True), np.float32)
    )


def words_model(texts: list[str], dim: int = 128) -> Embedding:
    """Hashed TF-IDF and an SVD, fitted to these texts."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    hashed = HashingVectorizer(n_features=2**16, alternate_sign=False, stop_words="english")
    hashed.set_params(norm=None)  # counts, of which TF-IDF takes logarithms
    words = make_pipeline(hashed, TfidfTransformer(sublinear_tf=True))
    smaller = make_pipeline(TruncatedSVD(dim, n_iter=2, random_state=0), Normalizer())
    smaller.fit(words.fit_transform(texts))
    return Embedding(
        "hashed TF-IDF and an SVD",
        lambda some: np.asarray(smaller.transform(words.transform(some)), np.float32),
    )
