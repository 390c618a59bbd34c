"""Run a server in a thread of the test's process, on a port of its own."""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from autopar.inference import Engine
from autopar.inference.serve.runner import Runner
from autopar.serving import Limits, Models, ServedModel, make_app
from autopar.serving.chat import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name | tojson }}{% endfor %}<assistant>"
)


def copied(engine: Engine) -> Engine:
    """An engine with the same programs and weights, and pages of its own."""
    runner = Runner(engine.runner.served, engine.runner.layout, engine.runner._params)
    num_pages = engine.pool.num_pages
    return Engine(runner, engine.tokenizer, engine.stop_tokens, num_pages=num_pages, proposer=engine.proposer)


class Server:
    """A server with one model, named "tiny".

    Attributes:
        url: its address. models: its models; use them in the event loop only (`call`).
        engine: that of its model.
        is_running: cleared, it stops the devices, so that requests wait.
    """

    def __init__(self, engine: Engine, limits: Limits, environment: dict[str, str], folder: Path | None) -> None:
        self.engine, self.is_running = engine, threading.Event()
        self.is_running.set()
        dispatch = engine.runner.dispatch

        def dispatch_later(iteration: Any, allowed: Any = None) -> Any:
            self.is_running.wait()
            return dispatch(iteration, allowed)

        engine.runner.dispatch = dispatch_later
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.models, self._server, self._task = self.call(self._start(engine, limits, environment, folder))
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    async def _start(self, engine: Engine, limits: Limits, environment: dict[str, str], folder: Path | None) -> Any:
        models = Models(lambda _: copied(engine), limits)
        models.add(ServedModel("tiny", engine, limits, folder=folder, template=ChatTemplate(TEMPLATE, {})))
        config = uvicorn.Config(make_app(models, environment), port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.001)
        return models, server, task

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's event loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task
        await self.models.close()

    def close(self) -> None:
        """End the server."""
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def served(
    engine: Engine, limits: Limits | None = None, environment: dict[str, str] | None = None, folder: Path | None = None
) -> Iterator[Server]:
    """Serve with the programs and the weights of an engine, on pages of its own."""
    server = Server(copied(engine), limits or Limits(), environment or {}, folder)
    try:
        yield server
    finally:
        server.is_running.set()
        server.close()


def events_of(text: str) -> list[Any]:
    """The server-sent events of a reply, the last of which is not JSON."""
    events = [each.removeprefix("data: ") for each in text.split("\n\n") if each]
    return [json.loads(each) for each in events[:-1]] + events[-1:]
