"""A primitive that autopar does not know is priced, chosen, reported, simulated, exported and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive  # noqa: TID251
from jax.interpreters import mlir  # noqa: TID251

import autopar

HARDWARE = str(Path(__file__).parent / "profiles" / "slow_gpu.toml")

soft_shift = Primitive("soft_shift")


def written_out(x: Any, shift: Any) -> Any:
    return jnp.log1p(jnp.exp(x - shift))


soft_shift.def_impl(jax.jit(written_out))
soft_shift.def_abstract_eval(lambda x, _: x)
mlir.register_lowering(soft_shift, mlir.lower_fun(written_out, multiple_results=False))


def step(weight: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((soft_shift.bind(x, jnp.arange(64.0)) @ w) ** 2)

    value, gradient = jax.value_and_grad(loss)(weight)
    return weight - 0.1 * gradient, value


@pytest.mark.contract
def test_it_works_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.rules.user_rules._registered", {})
    args = jax.random.normal(jax.random.key(0), (64, 128)), jax.random.normal(jax.random.key(1), (4096, 64))
    options: dict[str, Any] = {"mesh": "x=8", "hardware": HARDWARE}
    whole = autopar.plan(step, *args, **options)
    assert [one.name for one in whole.replicated] == ["soft_shift"]
    autopar.register_rule("soft_shift", "b d, d -> b d", flops_per_point=20.0)
    split = autopar.plan(step, *args, **options)
    made = next(one for one in split.decisions if one.primitive == "soft_shift")
    assert made.sharding.dims[0] == ("x",)  # chosen
    assert not split.replicated and split.prediction.compute_s < whole.prediction.compute_s  # priced, simulated
    assert "forward soft_shift" in str(autopar.explain(split))  # reported
    assert "`soft_shift` has no sharding rule" in str(autopar.explain(whole))
    file: dict[str, Any] = {"__name__": __name__}
    exec(autopar.export(split, step, *args), file)  # exported
    for run in (autopar.parallelize(step, plan=split), file["shard"](step, file["make_mesh"](), *args)):  # run
        assert "f32[512,64]" in str(run.lower(*args).compile().as_text())
        got, expected = run(*map(jnp.copy, args)), jax.jit(step)(*args)  # what is exported donates
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)
