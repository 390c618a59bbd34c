"""Test the router: servers that fail, queues, prefixes, draining, changes of models, against servers that only pretend."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from routed_servers import TOKENS, Routed, routed, wait_until  # noqa: E402

from autopar.cli.main import main  # noqa: E402
from autopar.errors import PlacementError  # noqa: E402
from autopar.placement import Group, Layout, Placement, Trace  # noqa: E402
from autopar.placement.tables import placement_json, read_placement  # noqa: E402
from autopar.serving import Limits  # noqa: E402
from autopar.serving.router import placed as placed_module  # noqa: E402
from autopar.serving.router.choose import choose_server  # noqa: E402
from autopar.serving.router.group_servers import GroupServer, ModelState, Prefixes, Sent  # noqa: E402
from autopar.serving.router.observed import Observed, Seen, drifted  # noqa: E402
from autopar.serving.router.placed import Replacing, servers_of  # noqa: E402
from autopar.serving.router.prompts import prompt_of  # noqa: E402

TINY = ("tiny",)
KEY, ADMIN = "a-key", "an-admin-key"
LIMITS = Limits(api_keys=frozenset([KEY]), admin_keys=frozenset([ADMIN]))


def post(router: Routed, path: str, body: dict[str, Any], key: str = ADMIN) -> Any:
    return httpx.post(router.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=300)


def complete(router: Routed, prompt: Any = "x", **body: Any) -> Any:
    return post(router, "/v1/completions", {"model": "tiny", "prompt": prompt, **body}, KEY)


def text_of(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def events_of(reply: Any) -> list[Any]:
    events = [each.removeprefix("data: ") for each in reply.text.split("\n\n") if each]
    return [each if each == "[DONE]" else json.loads(each) for each in events]


def in_threads(calls: list[Callable[[], Any]]) -> list[Future[Any]]:
    pool = ThreadPoolExecutor(len(calls))
    found = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return found


# -- what passes through ------------------------------------------------------------------------


def test_replies_pass_through_whole_and_as_streams() -> None:
    with routed([TINY], limits=LIMITS) as router:
        (server,) = router.servers
        assert text_of(complete(router, max_tokens=3)) == "aaa"
        streamed = complete(router, max_tokens=3, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = events_of(streamed)
        assert "".join(each["choices"][0]["text"] for each in events[:-1]) == "aaa"
        assert events[-1] == "[DONE]"  # the counts of tokens were asked for by the router only
        asked = events_of(complete(router, max_tokens=3, stream=True, stream_options={"include_usage": True}))
        assert asked[-2]["usage"]["completion_tokens"] == 3
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2}
        chunks = events_of(post(router, "/v1/chat/completions", chat, KEY))
        assert [each["choices"][0]["delta"]["content"] for each in chunks[:-1]] == ["", "a", "a"]
        assert post(router, "/v1/embeddings", {"model": "tiny", "input": "x"}, KEY).status_code == 200
        assert {each["key"] for each in server.bodies} == {f"Bearer {KEY}"}
        models = httpx.get(router.url + "/v1/models", headers={"authorization": f"Bearer {KEY}"}).json()
        assert models["data"] == [{"id": "tiny", "object": "model", "state": "ready"}]
        assert httpx.get(router.url + "/ready").json() == {"ready": True, "models": {"tiny": True}}
        text = httpx.get(router.url + "/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        assert f'autopar:router_replies_total{{model="tiny",server="{server.url}",status="200"}} 5.0' in text
        trace = router.forwarder.observed.trace(0.0, 1e12)
        assert trace is not None
        assert trace.output_tokens.tolist() == [3, 3, 3, 2, 6]
        assert not router.forwarder.servers[0].sent


def test_requests_that_no_server_may_get_are_refused() -> None:
    with routed([TINY, ("other",)], limits=LIMITS) as router:
        unknown = post(router, "/v1/completions", {"model": "x", "prompt": "x"}, KEY)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "served are: 'other', 'tiny'" in unknown.text
        for body in ({"prompt": "x"}, {"model": 7, "prompt": "x"}, {"model": ["tiny"]}):
            assert post(router, "/v1/completions", body, KEY).status_code == 400
        assert complete(router).status_code == 200
        assert post(router, "/v1/completions", {"model": "tiny"}, "no key").status_code == 401
        assert post(router, "/admin/drain", {"server": "http://x"}, KEY).status_code == 401
        assert post(router, "/admin/drain", {"server": "http://x"}).status_code == 404
        assert post(router, "/admin/replace", {}).status_code == 400
        assert post(router, "/admin/reload", {"servers": "x"}).status_code == 400
        router.servers[0].error = (400, {"message": "no such field", "type": "invalid_request_error"})
        assert complete(router).json() == {"error": router.servers[0].error[1]}
        deep: Any = 1
        for _ in range(300):
            deep = [deep]
        strange = json.dumps({"model": "tiny", "prompt": "\ud800", "x": float("nan"), "deep": deep})
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        assert httpx.post(f"{router.url}/v1/completions", content=strange, headers=headers).status_code == 400
        assert router.servers[0].bodies[-1]["prompt"] == "\ud800"
        for odd in (None, 7, [], [[]], {"a": 1}, [[1, "x"]]):  # the server says what is wrong
            assert complete(router, odd).status_code == 400


# -- servers that fail --------------------------------------------------------------------------


def test_requests_of_a_dead_server_go_to_others_and_none_is_lost_or_doubled() -> None:
    with routed([TINY, TINY]) as router:
        for each in router.servers:
            each.allow(begin=False)
        streams = [{}, {"stream": True}] * 6
        replies = in_threads(
            [
                lambda number=number, more=more: complete(router, f"{number}", **more)
                for number, more in enumerate(streams)
            ]
        )
        wait_until(lambda: sum(len(each.bodies) for each in router.servers) == 12)
        dead, alive = router.servers
        assert len(dead.bodies) == len(alive.bodies) == 6
        router.call(dead.die())
        wait_until(lambda: len(alive.bodies) == 12)
        alive.allow()
        assert all(each.result().status_code == 200 for each in replies)
        assert Counter(each["prompt"] for each in alive.bodies) == Counter(map(str, range(12)))
        texts = [
            events_of(each.result()) if more else each.result() for each, more in zip(replies, streams, strict=True)
        ]
        assert all(
            "".join(event["choices"][0]["text"] for event in text[:-1]) == "b" * TOKENS
            if more
            else text_of(text) == "b" * TOKENS
            for text, more in zip(texts, streams, strict=True)
        )
        assert not any(each.sent for each in router.forwarder.servers)
        assert text_of(complete(router)) == "b" * TOKENS


def test_a_stream_that_had_begun_ends_with_an_error() -> None:
    with routed([TINY, TINY]) as router:
        for each in router.servers:
            each.allow(end=False)
        (reply,) = in_threads([lambda: complete(router, stream=True)])
        wait_until(lambda: any(each.bodies for each in router.servers))
        wait_until(lambda: any(not sent.waiting_tokens for each in router.forwarder.servers for sent in each.sent))
        router.call(next(each for each in router.servers if each.bodies).die())
        events = events_of(reply.result())
        assert [each["choices"][0]["text"] for each in events[:-1]] == ["a", "a"]
        assert events[-1]["error"]["code"] == "server_lost"
        assert "send the request again" in events[-1]["error"]["message"]
        assert sum(len(each.bodies) for each in router.servers) == 1


def test_a_request_waits_for_a_replica_that_comes_back() -> None:
    with routed([TINY]) as router:
        (server,) = router.servers
        router.call(server.die())
        (reply,) = in_threads([lambda: complete(router)])
        wait_until(lambda: not router.forwarder.servers[0].is_up)
        assert httpx.get(router.url + "/ready").status_code == 503
        assert httpx.get(router.url + "/health").json() == {"status": "ok", "down": [server.url]}
        router.call(server.start())  # on the same port
        assert text_of(reply.result()) == "a" * TOKENS


def test_a_request_that_finds_no_replica_in_time_is_told_why() -> None:
    with routed([TINY], hold_s=0.05) as router:
        router.servers[0].models["tiny"] = "sleeping"
        wait_until(lambda: not router.forwarder.servers[0].serves("tiny"))
        reply = complete(router)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert f"no server serves 'tiny' now ({router.servers[0].url}: sleeping)" in reply.text


def test_what_one_server_refuses_another_one_serves() -> None:
    with routed([TINY, TINY]) as router:
        first, second = router.servers
        first.error = second.error = (429, {"message": "full", "code": "queue_full"})
        full = complete(router)
        assert (full.status_code, full.headers["retry-after"], full.json()["error"]["code"]) == (429, "7", "queue_full")
        assert len(first.bodies) == len(second.bodies) == 1
        second.error = None
        assert {text_of(complete(router)) for _ in range(3)} == {"b" * TOKENS}


def test_a_request_that_makes_servers_fail_is_not_sent_to_all_of_them() -> None:
    with routed([TINY] * 5) as router:
        for each in router.servers:
            each.error = (500, {"message": "the engine has failed", "code": None})
        reply = complete(router)
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "server_lost")
        assert sum(len(each.bodies) for each in router.servers) == 3


def test_a_server_that_does_not_answer_any_more_is_given_up() -> None:
    with routed([TINY, TINY], dead_s=0.2, poll_s=0.05) as router:
        server = router.servers[0]
        for each in router.servers:
            each.allow(begin=False)
        replies = in_threads([lambda: complete(router), lambda: complete(router)])
        wait_until(lambda: all(each.bodies for each in router.servers))
        server.is_frozen = True
        wait_until(lambda: len(router.servers[1].bodies) == 2)
        assert router.forwarder.servers[0].described()["state"] == "down"
        router.servers[1].allow()
        assert {text_of(each.result()) for each in replies} == {"b" * TOKENS}
        wait_until(lambda: bool(server.aborted))  # its connection was closed


def test_a_client_that_goes_away_ends_its_request() -> None:
    with routed([TINY]) as router:
        (server,) = router.servers
        server.allow(begin=False)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(router.url + "/v1/completions", json={"model": "tiny", "prompt": "x"}, timeout=0.3)
        wait_until(lambda: bool(server.aborted))
        assert not router.forwarder.servers[0].sent


# -- which server -------------------------------------------------------------------------------


def up(num_sent: int = 0, waiting: float = 0.0, layout: Layout | None = None, slots: int = 4) -> GroupServer:
    server = GroupServer("http://x", layout or Layout(), is_up=True, models={"tiny": ModelState("ready", slots, 0)})
    server.sent = {Sent("tiny", waiting / max(1, num_sent)) for _ in range(num_sent)}
    return server


def test_a_prompt_goes_where_its_prefix_was_until_the_queue_there_is_much_longer() -> None:
    prompt = prompt_of("tiny", {"prompt": "p" * 8000, "max_tokens": 10})
    other = prompt_of("tiny", {"prompt": "q" * 8000})
    assert (prompt.num_tokens, len(prompt.blocks), prompt.num_new) == (2000, 31, 10)
    one, two = up(), up(num_sent=1, waiting=1000.0)
    two.prefixes.add(prompt.blocks)
    means = {"tiny": 100.0}
    assert choose_server([one, two], "tiny", prompt, means) is two
    assert choose_server([one, two], "tiny", other, means) is one
    two.sent = {Sent("tiny", 1000.0) for _ in range(3)}  # more than the cache saves
    assert choose_server([one, two], "tiny", prompt, means) is one
    two.sent = {Sent("tiny", 0.0) for _ in range(4)}  # its slots are full of long texts
    assert choose_server([one, two], "tiny", prompt, means) is two
    two.sent = {Sent("tiny", 0.0) for _ in range(6)}
    assert choose_server([one, two], "tiny", prompt, means) is one
    assert prompt_of("other", {"prompt": "p" * 8000}).blocks[0] != prompt.blocks[0]


def test_larger_groups_get_more_and_equal_ones_the_same() -> None:
    prompt = prompt_of("tiny", {"prompt": "x"})
    large, small = up(num_sent=2, waiting=400.0, layout=Layout(4)), up(num_sent=1, waiting=200.0)
    assert choose_server([small, large], "tiny", prompt, {}) is large
    with routed([TINY, TINY]) as router:
        for each in router.servers:
            each.allow(begin=False)
        replies = in_threads([lambda number=number: complete(router, f"{number}") for number in range(6)])
        wait_until(lambda: sum(len(each.bodies) for each in router.servers) == 6)
        assert [len(each.bodies) for each in router.servers] == [3, 3]
        for each in router.servers:
            each.allow()
        assert all(each.result().status_code == 200 for each in replies)
        texts = [text_of(complete(router, f"{talk}" * 4000)) for talk in "pqrs"]
        assert texts == [text_of(complete(router, f"{talk}" * 4000)) for talk in "pqrs"]  # they stay where they are
        assert texts == [text_of(complete(router, f"{talk}" * 4000 + "more")) for talk in "pqrs"]


def test_the_blocks_that_were_used_last_are_remembered() -> None:
    found = Prefixes(4)
    one, two = [b"1", b"2", b"3"], [b"5", b"6"]
    found.add(one)
    found.add(two)
    assert (found.matched(one), found.matched(two), found.matched([])) == (2, 2, 0)
    found.add(one)
    assert (found.matched(one), found.matched(two)) == (3, 1)


# -- draining, reloading ------------------------------------------------------------------------


def test_a_server_that_is_drained_completes_what_it_has_and_gets_nothing_new() -> None:
    with routed([TINY, TINY], limits=LIMITS) as router:
        first, second = router.servers
        for each in router.servers:
            each.allow(begin=False)
        replies = in_threads([lambda: complete(router), lambda: complete(router)])
        wait_until(lambda: all(each.bodies for each in router.servers))
        (drained,) = in_threads([lambda: post(router, "/admin/drain", {"server": first.url})])
        wait_until(lambda: router.forwarder.servers[0].is_draining)
        second.allow()
        assert {text_of(complete(router)) for _ in range(3)} == {"b" * TOKENS}
        assert not drained.done()
        first.allow()
        assert drained.result().json()["state"] == "draining"
        assert drained.result().json()["num_requests"] == 0
        assert {text_of(each.result()) for each in replies} == {"a" * TOKENS, "b" * TOKENS}
        assert post(router, "/admin/resume", {"server": first.url}).json()["state"] == "up"
        assert "a" * TOKENS in {text_of(complete(router, str(number))) for number in range(4)}


def placement_file(path: Path, *groups: tuple[str, ...]) -> Path:
    placement = Placement(tuple(Group(Layout(), each) for each in groups))
    path.write_text(json.dumps(placement_json(placement, dict(enumerate(range(len(groups)))))))
    return path


def test_a_router_reads_its_placement_again(tmp_path: Path) -> None:
    file = placement_file(tmp_path / "placement.json", TINY, ("tiny", "gone"))
    with routed([TINY, TINY], file, LIMITS) as router:
        headers = {"authorization": f"Bearer {KEY}"}
        states = httpx.get(router.url + "/status", headers=headers).json()["servers"]
        assert [each["missing"] for each in states] == [[], ["gone"]]
        first, second = router.servers
        first.allow(begin=False)
        second.allow(begin=False)
        replies = in_threads([lambda: complete(router), lambda: complete(router)])
        wait_until(lambda: all(each.bodies for each in router.servers))
        wrong = post(router, "/admin/reload", {"servers": [first.url]})
        assert (wrong.status_code, "2 groups, but 1 servers are given" in wrong.text) == (400, True)
        placement_file(file, TINY)
        again = post(router, "/admin/reload", {"servers": [second.url]}).json()
        assert [each["url"] for each in again["servers"]] == [second.url]
        for each in router.servers:
            each.allow()
        assert {text_of(each.result()) for each in replies} == {"a" * TOKENS, "b" * TOKENS}
        assert {text_of(complete(router)) for _ in range(3)} == {"b" * TOKENS}


def test_servers_that_do_not_fit_a_placement_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = placement_file(tmp_path / "placement.json", TINY, TINY)
    for urls, why in [
        (["http://a"], "2 groups, but 1 servers"),
        (["a", "b"], "'a' is not one"),
        (["http://a"] * 2, "each server once"),
    ]:
        with pytest.raises(PlacementError, match=why):
            servers_of(file, urls)
    assert [each.first_device for each in servers_of(file, ["http://a/", "http://b"])] == [0, 1]
    assert main(["route", "--servers", "http://127.0.0.1:1", "--apply"]) == 2
    assert main(["route", "--servers", "http://127.0.0.1:1", "--models", "m.toml"]) == 2
    assert "give PLACEMENT too" in capsys.readouterr().err


# -- new placements -----------------------------------------------------------------------------


def seen(model: str, rate: float, seconds: float, cv: float = 1.0, seed: int = 0) -> list[Seen]:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.gamma(1 / cv**2, cv**2 / rate, int(3 * rate * seconds)))
    return [Seen(float(at), model, 10, 5) for at in times[times < seconds]]


def test_rates_have_drifted_if_bursts_do_not_explain_it() -> None:
    def trace(*parts: list[Seen]) -> Trace | None:
        observed = Observed()
        for each in sorted(itertools.chain(*parts)):
            observed.add(each)
        return observed.trace(0.0, 100.0)

    before = trace(seen("a", 2.0, 100.0), seen("b", 1.0, 100.0, seed=1))
    same = trace(seen("a", 2.0, 100.0, seed=2), seen("b", 1.0, 100.0, seed=3))
    assert drifted(before, same) == drifted(before, before) == drifted(None, None) == []
    more = trace(seen("a", 2.0, 100.0, seed=4), seen("b", 4.0, 100.0, seed=5))
    assert drifted(before, more) == drifted(more, before) == ["b"]
    assert drifted(before, None) == ["a", "b"]
    assert drifted(None, trace(seen("c", 2.0, 100.0))) == ["c"]
    bursts = [trace(seen("a", 1.0, 100.0, cv=6.0, seed=seed)) for seed in range(12)]
    assert sum(bool(drifted(one, other)) for one, other in itertools.pairwise(bursts)) <= 1


def models_file(tmp_path: Path, *names: str) -> Path:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 256}
    text = ""
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        text += f'[{name}]\nconfig = "{name}"\nslots = 4\nmax_length = 256\nlatency_s = 0.5\n'
    (tmp_path / "models.toml").write_text(text)
    return tmp_path / "models.toml"


def found_with(groups: list[tuple[int, list[str]]], pays: float | None = 5.0) -> dict[str, Any]:
    change = {"goodput_before": 0.5, "seconds": 1.0, "lost_requests": 10.0, "gain_per_s": 2.0, "pays_after_s": pays}
    return {
        "goodput": 0.9,
        "load_bytes": 1e9,
        "change": change,
        "groups": [{"first_device": at, "models": m} for at, m in groups],
    }


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The results of the estimates that a router asks for, in the place of a process."""
    results: list[dict[str, Any]] = []

    async def estimate(_: Any, __: Any, ___: Any) -> dict[str, Any]:
        return results.pop(0)

    monkeypatch.setattr(placed_module.Placed, "_estimate", estimate)
    return results


def test_a_placement_that_pays_is_applied_without_losing_a_request(
    tmp_path: Path, swapped: list[dict[str, Any]]
) -> None:
    file = placement_file(tmp_path / "placement.json", ("a", "b"), ("b",), ())
    replacing = Replacing(models=models_file(tmp_path, "a", "b"), window_s=60.0)
    with routed([("a", "b"), ("b",), ()], file, LIMITS, replacing) as router:
        assert post(router, "/admin/replace", {}).status_code == 400  # no request came
        is_over, replies = threading.Event(), list[int]()

        def ask_on(model: str) -> None:
            while not is_over.is_set():
                replies.append(post(router, "/v1/completions", {"model": model, "prompt": "x"}, KEY).status_code)

        asking = in_threads([lambda model=model: ask_on(model) for model in "abab"])
        wait_until(lambda: len(replies) > 8)
        swapped += [found_with([(0, ["b"]), (1, ["a"])], pays=1e6), found_with([(0, ["b"]), (1, ["a"]), (2, ["a"])])]
        shown = post(router, "/admin/replace", {"apply": True}).json()
        assert (shown["applied"], [each.calls for each in router.servers]) == (False, [[]] * 3)  # it does not pay
        assert post(router, "/admin/replace", {"apply": True}).json()["applied"] is True
        is_over.set()
        for each in asking:
            each.result()
        assert {*replies} == {200}
        assert [sorted(each.models) for each in router.servers] == [["b"], ["a"], ["a"]]
        order = [(what, body.get("name", body.get("model"))) for what, body in router.servers[1].calls]
        assert order == [("unload", "b"), ("load", "a")]
        assert router.servers[2].calls == [
            ("load", {"folder": str(tmp_path / "a"), "name": "a", "key": f"Bearer {ADMIN}"})
        ]
        assert [group.models for group in read_placement(file).placement.groups] == [("b",), ("a",), ("a",)]


def test_models_that_change_places_wait_in_the_router(tmp_path: Path, swapped: list[dict[str, Any]]) -> None:
    file = placement_file(tmp_path / "placement.json", ("a",), ("b",))
    replacing = Replacing(models=models_file(tmp_path, "a", "b"), window_s=60.0)
    with routed([("a",), ("b",)], file, LIMITS, replacing) as router:
        for name in "ab":
            assert post(router, "/v1/completions", {"model": name, "prompt": "x"}, KEY).status_code == 200
        swapped += [found_with([(0, ["b"]), (1, ["a"])])] * 2
        router.servers[1].fails_to.add("a")  # after both models have been unloaded somewhere
        failed = post(router, "/admin/replace", {"apply": True})
        assert (failed.status_code, "out of memory" in failed.text) == (400, True)
        assert [sorted(each.models) for each in router.servers] == [["a"], ["b"]]  # as before
        for name in "ab":
            assert post(router, "/v1/completions", {"model": name, "prompt": "x"}, KEY).status_code == 200
        router.servers[1].fails_to.clear()
        assert post(router, "/admin/replace", {"apply": True}).json()["applied"] is True
        assert [sorted(each.models) for each in router.servers] == [["b"], ["a"]]


@pytest.mark.slow
def test_a_router_finds_a_placement_for_rates_that_have_drifted(tmp_path: Path) -> None:
    """By `autopar estimate serving` in a process of its own: `b` gets requests, and has a replica too few."""
    models = models_file(tmp_path, "a", "b")
    text = models.read_text().replace("latency_s = 0.5", "latency_s = 0.0002")
    models.write_text(text)
    file = placement_file(tmp_path / "placement.json", ("a",), ("a", "b"))
    replacing = Replacing(
        models=models, hardware="h100-sxm", window_s=2.0, applies=True, options=("--load-rate", "2e9")
    )
    with routed([("a",), ("a", "b")], file, LIMITS, replacing) as router:
        for number in range(40):
            body = {"model": "b", "prompt": f"{number}", "max_tokens": 1}
            assert post(router, "/v1/completions", body, KEY).status_code == 200
        reply = post(router, "/admin/replace", {})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        assert {name for group in found["groups"] for name in group["models"]} == {"a", "b"}
        assert found["change"]["goodput_before"] <= found["goodput"]
