"""`examples/rag.py`: passages with their sources, reproducible vectors, answers and figures."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from examples import rag

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """A library and documentation."""
    library, documentation = tmp_path / "lib", tmp_path / "doc"
    (library / "site-packages").mkdir(parents=True)
    (library / "site-packages" / "other.py").write_text('"""Not of the library, though quite long enough to be one."""')
    (library / "broken.py").write_text("def (")
    (library / "zebra.py").write_text(
        '"""Stripes."""\n\n\ndef gallop(speed):\n    """Run over the savanna, faster than most lions do.\n\n'
        '    Herds gallop together, and turn where the first one turns, which confuses whoever hunts them.\n    """\n'
    )
    (documentation / "soup").mkdir(parents=True)
    text = "\n\nBoil the carrots for a quarter of an hour, then\nadd salt, pepper and a spoon of cream to them.\n\nServe.\n"
    (documentation / "soup" / "README.gz").write_bytes(gzip.compress(text.encode()))
    (documentation / "soup" / "changelog.gz").write_bytes(gzip.compress(b"what has changed is of no interest here" * 3))
    (documentation / "soup" / "picture.txt").write_bytes(b"\xff\xfe\x00 no text at all")
    (documentation / "soup" / "damaged.gz").write_bytes(b"no gzip")
    return library, documentation


def test_passages_know_where_they_stand(machine: tuple[Path, Path]) -> None:
    found = rag.passages(10, *machine)
    where = [(Path(one.file).name, one.line, one.text[:24]) for one in found]
    assert where == [
        ("zebra.py", 1, "zebra: Stripes."),
        ("zebra.py", 5, "zebra.gallop: Run over t"),
        ("README.gz", 3, "Boil the carrots for a q"),
    ]
    assert len(rag.passages(2, *machine)) == 2


def test_no_line_is_lost_where_text_is_parted(tmp_path: Path) -> None:
    lines = [f"Line {n} says something about the number {n}." for n in range(100)]
    found = list(rag._cut("\n".join(lines), tmp_path, 1, ""))
    assert all(len(one.text) <= rag.LONGEST for one in found)
    assert " ".join(one.text for one in found) == " ".join(lines)
    for one in found:
        assert one.text.startswith(f"Line {one.line - 1} ")


def test_vectors_are_the_same_every_time() -> None:
    texts = [f"{a} {b} {n}" for n in range(20) for a in ("red", "green", "blue") for b in ("fish", "bird", "tree")]
    one, other = (rag.words_model(texts, 8).vectors(texts) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert one.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, rtol=1e-5)


def test_the_text_that_shares_rare_words_comes_first() -> None:
    texts = [f"all of these talk of the same things, and number {n} of word{n} too" for n in range(60)]
    embedding = rag.words_model(texts, 16)
    assert embedding.likeness is not None
    alike = embedding.likeness("what of word7?", texts)
    assert alike.min() >= 0
    assert alike.argmax() == 7
    vectors = embedding.vectors(texts)
    index = rag.vector_search.build(vectors, metric="cosine", index="exact", progress=False)
    library = rag.Library([rag.Passage(text, "file", 1) for text in texts], vectors, embedding, index)
    ((_, found),) = rag.answer(library, "what of word7?", 1)
    assert found.text == texts[7]


def test_a_sentence_model_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def __init__(self, name: str, *, local_files_only: bool) -> None:
            assert local_files_only  # nothing is fetched

        def encode(self, texts: list[str], *, normalize_embeddings: bool) -> list[list[float]]:
            return [[1.0, 0.0] if "carrot" in text else [0.0, 1.0] for text in texts]

    module = SimpleNamespace(SentenceTransformer=Model, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    embedding = rag.sentence_model()
    assert embedding is not None
    texts = ["zebras", "stripes", "a carrot"]
    vectors = embedding.vectors(texts)
    passages = [rag.Passage(text, "file", n) for n, text in enumerate(texts)]
    index = rag.vector_search.build(vectors, metric="cosine", index="exact", progress=False)
    library = rag.Library(passages, vectors, embedding, index)
    assert [one.text for _, one in rag.answer(library, "carrots?", 1)] == ["a carrot"]

    def missing(*args: object, **options: object) -> None:
        raise OSError("no weights")

    monkeypatch.setattr(module, "SentenceTransformer", missing)
    assert rag.sentence_model() is None


@pytest.mark.slow
def test_it_answers_with_sources_and_measures() -> None:
    """V12: of a part of the machine's own text; the recall of the index is at least 0.95."""
    arguments = ["--limit", "600", "--measure", "--show", "2", "abstract base classes of numbers"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "examples/rag.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sources = re.findall(r"^  \d\. (.+):(\d+)  \(", done.stdout, re.MULTILINE)
    assert len(sources) == 2
    for file, line in sources:
        assert int(line) <= len(Path(file).read_bytes().splitlines())
    figures = re.findall(r"batch +(\d+)  autopar +recall@10 ([\d.]+) +([\d,]+)/s(.*)$", done.stdout, re.MULTILINE)
    assert [figure[0] for figure in figures] == ["1000", "1"]
    assert all(float(figure[1]) >= 0.95 for figure in figures)
    assert all("x FAISS Flat" in figure[3] for figure in figures)


@pytest.mark.parametrize("wrong", [["--limit", "0"], ["--show", "0"], ["--limit", "some"]])
def test_wrong_numbers_are_refused(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rag.py", *wrong])
    with pytest.raises(SystemExit) as caught:
        rag.main()
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err
