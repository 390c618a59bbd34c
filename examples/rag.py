"""Answer questions with passages of the documentation on this machine, found by a vector index, with their sources.

    python examples/rag.py "How do I read a CSV file?" "Which module parses dates?"
    python examples/rag.py --measure

The text: docstrings of Python's standard library, found by walking its syntax trees, and what lies in /usr/share/doc.
It becomes vectors by a sentence model, where `sentence-transformers` and a model's weights are installed, and else by the
words in it: hashed, weighted by how rare they are (TF-IDF), and brought to 128 elements by an SVD. Such vectors know
what a text is about, and little of single words; so of what the index finds, those come first that share rare words with
the question. The passages are what one would put before a language model. `make demo-search` runs this with `--measure`.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import ast
import gzip
import importlib.util
import re
import sys
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar import vector_search

QUESTIONS = (
    "compress data with gzip",
    "open a network socket and listen for connections",
    "start several processes and share work between them",
    "Under which license may this be copied?",
)
DOCUMENTATION = Path("/usr/share/doc")
#: Files of it that say what has changed or who may copy, over and over.
BORING = re.compile(r"changelog|news|copyright|license|\.(html?|png|gif|jpe?g|svg|pdf|c|h|pl|py|js|css)(\.gz)?$", re.I)
SENTENCE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
#: Characters of a passage.
SHORTEST, LONGEST = 60, 800
#: Passages, unless more are asked for: what is embedded and indexed in less than a minute on two cores.
BY_WORDS, BY_MODEL = 60_000, 3_000

#: Of one file of documentation: else a few logs and lists are most of it.
OF_A_FILE = 40
#: What the index finds, to be looked at again by its words.
CANDIDATES = 500


class Passage(NamedTuple):
    """Some text, and where it stands."""

    text: str
    file: str
    line: int


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
            yield from _of_python(file)


def _of_python(file: Path) -> Iterator[Passage]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # written for another Python, or out of reach
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text:
            name = f"{file.stem}.{node.name}: " if not isinstance(node, ast.Module) else f"{file.stem}: "
            yield from _cut(text, file, node.body[0].lineno, name)


def _of_documentation(folder: Path) -> Iterator[Passage]:
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.is_symlink() or BORING.search(file.name):
            continue
        try:
            raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            yield from islice(_cut(raw.decode("utf-8"), file, 1, ""), OF_A_FILE)
        except (OSError, EOFError, UnicodeDecodeError):
            continue  # no text


def _cut(text: str, file: Path, line: int, name: str) -> Iterator[Passage]:
    """Paragraphs, joined until they say something and parted where they are long, each with the line it begins on."""
    taken, first = "", line
    for number, raw in enumerate([*text.splitlines(), ""], line):
        row = raw.strip()
        ends = not row or len(taken) + len(row) > LONGEST
        if ends and len(taken) >= SHORTEST:
            if re.search("[a-z]{3}", taken):
                yield Passage(name + taken[:LONGEST], str(file), first)
            taken = ""
        first = first if taken else number
        taken = f"{taken} {row}".strip()
    if taken and name:  # a docstring of a few words
        yield Passage(name + taken, str(file), first)


# -- vectors ---------------------------------------------------------------------------------


class Embedding(NamedTuple):
    """How text becomes vectors of length 1, `[n, d]`; and where these are not all there is to compare, how like a text is
    to each of some others, `[n]`."""

    name: str
    vectors: Callable[[list[str]], np.ndarray]
    likeness: Callable[[str, list[str]], np.ndarray] | None = None


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
        lambda one, others: (words.transform(others) @ words.transform([one]).T).toarray()[:, 0],
    )


# -- search ----------------------------------------------------------------------------------


class Library(NamedTuple):
    """Passages, their vectors, how these were made, and the index over them."""

    passages: list[Passage]
    vectors: np.ndarray
    embedding: Embedding
    index: Any


def build(limit: int | None, kind: str) -> Library:
    """Read, embed and index the text of the machine."""
    embedding = sentence_model()
    start = time.perf_counter()
    found = passages(limit or (BY_MODEL if embedding else BY_WORDS))
    texts = [one.text for one in found]
    print(f"{len(found):,} passages of {len({one.file for one in found}):,} files in {_since(start)}")
    start = time.perf_counter()
    embedding = embedding or words_model(texts)
    vectors = embedding.vectors(texts)
    print(f"vectors of {vectors.shape[1]} elements by {embedding.name} in {_since(start)}")
    start = time.perf_counter()
    index = vector_search.build(vectors, metric="cosine", index=kind, batch=1000)
    print(f"{index.stats().kind} index in {_since(start)}")
    return Library(found, vectors, embedding, index)


def answer(library: Library, question: str, k: int) -> list[tuple[float, Passage]]:
    """The k passages most like a question, and how like: 1 is the same, 0 has nothing in common."""
    embedding = library.embedding
    wanted = k if embedding.likeness is None else max(k, CANDIDATES)
    ids, near = library.index.search(embedding.vectors([question])[0], wanted)
    near = near[ids >= 0]
    found = [library.passages[i] for i in ids[ids >= 0]]
    if embedding.likeness is not None:
        near = embedding.likeness(question, [one.text for one in found])
    best = np.argsort(-near, kind="stable")[:k]
    return [(float(near[i]), found[i]) for i in best]


def show(question: str, found: list[tuple[float, Passage]]) -> None:
    print(f"\n{question}")
    for number, (near, passage) in enumerate(found, 1):
        print(f"  {number}. {passage.file}:{passage.line}  ({near:.2f})")
        print(textwrap.indent(textwrap.fill(textwrap.shorten(passage.text, 300), 100), "     "))


# -- how good, how fast ----------------------------------------------------------------------


def measure(library: Library, k: int = 10) -> None:
    """Recall against an exact search, and queries/s in batches of 1000 and one by one; beside FAISS where it is there.

    The queries are beginnings of passages. Contenders take turns, and the best time of each counts.
    """
    step = max(1, len(library.passages) // 1000)
    texts = [" ".join(one.text.split()[:10]) for one in library.passages[::step]][:1000]
    queries = library.embedding.vectors(texts)
    queries = np.tile(queries, (-(-1000 // len(queries)), 1))[:1000]
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {"autopar": lambda q: library.index.search(q, k).ids}
    if library.index.stats().kind != "exact":
        exact = vector_search.build(library.vectors, metric="cosine", index="exact", batch=1000)
        ways["autopar, exact"] = lambda q: exact.search(q, k).ids
    best = _cosines(library.vectors, queries, list(ways.values())[-1](queries)).min(axis=1, keepdims=True)
    ways |= _faiss(library.vectors, k)
    print(f"\n{len(library.vectors):,} vectors of {library.vectors.shape[1]} elements, k = {k}:")
    for batch in (queries, queries[:1]):
        seconds = _take_turns(ways, batch, rounds=5 if len(batch) > 1 else 50)
        for name, way in ways.items():
            recall = np.mean(_cosines(library.vectors, queries, way(queries)) >= best - 1e-5)  # of equal ones, any
            ratio = f", {seconds['FAISS Flat'] / seconds[name]:.2f} x FAISS Flat" if "FAISS Flat" in seconds else ""
            print(
                f"  batch {len(batch):>4}  {name:16} recall@{k} {recall:.3f}  {len(batch) / seconds[name]:>8,.0f}/s{ratio}"
            )
    if "FAISS Flat" not in ways:
        print("  FAISS is not installed: pip install faiss-cpu, and it is measured beside")


def _cosines(vectors: np.ndarray, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of each query and what was found for it; of what was not, the least there is."""
    return np.where(ids < 0, -1.0, np.einsum("qd,qkd->qk", queries, vectors[ids]))


def _faiss(vectors: np.ndarray, k: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Its exact index; nothing where it is not installed."""
    if importlib.util.find_spec("faiss") is None:
        return {}
    if "OPENBLAS_CORETYPE" not in os.environ and " avx512f" in _cpu():
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"  # its OpenBLAS takes newer CPUs for the oldest, 4 times slower
    import faiss

    faiss.omp_set_num_threads(os.cpu_count() or 1)
    flat = faiss.IndexFlatIP(vectors.shape[1])  # of vectors of length 1, that is the cosine
    flat.add(vectors)  # pyright: ignore[reportCallIssue]
    return {"FAISS Flat": lambda q: flat.search(q, k)[1]}  # pyright: ignore[reportCallIssue]


def _take_turns(ways: dict[str, Callable[[np.ndarray], Any]], batch: np.ndarray, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(ways, float("inf"))
    for round_number in range(rounds + 1):  # the first one compiles
        for name, way in ways.items():
            start = time.perf_counter()
            way(batch)
            if round_number:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def _since(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer questions with the documentation on this machine.")
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="by default a few")
    parser.add_argument("--index", default="auto", metavar="KIND", help="as of autopar.vector_search.build")
    parser.add_argument("--limit", type=int, metavar="N", help=f"at most so many passages (default: {BY_WORDS:,})")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="passages for each question (default: 3)")
    parser.add_argument(
        "--measure", action="store_true", help="recall and queries/s, beside FAISS where it is installed"
    )
    options = parser.parse_args()
    if (options.limit is not None and options.limit < 1) or options.show < 1:
        parser.error("--limit and --show are numbers of passages: give 1 or more")
    if importlib.util.find_spec("sklearn") is None and importlib.util.find_spec("sentence_transformers") is None:
        sys.exit("text becomes vectors by scikit-learn here: pip install 'autopar[search]'")
    library = build(options.limit, options.index)
    for question in options.questions or QUESTIONS:
        show(question, answer(library, question, options.show))
    if options.measure:
        measure(library)


if __name__ == "__main__":
    main()
