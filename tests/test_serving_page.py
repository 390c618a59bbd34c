"""The server's page in a browser, at two widths: what it shows of a model that works, and of errors."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from chromium import Tab
from tiny_models import LENGTH, opened, write_model

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

from served_models import Server, copied, served

from autopar.inference import Engine
from autopar.serving import Limits, ServedModel

KEY = "a key, & more"
#: Pictures go there, to look at.
PICTURES = os.environ.get("AUTOPAR_PICTURES")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return opened(write_model(tmp_path_factory.mktemp("models") / "model"))


def wait_for(tab: Tab, script: str) -> Any:
    for _ in range(300):
        if found := tab.value(script):
            return found
        time.sleep(0.05)
    pytest.fail(f"never: {script}; the page says {tab.value('document.body.innerText')!r}")


def figures(tab: Tab) -> dict[str, str]:
    """What the first model's section shows, by name."""
    script = "[...document.querySelector('section').querySelectorAll('dl div')].map(e => [...e.children].map(c => c.textContent))"
    return dict(tab.value(script))


def fits(tab: Tab) -> bool:
    """Whether nothing is wider than the window, and no two figures overlap."""
    return tab.value(
        "document.documentElement.scrollWidth <= innerWidth && (() => { const boxes = [...document.querySelectorAll('dl div')]"
        ".map(e => e.getBoundingClientRect()); return boxes.every((a, i) => boxes.every((b, j) => i == j || a.right <= b.left"
        " || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top)); })()"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_the_page_shows_what_a_model_does(tab: Tab, engine: Engine, width: int, dark: bool) -> None:
    name = "a model with a long name " + "x" * 60 + "<b>"
    with served(engine, Limits(api_keys=frozenset([KEY]))) as server:
        server.call(add(server, name, copied(engine)))
        tab.open(server.url, width=width, dark=dark)
        assert "Add a key to the address" in wait_for(tab, "document.querySelector('#models .note')?.textContent")
        tab.value(f"void (location.hash = encodeURIComponent({json.dumps(KEY)}))")
        wait_for(tab, "document.querySelectorAll('section').length == 2")
        assert figures(tab)["slots in use"] == "0 of 4" and figures(tab)["tokens generated"] == "0"
        before = server.engine.stats.num_tokens
        slow_down(server)
        generations = server.call(submit(server))
        wait_for(tab, "document.querySelector('section dd')?.textContent == '4 of 4'")
        assert int(figures(tab)["requests waiting"]) == 4
        assert tab.value("document.querySelector('section .held').getBoundingClientRect().width") > 0
        assert fits(tab)
        if PICTURES:
            tab.picture(Path(PICTURES) / f"page-{width}.png")
        wait_for(tab, "document.querySelector('section dd')?.textContent == '0 of 4'")
        shown = figures(tab)
        assert int(shown["tokens generated"].replace(",", "")) == server.engine.stats.num_tokens > before
        assert shown["prompt tokens found in the cache"].endswith(" %") and generations
        titles = tab.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
        assert titles == ["tiny ready", f"{name} ready"], "names are text"
        assert fits(tab)
        said = [each for each in tab.said if "401" not in each]
        assert said == [] and all(each.startswith(server.url) for each in tab.asked_for)
    assert "does not reply" in wait_for(tab, "document.querySelector('#models > .note')?.textContent")


def slow_down(server: Server) -> None:
    """Let each call take a while, so that the page sees requests that run."""
    runner, dispatch = server.engine.runner, server.engine.runner.dispatch

    def dispatch_slowly(iteration: Any, allowed: Any = None) -> Any:
        time.sleep(0.15)
        return dispatch(iteration, allowed)

    runner.dispatch = dispatch_slowly


async def add(server: Server, name: str, engine: Engine) -> None:
    server.models.add(ServedModel(name, engine, Limits()))


async def submit(server: Server) -> list[Any]:
    (model, *_) = server.models.by_name.values()
    prompt = list(range(40))

    def queued() -> list[Any]:
        return [model.engine.submit(prompt, max_tokens=LENGTH - 50, name=f"request {n}") for n in range(8)]

    return await model.thread.call(queued)
