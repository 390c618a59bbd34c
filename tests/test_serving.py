"""Test the server: OpenAI's client, limits, failures, and the endpoints of SageMaker and Vertex AI."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_models import LENGTH, is_idle, opened, write_model

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytest.importorskip("starlette")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from served_models import Server, served  # noqa: E402

from autopar.cli.main import main  # noqa: E402
from autopar.inference import Engine, Options, SamplingOptions  # noqa: E402
from autopar.serving import Limits  # noqa: E402
from autopar.serving.chat import ToolCalls  # noqa: E402

KEY, ADMIN = "a-key", "an-admin-key"
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]
PROMPT = "<system>Be brief.<user>Hi<assistant>"
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return opened(folder)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    limits = Limits(api_keys=frozenset([KEY]), admin_keys=frozenset([ADMIN]), max_body_bytes=20_000)
    with served(engine, limits) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def post(server: Server) -> Callable[..., Any]:
    def send(path: str, body: Any, key: str = KEY, **headers: str) -> Any:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
        return httpx.post(server.url + path, content=sent, headers=headers, timeout=60)

    return send


def wait_until(is_true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_true():
            return
        time.sleep(0.005)
    pytest.fail("the condition is never met")


def is_quiet(server: Server) -> bool:
    model = next(iter(server.models.by_name.values()))
    return not model.queued_tokens and not model.thread.boxes and is_idle(model.engine)


# -- OpenAI's client ----------------------------------------------------------------------------


def test_completions_have_the_engines_text(client: Any, engine: Engine) -> None:
    assert [(each.id, each.owned_by) for each in client.models.list()] == [("tiny", "autopar")]
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == LENGTH
    alone = engine.submit("a prompt", max_tokens=30, num_best=2).result()
    found = client.completions.create(model="tiny", prompt="a prompt", max_tokens=30, temperature=0, logprobs=2)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, found.usage.completion_tokens) == (alone.text, "length", 30)
    assert choice.logprobs.token_logprobs == pytest.approx(alone.logprobs, abs=1e-6)
    assert all(1 <= len(each) <= 2 for each in choice.logprobs.top_logprobs)
    stop = alone.text[10:13]
    ended = client.completions.create(model="tiny", prompt="a prompt", max_tokens=30, temperature=0, stop=[stop])
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == (alone.text[: alone.text.index(stop)], "stop")
    several = client.completions.create(
        model="tiny", prompt=["a prompt", [1, 2, 3]], n=2, max_tokens=4, echo=True, seed=1
    )
    assert [each.index for each in several.choices] == [0, 1, 2, 3]
    assert all(each.text.startswith("a prompt") for each in several.choices[:2])


def test_seeds_give_the_same_text_and_choices_differ(client: Any, engine: Engine) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 12,
        "seed": 7,
        "n": 3,
        "top_p": 0.9,
        "extra_body": {"top_k": 40},
    }
    one, two = (client.completions.create(**options) for _ in range(2))
    texts = [each.text for each in one.choices]
    assert texts == [each.text for each in two.choices] and len(set(texts)) == 3
    sampling = SamplingOptions(1.0, top_k=40, top_p=0.9, seed=8)
    assert texts[1] == engine.submit("x", max_tokens=12, sampling=sampling).result().text


def test_penalties_biases_and_min_p_reach_the_engine(client: Any, engine: Engine) -> None:
    extra = {"min_p": 0.02, "repetition_penalty": 1.2, "top_k": 200}
    found = client.completions.create(
        model="tiny", prompt="xyx", max_tokens=20, seed=4, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"100": 4, "101": -100}, extra_body=extra,
    )  # fmt: skip
    sampling = SamplingOptions(
        1.0, 200, seed=4, min_p=0.02, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2,
        logit_bias={100: 4.0, 101: -100.0},
    )  # fmt: skip
    assert found.choices[0].text == engine.submit("xyx", max_tokens=20, sampling=sampling).result().text
    for options, why in [
        ({"presence_penalty": 3}, "'presence_penalty' is 3: give a number from -2 to 2"),
        ({"logit_bias": {"x": 1}}, "'logit_bias' is"),
        ({"logit_bias": {"1": 101}}, "'logit_bias' is"),
        ({"logit_bias": {"300": 1}}, "logit_bias has token 300"),
        ({"extra_body": {"min_p": True}}, "'min_p' is True"),
    ]:
        with pytest.raises(openai.BadRequestError, match=why):
            client.completions.create(model="tiny", prompt="x", **options)


def test_chats_stream_the_same_text_as_they_give_at_once(client: Any, engine: Engine) -> None:
    alone = engine.submit(PROMPT, max_tokens=20, num_best=3).result()
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    (choice,) = whole.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (alone.text, "assistant", "length")
    content = choice.logprobs.content
    assert [each.logprob for each in content] == pytest.approx(alone.logprobs, abs=1e-6)
    assert b"".join(bytes(each.bytes) for each in content).decode(errors="replace") == alone.text
    assert [len(each.top_logprobs) for each in content] == [3] * 20
    events = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}, n=2))
    for number in range(2):
        deltas = [one for each in events for one in each.choices if one.index == number]
        assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "length"
        assert "".join(each.delta.content or "" for each in deltas) == alone.text
    assert events[-1].usage.completion_tokens == 40 and events[-1].choices == []


def test_errors_are_those_that_clients_know(client: Any, server: Server, post: Callable[..., Any]) -> None:
    def create(**options: Any) -> Any:
        return client.completions.create(**{"model": "tiny", "prompt": "x"} | options)

    with pytest.raises(openai.NotFoundError, match="served are: 'tiny'"):
        create(model="another")
    with pytest.raises(openai.BadRequestError, match="at most 128 tokens") as raised:
        create(max_tokens=LENGTH)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="another", max_retries=0).models.list()
    for options, why in [
        ({"temperature": -1}, "'temperature' is -1"),
        ({"n": 0}, "'n' is 0"),
        ({"stop": [""]}, "'stop' is"),
        ({"prompt": [1, "a"]}, "'prompt' must be"),
        ({"prompt": [300]}, "tokens are 0 to 299"),
        ({"prompt": ""}, "a prompt has at least one"),
        ({"extra_body": {"beam_width": 3}}, "'beam_width' is not supported"),
        ({"suffix": "x"}, "'suffix' is not supported"),
    ]:
        with pytest.raises(openai.BadRequestError, match=why):
            create(**options)
    for body, headers, status in [
        (b"{", {}, 400),
        (b"[" * 10_000, {}, 400),
        (b"[]", {}, 400),
        (b" " * 20_001, {}, 413),
        ({"prompt": "x"}, {"content-type": "text/plain"}, 415),
    ]:
        assert post("/v1/completions", body, **headers).status_code == status
    assert post("/v1/nothing", {}).json()["error"]["type"] == "not_found_error"
    assert is_quiet(server)


def test_tool_calls_are_found_in_the_formats_of_models() -> None:
    call = '{"name": "look_up", "arguments": {"word": "x"}}'
    for text, before in [
        (f"Let me see. <tool_call>\n{call}\n</tool_call>", "Let me see. "),
        (f"[TOOL_CALLS] [{call}]", ""),
        (f"<|python_tag|>{call}", ""),
        (call.replace("arguments", "parameters"), ""),
    ]:
        for size in (1, 7, len(text)):
            finder = ToolCalls(frozenset(["look_up"]))
            shown = "".join(finder.add(text[at : at + size]) for at in range(0, len(text), size)) + finder.end()
            assert shown == before
            assert [each["function"] for each in finder.calls] == [{"name": "look_up", "arguments": '{"word": "x"}'}]
    for text in ['{"name": "another", "arguments": {}}', "{not json", "a < b", "<tool_call>{}", "  \n"]:
        finder = ToolCalls(frozenset(["look_up"]))
        assert "".join(map(finder.add, text)) + finder.end() == text and not finder.calls


def test_tools_reach_the_template(client: Any, engine: Engine) -> None:
    prompt = PROMPT.replace("<assistant>", '"look_up"<assistant>')
    alone = engine.submit(prompt, max_tokens=3).result()
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, temperature=0, tools=[TOOL])
    assert (found.choices[0].message.content, found.usage.prompt_tokens) == (alone.text, len(prompt))


# -- texts ---------------------------------------------------------------------------------------


def test_embeddings_are_the_last_states_of_length_1(client: Any, engine: Engine, post: Callable[..., Any]) -> None:
    found = client.embeddings.create(model="tiny", input=["a text", "another one"])  # in base64
    assert [each.index for each in found.data] == [0, 1] and found.usage.prompt_tokens == len("a textanother one")
    state = engine.submit("another one", max_tokens=1, wants_state=True).result().state
    assert state is not None
    np.testing.assert_allclose(found.data[1].embedding, state / np.linalg.norm(state), atol=1e-5)
    short = post("/v1/embeddings", {"input": [7, 8, 9], "dimensions": 16, "encoding_format": "float"}).json()
    (vector,) = (each["embedding"] for each in short["data"])
    assert len(vector) == 16 and np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    for body, why in [
        ({"input": ""}, "a prompt has at least one"),
        ({"input": ["a", 1]}, "'input' must be"),
        ({"input": "a", "dimensions": 65}, "from 1 to 64"),
        ({"input": "a", "encoding_format": "hex"}, "'encoding_format' is 'hex'"),
        ({"input": "a", "n": 2}, "'n' is not supported"),
        ({"input": "a" * LENGTH}, f"at most {LENGTH} tokens"),
    ]:
        refused = post("/v1/embeddings", body)
        assert refused.status_code == 400 and why in refused.json()["error"]["message"]


def test_embeddings_of_another_pooling_are_refused(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    with served(engine, folder=tmp_path) as server:
        for text, status in [
            ('{"pooling_mode_lasttoken": true, "word_embedding_dimension": 64}', 200),
            ('{"pooling_mode_mean_tokens": true}', 400),
            ("{", 400),
        ]:
            file.write_text(text)
            assert httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}).status_code == status


def test_texts_are_scored_after_texts(engine: Engine, post: Callable[..., Any]) -> None:
    pairs = [("The sky is", " blue"), ("The sky is", " a long answer"), ("The sky is", "x")]
    found = post("/v1/score", {"text_1": "The sky is", "text_2": [each for _, each in pairs], "logprobs": True}).json()
    for (before, after), one in zip(pairs, found["data"], strict=True):
        scores = engine.submit(before + after, max_tokens=1, scored_from=len(before)).result().prompt_scores
        logprobs = [scores[at][0] for at in sorted(scores)]
        assert len(logprobs) == len(after)
        assert one["token_logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert one["score"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-5)
    for body, why in [
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "'text_1' has 2 texts and 'text_2' 3"),
        ({"text_1": "a", "text_2": ""}, "a text has no tokens"),
        ({"text_1": "a"}, "'text_2' must be"),
    ]:
        refused = post("/v1/score", body)
        assert refused.status_code == 400 and why in refused.json()["error"]["message"]


def test_an_echo_has_the_logprobs_of_the_prompt(client: Any, engine: Engine) -> None:
    """As evaluation harnesses ask for."""
    found = client.completions.create(
        model="tiny", prompt=["some words", [70]], max_tokens=2, temperature=0, logprobs=1, echo=True, n=2
    )
    scores = engine.submit("some words", max_tokens=1, scored_from=1).result().prompt_scores
    for number in range(2):
        logprobs = found.choices[number].logprobs
        assert logprobs.tokens[:10] == list("some words") and len(logprobs.tokens) == 12
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:10] == pytest.approx([scores[at][0] for at in range(1, 10)], abs=1e-5)
        assert [max(each.values()) for each in logprobs.top_logprobs[1:10]] == pytest.approx(
            [scores[at][2] for at in range(1, 10)], abs=1e-5
        )
    assert found.choices[2].logprobs.token_logprobs[0] is None and len(found.choices[2].logprobs.tokens) == 3
    with pytest.raises(openai.BadRequestError, match="with 'echo', 'logprobs' is at most 1"):
        client.completions.create(model="tiny", prompt="x", logprobs=2, echo=True)


# -- JSON schemas -------------------------------------------------------------------------------


def random_schema(chance: random.Random, room: int) -> tuple[Any, int]:
    """A schema, and the length of its longest text: strings, numbers and arrays are bounded."""
    kind = chance.choice(["string", "enum", "integer", "boolean", "array", "object", "object"])
    if kind == "string" and room >= 20:  # a character may be escaped, in six
        return {"type": "string", "maxLength": 3}, 20
    if kind == "integer":
        return {"type": "integer", "minimum": -9, "maximum": 99}, 2
    if kind == "array" and room > 8:
        schema, length = random_schema(chance, room // 2 - 2)
        return {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}, 2 * length + 3
    if kind == "object" and room > 20:
        properties, length = {}, 2
        for name in "abc"[: chance.randint(1, 3)]:
            schema, more = random_schema(chance, (room - length - 5) // 2)
            if length + more + 5 > room:
                break
            properties[name], length = schema, length + more + 5
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }, length
    if kind == "enum" and room >= 5:
        return {"enum": ["x", 7, None, "yes"]}, 5
    return {"type": "boolean"}, 5


@pytest.fixture(scope="module")
def with_end(engine: Engine) -> Engine:
    """The engine with a token that ends a text, of which the tokenizer knows nothing."""
    return Engine(engine.runner, engine.tokenizer, [257], num_pages=engine.pool.num_pages)


@pytest.mark.parametrize("num", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_text_with_a_schema_is_valid_whatever_the_model(with_end: Engine, num: int) -> None:
    """The weights are random, the temperature is 1, and other requests run beside."""
    chance = random.Random(0)
    schemas = [random_schema(chance, 90)[0] for _ in range(num)]
    compiled: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    with served(with_end) as server, ThreadPoolExecutor(6) as pool:
        url, client = f"{server.url}/v1/completions", openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        beside = {"prompt": "beside", "max_tokens": 60, "temperature": 0}
        alone = httpx.post(url, json=beside, timeout=60).json()["choices"][0]["text"]
        jax.monitoring.register_event_duration_secs_listener(listen)

        def ask(number: int) -> Any:
            form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schemas[number], "strict": True}}
            return client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "x"}],
                response_format=form,
                seed=number,
                logprobs=True,
            )

        try:
            others = [pool.submit(httpx.post, url, json=beside, timeout=60) for _ in range(3)]
            replies = list(pool.map(ask, range(num)))
            assert {each.result().json()["choices"][0]["text"] for each in others} == {alone}
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert is_quiet(server)
    for reply, schema in zip(replies, schemas, strict=True):
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    assert not compiled, "a mask is an input of programs that are there"


def test_a_tool_call_that_is_required_is_one(with_end: Engine) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
    }
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": parameters | {"additionalProperties": False}}}
        for name in ("one", "two")
    ]
    with served(with_end) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for choice, names in [
            ("required", {"one", "two"}),
            ({"type": "function", "function": {"name": "two"}}, {"two"}),
        ]:
            for stream in (False, True):
                found: Any = client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": ""}], tools=tools, tool_choice=choice, stream=stream,
                )  # fmt: skip
                if stream:
                    chunks = [each.choices[0] for each in found]
                    assert chunks[-1].finish_reason == "tool_calls"
                    (call,) = [one for each in chunks for one in each.delta.tool_calls or ()]
                else:
                    assert (found.choices[0].finish_reason, found.choices[0].message.content) == ("tool_calls", None)
                    (call,) = found.choices[0].message.tool_calls
                assert call.function.name in names
                jsonschema.validate(json.loads(call.function.arguments), parameters)
        for options, why in [
            ({"tools": tools, "tool_choice": {"function": {"name": "three"}}}, "'tool_choice' must be"),
            ({"response_format": {"type": "xml"}}, "'response_format' must have"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}}, "JSON schema"),
        ]:
            with pytest.raises(openai.BadRequestError, match=why):
                client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


@pytest.mark.slow
def test_logits_and_samples_of_two_programs_give_the_same_text(with_end: Engine, folder: Path) -> None:
    """With a grammar, penalties and seeds, beside a request without any."""
    apart = opened(folder, options=replace(with_end.runner.served.options, samples_apart=True))
    apart = Engine(apart.runner, apart.tokenizer, [257])
    schema = {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 3, "maxItems": 5}
    sampled = {"temperature": 1.0, "frequency_penalty": 0.5, "logit_bias": {"70": 2.0}}
    texts: list[list[str]] = []
    for engine in (with_end, apart):
        with served(engine) as server, ThreadPoolExecutor(8) as pool:
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            bodies = [
                {"prompt": f"{n}", "max_tokens": 90, "seed": n, **sampled, "response_format": form} for n in range(12)
            ]
            bodies += [{"prompt": "beside", "max_tokens": 60, "seed": n} for n in range(4)]
            replies = list(
                pool.map(lambda body: httpx.post(f"{server.url}/v1/completions", json=body, timeout=60), bodies)
            )
            texts.append([each.json()["choices"][0]["text"] for each in replies])
            assert is_quiet(server)
    assert texts[0] == texts[1]
    for text in texts[0][:12]:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.slow
def test_grammars_and_speculative_decoding_go_together(with_end: Engine, folder: Path) -> None:
    """Greedy text is the same with and without draft tokens, and takes fewer steps, because the grammar forces many."""
    schema = {
        "type": "object",
        "properties": {"a_long_name": {"enum": ["yes", "no"]}, "another_name": {"type": "string", "maxLength": 8}},
        "required": ["a_long_name", "another_name"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 100, "response_format": form, "logprobs": 0}
    options = Options(num_slots=4, max_length=LENGTH, chunks=((4, 32),), steps=4, num_proposals=3)
    proposing = opened(folder, options=options, propose="n-gram")
    always = Engine(proposing.runner, proposing.tokenizer, [257], proposer=proposing.proposer)
    replies: list[Any] = []
    for engine in (with_end, always):
        with served(engine) as server, ThreadPoolExecutor(4) as pool:
            url = f"{server.url}/v1/completions"
            greedy = httpx.post(url, json=body | {"temperature": 0}, timeout=60).json()["choices"][0]
            steps = server.engine.stats.num_steps
            seeded = [pool.submit(httpx.post, url, json=body | {"seed": seed}, timeout=60) for seed in range(24)]
            beside = httpx.post(url, json={"prompt": "beside", "max_tokens": 60, "temperature": 0}).json()
            for each in seeded:
                (choice,) = each.result().json()["choices"]
                assert choice["finish_reason"] == "stop"
                jsonschema.validate(json.loads(choice["text"]), schema)
            replies.append((greedy, beside["choices"][0]["text"], steps))
            assert is_quiet(server)
    (plain, beside, num), (drafted, beside_drafts, num_drafted) = replies
    assert (drafted["text"], beside_drafts) == (plain["text"], beside)
    assert drafted["logprobs"]["token_logprobs"] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    assert num_drafted < 0.6 * num


def test_a_model_without_an_end_is_not_constrained(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="no token that ends a text"):
        client.completions.create(model="tiny", prompt="x", extra_body={"response_format": {"type": "json_object"}})


# -- limits and failures ------------------------------------------------------------------------


def test_a_client_that_goes_away_ends_its_request(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 120, "n": 3, "temperature": 0}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, headers=headers) as reply:
        chunks = reply.iter_text()
        next(chunks)
    server.is_running.clear()
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=0.3)
    server.is_running.set()
    wait_until(lambda: is_quiet(server))


def test_the_queue_is_bounded_in_tokens(engine: Engine) -> None:
    with served(engine, Limits(max_queued_tokens=300)) as server:
        body = {"messages": MESSAGES, "max_tokens": 90, "temperature": 0}
        url = f"{server.url}/v1/chat/completions"
        server.is_running.clear()
        with httpx.stream("POST", url, json=body | {"n": 12, "stream": True}) as reply:  # alone, it may be larger
            chunks = reply.iter_text()
            assert "assistant" in next(chunks)
            refused = httpx.post(url, json=body)
            server.is_running.set()
            assert (refused.status_code, reply.status_code) == (429, 200)
            assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["code"] == "queue_full"
            assert "".join(chunks).count('"finish_reason": "length"') == 12
        assert httpx.post(url, json=body).status_code == 200
        text = httpx.get(f"{server.url}/metrics").text
        values = {each.name: each.value for family in text_string_to_metric_families(text) for each in family.samples}
        assert values["autopar:requests_refused_total"] == 1
        assert values["vllm:generation_tokens_total"] == 13 * 90
        assert (
            values["vllm:time_to_first_token_seconds_count"] == values["vllm:e2e_request_latency_seconds_count"] == 13
        )
        assert is_quiet(server)


def test_a_reply_ends_at_its_deadline(server: Server, post: Callable[..., Any]) -> None:
    server.is_running.clear()
    late = post("/v1/completions", {"prompt": "x", "max_tokens": 120, "n": 5, "timeout": 0.05, "temperature": 0})
    server.is_running.set()
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    wait_until(lambda: is_quiet(server))


def test_only_so_many_requests_and_hosts_are_served(engine: Engine) -> None:
    with served(engine, Limits(max_connections=1, hosts=frozenset(["127.0.0.1"]))) as server:
        url = f"{server.url}/v1/chat/completions"
        server.is_running.clear()
        with httpx.stream("POST", url, json={"messages": MESSAGES, "stream": True}) as reply:
            chunks = reply.iter_text()
            assert "assistant" in next(chunks)
            assert httpx.get(f"{server.url}/v1/models").status_code == 503
            assert httpx.get(f"{server.url}/health").status_code == 200
            server.is_running.set()
        wait_until(lambda: is_quiet(server))
        assert httpx.get(f"{server.url}/ready", headers={"host": "evil.example"}).status_code == 400


def test_a_failed_program_fails_all_requests_and_health(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(engine) as server:
        body = {"prompt": "x", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200

        def fail(*_: Any) -> Any:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(server.engine.runner, "dispatch", fail)
        for _ in range(2):
            reply = httpx.post(f"{server.url}/v1/completions", json=body)
            assert reply.status_code == 500 and "engine" in reply.json()["error"]["message"]
        assert [httpx.get(server.url + path).status_code for path in ("/health", "/ready")] == [500, 503]


def test_models_sleep_wake_up_and_are_loaded_and_unloaded(
    server: Server, post: Callable[..., Any], folder: Path
) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9, "temperature": 0}
    before = post("/v1/completions", body).json()["choices"]
    assert post("/admin/sleep", {}).status_code == 401
    assert post("/admin/sleep", {}, key=ADMIN).json()["state"] == "sleeping"
    assert post("/v1/completions", body).status_code == httpx.get(f"{server.url}/ready").status_code == 503
    post("/admin/wake_up", {}, key=ADMIN)
    assert post("/v1/completions", body).json()["choices"] == before
    assert post("/admin/load", {"folder": str(folder), "name": "tiny"}, key=ADMIN).status_code == 400
    assert post("/admin/load", {"folder": str(folder)}, key=ADMIN).json()["id"] == "model"
    assert post("/v1/completions", body | {"model": "model"}).json()["choices"] == before
    assert post("/admin/unload", {"model": "model"}, key=ADMIN).json() == {"unloaded": "model"}
    assert post("/v1/completions", body | {"model": "model"}).status_code == 404


# -- other contracts ----------------------------------------------------------------------------


def test_sagemaker_and_vertex_ai_find_their_endpoints(engine: Engine) -> None:
    environment = {"AIP_HEALTH_ROUTE": "/v1/health-of-vertex", "AIP_PREDICT_ROUTE": "/v1/predict"}
    with served(engine, Limits(api_keys=frozenset([KEY])), environment) as server:
        headers = {"authorization": f"Bearer {KEY}"}
        assert [httpx.get(server.url + path).status_code for path in ("/ping", "/v1/health-of-vertex")] == [200, 200]
        instances = [{"prompt": "x", "max_tokens": 2}, {"messages": MESSAGES}]
        found = httpx.post(
            f"{server.url}/v1/predict",
            json={"instances": instances, "parameters": {"max_tokens": 3, "temperature": 0}},
            headers=headers,
        ).json()["predictions"]
        assert [each["object"] for each in found] == ["text_completion", "chat.completion"]
        assert [each["usage"]["completion_tokens"] for each in found] == [2, 3]
        invoked = [
            httpx.post(f"{server.url}/invocations", json=each | {"max_tokens": 2}, headers=headers)
            for each in instances
        ]
        assert [each.json()["object"] for each in invoked] == ["text_completion", "chat.completion"]


def test_vertex_ai_names_the_port(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    async def serve(folders: Any, *_: Any, **options: Any) -> None:
        found.update(options, folders=folders)

    monkeypatch.setattr("autopar.serving.server.serve", serve)
    main(["serve", f"tiny={folder}"])
    assert (found["host"], found["port"]) == ("127.0.0.1", 8000)
    monkeypatch.setenv("AIP_HTTP_PORT", "9123")
    main(["serve", f"tiny={folder}"])
    assert (found["host"], found["port"], found["folders"]) == ("0.0.0.0", 9123, [("tiny", folder)])
    main(["serve", str(folder), "--host", "127.0.0.1", "--port", "7000"])
    assert (found["host"], found["port"]) == ("127.0.0.1", 7000)


def test_the_page_shows_the_state_of_each_model(server: Server) -> None:
    page = httpx.get(server.url)
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    assert httpx.get(f"{server.url}/status").status_code == 401
    (state,) = httpx.get(f"{server.url}/status", headers={"authorization": f"Bearer {KEY}"}).json()["models"]
    assert (state["name"], state["state"], state["num_slots"]) == ("tiny", "ready", 4)
    assert all(f"model.{name}" in page.text for name in state if name not in ("queued_tokens",))
