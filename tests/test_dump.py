"""The text dumps of passes: all passes are there, equal plans have equal files, and the figures are the plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cli.main import main
from autopar.errors import ClusterError, OptionError
from autopar.planner.dump import FILES
from tests import programs

PROGRAM = programs.mlp(batch=4096, width=1024, num_layers=2, optimizer="adam")


def dumped(folder: Path, **options: Any) -> tuple[autopar.Plan, dict[str, str]]:
    options = {"mesh": "2x2", "hardware": "h100-sxm", **options}
    plan = autopar.plan(PROGRAM.step, *PROGRAM.abstract_args(), dump=folder, **options)
    return plan, {file.name: file.read_text() for file in folder.iterdir()}


def test_every_pass_writes_its_file_and_equal_plans_equal_files(tmp_path: Path) -> None:
    plan, files = dumped(tmp_path / "new" / "one")
    assert files.keys() == FILES.keys()
    assert all(text.strip() for text in files.values())
    assert dumped(tmp_path / "two")[1] == files
    explicit = files["07-explicit-program.txt"]
    kinds = {use.kind for use in plan.collectives}
    assert kinds and all(kind.upper() in explicit for kind in kinds)
    assert f"{plan.outcome.num_nodes} nodes, {plan.outcome.num_strategies} strategies" in files["05-problem.txt"]
    assert files["02-jaxpr.txt"].count("dot_general") == plan.program.primitives["dot_general"]


def test_another_plan_differs_where_it_does(tmp_path: Path) -> None:
    _, files = dumped(tmp_path / "one")
    _, pinned = dumped(tmp_path / "two", pin={"state/params/*/kernel": jax.sharding.PartitionSpec("data")})
    differing = {name for name in files if files[name] != pinned[name]}
    assert {"01-request.txt", "06-solution.txt", "07-explicit-program.txt"} <= differing
    assert differing.isdisjoint({"02-jaxpr.txt", "03-graph.txt"})


def test_microbatches_and_rematerialization_are_in_it(tmp_path: Path) -> None:
    plan, files = dumped(tmp_path, num_microbatches=2)
    assert plan.num_microbatches == 2 and "enter_carry" in files["02-jaxpr.txt"]
    assert "(rematerialization" not in files["07-explicit-program.txt"]

    def step(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            h = x
            for w in params:
                h = jax.checkpoint(lambda w, h: jnp.tanh(h @ w))(w, h)
            return (h * h).sum()

        return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]

    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    autopar.plan(step, weights, x, mesh="2x2", hardware="h100-sxm", dump=tmp_path / "checkpoint")
    text = (tmp_path / "checkpoint" / "07-explicit-program.txt").read_text()
    again = [line for line in text.splitlines() if "(rematerialization" in line]
    assert sum(" tanh " in line or " dot_general " in line for line in again) >= 2


def test_a_kept_plan_is_made_again_to_be_written(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "dump"
    autopar.plan(PROGRAM.step, *PROGRAM.abstract_args(), mesh="2x2", hardware="h100-sxm", cache=cache)
    assert dumped(folder, cache=cache)[1].keys() == FILES.keys()


def test_a_step_of_nothing_and_hostile_names(tmp_path: Path) -> None:
    def step(state: Any) -> Any:
        return state

    autopar.plan(step, {"a\n\x1b[31m'\"": jnp.zeros(())}, mesh="2", hardware="h100-sxm", dump=tmp_path)
    assert "\x1b" not in (tmp_path / "03-graph.txt").read_text()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot write into"):
        dumped(tmp_path / "file")
    with pytest.raises(OptionError, match="`dump` is empty"):
        autopar.plan(PROGRAM.step, *PROGRAM.abstract_args(), mesh="2", hardware="h100-sxm", dump="")
    with pytest.raises(ClusterError, match="`dump`"):
        dumped(tmp_path / "stages", stages=2, mesh=None, num_devices=4)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "train.py") + ":target"
    (tmp_path / "train.py").write_text(
        "import jax\ndef step(p, x):\n    return p - x.sum() * p\n"
        "def target():\n    s = jax.ShapeDtypeStruct((8, 8), 'float32')\n    return step, (s, s)\n"
    )
    assert main(["plan", target, "--mesh", "2x2", "--hardware", "h100-sxm", "--dump", str(tmp_path / "d")]) == 0
    assert {file.name for file in (tmp_path / "d").iterdir()} == FILES.keys()
    with pytest.raises(SystemExit):
        main(["estimate", "search", "--corpus", "1e6x64:int8", "--dump", str(tmp_path / "d")])
    assert "--dump" in capsys.readouterr().err
