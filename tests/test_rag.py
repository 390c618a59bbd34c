"""`examples/rag.py` and `examples/documentation.py`: passages with their sources, reproducible vectors, answers and figures."""

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

from examples import documentation, rag

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
    found = documentation.passages(10, *machine)
    where = [(Path(one.file).name, one.line, one.text[:24]) for one in found]
    assert where == [
        ("zebra.py", 1, "zebra: Stripes."),
        ("zebra.py", 5, "zebra.gallop: Run over t"),
        ("README.gz", 3, "Boil the carrots for a q"),
    ]
    assert len(documentation.passages(2, *machine)) == 2
    assert [one.title for one in found] == ["zebra. Stripes.", "zebra.gallop Stripes.", "soup"]


def test_no_line_is_lost_where_text_is_parted(tmp_path: Path) -> None:
    lines = [f"Line {n} says something about the number {n}." for n in range(100)]
    found = list(documentation._cut("\n".join(lines), tmp_path, 1, ""))
    assert all(len(one.text) <= documentation.LONGEST for one in found)
    assert " ".join(one.text for one in found) == " ".join(lines)
    for one in found:
        assert one.text.startswith(f"Line {one.line - 1} ")


def test_vectors_are_the_same_every_time() -> None:
    texts = [f"{a} {b} {n}" for n in range(20) for a in ("red", "green", "blue") for b in ("fish", "bird", "tree")]
    one, other = (documentation.words_model(texts, 8).vectors(texts) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert one.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, rtol=1e-5)


def test_a_corpus_answers_by_words_and_titles_and_forgets_files(tmp_path: Path) -> None:
    texts = [f"all of these talk of the same things, and number {n} of word{n} too" for n in range(60)]
    passages = [documentation.Passage(text, f"/files/{n // 3}.py", n, f"module{n}") for n, text in enumerate(texts)]
    corpus = rag.Corpus(tmp_path, documentation.words_model(texts, 16))
    with rag.Searches(corpus, ["word8"]) as searches:
        corpus.add(passages[:30])
        corpus.add(passages[30:])
    assert searches.failure is None
    assert corpus.answer("what of word7?", 1)[0][1] == passages[7]
    assert corpus.answer("module41", 1)[0][1] == passages[41]
    files = [found.file for _, found in corpus.answer("the same things of word7", 5)]
    assert len(set(files)) == 5
    assert corpus.remove("/files/2.py") == 3 and corpus.remove("/files/2.py") == 0
    assert "/files/2.py" not in [found.file for _, found in corpus.answer("what of word7?", 20)]
    assert corpus.answer('a "quoted" AND strange* question', 1)
    corpus.close()


def test_a_sentence_model_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def __init__(self, name: str, *, local_files_only: bool) -> None:
            assert local_files_only  # nothing is fetched

        def encode(self, texts: list[str], *, normalize_embeddings: bool) -> list[list[float]]:
            return [[1.0, 0.0] if "carrot" in text else [0.0, 1.0] for text in texts]

    module = SimpleNamespace(SentenceTransformer=Model, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    embedding = documentation.sentence_model()
    assert embedding is not None
    texts = ["zebras", "stripes", "a carrot"]
    assert embedding.vectors(texts).tolist() == [[0, 1], [0, 1], [1, 0]]

    def missing(*args: object, **options: object) -> None:
        raise OSError("no weights")

    monkeypatch.setattr(module, "SentenceTransformer", missing)
    assert documentation.sentence_model() is None


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
    assert re.search(r"among the first three for \d+ of 30 questions", done.stdout)
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
