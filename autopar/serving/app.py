"""Answer HTTP requests: OpenAI's endpoints, health, metrics, administration, and those of SageMaker and Vertex AI.

In: `Models`. Out: `make_app`, an ASGI application.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import functools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp

from autopar.serving import fields
from autopar.serving.access import json_of
from autopar.serving.generate_reply import reply_to
from autopar.serving.grammar import schema_of, schema_of_tools
from autopar.serving.inputs import model_of, only_or_named, prompts_of
from autopar.serving.limits import RequestError
from autopar.serving.metrics import exposition
from autopar.serving.models import Models, ServedModel
from autopar.serving.replies import Chat, Completion, Reply
from autopar.serving.routes import application
from autopar.serving.score_texts import embeddings, score

_COMPLETION = fields.COMMON | {"prompt", "max_tokens", "echo"}
_CHAT = fields.COMMON | {"messages", "max_tokens", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"}
_CHAT |= {"chat_template_kwargs"}
_MOST_LOGPROBS, _MOST_TOP_LOGPROBS = 5, 20

_Handler = Callable[[Models, Request], Awaitable[Response]]


def make_app(models: Models, environment: Mapping[str, str] | None = None) -> ASGIApp:
    """The application of a server.

    Args:
        environment: variables of the container; those of Vertex AI name further paths.
    """
    environment = environment or {}
    health = environment.get("AIP_HEALTH_ROUTE", "/ping")
    routes: dict[tuple[str, str], _Handler] = {
        ("GET", "/"): _page,
        ("GET", "/status"): _status,
        ("GET", "/health"): _health,
        ("GET", "/ready"): _ready,
        ("GET", "/ping"): _ready,
        ("GET", "/metrics"): _metrics,
        ("GET", "/v1/models"): _list,
        ("GET", "/v1/models/{name:path}"): _describe,
        ("POST", "/v1/completions"): _body_to(complete),
        ("POST", "/v1/chat/completions"): _body_to(chat),
        ("POST", "/v1/embeddings"): _body_to(embeddings),
        ("POST", "/v1/score"): _body_to(score),
        ("POST", "/invocations"): _body_to(_invoke),
        ("POST", "/admin/load"): _load,
        ("POST", "/admin/unload"): _unload,
        ("POST", "/admin/sleep"): _sleep,
        ("POST", "/admin/wake_up"): _wake_up,
        ("GET", health): _ready,
        ("POST", environment.get("AIP_PREDICT_ROUTE", "/predict")): _predict,
    }
    return application(models, routes, models.limits, {health})


def _body_to(handler: Callable[[Models, Request, dict[str, Any]], Awaitable[Response]]) -> _Handler:
    async def with_body(models: Models, request: Request) -> Response:
        return await handler(models, request, await json_of(request, models.limits))

    return with_body


# -- generation ----------------------------------------------------------------------------------


async def complete(models: Models, request: Request, body: dict[str, Any]) -> Response:
    """`/v1/completions`."""
    fields.check_known(body, _COMPLETION)
    model = model_of(models, body)
    prompts = [model.tokens_of(each) for each in prompts_of(body, "prompt")]
    num_best = None if body.get("logprobs") is None else fields.whole(body, "logprobs", 0, 0, _MOST_LOGPROBS)
    max_tokens = fields.whole(body, "max_tokens", 16, 1, 2**31)
    wanted = fields.generate(body, models.limits, max_tokens=max_tokens, num_best=num_best)
    wanted = replace(wanted, schema=schema_of(body.get("response_format")))
    tokenizer = model.engine.tokenizer
    if tokenizer is None and (wanted.stop or not wanted.return_token_ids):
        raise RequestError(
            400, "the model has no tokenizer, so there is no text: ask for return_token_ids, without stop strings"
        )
    echo, details = None, []
    if fields.flag(body, "echo"):
        echo = ["" if tokenizer is None else tokenizer.decode(list(each)) for each in prompts]
        if num_best is not None:
            if wanted.stream or num_best > 1:
                raise RequestError(
                    400, "with 'echo', 'logprobs' is at most 1, and the reply is not streamed", "logprobs"
                )
            details = [{"scored_from": 1} if len(each) > 1 else {} for each in prompts]
    form = Completion(tokenizer, echo=echo, has_tokens=wanted.return_token_ids, scored=prompts if details else None)
    reply = Reply(f"cmpl-{secrets.token_hex(12)}", form.kind, model.name)
    return await reply_to(request, model, prompts, wanted, form, reply, details)


async def chat(models: Models, request: Request, body: dict[str, Any]) -> Response:
    """`/v1/chat/completions`."""
    fields.check_known(body, _CHAT)
    model = model_of(models, body)
    if model.template is None:
        raise RequestError(
            400,
            f"the folder of {model.name!r} has no chat template: use /v1/completions, or start the server with --chat-template FILE",
            code="no_chat_template",
        )
    messages, tools = body.get("messages"), _tools(body)
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "'messages' must be a list with at least one message", "messages")
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise RequestError(400, "'chat_template_kwargs' must be an object", "chat_template_kwargs")
    prompt = model.tokens_of(model.template.prompt(messages, tools, options), special=False)
    num_best = None
    if fields.flag(body, "logprobs"):
        num_best = fields.whole(body, "top_logprobs", 0, 0, _MOST_TOP_LOGPROBS)
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = None if body.get(limit) is None else fields.whole(body, limit, 1, 1, 2**31)
    wanted = fields.generate({**body, "logprobs": None}, models.limits, max_tokens=max_tokens, num_best=num_best)
    wanted = replace(wanted, schema=schema_of(body.get("response_format")))
    call = schema_of_tools(tools or [], body.get("tool_choice"))
    if call is not None:
        wanted = replace(wanted, schema=call, schema_field="tools")
    names = frozenset(each["function"]["name"] for each in tools or ())
    form = Chat(model.engine.tokenizer, names, has_tokens=wanted.return_token_ids)
    reply = Reply(f"chatcmpl-{secrets.token_hex(12)}", form.kind, model.name)
    return await reply_to(request, model, [prompt], wanted, form, reply)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the model may call; None if it may call none."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools:
        return None
    is_valid = isinstance(tools, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("function"), dict)
        and isinstance(each["function"].get("name"), str)
        for each in tools
    )
    if not is_valid:
        raise RequestError(400, "'tools' must be a list of objects with a 'function' that has a 'name'", "tools")
    return None if choice == "none" else tools


async def _invoke(models: Models, request: Request, body: dict[str, Any]) -> Response:
    """SageMaker's `/invocations`: a chat if there are messages, embeddings if there is an input, else a completion."""
    return await (chat if "messages" in body else embeddings if "input" in body else complete)(models, request, body)


async def _predict(models: Models, request: Request) -> Response:
    """Vertex AI's predictions: instances are requests, `parameters` are fields of all of them."""
    body = await json_of(request, models.limits)
    instances, common = body.get("instances"), body.get("parameters") or {}
    is_valid = isinstance(instances, list) and all(isinstance(each, dict) for each in instances)
    if not is_valid or not isinstance(common, dict):
        raise RequestError(
            400, "'instances' must be a list of requests, and 'parameters' an object with fields of all", "instances"
        )
    predictions: list[Any] = []
    for instance in instances or ():
        reply = await _invoke(models, request, {**common, **instance, "stream": False})
        if reply.status_code != 200:
            return reply
        predictions.append(reply.body)
    text = b",".join(predictions)
    return Response(b'{"predictions":[' + text + b"]}", media_type="application/json")


# -- state ---------------------------------------------------------------------------------------


async def _page(_: Models, __: Request) -> Response:
    return HTMLResponse(
        _page_text(), headers={"content-security-policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"}
    )


@functools.cache
def _page_text() -> str:
    return (files("autopar.serving") / "page.html").read_text(encoding="utf-8")


async def _status(models: Models, _: Request) -> Response:
    return JSONResponse({"models": [_state(each) for each in models.by_name.values()]})


def _state(model: ServedModel) -> dict[str, Any]:
    """What the page shows of a model."""
    stats = model.thread.stats
    names = ("num_running", "num_waiting", "held_pages", "evictable_pages", "free_pages", "num_prompt_tokens")
    counts = {name: getattr(stats, name) for name in (*names, "num_cached_tokens", "num_tokens", "num_preempted")}
    slots = model.engine.runner.served.options.num_slots
    return {
        "name": model.name,
        "state": model.state,
        "num_slots": slots,
        "queued_tokens": model.queued_tokens,
        **counts,
    }


async def _health(models: Models, _: Request) -> Response:
    """Whether the server works: no engine has failed."""
    failed = [each.name for each in models.by_name.values() if each.state == "failed"]
    return JSONResponse({"status": "failed" if failed else "ok", "failed": failed}, 500 if failed else 200)


async def _ready(models: Models, _: Request) -> Response:
    """Whether requests are served now: there are models, and all are ready or asleep."""
    states = {each.name: each.state for each in models.by_name.values()}
    is_ready = any(state == "ready" for state in states.values()) and "failed" not in states.values()
    return JSONResponse({"ready": is_ready, "models": states}, 200 if is_ready else 503)


async def _metrics(models: Models, _: Request) -> Response:
    return Response(exposition(models.by_name.values()), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _list(models: Models, _: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_described(each) for each in models.by_name.values()]})


async def _describe(models: Models, request: Request) -> Response:
    return JSONResponse(_described(models.find(request.path_params["name"])))


def _described(model: ServedModel) -> dict[str, Any]:
    kind = {"id": model.name, "object": "model", "created": model.created, "owned_by": "autopar"}
    return {**kind, "max_model_len": model.max_length, "state": model.state}


# -- administration ------------------------------------------------------------------------------


async def _load(models: Models, request: Request) -> Response:
    body = await json_of(request, models.limits)
    fields.check_known(body, frozenset({"folder", "name"}))
    folder = Path(fields.text(body, "folder"))
    model = await models.load(folder, fields.text(body, "name", "") or None)
    return JSONResponse(_described(model))


async def _named(
    models: Models, request: Request, others: frozenset[str] = frozenset()
) -> tuple[ServedModel, dict[str, Any]]:
    """The model that a body names, and the body, which may have the fields `others`."""
    body = await json_of(request, models.limits)
    fields.check_known(body, frozenset({"model"}) | others)
    return only_or_named(models, body), body


async def _unload(models: Models, request: Request) -> Response:
    model, _ = await _named(models, request)
    await models.unload(model.name)
    return JSONResponse({"unloaded": model.name})


async def _sleep(models: Models, request: Request) -> Response:
    model, body = await _named(models, request, frozenset({"weights"}))
    weights = fields.text(body, "weights", "host")
    if weights not in ("host", "dropped"):
        raise RequestError(400, f"'weights' is {weights!r}: give 'host' or 'dropped'", "weights")
    await model.sleep(weights)
    return JSONResponse(_described(model))


async def _wake_up(models: Models, request: Request) -> Response:
    model, _ = await _named(models, request)
    await model.wake_up()
    return JSONResponse(_described(model))
