"""Let a request in: by its host name, its key, and the number of requests that are served; and read its body within limits.

In: ASGI calls. Out: `Access`, the outermost application; `json_of`, the JSON of a body.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from autopar.serving.limits import Limits, RequestError

#: Paths that need no key: what runs the server asks for these.
_OPEN = frozenset({"/health", "/ready", "/ping", "/"})


def error_response(error: RequestError) -> JSONResponse:
    """The reply with an error."""
    return JSONResponse(error.body(), error.status, error.headers())


class Access:
    """An application that lets in what the limits allow.

    Args:
        app: the application behind it.
        open_paths: further paths that need no key.

    Attributes:
        is_ending: whether the server has been told to end.
    """

    def __init__(self, app: ASGIApp, limits: Limits, open_paths: Iterable[str] = ()) -> None:
        self._app, self._limits = app, limits
        self._open = _OPEN | set(open_paths)
        self._num = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI's specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        self._num += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num -= 1

    def _check(self, scope: Scope) -> None:
        limits, headers, path = self._limits, Headers(scope=scope), scope["path"]
        host = (
            headers.get("host", "").rsplit(":", 1)[0] if not headers.get("host", "").endswith("]") else headers["host"]
        )
        if limits.hosts and host not in limits.hosts:
            raise RequestError(400, f"this server does not serve the host {host!r}: start it with --allow-host {host}")
        if path in self._open:
            return
        keys = limits.admin_keys if path.startswith("/admin/") else limits.api_keys | limits.admin_keys
        if path.startswith("/admin/") and not keys:
            raise RequestError(
                403, "loading and unloading are off: start the server with --admin-key", code="admin_off"
            )
        if (limits.api_keys or path.startswith("/admin/")) and not _has_key(headers.get("authorization", ""), keys):
            raise RequestError(
                401, "the request has no valid key: send it as `Authorization: Bearer KEY`", code="invalid_api_key"
            )
        if self._num >= limits.max_connections:
            raise RequestError(503, f"{self._num} requests are being served, the most there may be", retry_after_s=1)


def _has_key(authorization: str, keys: frozenset[str]) -> bool:
    scheme, _, given = authorization.partition(" ")
    found = [
        hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys
    ]  # all, so that time tells nothing
    return scheme.lower() == "bearer" and any(found)


async def json_of(request: Request, limits: Limits) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        RequestError: it is too large, too slow, or no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site could send other types without being asked
        raise RequestError(415, f"the body has the type {kind or 'none'!r}: send application/json")
    parts: list[bytes] = []
    num = 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                num += len(part)
                if num > limits.max_body_bytes:
                    raise RequestError(413, f"the body has more than {limits.max_body_bytes} bytes: send a shorter one")
                parts.append(part)
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {limits.body_s:g} s") from None
    except ClientDisconnect:
        raise RequestError(400, "the client has gone away") from None
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object")
    return body
