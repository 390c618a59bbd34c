"""Test `autopar generate`: its output, and its errors before a model is opened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CONFIG, LENGTH, write_model

from autopar.cli import main as cli
from autopar.inference import Engine, write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "model", num_hidden_layers=1))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["generate", *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return int(code or 0), captured.out, captured.err


@pytest.mark.slow
def test_it_prints_the_output_of_the_engine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--mesh", "model=8", "--attention", "gather", "--slots", "2")
    code, out, err = run(capsys, model, "--tokens", "1,2,3", "--prompt", "ab", *options, "--max-tokens", "6", "--json")
    assert code == 0, err
    outputs = {str(each["prompt"]): each for each in json.loads(out)}
    assert [len(each["tokens"]) for each in outputs.values()] == [6, 6]
    code, out, err = run(capsys, model, "--prompt", "ab", *options, "--max-tokens", "6")
    assert (code, out) == (0, outputs["ab"]["text"] + "\n")
    assert "6 tokens in" in err
    code, out, _ = run(capsys, model, "--prompt", "ab", *options, "--json")
    (whole,) = json.loads(out)
    assert code == 0 and len(whole["tokens"]) == LENGTH - 2, (
        "max_tokens defaults to 128, or less if max_length requires it"
    )
    code, out, _ = run(capsys, model, "--prompt", "ab", *options, "--best-of", "3", "--max-tokens", "4")
    assert code == 0 and out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "needs a prompt"),
        (("--prompt", ""), "prompt 1 has no tokens"),
        (
            ("--prompt", "a", "--prompt", "b" * 130),
            "prompt 2 has 130 tokens and 1 more .* --max-length is 128: shorten",
        ),
        (("--prompt", "ab", "--max-tokens", "127"), "2 tokens and 127 more .* --max-length is 128"),
        (("--prompt", "ab", "--max-tokens", "0"), "--max-tokens is 0: give 1 or more"),
        (("--prompt", "ab", "--best-of", "0"), "--best-of is 0: give 1 or more"),
        (("--prompt", "ab", "--slots", "0"), "--slots is 0: give 1 or more"),
        (("--prompt", "ab", "--max-length", "500"), "max_length is 500, but the model has 128 positions"),
        (("--prompt", "ab", "--stop", ""), "stop string is empty"),
        (("--prompt", "ab", "--top-p", "0"), "top_p is 0.0"),
        (("--prompt", "ab", "--temperature", "-1"), "temperature is -1.0"),
        (("--prompt", "ab", "--dtype", "float8"), "'float8' is none of float32"),
        (("--tokens", "1,x"), "'1,x' is not a list of token ids"),
        (("--tokens", "1,900"), "token 900, but the model's tokens are 0 to 299"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_invalid_arguments_are_refused_before_the_model_is_opened(
    arguments: tuple[str, ...],
    why: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "open", lambda *_, **__: pytest.fail("it is opened"))
    code, out, err = run(capsys, model, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("autopar: ") and err.count("\n") == 2 and "\nMore on this: " in err
    assert re.search(why, err), err


def test_folders_without_a_valid_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "bare", CONFIG)
    monkeypatch.setattr("autopar.inference.serve.engine.open_model", lambda *_: pytest.fail("it is planned"))
    for folder, arguments, why in (
        ("nowhere", ("--prompt", "a"), "config.json cannot be read"),
        ("bare", ("--prompt", "a"), "tokenizer.json does not exist"),
        ("bare", ("--tokens", "1", "--stop", "x"), "tokenizer.json does not exist"),
    ):
        code, _, err = run(capsys, str(tmp_path / folder), *arguments)
        assert code == 2 and why in err
    fields: dict[str, Any] = {**CONFIG, "intermediate_size": 100}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(fields))
    code, _, err = run(capsys, str(tmp_path / "bare"), "--tokens", "1")
    assert code == 2 and "`model.layers.0.mlp.down_proj.weight` has the shape [64, 128]" in err
