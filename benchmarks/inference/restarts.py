"""Kill a server at 20 random moments, while it starts and while it serves, and start it again.

`autopar serve` of a small model of random weights, with one cache of programs for all starts. Every second kill comes while it starts, at a
random share of the time of a start: while it plans, compiles, writes or reads its cache. The others come while it streams to eight
clients. It serves again if the next start gives the reply that the first one gave.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from autopar.inference import write_checkpoint
from benchmarks.inference.rows import Row, row
from benchmarks.inference.server_program import TINY
from benchmarks.inference.timed_device import vocabulary_of

KILLS = 20
_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 600.0


class _Process:
    """`autopar serve` in a process."""

    def __init__(self, model: Path, cache: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
        options = ["--port", "0", "--slots", "4", "--max-length", "128", "--mesh", "1", "--attention", "gather"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "autopar", "serve", str(model), *options], env=environment, stderr=subprocess.PIPE
        )

    def address(self, within_s: float) -> str | None:
        """Its address once it serves; None if it does not within a time."""
        pipe, text, until = self._process.stderr, b"", time.monotonic() + within_s
        assert pipe is not None
        while (left := until - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                return None
            text += piece
            if found := re.search(rb"http://[\d.:]+", text):
                return found[0].decode()
        return None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


def _reply(address: str, **fields: Any) -> str:
    body = json.dumps({"prompt": "def main(", "max_tokens": 60, "temperature": 0} | fields).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


def _stream(address: str) -> None:
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # it is killed meanwhile
        for _ in range(1000):
            _reply(address, stream=True)


def measure() -> list[Row]:
    """How many starts after a kill serve."""
    chance, served, seconds = random.Random(0), 0, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        model, cache = Path(folder) / "model", Path(folder) / "cache"
        write_checkpoint(model, TINY)
        vocabulary_of(TINY["vocab_size"]).save(str(model / "tokenizer.json"))
        started, process = time.monotonic(), _Process(model, cache)
        address = process.address(_PATIENCE_S)
        assert address is not None, "the first start serves"
        seconds.append(time.monotonic() - started)
        expected = json.loads(_reply(address))["choices"]
        for number in range(KILLS):
            if number % 2:
                for _ in range(8):
                    threading.Thread(target=_stream, args=(address,), daemon=True).start()
                time.sleep(chance.uniform(0.0, 1.0))
            else:
                process.kill()
                if number < KILLS // 2:  # it compiles again
                    for file in list(cache.rglob("*")):
                        file.unlink() if file.is_file() else None
                process = _Process(model, cache)
                process.address(chance.uniform(0.0, 1.1) * seconds[0 if number < KILLS // 2 else -1])
            process.kill()
            started, process = time.monotonic(), _Process(model, cache)
            address = process.address(_PATIENCE_S)
            if address is None:
                process.kill()
                process = _Process(model, cache)
                address = process.address(_PATIENCE_S)
                assert address is not None
                continue
            seconds.append(time.monotonic() - started)
            served += json.loads(_reply(address))["choices"] == expected
        process.kill()
    return [
        row(f"starts after a kill that serve the same, of {KILLS}", served, at_least=KILLS),
        row("start that compiles", seconds[0], "s"),
        row("start with the programs in the cache", sorted(seconds)[0], "s"),
    ]
