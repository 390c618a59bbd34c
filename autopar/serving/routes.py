"""Make an application of handlers: what each path answers, behind `Access`, with errors as OpenAI's clients know them.

In: handlers by method and path. Out: `application`.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from autopar.errors import AutoparError
from autopar.serving.access import Access, error_response
from autopar.serving.limits import Limits, RequestError

_Served = TypeVar("_Served")


def application(
    served: _Served,
    routes: Mapping[tuple[str, str], Callable[[_Served, Request], Awaitable[Response]]],
    limits: Limits,
    open_paths: Iterable[str] = (),
) -> ASGIApp:
    """An application.

    Args:
        served: the first argument of all handlers.
        routes: a handler by method and path.
        open_paths: further paths that need no key.
    """
    made = [
        Route(path, functools.partial(_answer, handler, served), methods=[method])
        for (method, path), handler in routes.items()
    ]
    app = Starlette(routes=made, exception_handlers={HTTPException: _http_error})
    return Access(app, limits, open_paths)


async def _answer(handler: Callable[[Any, Request], Awaitable[Response]], served: Any, request: Request) -> Response:
    """Run a handler. What is the client's fault is a reply with an error; all else is the server's."""
    try:
        return await handler(served, request)
    except RequestError as error:
        return error_response(error)
    except AutoparError as error:
        return error_response(RequestError(400, str(error)))


async def _http_error(_: Request, error: Any) -> Response:
    return error_response(RequestError(error.status_code, f"{error.detail}: see the paths in the documentation"))
