"""Serve a model by Ray Serve: replicas, autoscaling and routing are Ray's, the endpoints are those of `autopar serve`.

pip install './autopar[serve]' 'ray[serve]' && serve run examples.ray_serve:deployment model=Qwen3-0.6B
"""

from pathlib import Path
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]

from autopar.inference import Engine
from autopar.serving import Limits, Models, make_app


@serve.deployment(max_ongoing_requests=256)
@serve.ingress()  # the application is made in each replica, by the method that Ray names
class Served:
    async def __init__(self, folder: str) -> None:
        self.models = Models(Engine.open, Limits())
        self.model = await self.models.load(Path(folder))

    def __serve_build_asgi_app__(self) -> Any:
        return make_app(self.models)

    def check_health(self) -> None:
        if self.model.state == "failed":
            raise RuntimeError(self.model.failure)  # Ray replaces the replica


def deployment(arguments: dict[str, str]) -> Any:
    return Served.bind(str(Path(arguments["model"]).resolve()))  # pyright: ignore[reportAttributeAccessIssue]
