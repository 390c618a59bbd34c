"""Trace the path from a call of a planned step to the optimization problem, and check it against the layers.

    python scripts/walk.py

In: a two-layer MLP for eight devices; CPU devices stand for them. Out: the frames from `parallelize` to the
formulation, the modules on the path, and the calls from a lower package into a higher one during planning. Exit code 1
if there are more than `MOST_FRAMES` frames, or any such call. The user's functions (the step itself, `progress`) belong
to no package.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import autopar  # noqa: E402

#: From the call of the planned step to the formulation, inclusive.
MOST_FRAMES = 10
_END = "formulate.formulation.formulate"


def layers() -> dict[str, int]:
    """Package -> its row in the import contract; higher packages have lower numbers."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    rows = next(one["layers"] for one in contracts if one["id"] == "layers")
    return {name.strip(): row for row, names in enumerate(rows) for name in names.split("|")}


class Walk:
    """Calls among the package's modules, as the interpreter makes them."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.upward: Counter[tuple[str, str]] = Counter()
        self._layers = layers()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        called = _name(frame)
        if called is None:
            return
        if called == _END and not self.frames:
            self.frames = [name for name in map(_name, _callers(frame)) if name is not None][::-1]
        caller = frame.f_back and _name(frame.f_back)
        if caller and self._row(called) < self._row(caller):
            self.upward[caller, called] += 1

    def _row(self, name: str) -> int:
        return self._layers.get(name.split(".")[0], 0)

    @property
    def modules(self) -> list[str]:
        """The modules on the path, in order."""
        return list(dict.fromkeys(_module(name) for name in self.frames))


def _callers(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _name(frame: FrameType) -> str | None:
    """The module and function of a frame in the package; None for other frames."""
    module = frame.f_globals.get("__name__", "")
    if not module.startswith("autopar."):
        return None
    return f"{module.removeprefix('autopar.')}.{frame.f_code.co_qualname}"


def _module(name: str) -> str:
    known = [one.removeprefix("autopar.") for one in sys.modules if one.startswith("autopar.")]
    return max((one for one in known if name.startswith(f"{one}.")), key=len)


def step(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        hidden = jax.nn.relu(batch["x"] @ params["w1"])
        return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def walk() -> Walk:
    """Plan the step, and record the calls."""
    planned = autopar.parallelize(step, num_devices=8, hardware="h100-sxm", cache=False)
    params = {"w1": jnp.ones((256, 1024)), "w2": jnp.ones((1024, 256))}
    batch = {"x": jnp.ones((512, 256)), "y": jnp.ones((512, 256))}
    seen = Walk()
    sys.setprofile(seen)
    try:
        planned(params, batch)
    finally:
        sys.setprofile(None)
    return seen


def main() -> int:
    """Print the path; 1 if a limit is exceeded."""
    seen = walk()
    print(f"{len(seen.frames)} frames from the call to the formulation (at most {MOST_FRAMES}):")
    for depth, name in enumerate(seen.frames):
        print(f"{'  ' * depth}  {name}")
    print(f"{len(seen.modules)} modules: {', '.join(seen.modules)}")
    print(f"{len(seen.upward)} calls from a lower package into a higher one:")
    for (caller, called), times in sorted(seen.upward.items()):
        print(f"  {caller} -> {called}  x{times}")
    return int(len(seen.frames) > MOST_FRAMES or bool(seen.upward))


if __name__ == "__main__":
    sys.exit(main())
