"""Attack the server: names, bodies, broken text, parts of requests, slow readers, schemas. It refuses, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_models import LENGTH, opened, write_model

httpx = pytest.importorskip("httpx")
pytest.importorskip("llguidance")
pytest.importorskip("starlette")

from served_models import Server, served  # noqa: E402

from autopar.inference import Engine  # noqa: E402
from autopar.serving import Limits  # noqa: E402
from autopar.serving.server import close_idle  # noqa: E402

NESTED = "[" * 50_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    engine = opened(write_model(tmp_path_factory.mktemp("models") / "model"))
    with_end = Engine(engine.runner, engine.tokenizer, [257], num_pages=engine.pool.num_pages)
    limits = Limits(max_body_bytes=200_000, body_s=1.0, admin_keys=frozenset(["admin"]))
    with served(with_end, limits) as server:
        yield server


def post(server: Server, path: str, body: Any) -> Any:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=sent, headers={"content-type": "application/json"}, timeout=60)


def check_serves(server: Server) -> None:
    """The server replies, and nothing is left of earlier requests."""
    reply = post(server, "/v1/completions", {"prompt": "x", "max_tokens": 3, "temperature": 0})
    assert reply.status_code == 200 and httpx.get(f"{server.url}/health").status_code == 200
    (model,) = server.models.by_name.values()
    for _ in range(1000):
        stats = model.engine.stats
        if not (model.queued_tokens or model.thread.boxes or stats.num_running or stats.held_pages):
            return
        time.sleep(0.01)
    pytest.fail("a request is left")


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


MESSAGE = {"role": "user", "content": "x"}
NAMES = ["../../etc/passwd", "\x00", "\ud800", "a" * 50_000, "<script>", "tiny\n", "{{ 7 * 7 }}", "%s%n", ""]


@pytest.mark.parametrize("field", ["model", "stop", "role", "tool", "user", "folder"])
def test_hostile_names_are_refused_or_harmless(server: Server, field: str) -> None:
    for name in NAMES:
        if field == "model":
            replies = [post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2, "model": name})]
            replies.append(httpx.get(f"{server.url}/v1/models/{json.dumps(name)[1:-1][:2000]}".replace("\\", "%5C")))
            assert {each.status_code for each in replies} <= {400, 404}
        elif field == "stop":
            reply = post(server, "/v1/completions", {"prompt": "x", "max_tokens": 2, "stop": [name]})
            assert reply.status_code in (200, 400)
        elif field == "role":
            assert post(server, "/v1/chat/completions", {"messages": [{**MESSAGE, "role": name}]}).status_code == 400
        elif field == "tool":
            tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
            for choice in ("auto", "required", {"type": "function", "function": {"name": name}}):
                body = {"messages": [MESSAGE], "tools": tools, "tool_choice": choice, "max_tokens": 4}
                assert post(server, "/v1/chat/completions", body).status_code in (200, 400)
        elif field == "user":
            content = {"messages": [{**MESSAGE, "content": name}], "max_tokens": 2, "user": name}
            assert post(server, "/v1/chat/completions", content).status_code in (200, 400)
        else:
            assert post(server, "/admin/load", {"folder": name}).status_code == 401
    check_serves(server)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"\x00" * 100,
        b'{"prompt": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": 1e999}',
        b'{"prompt": "x", "logit_bias": {"1": NaN}}',
        b'{"prompt": "x", "logit_bias": {"-1": 1}}',
        b'{"prompt": "x", "logit_bias": {"\\u0661": 1}}',
        b'{"prompt": [1, 2, -3]}',
        b'{"prompt": [1e3]}',
        b'{"prompt": [99999999999999999999]}',
        b'{"prompt": ["x", ["x"]]}',
        b'{"prompt": "x", "timeout": NaN}',
        b'{"prompt": "x", "n": 1e1}',
        b'{"prompt": "x", "priority": 99999999999}',
        b'{"prompt": "x", "stream_options": [1]}',
        b'{"prompt": "x", "response_format": 7}',
        b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}',
        b'{"prompt": ' + NESTED.encode() + b"}",
        b'{"prompt": "' + b"x" * 150_000 + b'"}',
        b'{"prompt": "' + b"x" * 250_000 + b'"}',
    ],
    ids=lambda body: repr(body[:50]),
)
def test_broken_bodies_are_refused(server: Server, body: bytes) -> None:
    reply = post(server, "/v1/completions", body)
    assert reply.status_code in (400, 413) and reply.json()["error"]["message"]


def test_hostile_chats_are_refused_or_harmless(server: Server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": NESTED}}
    for messages in [
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        [{"role": "assistant", "tool_calls": {"function": 7}}],
        [{"role": "assistant", "tool_calls": [7]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": "{{ cycler.__init__.__globals__ }}"}],
        [MESSAGE] * 5000,
        ["x"],
        [None],
    ]:
        reply = post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert reply.status_code in (200, 400), messages
    for options in [{"messages": 7}, {"bos_token": NESTED}, {"add_generation_prompt": {}}, {"tools": "x"}]:
        body = {"messages": [MESSAGE], "max_tokens": 2, "chat_template_kwargs": options}
        assert post(server, "/v1/chat/completions", body).status_code in (200, 400)
    check_serves(server)


def test_parts_of_requests_are_dropped_after_a_while(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    task: Any = asyncio.run_coroutine_threadsafe(close_idle(server._server, 1.0), server._loop)
    try:
        connections = [connected(server) for _ in range(5)]
        connections[1].sendall(b"POST /v1/compl")
        connections[2].sendall(head)
        connections[3].sendall(head + b"content-length: 100\r\n\r\n{")
        connections[4].sendall(head + b"transfer-encoding: chunked\r\n\r\n5\r\n{  ")
        check_serves(server)
        replies = list(map(read_all, connections))  # each ends, or this waits for ever
    finally:
        task.cancel()
    assert replies[:3] == [b"", b"", b""]
    assert all(b" 408 " in each for each in replies[3:])
    check_serves(server)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models/%00%ff%fe HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ],
    ids=lambda sent: repr(sent[:30]),
)
def test_what_is_not_http_is_refused(server: Server, sent: bytes) -> None:
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        reply = read_all(connection)
    assert not reply or reply.split()[1] in (b"400", b"404", b"405", b"414", b"415", b"431")
    check_serves(server)


def test_a_reader_that_reads_nothing_delays_nobody(server: Server) -> None:
    """Its request ends at its deadline at the latest, and nothing is held."""
    body = json.dumps({"prompt": "x", "max_tokens": LENGTH - 1, "n": 8, "stream": True, "timeout": 2}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    slow: list[socket.socket] = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        connection.sendall(request % len(body) + body)
        slow.append(connection)
    check_serves(server)
    for connection in slow:
        connection.close()
    check_serves(server)


BOMBS: dict[str, Any] = {
    "nested": {"type": "object", "properties": {"a": {}}},
    "items": {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
    "pattern": {"type": "string", "pattern": "^((((a{1,500}){1,500}){1,500}){1,500})$"},
    "backtracking": {"type": "string", "pattern": "^(a+)+$"},
    "length": {"type": "string", "minLength": 10**8},
    "recursive": {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2}}, "$ref": "#/$defs/n"},
    "infinite": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"},
    "remote": {"$ref": "http://127.0.0.1:9/schema.json"},
    "file": {"$ref": "file:///etc/passwd"},
    "choices": {"enum": [f"choice {n}" for n in range(8000)]},
    "combinations": {"allOf": [{"anyOf": [{"type": "string", "maxLength": n}, {"minLength": m}]} for n in range(9) for m in range(9)]},
    "properties": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
    "number": {"type": "number", "multipleOf": 1e-300},
    "surrogate": {"const": "\ud800"},
}  # fmt: skip
for _ in range(300):
    BOMBS["nested"] = {"type": "object", "properties": {"a": BOMBS["nested"]}, "required": ["a"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_schemas_that_are_bombs_end_alone(server: Server, name: str) -> None:
    """Other requests are served meanwhile."""
    form = {"type": "json_schema", "json_schema": {"schema": BOMBS[name]}}
    with ThreadPoolExecutor(3) as pool:
        bombs = [
            pool.submit(post, server, "/v1/completions", {"prompt": "x", "max_tokens": 20, "response_format": form, "timeout": 30})
            for _ in range(3)
        ]  # fmt: skip
        longest = 0.0
        while not all(each.done() for each in bombs):
            started = time.monotonic()
            assert (
                post(server, "/v1/completions", {"prompt": "y", "max_tokens": 2, "temperature": 0}).status_code == 200
            )
            longest = max(longest, time.monotonic() - started)
    print(name, {each.result().status_code for each in bombs}, f"{longest:.2f} s")
    assert {each.result().status_code for each in bombs} <= {200, 400, 500}
    check_serves(server)
