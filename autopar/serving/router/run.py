"""Run a router: watch the servers, listen, and end gracefully.

In: a placement's file, addresses of servers, limits, an address to listen on. Out: a process that routes until SIGTERM or SIGINT.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from autopar.serving.limits import Limits
from autopar.serving.router.app import make_app
from autopar.serving.router.forward import Forwarder
from autopar.serving.router.placed import Placed, Replacing, servers_of
from autopar.serving.server import listen


def new_client() -> httpx.AsyncClient:
    """A client without limits of its own: the router's are those that count."""
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=unlimited, trust_env=False)


async def route(
    placement: Path | None,
    urls: Sequence[str],
    limits: Limits,
    *,
    host: str,
    port: int,
    replacing: Replacing | None = None,
    hold_s: float = 10.0,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Route requests until a signal ends the process.

    Args:
        placement, urls: as for `servers_of`. hold_s: how long a request waits for a replica.
        on_ready: called with the address once requests are served.

    Raises:
        PlacementError: as for `servers_of`. InferenceError: nothing can listen there.
    """
    servers = servers_of(placement, urls)
    async with new_client() as client:
        placed = Placed(Forwarder(servers, limits, client, hold_s=hold_s), placement, replacing)
        placed.start()
        try:
            await listen(make_app(placed), limits, host=host, port=port, on_ready=on_ready)
        finally:
            await placed.close()
