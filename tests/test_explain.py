"""Explanations of a plan: the decision, its optimality, its reason, and its price; equal rows become one."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console
from test_plan import make_plan

from autopar.ir.mesh import MeshShape
from autopar.plans.plan import Plan
from autopar.plans.records import Replicated, Tie
from autopar.report.explain import explain, explain_json, render, render_summary
from autopar.report.explain_program import MAX_ROWS
from autopar.system.name_patterns import collapse
from autopar.system.text_tables import TEXT_WIDTH, short_source
from autopar.system.units import human_bytes, human_seconds

#: All of `explain` for the hand-made plan. After a wanted change, paste what the test prints.
GOLDEN = """\
Plan of `train_step` for 8 h100-sxm devices, mesh 2x4 (data=2, model=4)

  Strategy   data parallel over `data`, tensor parallel over `model` in fc_in and fc_out
  Certainty  proven optimal: in the solver's model none is faster by more than one part in a million
             (120 decisions, 1,450 strategies, solved in 420 ms)
  Pinned     state/params/*/fc_in/kernel = P(None, 'model')

Predicted step time: 2.60 ms
  compute              1.97 ms   76 %  ##############################
  all-reduce            630 us   24 %  ##########
XLA's estimate, simulated: 2.50 ms (expected from XLA's latency estimator; `verify` compares it)

Predicted peak memory per device: 12.0 GB of 40.0 GB (30 %)
  parameters           1.50 GB   12 %  #####
  optimizer state      3.00 GB   25 %  ##########
  data                 1.00 MB    0 %
  temporaries          7.50 GB   62 %  #########################

How to read it: P('data', None) shards dim 0 of a tensor over the mesh axis `data` and leaves dim 1
whole; P() keeps a copy on every device. `cost` is the time of one tensor's sharding in a step: its
own kernel and the collectives next to it. `runner-up` is the next best sharding of this tensor,
with all others fixed, and the time that it would add to the step. A `-` marks a tensor too small
for a decision. Identical layers share a row: `h_{0..11}/kernel` x12.

Parameters: 7 tensors, 25.2 MB, 6.29 MB on each device; paths under state/params/

  tensor                  sharding             cost  runner-up, collectives caused
  --------------------------------------------------------------------------------
  h_{0..2}/fc_in/kernel   P(None, 'model')  12.5 us
    f32[512,2048]  x3     pinned
  h_{0..2}/fc_out/kernel  P('model')        12.5 us  P(): +45.0 us
    f32[2048,512]  x3                                all-reduce over model: 210 us
  norm/bias               P()                     -  -
    f32[512]

Data and other arguments: 1 tensor, 32.8 KB, 16.4 KB on each device

  tensor         sharding   cost  runner-up, collectives caused
  -------------------------------------------------------------
  batch/x        P('data')     -  -
    f32[16,512]

Optimizer state, by sharding; paths under state/opt_state/0/mu/

  sharding          tensors   global  per device  the largest
  -----------------------------------------------------------------
  P(None, 'model')        3  12.6 MB     3.15 MB  h_0/fc_in/kernel
  P('model')              3  12.6 MB     3.15 MB  h_0/fc_out/kernel
  P()                     1  2.05 KB     2.05 KB  norm/bias

Large activations, the largest first

  produced by              sharding                    cost  runner-up, collectives caused
  ----------------------------------------------------------------------------------------
  GPT/h_{0..2}/fc_in       P('data', None, 'model')  300 us  P('data'): +220 us
    bf16[16,256,2048]  x3
    forward dot_general
    gpt.py:30

Collectives: 3 in a step, 630 us; data per device

  collective    count  total time  total data  cause
  --------------------------------------------------------------------------------------------------
  all-reduce        3      630 us     25.2 MB  sum the result of `GPT/h_{0..2}/fc_out` over its
    over model                                 split inner dim
                                                 forward, gpt.py:31

Other meshes, planned and rejected

  mesh                     predicted step  peak memory  strategy
  -------------------------------------------------------------------
  8 (data=8)             3.10 ms, +19.2 %      20.0 GB  data parallel
  4x2 (data=4, model=2)      does not fit      50.0 GB

Notes
  - primitive `fft` has no sharding rule: it runs replicated and is priced so
"""


def test_whole_text() -> None:
    text = str(explain(make_plan()))
    print(text)
    assert text + "\n" == GOLDEN


def test_text_is_plain_and_narrow() -> None:
    text = str(explain(make_plan(12)))
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    assert repr(explain(make_plan())) == str(explain(make_plan()))


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_terminal_gets_styles_and_every_word(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        render(make_plan(), console)
    assert "\x1b[" in captured.get()
    plain = Console(file=io.StringIO(), width=width, color_system=None)
    with plain.capture() as captured:
        render(make_plan(), plain)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    together = "".join("".join(lines).split())
    for word in ("all-reduceovermodel", "fc_out/kernel", "proven", "doesnotfit"):
        assert word in together or width < 100


def test_users_text_is_never_markup() -> None:
    plan = replace(make_plan(), strategy="[red]split[/red] :smile:", notes=("[bold]x", "f32[8]"))
    text = str(explain(plan))
    assert "[red]split[/red] :smile:" in text
    assert "[bold]x" in text


def test_layers_collapse_to_one_row() -> None:
    told = explain(make_plan(12))
    assert [(row.path, row.count) for row in told.parameters] == [
        ("state/params/h_{0..11}/fc_in/kernel", 12),
        ("state/params/h_{0..11}/fc_out/kernel", 12),
        ("state/params/norm/bias", 1),
    ]
    assert [(row.path, row.count) for row in told.activations] == [("GPT/h_{0..11}/fc_in", 12)]
    assert [(row.cause, row.count) for row in told.collectives] == [
        ("sum the result of `GPT/h_{0..11}/fc_out` over its split inner dim", 12)
    ]
    assert [(row.sharding, row.num_tensors) for row in told.optimizer] == [
        ("P(None, 'model')", 12),
        ("P('model')", 12),
        ("P()", 1),
    ]


def test_layers_that_differ_stay_separate() -> None:
    plan = make_plan(4)
    other = replace(plan.inputs[0], sharding=plan.inputs[1].sharding)
    rows = explain(replace(plan, inputs=(other, *plan.inputs[1:]))).parameters
    assert [row.path for row in rows if "fc_in" in row.path] == [
        "state/params/h_0/fc_in/kernel",
        "state/params/h_{1..3}/fc_in/kernel",
    ]


def test_spread_of_alike_rows_is_told() -> None:
    plan = make_plan(3)
    spread = [replace(d, runner_up_extra_s=d.runner_up_extra_s * (1 + i)) for i, d in enumerate(plan.decisions)]
    assert "P(): +90.0-270 us" in str(explain(replace(plan, decisions=tuple(spread))))


@pytest.mark.parametrize(
    ("texts", "patterns"),
    [
        (["a", "b"], ["a", "b"]),
        (["h_0/k", "h_1/k"], ["h_{0,1}/k"]),
        ([f"h/{i}/k" for i in (10, 2, 0, 1)], ["h/{0,1,2,10}/k"]),
        ([f"Dense_{i}" for i in (0, 2, 4, 6)], ["Dense_{0,2,..,6}"]),
        ([f"s{i}/b{j}" for i in range(2) for j in range(3)], ["s{0,1}/b{0..2}"]),
        (["s0/b0", "s0/b1", "s1/b0"], ["s0/b{0,1}", "s1/b0"]),
        ([f"h_{i}: reads {i + 1}, {i}" for i in range(5)], ["h_{0..4}: reads {1..5}, {0..4}"]),
        (["h_0/k", "h_0/k", "h_1/k"], ["h_{0,1}/k"]),
        (["layer_00", "layer_01", "layer_02"], ["layer_{00..02}"]),
        ([], []),
    ],
)
def test_collapse(texts: list[str], patterns: list[str]) -> None:
    found = collapse(texts)
    assert [pattern for pattern, _ in found] == patterns
    assert sorted(position for _, positions in found for position in positions) == list(range(len(texts)))


def test_gap_is_stated() -> None:
    plan = make_plan()
    stopped = replace(plan, outcome=replace(plan.outcome, gap=0.034, status="feasible, stopped by the time limit"))
    assert "within 3.4 % of the optimum; feasible, stopped by the time limit" in str(explain(stopped))
    unbounded = replace(plan, outcome=replace(plan.outcome, gap=math.inf, status="feasible"))
    assert "not bounded; feasible" in str(explain(unbounded))


def test_what_runs_replicated_is_told_beside_the_strategy() -> None:
    """With its share of the step; and the certainty does not read as if that were no matter."""
    plan = make_plan()
    replicated = (
        Replicated(name="mha_forward", count=2, time_s=0.7e-3, source=""),
        Replicated(name="fft", count=1, time_s=0.1e-3, source=""),
    )
    text = " ".join(str(explain(replace(plan, replicated=replicated))).split())
    assert (
        "Replicated 3 operations have no sharding rule and run replicated on all 8 devices: `mha_forward` x2 (27 %), `fft`"
        " (4 %); 31 % of the step Certainty proven optimal among the strategies of the known sharding rules: in the solver's model"
        " none is faster" in text
    )
    one = replace(plan, replicated=(replace(replicated[1], time_s=1e-6),))
    told = "1 operation has no sharding rule and runs replicated on all 8 devices: `fft`; under 1 % of the step"
    assert told in " ".join(str(explain(one)).split())
    assert explain_json(one)["replicated"] == [{"name": "fft", "count": 1, "time_s": 1e-6, "source": ""}]
    many = replace(plan, replicated=tuple(Replicated(name=f"op{n}", count=1, time_s=0.0, source="") for n in range(6)))
    assert "`op0`, `op1`, `op2`, `op3` and 2 more; under" in " ".join(str(explain(many)).split())
    alone = replace(plan, replicated=replicated, mesh=MeshShape(("data", "model"), (1, 1)))
    assert "Replicated" not in str(explain(alone))
    for told in (plan, alone):
        assert "among the strategies" not in str(explain(told))


def test_a_tie_is_told() -> None:
    plan = make_plan()
    tie = Tie(
        mesh=MeshShape(("data",), (8,)), strategy="data parallel, parameters sharded", num_split=19, faster=0.0012
    )
    tied = replace(plan, tie=tie, outcome=replace(plan.outcome, gap=0.0015))
    text = " ".join(str(explain(tied)).split())
    assert "Certainty within 0.15 % of the optimum, in the solver's model" in text
    assert (
        "Tie the simplest plan within 0.5 % of the fastest, with 13 sharded arguments. 0.12 % faster, with 19 sharded:"
        " data parallel, parameters sharded, on mesh 8" in text
    )
    assert explain_json(tied)["tie"]["faster"] == 0.0012
    assert Plan.from_json(tied.to_json()) == tied


def test_both_step_times_have_names_of_their_own() -> None:
    text = str(explain(make_plan()))
    assert "Predicted step time: 2.60 ms" in text and "XLA's estimate, simulated: 2.50 ms (" in text
    unknown = replace(make_plan().prediction, xla_step_time_s=None, xla_exposed_s=None)
    assert "simulated" not in str(explain(replace(make_plan(), prediction=unknown)))


def test_a_bare_plan_is_explained() -> None:
    """One device, no decisions, no collectives, no budget."""
    plan = make_plan(0)
    bare = replace(plan, decisions=(), collectives=(), rejected=(), notes=(), pins={}, memory_budget_bytes=None)
    text = str(explain(bare))
    assert "12.0 GB (no budget given: the device's memory)" in text
    assert "Collectives: none" in text
    for absent in ("Large activations", "Other meshes", "Notes", "Pinned"):
        assert absent not in text


def test_only_what_nothing_hides_adds_to_the_step() -> None:
    plan = make_plan()
    exposed = replace(plan.prediction, step_time_s=2.0e-3, compute_s=1.9e-3, exposed_s={"all-reduce": 1e-4})
    rows = [line.split()[:5] for line in str(explain(replace(plan, prediction=exposed))).splitlines()]
    assert ["all-reduce", "100", "us", "5", "%"] in rows
    assert ["compute", "1.90", "ms", "95", "%"] in rows


def long_plan() -> Plan:
    """More kinds of activations and collectives than are shown."""
    plan = make_plan(1)
    activation, use = plan.decisions[-1], plan.collectives[0]
    names = [f"module_{'x' * n}" for n in range(1, 31)]
    return replace(
        plan,
        decisions=tuple(replace(activation, path=name, shape=(16, 256, 8 * len(name))) for name in names),
        collectives=tuple(replace(use, cause=name, combinable=True) for name in names),
    )


def test_long_tables_say_what_they_leave_out() -> None:
    text = str(explain(long_plan()))
    assert f"and {30 - MAX_ROWS} rows of smaller activations; --json has all" in text
    assert f"and {30 - MAX_ROWS} more rows, 2.94 ms; --json has all" in text
    assert "* XLA may combine these into fewer" in text
    assert len(explain_json(long_plan())["activations"]) == 30


def test_summary_is_the_head_alone() -> None:
    console = Console(file=io.StringIO(), width=TEXT_WIDTH)
    with console.capture() as captured:
        render_summary(make_plan(), console)
    text = captured.get()
    assert "Predicted step time: 2.60 ms" in text
    assert "Notes" in text
    assert "Parameters:" not in text
    assert "Parameters:" not in explain(make_plan()).summary


def test_json_is_for_programs() -> None:
    told = json.loads(json.dumps(explain_json(make_plan()), allow_nan=False))
    assert told["format"] == "autopar-explanation"
    assert told["mesh"] == {"data": 2, "model": 4}
    assert told["prediction"]["peak_bytes"] == pytest.approx(1.2001e10)
    assert told["rejected"][1]["step_time_s"] is None
    column = told["parameters"][0]
    assert (column["path"], column["count"], column["pinned"]) == ("state/params/h_{0..2}/fc_in/kernel", 3, True)
    assert column["num_bytes"] == 4 * column["local_bytes"] == 3 * 4 * 512 * 2048
    assert told["activations"][0]["source"] == "/home/me/models/gpt.py:30 (__call__)"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (12_345, "12.3 KB"), (999_600, "1.00 MB"), (4e13, "40.0 TB")],
)
def test_human_bytes(num_bytes: float, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (5e-9, "5.00 ns"), (1.5e-5, "15.0 us"), (-2e-3, "-2.00 ms"), (75, "75.0 s"), (4321, "4,321 s")],
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("/home/me/gpt.py:12 (loss)", "gpt.py:12"),
        ("C:\\me\\gpt.py:3 (f)", "gpt.py:3"),
        ("", ""),
        ("builtin", "builtin"),
    ],
)
def test_short_source(source: str, text: str) -> None:
    assert short_source(source) == text
