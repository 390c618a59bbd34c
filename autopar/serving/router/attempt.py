"""Send a request to one server, and read its reply, as a whole or event by event.

In: an HTTP client, a server, a request. Out: `Attempt`, which becomes a reply, an error of the server, or `Lost`.

A streamed reply is held back until its first generated token. Until then nothing has reached the client, so if the server fails the
request can be sent to another one, and the client sees one reply. After that, a failure is an event with an error.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import httpx
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from autopar.serving.limits import RequestError
from autopar.serving.router.group_servers import GroupServer, Sent

_DONE = b"data: [DONE]"
#: Errors of one server after which another one may serve the request: it sleeps or ends, its queue is full, its engine has failed, or
#: the model was unloaded.
_ELSEWHERE = {404, 429, 500, 503}


class Lost(NamedTuple):
    """The server is gone.

    Args:
        why: for people. had_it: whether the request may have run there.
    """

    why: str
    had_it: bool


class Refused(NamedTuple):
    """The server does not serve the request now; another one may."""

    response: Response


class Usage(NamedTuple):
    """The tokens of a request."""

    prompt_tokens: int
    output_tokens: int


class Attempt:
    """A request at a server.

    Args:
        sent: its entry at the server, which is removed when the attempt ends.
        wants_usage: whether the client wants the event with the counts of tokens; it is asked for in any case.
        has_echo: whether each choice begins with its prompt.
        on_end: called once, with the tokens if they are known, when the reply is complete or the attempt has failed.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        request: httpx.Request,
        server: GroupServer,
        sent: Sent,
        *,
        wants_usage: bool,
        has_echo: bool,
        on_end: Callable[[Usage | None], None],
    ) -> None:
        self._client, self._request, self._server, self._sent = client, request, server, sent
        self._wants_usage, self._has_echo, self._on_end = wants_usage, has_echo, on_end
        self._usage: Usage | None = None
        self._has_ended = False
        self._parts: asyncio.Queue[Any] = asyncio.Queue()
        self._opened: set[Any] = set()
        server.sent.add(sent)
        sent.task = asyncio.ensure_future(self._read())

    async def begin(self) -> Response | Refused | Lost:
        """Wait until the reply has begun: all of it, or the first token of a stream."""
        try:
            outcome = await self._begin()
        except BaseException:
            self._end()
            raise
        if not isinstance(outcome, StreamingResponse):
            self._end()
        return outcome

    async def _begin(self) -> Response | Refused | Lost:
        head = await self._parts.get()
        if isinstance(head, Lost):
            return head
        if not _is_stream(head):
            content = await self._parts.get()
            if isinstance(content, Lost):
                return content
            self._usage = _usage_of(content)
            return _reply(head.status_code, content, head.headers)
        events, held = self._events(), list[bytes]()
        async for event in events:
            if isinstance(event, Lost):
                return event
            error = _error_of(event)
            if error is not None:
                return _reply_of_error(error)
            held.append(event)
            if event == _DONE or self._is_generated(event):
                self._sent.waiting_tokens = 0
                headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
                body = self._stream(held, events)
                return _Streamed(body, headers, self._end)
        return Lost("it ended the stream before the first token", had_it=True)

    async def _stream(self, held: list[bytes], events: AsyncIterator[bytes | Lost]) -> AsyncIterator[bytes]:
        """The events to the client, the first ones at once."""
        is_done, why = _DONE in held, "it ended the reply early"
        yield b"".join(each + b"\n\n" for each in held)
        async for event in events:
            if isinstance(event, Lost):
                why = event.why
                break
            is_done = is_done or event == _DONE or _error_of(event) is not None
            yield event + b"\n\n"
        if not is_done:
            text = f"the server of this reply has failed after a part of it ({why}): send the request again"
            yield f"data: {json.dumps(RequestError(502, text, code='server_lost').body())}\n\n".encode()

    async def _events(self) -> AsyncIterator[bytes | Lost]:
        """The events of the reply, without that with the counts of tokens if the client has not asked for it."""
        rest = b""
        while (part := await self._parts.get()) is not None:
            if isinstance(part, Lost):
                yield part
                return
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if b'"usage"' in event and (usage := _usage_of(event.removeprefix(b"data: "))) is not None:
                    self._usage = usage
                    if not self._wants_usage and not _json(event).get("choices"):
                        continue
                yield event

    def _is_generated(self, event: bytes) -> bool:
        """Whether an event has more than the opening of a choice: the role, or the prompt with `echo`."""
        for choice in _json(event).get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content")
            is_opening = self._has_echo and choice.get("index") not in self._opened
            self._opened.add(choice.get("index"))
            others = (choice.get("finish_reason"), choice.get("token_ids"), delta.get("tool_calls"))
            if any(others) or (text and not is_opening):
                return True
        return False

    async def _read(self) -> None:
        """Put the parts of the reply into the queue, and None or `Lost` at the end."""
        try:
            response = await self._client.send(self._request, stream=True)
            try:
                self._parts.put_nowait(response)
                if _is_stream(response):
                    async for part in response.aiter_raw():
                        self._parts.put_nowait(part)
                    self._parts.put_nowait(None)
                else:
                    self._parts.put_nowait(await response.aread())
            finally:
                await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._parts.put_nowait(Lost(f"no connection: {error}", had_it=False))
        except (httpx.HTTPError, httpx.StreamError) as error:
            self._parts.put_nowait(Lost(str(error) or type(error).__name__, had_it=True))
        except asyncio.CancelledError:
            self._parts.put_nowait(Lost("it does not answer any more", had_it=True))
            raise
        finally:
            self._server.sent.discard(self._sent)
            self._parts.put_nowait(Lost("the router has failed", had_it=True))  # whoever waits must not wait for ever

    def _end(self) -> None:
        """Close the connection, so that the server aborts what still runs, and tell that the request has ended."""
        if self._has_ended:
            return
        self._has_ended = True
        self._server.sent.discard(self._sent)
        assert self._sent.task is not None
        self._sent.task.cancel()
        self._on_end(self._usage)


class _Streamed(StreamingResponse):
    """A streamed reply that tells when it has ended, also if the client goes away before the first event."""

    def __init__(self, body: AsyncIterator[bytes], headers: dict[str, str], on_end: Callable[[], None]) -> None:
        super().__init__(body, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI's specification."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _is_stream(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


def _reply(status: int, content: bytes, headers: httpx.Headers) -> Response | Refused:
    kept = {name: headers[name] for name in ("retry-after",) if name in headers}
    response = Response(content, status, kept, headers.get("content-type"))
    return Refused(response) if status in _ELSEWHERE else response


def _reply_of_error(error: dict[str, Any]) -> Response | Refused:
    """The reply for an error that came as an event, before any token."""
    is_timeout = error.get("code") == "timeout"
    status = 504 if is_timeout else 503 if error.get("type") == "server_error" else 400
    content = json.dumps({"error": error}).encode()
    return _reply(status, content, httpx.Headers({"content-type": "application/json"}))


def _error_of(event: bytes) -> dict[str, Any] | None:
    if b'"error"' not in event:
        return None
    error = _json(event).get("error")
    return error if isinstance(error, dict) else None


def _json(event: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        content = json.loads(event.removeprefix(b"data: "))
        if isinstance(content, dict):
            return content
    return {}


def _usage_of(content: bytes) -> Usage | None:
    usage = _json(content).get("usage")
    if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
        return None
    return Usage(usage["prompt_tokens"], int(usage.get("completion_tokens") or 0))
