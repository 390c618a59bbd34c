"""An exported file runs without autopar, and compiles to the same program as the plan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cli.main import main
from autopar.code_export.export import _table
from autopar.code_export.name_patterns import as_patterns, inputs_as_patterns
from autopar.code_export.value_places import places_of
from autopar.errors import ExportError, MeshError, PlanFileError, PlanMismatchError
from autopar.frontend.step import Step
from autopar.frontend.tracing import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.plan_files import load_plan
from autopar.plans.plan import Plan
from autopar.plans.records import TensorPlan
from autopar.runtime import jit as execute
from autopar.transforms.program import program_of
from autopar.xla_compiler import hlo_collectives as hlo

HERE = Path(__file__).parent

#: A slow GPU, on which even these small steps gain from sharding.
SLOW = str(HERE / "profiles" / "slow_gpu.toml")

#: Case of `exported_runs` -> planning options. The MLP becomes tensor parallel, and the GPT ZeRO-sharded; the others
#: follow their pins.
OPTIONS: dict[str, dict[str, Any]] = {
    "mlp": {"mesh": "data=2,model=4", "memory_budget_bytes": 450_000},
    "gpt": {"mesh": "8", "pin": {"state/params/*/kernel": P("data")}},
    "equinox": {"mesh": "data=2,model=4", "pin": {"x": P("data"), "model/layers/0/weight": P("model")}},
    "nnx": {"mesh": "data=2,model=4", "pin": {"x": P("data"), "params/first/kernel*": P(None, "model")}},
    "loop": {"mesh": "8", "pin": {"weights": P(None, None, "data")}},
}


def collectives(text: str) -> dict[str, tuple[int, float]]:
    """Number and bytes of the collectives' buffers, by kind."""
    count: Counter[str] = Counter()
    num_bytes: dict[str, float] = defaultdict(float)
    for one in hlo.collectives(text, ignore_up_to=0):
        count[one.kind] += one.num_times * (1 if one.kind == "all-to-all" else one.num_results)
        num_bytes[one.kind] += one.num_times * sum(one.payloads(8))
    return {kind: (count[kind], num_bytes[kind]) for kind in sorted(count)}


@pytest.mark.slow
def test_exported_files_run_without_autopar_and_send_what_the_plan_sends(tmp_path: Path) -> None:
    import exported_runs

    planned = {}
    for name, options in OPTIONS.items():
        step, args = exported_runs.CASES[name]()
        plan = autopar.plan(step, *args, hardware=SLOW, dims_as_written=True, **options)
        (tmp_path / f"{name}.py").write_text(autopar.export(plan, step, *args))
        program = program_of(step, args, carry=None, donate=None).of(plan)
        jitted = execute.jit_plan(plan, program.trace, execute.make_mesh(plan.mesh))
        planned[name] = collectives(jitted.lower(*program.trace.arguments).compile().as_text())
    command = [sys.executable, str(HERE / "exported_runs.py"), str(tmp_path), *OPTIONS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert all(difference < 1e-4 for difference in json.loads(result.stdout).values()), result.stdout
    for name, expected in planned.items():
        assert expected, f"{name}: nothing is sent"
        assert collectives((tmp_path / f"{name}.hlo").read_text()) == expected, name


# The text of the file.


def pure_step() -> tuple[Any, tuple[Any, ...]]:
    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    f32 = jnp.float32
    shapes = {"up": jax.ShapeDtypeStruct((64, 256), f32), "down": jax.ShapeDtypeStruct((256, 64), f32)}
    return step, (shapes, jax.ShapeDtypeStruct((32, 64), f32))


def pinned(**more: Any) -> tuple[Plan, Any, tuple[Any, ...]]:
    step, args = pure_step()
    pins = {"x": P("data"), "params/up": P(None, "model"), "params/down": P("model")}
    return autopar.plan(step, *args, mesh="data=2,model=4", hardware="h100-sxm", pin=pins, **more), step, args


def test_the_file_has_idiomatic_shardings() -> None:
    plan, step, args = pinned()
    text = autopar.export(plan, step, *args)
    assert "import autopar" not in text
    assert '    "params/down": P("model"),\n' in text
    assert '    "params/up": P(None, "model"),\n' in text
    assert '    "out/0": "params",\n' in text
    assert '    "forward dot_general #' in text
    assert re.search(r"    # test_export\.py:\d+\n", text)
    assert 'jax.make_mesh((2, 4), ("data", "model")' in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_file_rejects_another_step(tmp_path: Path) -> None:
    plan, step, args = pinned()
    names: dict[str, Any] = {"__name__": "exported"}
    sys.modules["exported"] = type(sys)("exported")
    exec(autopar.export(plan, step, *args), names)
    mesh = names["make_mesh"]()
    with pytest.raises(TypeError, match="the step takes params, x; 1 example arguments were given"):
        names["shard"](step, mesh, args[0])
    with pytest.raises(ValueError, match=r"the step has no '\w+ .*': this file is for another step"):
        names["shard"](lambda params, x: (params, jnp.sum(x)), mesh, *args).lower(*args)
    with pytest.raises(ValueError, match="no argument has an array 'params/down': this file is for another step"):
        names["shard"](lambda params, x: (params, jnp.sum(x)), mesh, {"up": args[0]["up"]}, args[1])


def test_plans_beyond_shardings_are_errors() -> None:
    plan, step, args = pinned(num_microbatches=2)
    with pytest.raises(ExportError, match=r"accumulates gradients over 2 microbatches.*num_microbatches=1"):
        autopar.export(plan, step, *args)
    plan, _, _ = pinned()
    with pytest.raises(PlanMismatchError, match="made for another program"):
        autopar.export(plan, lambda params, x: (params, jnp.sum(x)), *args)
    with pytest.raises(ExportError, match=r"changes objects in place, or has static or keyword arguments"):
        keyword = Step(lambda params, *, x: step(params, x), kwargs={"x": args[1]})
        autopar.export(plan, keyword, args[0])


def test_the_command_writes_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    plan, step, args = pinned()
    plan.save(tmp_path / "p.json")
    (tmp_path / "train.py").write_text("from test_export import pure_step\n\ndef make():\n    return pure_step()\n")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "p.json", "train.py:make", "-o", "sharded.py"]) == 0
    assert capsys.readouterr().out == "Saved to sharded.py; it needs JAX alone.\n"
    assert (tmp_path / "sharded.py").read_text() == autopar.export(plan, step, *args)
    assert main(["export", "p.json", "train.py:make"]) == 0
    assert capsys.readouterr().out == (tmp_path / "sharded.py").read_text()


# Hostile names stay strings.

#: Unescaped, each would run code or end its string.
HOSTILE = (
    'w": P(), **(ran.append(()) or {}), "z',
    "w') or ran.append(()) or P('",
    '"""\nran.append(())\n"""',
    "w\nran.append(())\n",
    "w\rran.append(())\r",
    "\\",
    'w\\"""; ran.append(())',
    "\x1b[J\u2028\u202e\ud800",
)


def run_exported(text: str) -> dict[str, Any]:
    """Run an exported file and return its names; code in hostile names must not run."""
    names: dict[str, Any] = {"__name__": "exported", "ran": []}
    sys.modules["exported"] = type(sys)("exported")
    exec(compile(text.encode(), "exported.py", "exec"), names)
    assert not names["ran"], "a name was run"
    return names


def test_names_of_parameters_are_text_in_the_file() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        return {name: p * jnp.sum(x) for name, p in params.items()}, jnp.sum(x)

    args = {name: jax.ShapeDtypeStruct((8, 8), jnp.float32) for name in HOSTILE}, jax.ShapeDtypeStruct((8, 8), "f4")
    specs = [P(), P("data"), P(None, "data")]
    pins = {f"params/{re.sub(r'[*?[]', '?', name)}": specs[n % 3] for n, name in enumerate(HOSTILE)}
    plan = autopar.plan(step, *args, mesh="data=2", hardware="h100-sxm", pin=pins)
    made = run_exported(autopar.export(plan, step, *args))
    assert made["SHARDINGS"] == {f"params/{name}": specs[n % 3] for n, name in enumerate(HOSTILE) if n % 3}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_descriptions_of_a_plan_are_escaped(hostile: str) -> None:
    plan, step, args = pinned()
    evil = replace(plan, hardware=hostile, strategy=hostile, program=replace(plan.program, name=hostile))
    made = run_exported(autopar.export(evil, step, *args))
    assert made["ARGUMENTS"] == ("params", "x")
    assert made["__doc__"].isascii() and "\x1b" not in made["__doc__"]


def test_lines_of_code_are_comments_in_the_file() -> None:
    text = _table("T", "Mapping[str, str]", "", [("a", '"b"', "x.py\nran.append(())"), ("c", '"d"', "")])
    assert run_exported("from collections.abc import Mapping\n" + text)["T"] == {"a": "b", "c": "d"}


@pytest.mark.parametrize("name", ["d') or ran.append(()) or P('", "a b", "2", "", "a\n"])
def test_an_axis_of_a_mesh_is_an_identifier(name: str, tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=re.escape(f"a mesh axis is called {name!r}: give it a Python identifier")):
        MeshShape(("data", name), (2, 4))
    plan, _, _ = pinned()
    written = json.dumps(plan.to_json()).replace('"data"', json.dumps(name))
    (tmp_path / "p.json").write_text(written)
    with pytest.raises(
        PlanFileError, match=r"cannot use the plan file .* its field `mesh` is not a mesh: a mesh axis is"
    ):
        load_plan(tmp_path / "p.json")


# Names.


def test_values_are_named_after_their_producer_and_operands_after_their_user() -> None:
    """In a loop: a carry, a row, and results that the body passes on, computes or shares."""

    def step(x: jax.Array, rows: jax.Array) -> Any:
        def body(carry: jax.Array, row: jax.Array) -> Any:
            return jnp.sin(carry), (carry, row, carry + row)

        return jax.lax.scan(body, x, rows)

    shapes = jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((3, 8), jnp.float32)
    places = places_of(step, shapes, trace(step, shapes, names=["x", "rows"]))
    made, read = [*places.made.values()], [*places.read.values()]
    assert made[:4] == [
        "update scan #1, jaxpr 0 takes 0",
        "update scan #1, jaxpr 0 takes 1",
        "update sin #1",
        "update add #1",
    ]
    assert not [name for name in made if ", operand " in name or " gives " in name]
    assert [name for name in read if " gives " in name] == [f"update scan #1, jaxpr 0 gives {n}" for n in range(3)]


def test_a_pattern_matches_names_of_equal_value_and_no_others() -> None:
    said = {"h/0/k": 1, "h/1/k": 1, "h/2/k": 1, "top": 2}
    assert as_patterns(said, ["h/0/b"]) == [("h/*/k", 1), ("top", 2)]
    assert as_patterns({"h/0": 1, "h/2": 1}, ["h/1"]) == [("h/{0,2}", 1)]
    grid = {f"h/{n} add #{k}": 1 for n in range(2) for k in (1, 2)}
    assert as_patterns(grid, [f"h/{n} add #3" for n in range(2)]) == [("h/* add #{1,2}", 1)]


def test_one_pattern_matches_a_parameter_and_its_moments() -> None:
    split, whole = TensorSharding(((), ("model",))), TensorSharding(((), ()))

    def tensors(moment: TensorSharding) -> list[TensorPlan]:
        about = {"shape": (8, 8), "dtype": "float32", "num_bytes": 1.0}
        found = [TensorPlan(path=f"s/params/h_{n}/k", role="parameter", sharding=split, **about) for n in range(2)]
        return found + [
            TensorPlan(path=f"s/opt/0/mu/h_{n}/k", role="optimizer", sharding=moment, **about) for n in range(2)
        ]

    both = tensors(split)
    assert inputs_as_patterns(both, [one.path for one in both]) == [("**/h_*/k", split)]
    apart = tensors(whole)
    assert inputs_as_patterns(apart, [one.path for one in apart]) == [("s/params/h_*/k", split)]
