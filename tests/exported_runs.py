"""Run exported files as their users would: in a process in which autopar cannot be imported.

    python exported_runs.py FOLDER NAME...

In: a folder with `NAME.py`, as written by `autopar export`, and the names of `CASES`. Out, in the folder: `NAME.hlo`,
the compiled step; on standard output, for each name, the largest difference of its results from those of the plain
jitted step.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
from flax import nnx

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def of_catalogue(program: programs.Program) -> Case:
    return program.step, program.args()


def equinox_model() -> Case:
    """A module whose leaves are arrays and functions; it is an argument and a result."""
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))
    tx = optax.sgd(0.1)

    def step(model: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    return step, (model, tx.init(eqx.filter(model, eqx.is_array)), np.ones((16, 32), np.float32))


def nnx_model() -> Case:
    """The state of a Flax NNX module, split by the user."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.last = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.last(nnx.relu(self.first(x)))

    graph, params = nnx.split(Model(nnx.Rngs(0)))

    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((nnx.merge(graph, p)(x) - x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step, (params, np.ones((16, 32), np.float32))


def loop_over_layers() -> Case:
    def step(weights: Any, x: Any) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    return step, (0.1 * np.ones((3, 64, 64), np.float32), np.ones((8, 64), np.float32))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": partial(of_catalogue, programs.mlp(batch=8, width=128, num_layers=4)),
    "gpt": partial(of_catalogue, programs.gpt(sizes=programs.GPTSizes(num_layers=2))),
    "equinox": equinox_model,
    "nnx": nnx_model,
    "loop": loop_over_layers,
}


def main(folder: Path, names: list[str]) -> None:
    differences = {}
    for name in names:
        step, args = CASES[name]()
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        sharded = module.shard(step, module.make_mesh(), *args)
        (folder / f"{name}.hlo").write_text(sharded.lower(*args).compile().as_text())
        alone = (jax.jit(step) if name != "equinox" else eqx.filter_jit(step))(*args)
        results = sharded(*sharded.place(*args))
        pairs = zip(arrays(alone), arrays(results), strict=True)
        differences[name] = max(float(np.max(np.abs(one - other))) for one, other in pairs)
        assert jax.tree.structure(alone) == jax.tree.structure(results)
    print(json.dumps(differences))


def arrays(tree: Any) -> list[np.ndarray]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return [np.asarray(leaf, np.float64) for leaf in leaves]


if __name__ == "__main__":
    sys.modules["autopar"] = None  # type: ignore[assignment]  # to import it is an ImportError
    main(Path(sys.argv[1]), sys.argv[2:])
