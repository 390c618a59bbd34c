"""Generate a reply: wait for tokens, write them in a form, end at the deadline or when the client goes away.

In: a model, prompts, what to generate. Out: a Starlette response. If the client disconnects, its requests are aborted before the
engine's next step.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from autopar.serving.choice_text import Delta
from autopar.serving.fields import Generate
from autopar.serving.limits import RequestError
from autopar.serving.models import Running, ServedModel
from autopar.serving.replies import Form, Reply, usage

DISCONNECTED = 499  # as nginx logs it; nobody reads the reply
_ENDS = {
    "failed": (500, "the engine has failed: load the model again"),
    "unsound": (500, "the model's logits were NaN or infinite: its weights are damaged, or their dtype is too narrow"),
    "aborted": (503, "the request was aborted, because the server or the model is being shut down"),
}


async def reply_to(
    request: Request,
    model: ServedModel,
    prompts: list[tuple[int, ...]],
    wanted: Generate,
    form: Form,
    reply: Reply,
    details: Sequence[Mapping[str, Any]] = (),
) -> Response:
    """Generate the reply to an HTTP request.

    Args:
        details: as for `ServedModel.submit`.

    Raises:
        RequestError: it cannot be served, now or ever.
    """
    running = await model.submit(prompts, wanted, str(reply.head["id"]), details)
    if wanted.stream:
        events = _events(running, wanted, form, reply)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    if not await is_complete(request, running, wanted):
        return Response(status_code=DISCONNECTED)
    body = {**reply.head, "choices": form.whole(running.choices), "usage": usage(prompts, running.choices)}
    return JSONResponse(body)


async def is_complete(request: Request, running: Running, wanted: Generate) -> bool:
    """Wait for the end of all choices; False if the client goes away before.

    Raises:
        RequestError: the deadline has passed, or a request has failed.
    """
    whole = asyncio.ensure_future(_whole(running, wanted))
    gone = asyncio.ensure_future(_until_disconnect(request))
    try:
        await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            return False
        whole.result()
    finally:
        for task in (whole, gone):
            task.cancel()
        running.abort()
    return True


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(running: Running, wanted: Generate) -> None:
    async with aclosing(_deltas(running, wanted)) as deltas:
        async for _ in deltas:
            pass


async def _events(running: Running, wanted: Generate, form: Form, reply: Reply) -> AsyncIterator[str]:
    """The events of a reply. An error after the first one is an event, too."""
    try:
        opening = form.opening(len(running.names))
        if opening:
            yield "".join(map(reply.event, opening))
        async with aclosing(_deltas(running, wanted)) as deltas:
            async for new in deltas:
                events = "".join(reply.event(piece) for choice, delta in new for piece in form.pieces(choice, delta))
                if events:
                    yield events
        if wanted.include_usage:
            yield reply.usage_event(usage(running.prompts, running.choices))
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield f"data: {json.dumps(error.body())}\n\n"
    finally:
        running.abort()


async def _deltas(running: Running, wanted: Generate) -> AsyncGenerator[list[tuple[int, Delta]], None]:
    """What new tokens add to the choices, until all have ended.

    Raises:
        RequestError: the deadline has passed, or a request has failed.
    """
    metrics, left = running.model.metrics, set(range(len(running.names)))
    latest: dict[int, float] = {}
    try:
        async with asyncio.timeout(wanted.timeout_s):
            while left:
                new: list[tuple[int, Delta]] = []
                for each in await running.box.take():
                    number, now = each.choice, time.monotonic()
                    if number not in left:  # after its stop string
                        continue
                    if each.ended in _ENDS:
                        if problem := getattr(running.choices[number].generation.constraint, "error", ""):
                            raise RequestError(500, f"the grammar of the text has failed: {problem}")
                        raise RequestError(*_ENDS[each.ended])
                    running.started(number)
                    delta = running.choices[number].add(each)
                    if number in latest:
                        metrics.next_tokens(now - latest[number], len(delta.tokens))
                    else:
                        metrics.first_token(now - running.started_at)
                    latest[number] = now
                    new.append((number, delta))
                    if delta.finish is not None:
                        left.remove(number)
                        running.abort(number)
                        metrics.ended(delta.finish, now - running.started_at, running.num_tokens[number])
                yield new
    except TimeoutError:
        raise RequestError(
            504, f"the reply was not complete after {wanted.timeout_s:g} s", "timeout", "timeout"
        ) from None
