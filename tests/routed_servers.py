"""Run a router and servers that only pretend to have models, in a thread of the test's process."""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from autopar.serving import Limits
from autopar.serving.router.app import make_app
from autopar.serving.router.forward import Forwarder
from autopar.serving.router.placed import Placed, Replacing, servers_of
from autopar.serving.router.run import new_client

TOKENS = 6


class Pretender:
    """A server whose replies have its name, and as many tokens as asked for, at most `TOKENS`.

    Attributes:
        models: the state of each. bodies: the requests that came. calls: what its administration was asked for.
        can_begin: cleared, requests wait before the first token. can_end: cleared, they stop after two tokens.
        error: replied instead of text: a status and an error.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, models: tuple[str, ...] = ("tiny",)) -> None:
        self.name, self._loop = name, loop
        self.models = dict.fromkeys(models, "ready")
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.can_begin, self.can_end = asyncio.Event(), asyncio.Event()
        self.can_begin.set()
        self.can_end.set()
        self.error: tuple[int, dict[str, Any]] | None = None
        self.is_frozen = False
        self.fails_to: set[str] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def allow(self, *, begin: bool = True, end: bool = True) -> None:
        """Let requests begin and end, or not; from the test's thread."""
        for event, may in ((self.can_begin, begin), (self.can_end, end)):
            self._loop.call_soon_threadsafe(event.set if may else event.clear)

    async def start(self) -> None:
        paths = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score")
        routes = [Route(path, self._generate, methods=["POST"]) for path in paths]
        routes += [Route("/status", self._status), Route("/v1/models", self._list)]
        routes += [Route("/admin/{what}", self._administer, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), port=self.port, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._task = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Reset all connections, as if the process were killed."""
        for each in self._server.servers:
            each.close()
        for each in list(self._server.server_state.connections):
            each.transport.abort()
        self._server.should_exit = self._server.force_exit = True
        await self._task

    async def _status(self, _: Request) -> Response:
        while self.is_frozen:
            await asyncio.sleep(0.01)
        counts = {"num_running": 0, "num_waiting": 0, "num_slots": 4}
        return JSONResponse({"models": [{"name": n, "state": s, **counts} for n, s in self.models.items()]})

    async def _list(self, _: Request) -> Response:
        data = [{"id": name, "object": "model", "state": state} for name, state in self.models.items()]
        return JSONResponse({"object": "list", "data": data})

    async def _administer(self, request: Request) -> Response:
        what, body = request.path_params["what"], await request.json()
        self.calls.append((what, {**body, "key": request.headers.get("authorization")}))
        name = body.get("name", body.get("model"))
        if name in self.fails_to and what == "load":
            return JSONResponse({"error": {"message": "out of memory"}}, 400)
        if what == "load":
            self.models[name] = "ready"
        else:
            self.models.pop(name)
        return JSONResponse({})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append({**body, "path": request.url.path, "key": request.headers.get("authorization")})
        if self.error is not None:
            status, error = self.error
            return JSONResponse({"error": error}, status, {"retry-after": "7"})
        num = min(TOKENS, body.get("max_tokens", TOKENS))
        usage = {"prompt_tokens": 10, "completion_tokens": num, "total_tokens": 10 + num}
        if body.get("stream"):
            has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            events = self._events("messages" in body, num, usage if has_usage else None)
            return StreamingResponse(events, media_type="text/event-stream")
        await self._until_gone_or(request, body, self.can_begin)
        return JSONResponse({"choices": [{"text": self.name * num}], "usage": usage})

    async def _until_gone_or(self, request: Request, body: dict[str, Any], event: asyncio.Event) -> None:
        waits = asyncio.ensure_future(event.wait())
        while not waits.done():
            await asyncio.wait([waits], timeout=0.01)
            if await request.is_disconnected():
                self.aborted.append(body)
                waits.cancel()
                return

    async def _events(self, is_chat: bool, num: int, usage: Any) -> AsyncIterator[str]:
        if is_chat:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await self.can_begin.wait()
        for number in range(num):
            if number == 2:
                await self.can_end.wait()
            piece = {"delta": {"content": self.name}} if is_chat else {"text": self.name}
            finish = "length" if number == num - 1 else None
            yield _event({"choices": [{"index": 0, **piece, "finish_reason": finish}]})
        if usage is not None:
            yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


class Routed:
    """A router and its servers.

    Attributes:
        url: the router's address. placed, forwarder: the router's; use them in the event loop only (`call`).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.servers: list[Pretender] = []

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    async def start(
        self,
        models: list[tuple[str, ...]],
        placement: Path | None,
        limits: Limits,
        replacing: Replacing | None,
        **times: Any,
    ) -> None:
        self.servers = [Pretender("abcdef"[number], self.loop, each) for number, each in enumerate(models)]
        for each in self.servers:
            await each.start()
        await self.start_router([each.url for each in self.servers], placement, limits, replacing, **times)

    async def start_router(
        self, urls: list[str], placement: Path | None, limits: Limits, replacing: Replacing | None, **times: Any
    ) -> None:
        self.client = new_client()
        hold_s = times.pop("hold_s", 5.0)
        self.forwarder = Forwarder(servers_of(placement, urls), limits, self.client, hold_s=hold_s)
        self.placed = Placed(self.forwarder, placement, replacing, **{"poll_s": 0.05, "dead_s": 5.0, **times})
        self.placed.start()
        config = uvicorn.Config(make_app(self.placed), port=0, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._task = asyncio.ensure_future(self._server.serve())
        while not self._server.started or not all(each.is_up for each in self.forwarder.servers):
            await asyncio.sleep(0.001)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task
        await self.placed.close()
        await self.client.aclose()
        for each in self.servers:
            each.is_frozen = False
            if not each._task.done():
                await each.die()


@contextlib.contextmanager
def routed(
    models: list[tuple[str, ...]],
    placement: Path | None = None,
    limits: Limits | None = None,
    replacing: Replacing | None = None,
    **times: Any,
) -> Iterator[Routed]:
    """Run a router in front of a server for each tuple of models.

    Args:
        times: hold_s, poll_s, dead_s of the router.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    router = Routed(loop)
    try:
        router.call(router.start(models, placement, limits or Limits(), replacing, **times))
        yield router
    finally:
        router.call(router.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for a condition that another thread makes true."""
    done = threading.Event()
    for _ in range(2000):
        if is_true():
            return
        done.wait(0.005)
    raise AssertionError("the condition is never met")
