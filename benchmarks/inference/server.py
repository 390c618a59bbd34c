"""Measure the HTTP server: throughput, overload with disconnects, masks, and a short prompt behind a long one.

Throughput, masks and the short prompt have a device of 10 ms a step and 64 slots, and real engine, scheduler and server; clients are two
processes over plain sockets, which stream. The library serves the same requests without HTTP. With one step a call, each token of each
request is an event. Masks: 64 requests for JSON of one schema,
with a vocabulary of 32,000 pieces, against 64 requests without. Overload: 1,000 requests to a small model of random weights, sent ten times
as fast as it serves them, of which one in five disconnects in the queue or after a few events; then twice again, between which memory is
compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.inference import SamplingOptions
from autopar.serving.grammar import Grammars
from benchmarks.inference.rows import Row, row
from benchmarks.inference.server_program import LENGTH, SLOTS, STEP_S, opened
from benchmarks.inference.timed_device import random_prompt, timed_engine

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
REQUESTS, PROMPT, OUTPUT = 512, 64, 128
OVERLOAD, SHORT = 1000, 16
SCHEMA: Any = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["person", "company", "place"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}


def measure() -> list[Row]:
    """All rows."""
    return [*_throughput(8), *_throughput(1), *_masks(), *_overload(), *_short_prompt()]


class Server:
    """A server in a process of its own. `pid` is its process; `compiled` is known after it has ended."""

    def __init__(self, kind: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(_HERE / "server_program.py"), kind]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self.port, self.pid = int(self.url.rsplit(":", 1)[1]), self._process.pid

    def status(self) -> dict[str, Any]:
        """The state of the model."""
        with urllib.request.urlopen(f"{self.url}/status") as reply:
            return json.load(reply)["models"][0]

    def resident_bytes(self) -> int:
        """The memory of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> int:
        """End it, and return the number of programs that it compiled while it served."""
        self._process.send_signal(signal.SIGTERM)
        out, _ = self._process.communicate(timeout=60)
        return json.loads(out.splitlines()[-1])["compiled"]


@contextlib.contextmanager
def _served(kind: str) -> Iterator[tuple[Server, dict[str, int]]]:
    server, result = Server(kind), dict[str, int]()
    try:
        yield server, result
    finally:
        result["compiled"] = server.close()


def _sent(port: int, requests: Sequence[dict[str, Any]], at_once: int | None) -> tuple[float, list[tuple[str, int]]]:
    """Send requests from two processes. Returns the seconds, and how each ended with its number of tokens."""
    clients: list[Any] = []
    for part in (requests[::2], requests[1::2]):
        spec = {"port": port, "requests": part, "at_once": at_once and at_once // 2}
        client = subprocess.Popen(
            [sys.executable, str(_HERE / "server_clients.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert client.stdin is not None
        client.stdin.write(json.dumps(spec))
        client.stdin.close()
        clients.append(client)
    found = [json.loads(client.stdout.read()) for client in clients]
    for client in clients:
        client.wait(60)
    return max(each["seconds"] for each in found), [tuple(one) for each in found for one in each["found"]]


def _request(number: int, prompt: int, output: int, at: float = 0.0, leaves_after: int | None = None) -> dict[str, Any]:
    return {"at": at, "prompt": random_prompt(prompt, number), "max_tokens": output, "leaves_after": leaves_after}


def _throughput(steps: int) -> list[Row]:
    """Tokens per second of the library and over HTTP, with so many decode steps in a call."""
    requests = [_request(number, PROMPT, OUTPUT) for number in range(REQUESTS)]
    engine = timed_engine(SLOTS, LENGTH, STEP_S, steps=steps)
    for each in requests:
        engine.submit(each["prompt"], max_tokens=OUTPUT, sampling=SamplingOptions(1.0), stop_tokens=())
    started = time.perf_counter()
    engine.run()
    library = REQUESTS * OUTPUT / (time.perf_counter() - started)
    with _served(str(steps)) as (server, _):
        _sent(server.port, requests[:SLOTS], 2 * SLOTS)
        again = [_request(number + REQUESTS, PROMPT, OUTPUT) for number in range(REQUESTS)]
        seconds, found = _sent(server.port, again, 4 * SLOTS)
    served = sum(num for _, num in found) / seconds
    calls = f"{steps} steps a call" if steps > 1 else "one step a call"
    return [
        row(f"{calls}: tokens per second, library", library, "/s"),
        row(f"{calls}: tokens per second, HTTP", served, "/s"),
        row(f"{calls}: HTTP / library", served / library, at_least=0.9),
        row(f"{calls}: requests that did not complete, of 512", sum(how != "done" for how, _ in found), at_most=0),
    ]


def _masks() -> list[Row]:
    """The time of a step with masks and without, in turns."""
    engine = timed_engine(SLOTS, 1024, STEP_S, vocabulary=32_000, steps=1, samples_apart=True)
    grammars = Grammars(engine)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        for masked in seconds:
            generations = [
                engine.submit(
                    random_prompt(32, number),
                    max_tokens=200,
                    sampling=SamplingOptions(1.0),
                    stop_tokens=None if masked else (),
                    constraint=grammars.of_schema(SCHEMA, "schema") if masked else None,
                )
                for number in range(SLOTS)
            ]
            while engine.stats.num_waiting or any(not each.tokens for each in generations):
                engine.step()
            before, started = engine.stats.num_steps, time.perf_counter()
            while engine.stats.num_running == SLOTS and engine.stats.num_steps < before + 120:
                engine.step()
            seconds[masked].append((time.perf_counter() - started) / (engine.stats.num_steps - before))
            for each in generations:
                each.abort()
            engine.run()
    with_masks, without = (sorted(seconds[masked])[1] for masked in (True, False))
    return [
        row("step without masks", 1e3 * without, "ms"),
        row("step with 64 masks / without", with_masks / without, at_most=1.05),
    ]


def _overload() -> list[Row]:
    chance = random.Random(0)
    engine = opened("model")
    for number in range(128):
        engine.submit(random_prompt(32, number), max_tokens=SHORT, stop_tokens=())
    started = time.perf_counter()
    engine.run()
    rate = 10 * 128 / (time.perf_counter() - started)
    rounds: list[tuple[int, Counter[str], int]] = []
    with _served("model") as (server, result):
        for turn in range(3):
            requests = [
                _request(
                    10_000 * turn + number,
                    32,
                    SHORT,
                    number / rate,
                    chance.randrange(4) if number % 5 == 0 else None,
                )
                for number in range(OVERLOAD)
            ]
            _, found = _sent(server.port, requests, None)
            held = server.status()["held_pages"]
            for _ in range(200):
                if not held:
                    break
                time.sleep(0.05)
                held = server.status()["held_pages"]
            rounds.append((held, Counter(how for how, _ in found), server.resident_bytes()))
    ended = sum((counts for _, counts, _ in rounds[1:]), Counter[str]())
    return [
        row("requests per second at 10 times capacity", rate, "/s"),
        row("requests that completed, of 2,000", ended["done"]),
        row("requests that disconnected", ended["left"]),
        row("requests that failed", ended.total() - ended["done"] - ended["left"], at_most=0),
        row("pages held after overload", max(held for held, _, _ in rounds), at_most=0),
        row("programs compiled while serving", result["compiled"], at_most=0),
        row("memory after the third 1,000 requests / after the first", rounds[-1][2] / rounds[0][2], at_most=1.02),
    ]


def _short_prompt() -> list[Row]:
    """Iterations from the submission of a short prompt to its first token, behind one of 16,000 tokens."""
    engine = timed_engine(SLOTS, 16_384, 0.0, chunks=((8, 64), (2, 256)))
    engine.submit(random_prompt(16_000, 0), max_tokens=1)
    engine.step()
    short, before = engine.submit(random_prompt(20, 1), max_tokens=1), engine.stats.num_iterations
    while short.ended is None:
        engine.step()
    return [
        row("iterations of a prompt of 20 tokens behind one of 16,000", engine.stats.num_iterations - before, at_most=4)
    ]
