"""The values in all reports of a plan: parts that add up to the prediction, memory curves with its peaks as maxima."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from once_a_session import once_a_session
from test_plan import make_plan
from test_stages import plan as staged_plan

import autopar
from autopar.errors import PlanFileError
from autopar.ir.device_program import Buffer, DeviceProgram, Op, buffers_at_peak, live_temporaries
from autopar.ir.graph import Graph, Node
from autopar.pipeline.plan import PipelinePlan
from autopar.plans.json_codec import encode
from autopar.plans.plan import Plan
from autopar.report.breakdown import memory_use, step_time
from autopar.report.module_tree import Module, module_tree
from autopar.xla_model import step_summary as over_time
from autopar.xla_model.timeline import Ran, Timeline


@cache
def transformer_plan(num_microbatches: int = 1) -> Plan:
    """Three layers alike and what Adam keeps of them, large enough to be split; as from a file."""

    def made() -> Any:
        model = programs.bert_layers(batch=64, seq=512, hidden=1024, heads=16, num_layers=3)
        options = {"mesh": "2x4", "hardware": "h100-sxm", "num_microbatches": num_microbatches}
        return autopar.plan(model.step, *model.abstract_args(), **options).to_json()

    return Plan.from_json(once_a_session(f"transformer-plan-{num_microbatches}", made))


# -- time and memory -------------------------------------------------------------------------


def test_parts_sum_up_to_the_prediction() -> None:
    plan = transformer_plan()
    time, memory = step_time(plan), memory_use(plan)
    assert sum(seconds for _, seconds in time.parts) == pytest.approx(plan.prediction.step_time_s)
    assert sum(size for _, size in memory.parts) == pytest.approx(plan.prediction.peak_bytes)
    assert max(memory.over_step) == plan.prediction.peak_bytes
    assert min(memory.over_step) >= memory.steady_bytes * (1 - 1e-9)
    assert sum(parts for _, parts in memory.phases) == len(memory.over_step)
    assert memory.phases[0][0] == "forward"


def test_what_stands_at_the_peak_is_there() -> None:
    plan = transformer_plan()
    held = memory_use(plan).at_peak
    assert 0.9 * plan.prediction.temporary_bytes < sum(one.num_bytes for one in held)
    assert sum(one.num_bytes for one in held) <= plan.prediction.temporary_bytes * (1 + 1e-9)
    scores = [one for one in held if one.shape == (64, 16, 512, 512)]
    # Each layer's scores, which the matmul divides, and their softmax.
    assert any(one.path.endswith("PostNormLayer_{0..2}") and one.count == 6 for one in scores)


def test_a_trace_takes_as_long_as_the_step() -> None:
    plan = transformer_plan()
    assert plan.trace is not None
    kernels, sent = plan.trace.kernels, plan.trace.collectives
    ends = [start + ns for start, ns in zip(kernels.start_ns, kernels.ns, strict=True)]
    assert all(end <= start + 2 for end, start in zip(ends, kernels.start_ns[1:], strict=False)), "one after another"
    assert sum(kernels.ns) + sum(sent.exposed_ns) == pytest.approx(1e9 * plan.prediction.step_time_s, rel=1e-4)
    exposed = {kind: 0 for kind, _ in plan.trace.kinds}
    for kind, ns in zip(sent.kind, sent.exposed_ns, strict=True):
        exposed[plan.trace.kinds[kind][0]] += ns
    for kind, seconds in plan.prediction.exposed_s.items():
        assert exposed[kind] == pytest.approx(1e9 * seconds, rel=1e-3, abs=10)


def test_trips_of_a_loop_are_one_stretch() -> None:
    plan = transformer_plan(4)
    assert plan.trace is not None and plan.memory is not None
    assert [trips for _, _, trips in plan.trace.loops] == [4] == [trips for _, _, trips in plan.memory.loops]
    (start, end, _) = plan.trace.loops[0]
    assert 0.5 < (end - start) / (1e9 * plan.prediction.step_time_s) <= 1
    told = sum(plan.trace.kernels.ns) + sum(plan.trace.collectives.exposed_ns)
    assert told == pytest.approx(1e9 * plan.prediction.step_time_s, rel=1e-4)
    assert max(memory_use(plan).over_step) == plan.prediction.peak_bytes


def test_long_traces_are_told_by_the_modules_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of two modules, of two kernels each: by module, by layer, or as one, whichever is few enough."""
    paths = [f"net/layer_{layer}/{name}" for layer in range(2) for name in ("attention", "mlp") for _ in range(2)]
    nodes = tuple(Node("dot_general", {}, (), (), path=path, phase="forward") for path in paths)
    graph = Graph((), nodes, (), (), (), ())
    ran = tuple(Ran(Op("gemm", n, (), (), 0, 0), n * 1e-3, (n + 1) * 1e-3) for n in range(len(paths)))
    timeline = Timeline(8e-3, 8e-3, {}, {}, ran=ran)
    for most, expected in ((4, [2, 2, 2, 2]), (3, [4, 4]), (1, [8])):
        monkeypatch.setattr(over_time, "MAX_RUNS", most)
        trace = over_time.step_trace(graph, DeviceProgram((), ()), timeline)
        assert trace is not None
        assert [round(ns / 1e6) for ns in trace.kernels.ns] == expected
    later = (one._replace(start_s=one.start_s + 1e-3, end_s=one.end_s + 1e-3) for one in ran[1:])
    pause = replace(timeline, ran=(ran[0], *later))
    monkeypatch.setattr(over_time, "MAX_RUNS", 8)
    broken = over_time.step_trace(graph, DeviceProgram((), ()), pause)
    assert broken is not None and len(broken.kernels.ns) == 5, "a pause ends a run"


SIZES = st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=6)


@settings(deadline=None)
@given(SIZES, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_what_is_live_by_its_definition(sizes: list[float], uses: list[tuple[int, int]]) -> None:
    """A buffer is live from the first operation that has to do with it to the last."""
    buffers = tuple(Buffer(size, n, argument=n == 1) for n, size in enumerate(sizes))
    ops = tuple(Op("fusion", 0, (a % len(sizes),), (b % len(sizes),), 0, 0) for a, b in uses)
    program = DeviceProgram(ops, buffers)
    touched = [{*op.reads, *op.writes} for op in ops]
    expected = [
        sum(
            size
            for n, size in enumerate(sizes)
            if n != 1 and any(n in own for own in touched[: at + 1]) and any(n in own for own in touched[at:])
        )
        for at in range(len(ops))
    ]
    assert live_temporaries(program) == expected
    at, held = buffers_at_peak(program)
    assert expected[at] == max(expected) == sum(buffer.num_bytes for buffer in held)


# -- files -----------------------------------------------------------------------------------


def test_a_plan_s_file_keeps_the_step_over_time() -> None:
    plan = transformer_plan()
    text = json.dumps(plan.to_json())
    read = Plan.from_json(json.loads(text))
    assert read.trace == plan.trace and read.memory == plan.memory
    assert len(json.dumps([plan.to_json()["trace"], plan.to_json()["memory"]])) < 0.2 * len(text)


def test_files_of_version_1_are_read() -> None:
    """They say nothing of the step over time: the parts still sum up."""
    plan = transformer_plan()
    head = {"format": "autopar-plan", "version": 1}
    old = head | {key: value for key, value in encode(plan).items() if key not in ("trace", "memory")}
    read = Plan.from_json(old)
    assert read == replace(plan, trace=None, memory=None)
    assert read.to_json()["version"] == plan.to_json()["version"] and Plan.from_json(read.to_json()) == read
    assert memory_use(read).over_step == () and memory_use(read).peak_bytes == plan.prediction.peak_bytes
    assert sum(seconds for _, seconds in step_time(read).parts) == pytest.approx(plan.prediction.step_time_s)
    stages: dict[str, Any] = {"format": "autopar-pipeline-plan", "version": 1} | encode(staged_plan())
    for stage in stages["stages"]:
        del stage["plan"]["trace"], stage["plan"]["memory"]
    assert PipelinePlan.from_json(stages).prediction == staged_plan().prediction


@pytest.mark.parametrize(
    ("where", "what", "words"),
    [
        (("trace", "kernels", "ns"), [1], r"`trace\.kernels` has columns of"),
        (("trace", "kernels", "place", 0), 10**6, r"`trace\.kernels\.place` points outside a list of"),
        (("trace", "collectives", "kind", 0), -1, r"`trace\.collectives\.kind` points outside"),
        (("memory", "phases"), [["forward", 3]], r"`memory\.phases` must have 160 parts together"),
        (("memory", "live_bytes", 0), "much", r"`memory\.live_bytes\[0\]` must be a number"),
    ],
)
def test_a_damaged_trace_is_refused(where: tuple[Any, ...], what: Any, words: str) -> None:
    document = json.loads(json.dumps(transformer_plan().to_json()))
    inside = document
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = what
    with pytest.raises(PlanFileError, match=words):
        Plan.from_json(document)


# -- modules ---------------------------------------------------------------------------------


def inputs_in(module: Module) -> int:
    own = sum(one.row.count for one in module.tensors if one.row.kind != "activation")
    return own + sum(map(inputs_in, module.modules))


def activations_in(module: Module) -> int:
    own = sum(one.row.count for one in module.tensors if one.row.kind == "activation")
    return own + sum(map(activations_in, module.modules))


def test_every_tensor_is_in_the_tree_once() -> None:
    plan = transformer_plan()
    tree = module_tree(plan)
    assert inputs_in(tree.root) + sum(row.count for row in tree.arguments) == len(plan.inputs)
    assert activations_in(tree.root) == sum(one.kind == "activation" for one in plan.decisions)
    assert tree.root.local_bytes == pytest.approx(
        sum(tensor.num_bytes for tensor in plan.inputs if tensor.role != "data"), rel=1e-3
    )


def test_layers_alike_are_one_module() -> None:
    tree = module_tree(transformer_plan())
    assert (tree.parameters_under, tree.activations_under) == ("state/params", "PostNormEncoder")
    (layers,) = tree.root.modules
    assert layers.name == "PostNormLayer_{0..2}" and layers.count == 3 and layers.depth == 1
    kernel = next(one for child in layers.modules if child.name == "ffn_in" for one in child.tensors)
    assert kernel.row.count == 3 and kernel.place[:2] == ("PostNormLayer_{0..2}", "ffn_in")


def test_layers_split_otherwise_stand_apart() -> None:
    plan = make_plan(4)
    inputs = list(plan.inputs)
    position = next(n for n, one in enumerate(inputs) if one.path == "state/params/h_2/fc_in/kernel")
    inputs[position] = replace(inputs[position], sharding=replace(inputs[position].sharding, dims=((), ())))
    names = [module.name for module in module_tree(replace(plan, inputs=tuple(inputs))).root.modules]
    assert names == ["h_{0,1,3}", "h_2", "norm"]


def test_a_model_without_module_names_has_its_parameters() -> None:
    plan = make_plan(1)
    bare = replace(plan, decisions=tuple(replace(one, path="") for one in plan.decisions if one.kind == "activation"))
    tree = module_tree(bare)
    assert tree.parameters_under == "state/params" and activations_in(tree.root) == 1
    assert [module.name for module in tree.root.modules] == ["h_0", "norm"]


# -- stages ----------------------------------------------------------------------------------


def test_submeshes_are_busy_or_idle_and_hold_what_is_predicted() -> None:
    plan = staged_plan()
    told = autopar.explain(plan)
    assert len(told.stages) == len(plan.stages)
    for use, peak in zip(told.submeshes, plan.prediction.stage_bytes, strict=True):
        whole = sum(seconds for _, seconds in use.phases) + use.idle_s
        assert whole == pytest.approx(plan.prediction.step_time_s)
        assert use.peak_bytes == pytest.approx(peak)
        starts = [start for start, _ in use.in_flight]
        assert starts == sorted(starts) and use.in_flight[0][0] >= 0
