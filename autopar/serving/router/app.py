"""Answer HTTP requests to a router: OpenAI's endpoints, health, status, metrics, administration.

In: a `Forwarder`. Out: `make_app`, an ASGI application.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from autopar.serving import fields
from autopar.serving.access import json_of
from autopar.serving.limits import RequestError
from autopar.serving.router.group_servers import GroupServer, by_url
from autopar.serving.router.placed import Placed
from autopar.serving.routes import application

_FORWARDED = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score")
_Handler = Callable[[Placed, Request], Awaitable[Response]]


def make_app(placed: Placed) -> ASGIApp:
    """The application of a router."""
    routes: dict[tuple[str, str], _Handler] = {
        ("GET", "/status"): _status,
        ("GET", "/health"): _health,
        ("GET", "/ready"): _ready,
        ("GET", "/ping"): _ready,
        ("GET", "/metrics"): _metrics,
        ("GET", "/v1/models"): _list,
        **{("POST", path): _forward for path in _FORWARDED},
        ("POST", "/admin/drain"): _drain,
        ("POST", "/admin/resume"): _resume,
        ("POST", "/admin/reload"): _reload,
        ("POST", "/admin/replace"): _replace,
    }
    return application(placed, routes, placed.forwarder.limits)


async def _forward(placed: Placed, request: Request) -> Response:
    body = await json_of(request, placed.forwarder.limits)
    return await placed.forwarder.reply(request, body)


# -- state ---------------------------------------------------------------------------------------


async def _status(placed: Placed, _: Request) -> Response:
    servers = [each.described() for each in placed.forwarder.servers]
    return JSONResponse({"servers": servers, "replacement": placed.replacement})


async def _health(placed: Placed, _: Request) -> Response:
    """Whether the router works: it does if it answers. Servers that are down are named."""
    down = [each.url for each in placed.forwarder.servers if not each.is_up]
    return JSONResponse({"status": "ok", "down": down})


async def _ready(placed: Placed, _: Request) -> Response:
    """Whether every model that was served, or should be, has a server for new requests."""
    forwarder = placed.forwarder
    models = {name: any(each.serves(name) for each in forwarder.servers) for name in forwarder.models()}
    is_ready = bool(models) and all(models.values())
    return JSONResponse({"ready": is_ready, "models": models}, 200 if is_ready else 503)


async def _metrics(placed: Placed, _: Request) -> Response:
    text = placed.forwarder.metrics.text(placed.forwarder.servers)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _list(placed: Placed, request: Request) -> Response:
    """The models of all servers that answer, as the servers describe them; one that is ready goes first."""
    forwarder = placed.forwarder

    async def of(server: GroupServer) -> list[dict[str, Any]]:
        try:
            url, headers = f"{server.url}/v1/models", forwarder.headers(request.headers)
            reply = await forwarder.client.get(url, headers=headers, timeout=httpx.Timeout(2.0))
            return list(reply.json()["data"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []

    found: dict[str, dict[str, Any]] = {}
    for models in await asyncio.gather(*(of(each) for each in forwarder.servers if each.is_up)):
        for each in models:
            if found.get(each["id"], {}).get("state") != "ready":
                found[each["id"]] = each
    return JSONResponse({"object": "list", "data": [found[name] for name in sorted(found)]})


# -- administration ------------------------------------------------------------------------------


async def _server(placed: Placed, request: Request) -> GroupServer:
    body = await json_of(request, placed.forwarder.limits)
    fields.check_known(body, frozenset({"server"}))
    url = fields.text(body, "server")
    server = by_url(placed.forwarder.servers, url)
    if server is None:
        known = ", ".join(each.url for each in placed.forwarder.servers)
        raise RequestError(404, f"there is no server {url!r}; the servers are {known}", "server")
    return server


async def _drain(placed: Placed, request: Request) -> Response:
    """Send a server no new requests, and reply when all that it has have ended."""
    server = await _server(placed, request)
    server.is_draining = True
    placed.forwarder.changed()
    await placed.forwarder.drain(server)
    return JSONResponse(server.described())


async def _resume(placed: Placed, request: Request) -> Response:
    server = await _server(placed, request)
    server.is_draining = False
    placed.forwarder.changed()
    return JSONResponse(server.described())


async def _reload(placed: Placed, request: Request) -> Response:
    """Read the placement again, with other servers if the request has some."""
    body = await json_of(request, placed.forwarder.limits)
    fields.check_known(body, frozenset({"servers"}))
    urls = body.get("servers")
    if urls is not None and not (isinstance(urls, list) and urls and all(isinstance(each, str) for each in urls)):
        raise RequestError(400, "'servers' must be a list of addresses", "servers")
    await placed.reload(urls)
    return await _status(placed, request)


async def _replace(placed: Placed, request: Request) -> Response:
    """Find a placement for the requests of the last while, and apply it if the request says so."""
    body = await json_of(request, placed.forwarder.limits)
    fields.check_known(body, frozenset({"apply"}))
    await placed.replace(applies=fields.flag(body, "apply"))
    return JSONResponse(placed.replacement)
