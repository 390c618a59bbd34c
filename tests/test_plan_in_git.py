"""Plan files under version control: a local change of a model, or of its source, changes few lines of the file."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import make_plan
from test_stages import plan as staged_plan

import autopar
from autopar.errors import PlanFileError
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.node_names import NodeNames
from autopar.pipeline.plan import AnyPlan
from autopar.pipeline.plan_files import plan_from_json

SLOW_GPU = str(Path(__file__).parent / "profiles" / "slow_gpu.toml")

MODEL = """
import jax


def layer(p, x):
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def loss(params, x):
    for p in params["layers"]:
        x = layer(p, x)
    return ((x @ params["head"]) ** 2).mean()


def step(state, x):
    value, grads = jax.value_and_grad(loss)(state["params"], x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}, value
"""


def saved(plan: AnyPlan, path: Path) -> list[str]:
    """The lines of its file, each below the name of the part that it stands in."""
    plan.save(path)
    part, out = "", []
    for line in path.read_text().splitlines():
        part = line.split('"')[1] if line.startswith('  "') else part
        out.append(f"{part} {line.rstrip(',')}")  # a comma follows all entries but the last
    return out


def changed(before: list[str], after: list[str]) -> tuple[Counter[str], Counter[str]]:
    """By part of the file, how many lines are removed, and how many added."""
    lines = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in ("---", "+++")]
    removed, added = ([line[1:].split()[0] for line in lines if line[0] == sign] for sign in "-+")
    return Counter(removed), Counter(added)


def written(text: str, folder: Path) -> ModuleType:
    path = folder / "model.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("model_of_a_user", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plan_of_text(text: str, folder: Path, num_layers: int = 3) -> autopar.Plan:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32")

    layers = [{"up": array(256, 1024), "down": array(1024, 256)} for _ in range(num_layers)]
    params = {"head": array(256, 256), "layers": layers}
    state = {"params": params, "moments": params}
    plan = autopar.plan(written(text, folder).step, state, array(64, 256), mesh="2x4", hardware=SLOW_GPU)
    assert isinstance(plan, autopar.Plan)
    return plan


def gpt(num_layers: int) -> AnyPlan:
    sizes = programs.GPTSizes(num_layers=num_layers, hidden=256, dropout_rate=0.0)
    program = programs.gpt(batch=32, sizes=sizes)
    return autopar.plan(program.step, *program.abstract_args(), mesh="2x4", hardware=SLOW_GPU)


@pytest.mark.slow
def test_a_layer_more_is_its_own_lines(tmp_path: Path) -> None:
    """In the midst of a GPT, between embedding and head: of what tensors, decisions, collectives and constraints say of
    other layers, one line changes, of a choice beside the new layer. The rest are sums over the step, and columns."""
    before, after = (saved(gpt(n), tmp_path / "plan.json") for n in (2, 3))
    removed, added = changed(before, after)
    assert Counter(["constraints", "decisions", "collectives"]) <= added  # it is split, and sends
    told = ("inputs", "outputs", "constraints", "decisions", "collectives")
    assert sum(removed[part] for part in told) <= 1
    of_a_layer = len(after) - len(before)
    assert removed.total() < of_a_layer / 7 and added.total() < of_a_layer * 8 / 7


def test_a_line_more_above_a_model_changes_a_line_for_each_function(tmp_path: Path) -> None:
    before, after = (saved(plan_of_text(text, tmp_path), tmp_path / "plan.json") for text in (MODEL, f"\n{MODEL}"))
    assert changed(before, after) == (Counter(sources=3), Counter(sources=3))  # layer, loss, step


def test_a_model_without_modules_is_told_by_its_arrays(tmp_path: Path) -> None:
    """And a layer more at its end renames nothing, though all stands in the same three functions."""
    three, four = (plan_of_text(MODEL, tmp_path, n) for n in (3, 4))
    places = [one.at for one in three.constraints]
    assert "forward state/params/layers/0/up max #1" in places
    assert "update state/params/layers/2/down sub #1" in places
    assert len(set(places)) == len(places)
    said = {one.at: one.shardings for one in four.constraints}
    assert [said.get(one.at) for one in three.constraints] == [one.shardings for one in three.constraints]


def test_a_plan_of_stages_opens_up_too(tmp_path: Path) -> None:
    """What its stages are made of stands one record a line, and round its columns nothing is lost."""
    plan = staged_plan()
    lines = saved(plan, tmp_path / "plan.json")
    assert plan_from_json(json.loads((tmp_path / "plan.json").read_text())) == plan
    assert sum(line.strip().startswith("stages") and '"role": "parameter"' in line for line in lines) >= 4
    assert max(len(line) for line in lines if "num_bytes" in line and "start_ns" not in line) < 400


def test_names_of_values() -> None:
    """By the module, or the array that is worked on; by what kind, and which of these; with its result where there are
    several."""
    shape = Value(shape=(8, 8), dtype="float32", itemsize=4.0)
    graph = Graph(
        values=(shape,) * 7,
        nodes=(
            Node("dot_general", {}, (0, 1), (2,), path="net/h_0", phase="forward"),
            Node("split", {}, (2,), (3, 4), path="net/h_10", phase="forward"),
            Node("mul", {}, (1, None), (5,)),
            Node("mul", {}, (5, 6), (6,)),
        ),
        inputs=(0, 1),
        input_paths=("x", "params/w"),
        outputs=(6,),
        output_paths=("out/w",),
    )
    names = NodeNames(graph)
    assert [names.value(n) for n in range(7)] == [
        "x",
        "params/w",
        "forward net/h_0 dot_general #1",
        "forward net/h_10 split #1, result 0",
        "forward net/h_10 split #1, result 1",
        "update params/w mul #1",
        "update params/w mul #2",
    ]
    assert names.reading(0, 1) == "forward net/h_0 dot_general #1, operand 1"
    assert names.reading(4, 0) == "out/w"
    places = [(2, 0, 1), (6, 4, 0), (3, None, None), (5, None, None), (2, None, None), (1, None, None)]
    assert [value for value, *_ in sorted(places, key=lambda place: names.order(*place))] == [1, 2, 2, 3, 5, 6]


@settings(max_examples=100)
@given(
    st.lists(
        st.one_of(st.text(max_size=8), st.from_regex(r"a?( \(b)?\.py:[0-9]{1,3}( \(f\))?")), min_size=3, max_size=3
    )
)
def test_any_source_survives_its_column(sources: list[str]) -> None:
    """Whatever a line of code is called."""
    plan = make_plan()
    named = [replace(use, source=text) for use, text in zip(plan.collectives, sources, strict=True)]
    plan = replace(plan, collectives=tuple(named))
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("place", ["constraints.value", "decisions.source", "donated"])
def test_damage_in_a_stage_is_named(place: str) -> None:
    document = json.loads(json.dumps(staged_plan().to_json()))
    document["stages"][1]["plan"]["numbers"][place] = "x"
    with pytest.raises(PlanFileError, match=rf"`stages\[1\]\.plan\.numbers\.{place}` must be a list"):
        plan_from_json(document)
