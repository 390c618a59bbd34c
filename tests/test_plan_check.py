"""Changed code compared with its committed plan: the check fails for added costs and names their source lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli.main import main
from autopar.comparison.plan_check import Allowed, check_plan, unmatched_collectives
from autopar.plans.records import CollectiveUse

SLOW = str(Path(__file__).parent / "profiles" / "slow_gpu.toml")
TARGET = """\
from test_plan_check import make

def same():
    return make()

def wider():
    return make(width=512)

def norms():
    return make(norms=True)
"""


def make(width: int = 256, *, norms: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Two layers; with `norms`, their activations are divided by a norm over the whole batch."""

    def step(params: dict[str, jax.Array], x: jax.Array) -> Any:
        def loss_of(params: dict[str, jax.Array]) -> jax.Array:
            h = jnp.tanh(x @ params["up"])
            if norms:
                h = h / jnp.sqrt(jnp.sum(h**2, axis=0))
            return jnp.mean((h @ params["down"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    step.__qualname__ = "train_step"
    shapes = {
        "up": jax.ShapeDtypeStruct((128, width), "float32"),
        "down": jax.ShapeDtypeStruct((width, 128), "float32"),
    }
    return step, (shapes, jax.ShapeDtypeStruct((8192, 128), "float32"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a plan of the step, and targets of the unchanged and the changed step."""
    step, args = make()
    autopar.plan(step, *args, mesh="8", hardware=SLOW).save(tmp_path / "step.plan.json")
    (tmp_path / "train.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_unchanged_code_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["diff", "step.plan.json", "train.py:same", "--check", "--hardware", SLOW, "--memory", "0", "--time", "0%"]
        )
        == 0
    )
    first = capsys.readouterr().out
    assert first.startswith("`train_step` is as planned on mesh 8 (")
    assert main(["diff", "step.plan.json", "train.py:same", "--check", "--hardware", SLOW]) == 0
    assert capsys.readouterr().out == first


def test_an_added_collective_is_named_with_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "step.plan.json", "train.py:norms", "--check", "--hardware", SLOW, "--memory", "1GB"]) == 1
    out = capsys.readouterr().out
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "jnp.sum(h**2" in text)
    assert out.startswith("`train_step` is no longer as planned on mesh 8 (")
    added = [text for text in out.splitlines() if text.startswith("  a collective more: ")]
    assert any(f"(test_plan_check.py:{line})" in text and "all-reduce over data of" in text for text in added)
    assert "more peak memory" not in out
    assert "plan again and commit that plan" in out


def test_more_memory_and_time_than_allowed_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["diff", "step.plan.json", "train.py:wider", "--check", "--hardware", SLOW, "--memory", "5%", "--json"])
        == 1
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["holds"], result["added"]) == (False, [])
    assert [text.split(":")[0] for text in result["failures"]] == ["more peak memory"]
    assert main(["diff", "step.plan.json", "train.py:wider", "--check", "--hardware", SLOW, "--memory", "1GB"]) == 0
    assert (
        main(
            [
                "diff",
                "step.plan.json",
                "train.py:wider",
                "--check",
                "--hardware",
                SLOW,
                "--memory",
                "1GB",
                "--time",
                "10us",
            ]
        )
        == 1
    )
    assert "more step time: " in capsys.readouterr().out


def test_a_step_over_the_budget_fails(folder: Path) -> None:
    saved = autopar.load_plan("step.plan.json")
    step, args = make()
    result = check_plan(replace(saved, memory_budget_bytes=1e5), step, *args, hardware=SLOW)
    assert not result.holds
    assert str(result).splitlines()[1].startswith("  the step no longer fits: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["step.plan.json", "step.plan.json", "--check"], "is a plan: give a TARGET, or drop --check"),
        (
            ["step.plan.json", "step.plan.json", "--memory", "5%"],
            "--memory: these belong to --check: add it",
        ),
        (["step.plan.json", "train.py:none", "--check"], "has no function 'none'"),
    ],
)
def test_invalid_options_are_errors_and_no_failed_check(
    folder: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *options]) == 2
    assert words in capsys.readouterr().err


def use(path: str, num_bytes: float = 8e6, **more: Any) -> CollectiveUse:
    about: dict[str, Any] = {
        "kind": "all-reduce",
        "axes": ("data",),
        "cause": "reduce the gradient",
        "phase": "backward",
    }
    return CollectiveUse(path=path, num_bytes=num_bytes, time_s=1e-3, source="a.py:1", **(about | more))


def test_a_renamed_module_adds_no_collective() -> None:
    before, after = [use("h_0/mlp"), use("h_1/mlp")], [use("h_0/ffn"), use("h_1/mlp", 9e6)]
    assert unmatched_collectives(before, after) == ((), ())
    more = use("h_2/mlp")
    assert unmatched_collectives(before, [*after, more]) == ((more,), ())
    assert unmatched_collectives([*before, more], after) == ((), (more,))


def test_a_collective_that_xla_combines_is_not_added() -> None:
    small = [use(f"loss_{n}", 4, combinable=True, cause=f"sum {n}") for n in range(2)]
    assert unmatched_collectives(small[:1], small) == ((), ())
    assert unmatched_collectives([], small[:1]) == ((small[0],), ())


def test_allowed() -> None:
    assert Allowed(fraction=0.05).of(100.0) == pytest.approx(105)
    assert Allowed(amount=7).of(100.0) == 107
