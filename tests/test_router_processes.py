"""Test the router's command in front of real servers, of which one is killed, one ends, and one comes back."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
from tiny_models import opened, write_model

httpx = pytest.importorskip("httpx")
pytest.importorskip("llguidance")
pytest.importorskip("starlette")

from served_models import events_of  # noqa: E402


class Command:
    """`autopar` in a process of its own, which prints its address when it is ready."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "autopar", *arguments],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            log.append(line)
            if found := re.search(r"http://[\d.:]+", line):
                self.url = found[0]
                return
        pytest.fail("".join(log))


@contextlib.contextmanager
def commands() -> Iterator[list[Command]]:
    """Commands that are killed at the end."""
    started: list[Command] = []
    try:
        yield started
    finally:
        for each in started:
            each.process.kill()
            each.process.wait(30)


@pytest.mark.slow
def test_no_request_is_lost_when_servers_are_killed_and_end(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    alone = opened(folder)
    prompts = [f"prompt {number}" for number in range(24)]
    expected = [alone.submit(each, max_tokens=100).result().text for each in prompts]
    options = ["--slots", "2", "--mesh", "1", "--attention", "gather"]
    with commands() as started:

        def serve(port: str = "0") -> Command:
            started.append(Command("serve", f"tiny={folder}", "--port", port, *options))
            return started[-1]

        servers = [serve() for _ in range(3)]
        router = Command("route", "--servers", *(each.url for each in servers), "--port", "0", "--hold", "60")
        started.append(router)
        url = f"{router.url}/v1/completions"

        def complete(number: int) -> str:
            body = {"model": "tiny", "prompt": prompts[number], "max_tokens": 100, "temperature": 0}
            reply = httpx.post(url, json={**body, "stream": number % 2 == 1}, timeout=120)
            assert reply.status_code == 200, reply.text
            if number % 2 == 0:
                return reply.json()["choices"][0]["text"]
            events: list[Any] = events_of(reply.text)
            if "error" in (events[-1] if isinstance(events[-1], dict) else events[-2]):
                return "begun"
            return "".join(each["choices"][0]["text"] for each in events[:-1])

        complete(0)  # the servers are known, and warm
        with ThreadPoolExecutor(24) as pool:
            replies = [pool.submit(complete, number) for number in range(24)]
            for _, _ in zip(range(3), as_completed(replies), strict=False):
                pass
            servers[0].process.kill()
            servers[1].process.terminate()  # it completes what it has
            texts = [each.result() for each in replies]
        begun = [number for number, text in enumerate(texts) if text == "begun"]
        assert len(begun) <= 2  # those in the slots of the server that was killed
        assert all(text == expected[number] for number, text in enumerate(texts) if number not in begun)
        assert servers[1].process.wait(60) == 0
        servers[2].process.kill()
        servers[2].process.wait(30)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(complete, 4)
            serve(servers[2].url.rpartition(":")[2])
            assert waiting.result() == expected[4]
        router.process.terminate()
        assert router.process.wait(60) == 0
