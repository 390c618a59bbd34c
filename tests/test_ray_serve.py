"""Test the deployment of Ray Serve: against Ray's contract always, and by Ray where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "ray_serve.py"
BODY = {"prompt": "x", "max_tokens": 5, "temperature": 0}


class Deployment:
    """What `serve.deployment` returns, as far as the example needs it."""

    def __init__(self, cls: type, options: dict[str, Any]) -> None:
        self.cls, self.options = cls, options

    def bind(self, *arguments: Any) -> tuple[type, tuple[Any, ...]]:
        return self.cls, arguments


def stand_in() -> types.ModuleType:
    """Ray's `serve`, which wraps a class and calls nothing of it before it is in a replica."""

    def ingress() -> Callable[[type], type]:
        def wrapped(cls: type) -> type:
            assert hasattr(cls, "__serve_build_asgi_app__") and "__call__" not in vars(cls)  # Ray refuses others
            return cls

        return wrapped

    ray, serve = types.ModuleType("ray"), types.ModuleType("ray.serve")
    vars(serve).update(ingress=ingress, deployment=lambda **options: lambda cls: Deployment(cls, options))
    vars(ray).update(serve=serve)
    return ray


def example() -> Any:
    spec = importlib.util.spec_from_file_location("ray_serve_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_deployment_is_of_twenty_lines() -> None:
    text = EXAMPLE.read_text(encoding="utf-8").split('"""', 2)[2]
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 20


@pytest.mark.slow
def test_a_replica_serves_and_reports_its_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray does: the constructor, then the application; requests; checks of health."""
    folder = write_model(tmp_path / "tiny")
    monkeypatch.setitem(sys.modules, "ray", stand_in())
    cls, arguments = example().deployment({"model": str(folder)})

    async def served() -> None:
        replica = cls.__new__(cls)
        await replica.__init__(*arguments)
        transport = httpx.ASGITransport(replica.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert model["id"] == "tiny"
            reply = (await client.post("/v1/completions", json=BODY, timeout=60)).json()
            assert reply["usage"]["completion_tokens"] == 5
            replica.check_health()
            replica.model._fail(ValueError("a program has failed"))
            with pytest.raises(RuntimeError, match="a program has failed"):
                replica.check_health()
        await replica.models.close()

    asyncio.run(served())


@pytest.mark.slow
def test_ray_serves_the_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole replies and streams, through Ray's proxy."""
    serve = pytest.importorskip("ray.serve", reason="Ray is not installed")
    import ray  # pyright: ignore[reportMissingImports]

    folder = write_model(tmp_path / "tiny")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8765})
        serve.run(example().deployment({"model": str(folder)}))
        url = "http://127.0.0.1:8765/v1/completions"
        whole = httpx.post(url, json=BODY, timeout=60).json()["choices"][0]["text"]
        with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=60) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1]) == whole
    finally:
        serve.shutdown()
        ray.shutdown()
