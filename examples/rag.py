"""Answer questions with passages of the documentation on this machine, with their sources, from a corpus that changes.

    python examples/rag.py "How do I read a CSV file?" "Which module parses dates?"
    python examples/rag.py --measure

Vectors are in an updatable index on disk, and texts and words in SQLite beside it: neither needs memory for the corpus. A
thread searches while the passages of `examples/documentation.py` are inserted, and while files are deleted and inserted
again. An answer is found by both: vectors know what a text is about, and BM25 knows its words and titles; the ranks of a
passage in both are added up (reciprocal rank fusion), then those of the three best passages of a file, and each file
answers once, with its best passage. `--measure` counts the questions of
`examples/questions.toml` whose page is among the first three. `make demo-search` runs this with `--measure`.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import importlib.util
import math
import re
import sqlite3
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autopar import vector_search
from examples.documentation import Embedding, Passage, passages, sentence_model, words_model

QUESTIONS = (
    "compress data with gzip",
    "open a network socket and listen for connections",
    "start several processes and share work between them",
    "Under which license may this be copied?",
)
ASKED = Path(__file__).resolve().parent / "questions.toml"
#: Passages, unless more are given: what is embedded and indexed in less than a minute on two cores.
BY_WORDS, BY_MODEL = 60_000, 3_000
#: Passages that the embedding is fitted to, and passages inserted at a time.
FITTED, AT_ONCE = 20_000, 2_000
#: Memory for the index of vectors, searches and a cache.
BUDGET_BYTES = 8e6
#: Passages that each way of searching finds, and the constant of reciprocal rank fusion (Cormack, 2009).
CANDIDATES, RANK = 100, 60
#: Pause between the questions that are answered while the corpus changes.
PAUSE_S = 0.1
#: Weight of a word in a title, of one in the text, and of the ranks of BM25.
IN_TITLE, IN_TEXT, OF_WORDS = 4.0, 1.0, 4.0
#: Words of questions that say nothing about what is wanted.
SILENT = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "can",
        "could",
        "do",
        "does",
        "for",
        "from",
        "have",
        "how",
        "i",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "me",
        "my",
        "of",
        "on",
        "or",
        "should",
        "so",
        "such",
        "that",
        "the",
        "their",
        "them",
        "there",
        "these",
        "this",
        "to",
        "under",
        "use",
        "was",
        "what",
        "when",
        "where",
        "which",
        "who",
        "why",
        "will",
        "with",
        "would",
        "you",
        "your",
        "one",
    ]
)


class Corpus:
    """Passages in a folder: their vectors in an updatable index, their texts and words in SQLite.

    Args:
        folder: an existing folder; the corpus begins empty.
        budget_bytes: memory for the vectors' index, searches and a cache.
    """

    def __init__(self, folder: Path, embedding: Embedding, budget_bytes: float = BUDGET_BYTES) -> None:
        self.embedding = embedding
        self._lock = threading.Lock()
        self._texts = sqlite3.connect(folder / "texts", check_same_thread=False)
        self._texts.execute(
            "create virtual table texts using fts5(title, text, file, line unindexed, tokenize='porter unicode61')"
        )
        dim = embedding.vectors(["a text"]).shape[1]
        vector_search.create_updatable(folder / "vectors", dim, metric="cosine").close()
        self.vectors: Any = vector_search.load(folder / "vectors", memory_budget_bytes=budget_bytes, batch=1)
        self._next = 1

    def add(self, some: Sequence[Passage]) -> None:
        """Insert passages."""
        ids = np.arange(self._next, self._next + len(some))
        vectors = self.embedding.vectors([f"{one.title} {one.text}" for one in some])
        with self._lock, self._texts:
            rows = [(int(n), one.title, one.text, one.file, one.line) for n, one in zip(ids, some, strict=True)]
            self._texts.executemany("insert into texts(rowid, title, text, file, line) values (?, ?, ?, ?, ?)", rows)
        self.vectors.insert(ids, vectors)
        self._next += len(some)

    def remove(self, file: str) -> int:
        """Delete the passages of a file, and return how many there were."""
        with self._lock, self._texts:
            ids = [
                n
                for n, name in self._texts.execute("select rowid, file from texts where file match ?", (_phrase(file),))
                if name == file
            ]
            self._texts.executemany("delete from texts where rowid = ?", [(n,) for n in ids])
        return self.vectors.delete(np.array(ids, np.int64)) if ids else 0

    def answer(self, question: str, k: int) -> list[tuple[float, Passage]]:
        """The best passages of k files, with their fused ranks."""
        ranks: dict[int, float] = {}
        near = self.vectors.search(self.embedding.vectors([question])[0], CANDIDATES).ids
        for weight, ids in ((1.0, near[near >= 0].tolist()), (OF_WORDS, self._by_words(question))):
            for rank, each in enumerate(ids):
                ranks[each] = ranks.get(each, 0.0) + weight / (RANK + rank)
        files: dict[str, tuple[Passage, list[float]]] = {}
        for each, score in sorted(ranks.items(), key=lambda one: -one[1]):
            with self._lock:
                row = self._texts.execute(
                    "select text, file, line, title from texts where rowid = ?", (each,)
                ).fetchone()
            if row is not None:  # it may have been deleted since
                files.setdefault(row[1], (Passage(*row), []))[1].append(score)
        found = [(math.fsum(score / 2**n for n, score in enumerate(scores[:3])), one) for one, scores in files.values()]
        return sorted(found, key=lambda one: -one[0])[:k]

    def close(self) -> None:
        """Close the files."""
        self.vectors.close()
        self._texts.close()

    def _by_words(self, question: str) -> list[int]:
        words = [word for word in re.findall(r"\w+", question.lower()) if word not in SILENT]
        if not words:
            return []
        rank = f"bm25(texts, {IN_TITLE}, {IN_TEXT}, 0, 0)"
        wanted = "{title text} : (" + " OR ".join(map(_phrase, words)) + ")"
        order = f"select rowid from texts where texts match ? order by {rank} limit {CANDIDATES}"
        with self._lock:
            return [n for (n,) in self._texts.execute(order, (wanted,))]


def _phrase(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


# -- a corpus that grows ---------------------------------------------------------------------


class Searches:
    """Questions in a thread of their own, until the end of the context; every answer is counted, and checked."""

    def __init__(self, corpus: Corpus, questions: Sequence[str]) -> None:
        self._corpus, self._questions = corpus, questions
        self._is_done, self.count, self.failure = threading.Event(), 0, None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Searches:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._is_done.wait(PAUSE_S):
                self._corpus.answer(self._questions[self.count % len(self._questions)], 3)
                self.count += 1
        except Exception as error:
            self.failure = error


def grown(folder: Path, limit: int | None) -> tuple[Corpus, list[Passage]]:
    """A corpus of the text of this machine, searched while it grows, and while it is edited."""
    start = time.perf_counter()
    embedding = sentence_model()
    found = passages(limit or (BY_MODEL if embedding else BY_WORDS))
    print(f"{len(found):,} passages of {len({one.file for one in found}):,} files in {_since(start)}")
    start = time.perf_counter()
    step = max(1, len(found) // FITTED)
    embedding = embedding or words_model([f"{one.title} {one.text}" for one in found[::step]])
    corpus = Corpus(folder, embedding)
    with Searches(corpus, QUESTIONS) as searches:
        for some in _parts(found):
            corpus.add(some)
        print(f"inserted in {_since(start)}, while {searches.count:,} questions were answered")
        start, edited = time.perf_counter(), list(dict.fromkeys(one.file for one in found))[::20]
        deleted = sum(corpus.remove(file) for file in edited)
        again = [one for one in found if one.file in set(edited)]
        assert deleted == len(again), (deleted, len(again))
        corpus.add(again)
        print(f"{len(edited):,} files with {deleted:,} passages deleted and inserted again in {_since(start)}")
    corpus.vectors.checkpoint()
    stats = corpus.vectors.stats()
    num_bytes, cached = 4 * stats.num_vectors * stats.dim, stats.details["cache"].pages * 4096
    print(
        f"{stats.num_vectors:,} vectors of {stats.dim} elements by {embedding.name}, {num_bytes / 1e6:.0f} MB, are in lists on"
        f" disk; in memory are {stats.device_bytes / 1e6:.1f} MB and a cache of {cached / 1e6:.1f} MB"
    )
    return corpus, found


def _parts(found: Sequence[Passage]) -> Iterator[Sequence[Passage]]:
    for at in range(0, len(found), AT_ONCE):
        yield found[at : at + AT_ONCE]


def show(question: str, found: list[tuple[float, Passage]]) -> None:
    print(f"\n{question}")
    for number, (score, passage) in enumerate(found, 1):
        print(f"  {number}. {passage.file}:{passage.line}  ({score:.3f})")
        print(textwrap.indent(textwrap.fill(textwrap.shorten(passage.text, 300), 100), "     "))


# -- how good, how fast ----------------------------------------------------------------------


def answered(corpus: Corpus) -> None:
    """Count the questions whose page is among the first three answers, and name the others."""
    pages = tomllib.loads(ASKED.read_text(encoding="utf-8"))["pages"]
    missed = []
    for question, right in pages.items():
        files = [passage.file for _, passage in corpus.answer(question, 3)]
        if not any(file.endswith(f"/{page}") for file in files for page in right):
            missed.append(f"  missed: {question}  ({', '.join(right)})")
    print(f"\nThe page that answers is among the first three for {len(pages) - len(missed)} of {len(pages)} questions")
    print("\n".join(missed))


def measure(vectors: np.ndarray, queries: np.ndarray, kind: str, k: int = 10) -> None:
    """Of an index in memory: recall against an exact search, and queries/s in batches of 1000 and one by one; beside FAISS
    where it is there. Contenders take turns, and the best time of each counts.
    """
    index = vector_search.build(vectors, metric="cosine", index=kind, batch=1000)
    queries = np.tile(queries, (-(-1000 // len(queries)), 1))[:1000]
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {"autopar": lambda q: index.search(q, k).ids}
    if index.stats().kind != "exact":
        exact = vector_search.build(vectors, metric="cosine", index="exact", batch=1000)
        ways["autopar, exact"] = lambda q: exact.search(q, k).ids
    best = _cosines(vectors, queries, list(ways.values())[-1](queries)).min(axis=1, keepdims=True)
    ways |= _faiss(vectors, k)
    print(f"\n{len(vectors):,} vectors of {vectors.shape[1]} elements, k = {k}:")
    for batch in (queries, queries[:1]):
        seconds = _take_turns(ways, batch, rounds=5 if len(batch) > 1 else 50)
        for name, way in ways.items():
            recall = np.mean(_cosines(vectors, queries, way(queries)) >= best - 1e-5)  # of equal ones, any
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
    parser.add_argument(
        "--index", default="auto", metavar="KIND", help="index in memory to measure, as of autopar.vector_search.build"
    )
    parser.add_argument("--limit", type=int, metavar="N", help=f"at most so many passages (default: {BY_WORDS:,})")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="passages for each question (default: 3)")
    about = "questions answered, recall and queries/s, beside FAISS where it is installed"
    parser.add_argument("--measure", action="store_true", help=about)
    options = parser.parse_args()
    if (options.limit is not None and options.limit < 1) or options.show < 1:
        parser.error("--limit and --show are numbers of passages: give 1 or more")
    if importlib.util.find_spec("sklearn") is None and importlib.util.find_spec("sentence_transformers") is None:
        sys.exit("text becomes vectors by scikit-learn here: pip install '.[search]' in the checkout")
    with tempfile.TemporaryDirectory() as folder:
        corpus, found = grown(Path(folder), options.limit)
        for question in options.questions or QUESTIONS:
            show(question, corpus.answer(question, options.show))
        if options.measure:
            answered(corpus)
            step = max(1, len(found) // 1000)
            texts = [" ".join(one.text.split()[:10]) for one in found[::step]][:1000]
            vectors = np.concatenate([vectors for _, vectors, _ in corpus.vectors.items()])
            measure(vectors, corpus.embedding.vectors(texts), options.index)
        corpus.close()


if __name__ == "__main__":
    main()
