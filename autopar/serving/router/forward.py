"""Forward a request to a server of its model, and to another one if that fails.

In: the JSON of a request. Out: a reply. No request is lost while a replica lives, and none has two replies: another server gets it only
if nothing has reached the client. Without a replica, requests wait for a while.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response

from autopar.errors import PlacementError
from autopar.serving.access import error_response
from autopar.serving.limits import Limits, RequestError
from autopar.serving.router.attempt import Attempt, Refused, Usage
from autopar.serving.router.choose import choose_server, uncached_tokens
from autopar.serving.router.group_servers import GroupServer, Sent
from autopar.serving.router.metrics import RouterMetrics
from autopar.serving.router.observed import Observed, Seen
from autopar.serving.router.prompts import Prompt, prompt_of

#: A request that runs on so many servers when they fail may be the reason, and is not sent to another one.
_MOST_FAILED = 2
_DISCONNECTED = 499  # nobody reads the reply


class Forwarder:
    """The servers, and the requests at them. For the event loop.

    Args:
        servers: may be replaced while it runs.
        hold_s: how long a request waits for a replica if there is none.
    """

    def __init__(
        self, servers: Sequence[GroupServer], limits: Limits, client: httpx.AsyncClient, *, hold_s: float = 10.0
    ) -> None:
        self.servers, self.limits, self.client = list(servers), limits, client
        self.observed, self.metrics = Observed(), RouterMetrics()
        self._hold_s = hold_s
        self._changed = asyncio.Event()
        self._known: set[str] = set()

    # -- state --------------------------------------------------------------------------------

    def changed(self) -> None:
        """Wake up whoever waits for a replica, or for the end of requests."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_changed(self, timeout_s: float) -> None:
        """Wait for the next change.

        Raises:
            TimeoutError: there is none in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()

    def models(self) -> list[str]:
        """The models that are served, or were, or should be."""
        self._known |= {name for server in self.servers for name in (*server.models, *(server.placed or ()))}
        return sorted(self._known)

    def headers(self, given: Mapping[str, str]) -> dict[str, str]:
        """The headers of a request to a server: with the router's own key, or else the client's."""
        keys = sorted(self.limits.api_keys)
        authorization = f"Bearer {keys[0]}" if keys else given.get("authorization")
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        return headers if authorization is None else {**headers, "authorization": authorization}

    async def drain(self, server: GroupServer, model: str | None = None) -> None:
        """Wait until no request is at a server, or none for one model.

        Raises:
            PlacementError: none has ended for as long as a reply may take.
        """
        while num := len(server.sent) if model is None else server.num_sent(model):
            try:
                await self.until_changed(self.limits.timeout_s)
            except TimeoutError:
                raise PlacementError(
                    f"{num} requests at {server.url} have not ended within {self.limits.timeout_s:g} s: end them, or the server"
                ) from None

    # -- requests -----------------------------------------------------------------------------

    async def reply(self, request: Request, body: dict[str, Any]) -> Response:
        """The reply to a request.

        Raises:
            RequestError: no server replies.
        """
        work = asyncio.ensure_future(self._reply(request, body))
        gone = asyncio.ensure_future(_until_disconnect(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else Response(status_code=_DISCONNECTED)
        finally:
            work.cancel()
            gone.cancel()

    async def _reply(self, request: Request, body: dict[str, Any]) -> Response:
        model, arrived = self._model_of(body), time.monotonic()
        try:
            prompt = prompt_of(model, body)
            json.dumps(body)
        except RecursionError:
            raise RequestError(400, "the body is nested too deeply") from None
        tried: set[tuple[GroupServer, int]] = set()
        num_failed = 0
        refused: Response | None = None
        deadline = arrived + self._hold_s
        while True:
            able = [each for each in self.servers if each.serves(model) and (each, each.epoch) not in tried]
            if not able:
                if refused is None and await self._holds(deadline):
                    continue
                seen = Seen(arrived, model, prompt.num_tokens, round(self.observed.mean_of(model)))
                self.observed.add(seen)  # a request that is not served is part of the demand
                return refused or error_response(self._no_replica(model))
            server = choose_server(able, model, prompt, self.observed.mean_new)
            tried.add((server, server.epoch))
            outcome = await self._attempt(request, body, server, model, prompt, arrived).begin()
            if isinstance(outcome, Response):
                self.metrics.replied(server.url, model, outcome.status_code)
                return outcome
            if isinstance(outcome, Refused):
                self.metrics.sent_again(server.url, "refused")
                refused = outcome.response
                num_failed += refused.status_code == 500
            else:
                self.metrics.sent_again(server.url, "lost")
                num_failed += outcome.had_it
                if server.is_up:
                    server.went_down(outcome.why)
                    self.changed()
            if num_failed > _MOST_FAILED:
                raise RequestError(
                    502,
                    f"{num_failed} servers failed while they had this request: it is not sent again",
                    code="server_lost",
                )

    def _attempt(
        self,
        request: Request,
        body: dict[str, Any],
        server: GroupServer,
        model: str,
        prompt: Prompt,
        arrived: float,
    ) -> Attempt:
        """Send a request to a server, with the counts of tokens asked for."""
        sent = Sent(model, uncached_tokens(server, prompt))
        self.metrics.chosen(prompt.num_tokens, prompt.num_tokens - sent.waiting_tokens)
        server.prefixes.add(prompt.blocks)
        options, wants_usage = body.get("stream_options"), False
        if body.get("stream") is True and (options is None or isinstance(options, dict)):
            wants_usage = bool((options or {}).get("include_usage"))
            body = {**body, "stream_options": {**(options or {}), "include_usage": True}}
        url = f"{server.url}{request.url.path}"
        content = json.dumps(body).encode()  # not httpx's JSON, which refuses what the server is to refuse
        made = self.client.build_request("POST", url, content=content, headers=self.headers(request.headers))

        def on_end(usage: Usage | None) -> None:
            self.changed()
            if usage is None:
                return
            self.observed.add(Seen(arrived, model, max(1, usage.prompt_tokens), max(1, usage.output_tokens)))

        has_echo = body.get("echo") is True
        return Attempt(self.client, made, server, sent, wants_usage=wants_usage, has_echo=has_echo, on_end=on_end)

    async def _holds(self, deadline: float) -> bool:
        """Wait for a server that may serve a request; False if there is none in time."""
        try:
            await self.until_changed(deadline - time.monotonic())
        except TimeoutError:
            return False
        return True

    def _no_replica(self, model: str) -> RequestError:
        """The error of a request for which no server was found."""
        states = {
            each.url: each.problem
            or ("draining" if each.is_draining else each.described()["models"].get(model, "no such model"))
            for each in self.servers
        }
        where = "; ".join(f"{url}: {state}" for url, state in states.items())
        return RequestError(503, f"no server serves {model!r} now ({where})", "model", "no_replica", retry_after_s=5)

    def _model_of(self, body: Mapping[str, Any]) -> str:
        models, name = self.models(), body.get("model")
        if name is None and len(models) == 1:
            return models[0]
        if not isinstance(name, str):
            raise RequestError(400, f"the field 'model' must be a text; served are: {', '.join(models)}", "model")
        if name not in models:
            names = ", ".join(map(repr, models)) or "none"
            raise RequestError(404, f"there is no model {name!r}; served are: {names}", "model", "model_not_found")
        return name


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
