"""Test `autopar serve` as a command: signals, kills, quantized weights, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_checkpoints import write_quantized
from tiny_models import CONFIG, write_model

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")

from autopar.cli.main import main  # noqa: E402
from autopar.inference import Checkpoint, write_checkpoint  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


class Command:
    """`autopar serve` in a process of its own."""

    def __init__(self, folder: Path, *more: str) -> None:
        options = ["--port", "0", "--slots", "2", "--mesh", "1", "--attention", "gather", "--shutdown", "20", *more]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autopar", "serve", f"tiny={folder}", *options],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"http://[\d.:]+", line):
                self.url = found[0]
                return
        pytest.fail("".join(self.log))


@pytest.mark.slow
def test_the_command_ends_gracefully_and_starts_after_it_is_killed(folder: Path) -> None:
    first = Command(folder)
    body = {"prompt": "x", "max_tokens": 120, "stream": True, "temperature": 0, "n": 8}
    with httpx.stream("POST", f"{first.url}/v1/completions", json=body) as reply:
        chunks = reply.iter_text()
        next(chunks)
        first.process.send_signal(signal.SIGTERM)
        assert "".join(chunks).endswith("data: [DONE]\n\n")
    assert first.process.wait(30) == 0
    second = Command(folder)
    with httpx.stream("POST", f"{second.url}/v1/completions", json=body) as reply:
        second.process.kill()
        second.process.wait(30)
    third = Command(folder)
    assert httpx.post(f"{third.url}/v1/completions", json=body | {"stream": False}).status_code == 200
    third.process.terminate()
    assert third.process.wait(30) == 0


def test_the_command_refuses_what_it_cannot_serve(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, why in [
        ([str(tmp_path / "nothing")], "nothing"),
        ([str(folder), "--slots", "0"], "--slots is 0"),
        ([str(folder), "--api-key-file", str(tmp_path / "none")], "cannot be read"),
    ]:
        assert main(["serve", *arguments]) == 2
        assert why in capsys.readouterr().err


# -- quantized weights --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without tokenizer whose weights are all finite."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    write_checkpoint(folder, CONFIG)
    return folder


def greedy(folder: Path, prompt: list[int], num: int, quantize: str | None = None) -> list[int]:
    """Tokens by the decoder over the whole sequence, without an engine."""
    checkpoint, tokens = Checkpoint.open(folder, quantize), list(prompt)
    params, model = checkpoint.load(), checkpoint.model
    for _ in range(num):
        logits: Any = model.apply(params, jnp.array([tokens]))
        tokens.append(int(np.argmax(logits[0][0, -1])))
    return tokens[len(prompt) :]


def check_serves(expected: list[int], prompt: list[int], folder: Path, *options: str) -> None:
    """Whether `autopar serve` generates these tokens."""
    command = Command(folder, *options)
    body = {"prompt": prompt, "max_tokens": len(expected), "temperature": 0, "return_token_ids": True}
    (choice,) = httpx.post(f"{command.url}/v1/completions", json=body, timeout=60).json()["choices"]
    command.process.terminate()
    assert command.process.wait(30) == 0
    assert choice["token_ids"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4-g16"])
def test_weights_are_quantized_on_load(plain: Path, name: str) -> None:
    prompt = [1, 2, 3, 4]
    check_serves(greedy(plain, prompt, 12, name), prompt, plain, "--quantize", name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "packed 4 bits with zeros", "gptq", "awq"])
def test_quantized_checkpoints_are_served(tmp_path: Path, name: str) -> None:
    """The tokens are those of the same weights as floats."""
    quantized, floats = write_quantized(tmp_path, "llama", name)
    prompt = [1, 2, 3, 4]
    check_serves(greedy(floats, prompt, 12), prompt, quantized)


@pytest.mark.slow
def test_the_estimate_has_the_bytes_that_the_engine_has(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, int] = {}
    workload = [
        "--prompt-tokens",
        "20",
        "--output-tokens",
        "10",
        "--batch",
        "2",
        "--dtype",
        "bfloat16",
        "--devices",
        "1",
        "--json",
    ]
    for name in ("", "int8", "int4-g16"):
        options = ["--quantize", name] if name else []
        assert main(["estimate", "inference", str(plain), *workload, *options]) == 0
        sizes[name] = json.loads(capsys.readouterr().out)["replicas"][0]["figures"]["weight_bytes"]
        params = Checkpoint.open(plain, name or None).load(dtype=jnp.bfloat16)
        assert sizes[name] == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    assert sizes["int4-g16"] < sizes["int8"] < 0.6 * sizes[""]
