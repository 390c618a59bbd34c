"""Run a server: open the models, listen, and end gracefully.

In: models' folders, an address, limits. Out: a process that serves until SIGTERM or SIGINT. Then it takes no new connections,
replies to the requests that run for a while, aborts the rest, and ends.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from autopar.errors import InferenceError
from autopar.serving.app import make_app
from autopar.serving.limits import Limits
from autopar.serving.models import Models, OpenEngine

_KEEP_ALIVE_S = 30


async def serve(
    folders: Sequence[tuple[str | None, Path]],
    open_engine: OpenEngine,
    limits: Limits,
    *,
    host: str,
    port: int,
    chat_template: Path | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve models until a signal ends the process.

    Args:
        folders: the name, if it is not the folder's, and the folder of each model.
        on_ready: called with the address once requests are served.

    Raises:
        AutoparError: a folder cannot be served.
    """
    models = Models(open_engine, limits, chat_template)
    try:
        for name, folder in folders:
            await models.load(folder, name)
        await listen(make_app(models, os.environ), limits, host=host, port=port, on_ready=on_ready)
    finally:
        await models.close()


async def listen(app: ASGIApp, limits: Limits, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve an application until a signal ends the process.

    Raises:
        InferenceError: nothing can listen on this address.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(limits.shutdown_s)),
        limit_concurrency=2 * limits.max_connections + 16,  # of connections; requests are counted in `Access`
    )
    server = _Server(config)
    ready = asyncio.ensure_future(_report_address(server, on_ready))
    idle = asyncio.ensure_future(close_idle(server, limits.body_s))
    try:
        await server.serve()
    except SystemExit:  # it has said why
        raise InferenceError(f"nothing can listen on {host}, port {port}: give another --port") from None
    finally:
        ready.cancel()
        idle.cancel()


class _Server(uvicorn.Server):
    """Uvicorn's server, which after a signal returns instead of raising it again, so that the models are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals until the server has ended."""
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for each in signals:
            loop.add_signal_handler(each, self.handle_exit, each, None)
        try:
            yield
        finally:
            for each in signals:
                loop.remove_signal_handler(each)


async def close_idle(server: uvicorn.Server, idle_s: float) -> None:
    """Close connections on which no request is complete after a while, also those with a part of one, which uvicorn would keep."""
    since: dict[tuple[Any, Any], float] = {}
    while True:
        await asyncio.sleep(idle_s / 8)
        connections: list[Any] = list(server.server_state.connections)
        now, cycles = time.monotonic(), [(each, each.cycle) for each in connections]  # of requests
        idle = [(each, cycle) for each, cycle in cycles if cycle is None or cycle.response_complete]
        since = {each: since.get(each, now) for each in idle}
        for (connection, _), start in since.items():
            if now - start > idle_s:
                connection.transport.close()


async def _report_address(server: uvicorn.Server, on_ready: Callable[[str], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
