"""Answer `/v1/embeddings` and `/v1/score`: what a model says of given texts. Nothing is generated.

In: texts. Out: the last hidden state of each, or the logprob of one text after another. Each text is a request for one token, which
nobody reads, so these requests share the engine's batches, queue and page cache with all others.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from autopar.inference import SamplingOptions
from autopar.serving import fields
from autopar.serving.fields import Generate
from autopar.serving.generate_reply import DISCONNECTED, is_complete
from autopar.serving.inputs import model_of, prompts_of
from autopar.serving.limits import Limits, RequestError
from autopar.serving.models import Models, Running, ServedModel
from autopar.serving.replies import usage

_SHARED = frozenset({"model", "priority", "timeout"})
_EMBEDDINGS = _SHARED | {"input", "encoding_format", "dimensions"}
_SCORE = _SHARED | {"text_1", "text_2", "logprobs"}


async def embeddings(models: Models, request: Request, body: dict[str, Any]) -> Response:
    """`/v1/embeddings`: the last hidden state of each text's last token, of length 1."""
    fields.check_known(body, _EMBEDDINGS)
    model = model_of(models, body)
    model.check_pooling()
    size = model.engine.runner.served.model.config.hidden_size
    dimensions = fields.whole(body, "dimensions", size, 1, size)
    form = fields.text(body, "encoding_format", "float")
    if form not in ("float", "base64"):
        raise RequestError(400, f"'encoding_format' is {form!r}: give 'float' or 'base64'", "encoding_format")
    prompts = [model.tokens_of(each) for each in prompts_of(body, "input")]
    found = await _computed(request, models.limits, model, prompts, body, [{"wants_state": True}] * len(prompts))
    if isinstance(found, Response):
        return found
    states = [np.asarray(each.generation.state, np.float32)[:dimensions] for each in found.choices]
    units = [state / max(float(np.linalg.norm(state)), 1e-30) for state in states]
    data = [
        {"object": "embedding", "index": number, "embedding": _written(unit, form)} for number, unit in enumerate(units)
    ]
    return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": _usage(found)})


def _written(unit: np.ndarray, form: str) -> Any:
    return base64.b64encode(unit.astype("<f4").tobytes()).decode() if form == "base64" else unit.tolist()


async def score(models: Models, request: Request, body: dict[str, Any]) -> Response:
    """`/v1/score`: the mean logprob of the tokens of `text_2` after `text_1`. One text may be paired with several."""
    fields.check_known(body, _SCORE)
    model = model_of(models, body)
    firsts, seconds = (prompts_of(body, name) for name in ("text_1", "text_2"))
    num = max(len(firsts), len(seconds))
    if {len(firsts), len(seconds)} - {1, num}:
        raise RequestError(
            400,
            f"'text_1' has {len(firsts)} texts and 'text_2' {len(seconds)}: give as many, or one of either",
            "text_2",
        )
    befores = [model.tokens_of(each) for each in firsts] * (num if len(firsts) == 1 else 1)
    afters = [model.tokens_of(each, special=False) for each in seconds] * (num if len(seconds) == 1 else 1)
    if not all(befores) or not all(afters):
        raise RequestError(400, "a text has no tokens: give a longer one", "text_2" if all(befores) else "text_1")
    prompts = [(*before, *after) for before, after in zip(befores, afters, strict=True)]
    details = [{"scored_from": len(before)} for before in befores]
    found = await _computed(request, models.limits, model, prompts, body, details)
    if isinstance(found, Response):
        return found
    needs_logprobs, data = fields.flag(body, "logprobs"), []
    for number, choice in enumerate(found.choices):
        logprobs = [each[0] for _, each in sorted(choice.generation.prompt_scores.items())]
        one = {"object": "score", "index": number, "score": sum(logprobs) / len(logprobs)}
        data.append(one | ({"token_logprobs": logprobs} if needs_logprobs else {}))
    head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": model.name}
    return JSONResponse({**head, "data": data, "usage": _usage(found)})


async def _computed(
    request: Request,
    limits: Limits,
    model: ServedModel,
    prompts: list[tuple[int, ...]],
    body: Mapping[str, Any],
    details: Sequence[Mapping[str, Any]],
) -> Running | Response:
    """Compute the prompts; a response if the client has gone away."""
    wanted = Generate(
        n=1,
        max_tokens=1,
        sampling=SamplingOptions(),
        stop=(),
        num_best=None,
        stream=False,
        include_usage=False,
        priority=fields.priority(body),
        timeout_s=fields.timeout_s(body, limits),
        return_token_ids=True,
    )
    running = await model.submit(prompts, wanted, f"texts-{secrets.token_hex(12)}", details)
    return running if await is_complete(request, running, wanted) else Response(status_code=DISCONNECTED)


def _usage(running: Running) -> dict[str, Any]:
    counts = usage(running.prompts, running.choices)
    return {"prompt_tokens": counts["prompt_tokens"], "total_tokens": counts["prompt_tokens"]}
