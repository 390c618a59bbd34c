"""The page of a plan is well-formed, self-contained, and agrees with the plan, whatever names it contains."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_explained_values import transformer_plan
from test_plan import make_plan
from test_stages import plan as staged_plan

import autopar
from autopar.cli.main import main
from autopar.errors import PlotError, VerifyError
from autopar.ir.mesh import MeshShape
from autopar.pipeline.plan import AnyPlan
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import build
from autopar.plans.records import Replicated, Tie
from autopar.report.html.document import page
from autopar.report.html.markup import written
from autopar.report.html.timeline import MAX_TASKS, pipeline_tracks
from autopar.report.predicted_vs_compiled import compiled_of

_VOID = {"meta", "input", "br"}


class Parsed(HTMLParser):
    """A page as its elements; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text[self.open[-1] if self.open else ""] = self.text.get(self.open[-1] if self.open else "", "") + data

    def all_of(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.elements if (value := attrs.get(attribute)) is not None]


def parsed(plan: AnyPlan, **more: Any) -> Parsed:
    return Parsed(page(autopar.explain(plan), **more))


PLANS: dict[str, Callable[[], AnyPlan]] = {
    "program": transformer_plan,
    "microbatches": lambda: transformer_plan(4),
    "stages": staged_plan,
    "older file": make_plan,
}


def test_the_head_says_what_runs_replicated_and_names_both_step_times() -> None:
    replicated = (Replicated(name="<b>fft", count=2, time_s=0.8e-3, source=""),)
    tie = Tie(mesh=MeshShape(("data",), (8,)), strategy="data parallel", num_split=9, faster=0.0012)
    head = page(autopar.explain(replace(make_plan(), replicated=replicated, tie=tie))).split("<nav")[0]
    assert (
        "2 operations have no sharding rule and run replicated on all 8 devices: <code>&lt;b&gt;fft</code> x2; 31 %"
        in head
    )
    assert "among the strategies of the known sharding rules" in head
    assert (
        "A tie: the simplest plan within 0.5 % of the fastest, with 13 sharded arguments. 0.12 % faster, with 9 sharded"
        in head
    )
    assert "by the cost model, not measured; XLA's estimator would predict 2.50 ms" in head.replace(
        "&#x27;", "'"
    ).replace("&apos;", "'")
    plain = page(autopar.explain(make_plan())).split("<nav")[0]
    assert "replicated on all" not in plain and "A tie" not in plain and "rules know" not in plain
    staged = staged_plan()
    stage = replace(staged.stages[0], plan=replace(staged.stages[0].plan, replicated=replicated))
    staged = replace(staged, stages=(stage, *staged.stages[1:]))
    assert "stage 0: 2 operations have no sharding rule" in page(autopar.explain(staged)).split("<nav")[0]
    assert "stage 0: 2 operations have no sharding rule" in " ".join(str(autopar.explain(staged)).split())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
def test_a_page_is_well_formed_and_whole_in_itself(name: str) -> None:
    told = parsed(PLANS[name]())
    assert not Counter(told.all_of("id")).most_common(1)[0][1] > 1, "an id stands twice"
    ids = set(told.all_of("id"))
    assert all(link[1:] in ids for link in told.all_of("href")), "every link is to a place in the page"
    assert not told.all_of("src") and not [
        tag for tag, _ in told.elements if tag in ("link", "img", "iframe", "object")
    ]
    assert not re.search(r"url\((?!#)|@import|https?:", told.text["style"])
    script = re.sub(r'"http://www\.w3\.org/2000/svg"', "", told.text["script"])
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(|eval\(", script)


def test_a_page_is_small() -> None:
    assert len(page(autopar.explain(transformer_plan()))) < 300_000


def test_the_bar_s_parts_are_the_whole_step() -> None:
    for plan in (transformer_plan(), staged_plan()):
        text = page(autopar.explain(plan))
        for bar in re.findall(r'<div class="bar"[^>]*>(.*?)</div>', text):
            widths = [float(width) for width in re.findall(r"width:([\d.e-]+)%", bar)]
            assert sum(widths) == pytest.approx(100, abs=0.05)


def test_what_a_plan_says_is_in_its_page() -> None:
    plan = replace(transformer_plan(), notes=("primitive `fft` has no sharding rule",), memory_budget_bytes=60e9)
    text = page(autopar.explain(plan))
    assert "PostNormLayer_{0..2}" in text and "x3</span>" in text
    assert "budget 60.0 GB" not in text or plan.prediction.peak_bytes > 20e9
    assert "of the budget of 60.0 GB" in text
    assert "<code>fft</code> has no sharding rule" in text
    older = page(autopar.explain(make_plan()))
    assert "plan again to see memory over the step" in older and "4x2 (data=4, model=2)" in older


#: What would end an attribute, a text, a script or a style, were it not escaped.
NASTY = """</script><script>alert('"&amp;<b>')</script></style>`'"{0..11}"""


def test_users_names_are_text_wherever_they_stand() -> None:
    plan = make_plan()
    inputs = tuple(replace(one, path=one.path.replace("fc_in", NASTY)) for one in plan.inputs)
    decisions = tuple(
        replace(one, path=one.path.replace("fc_in", NASTY), source=f"/home/{NASTY}.py:12 ({NASTY})")
        for one in plan.decisions
    )
    collectives = tuple(replace(one, cause=NASTY, path=NASTY) for one in plan.collectives)
    program = replace(plan.program, name=NASTY)
    odd = replace(
        plan,
        program=program,
        inputs=inputs,
        decisions=decisions,
        collectives=collectives,
        strategy=NASTY,
        notes=(NASTY,),
    )
    before, after = parsed(plan), parsed(odd)
    assert (
        Counter(tag for tag, _ in after.elements)["script"] == 2 == Counter(tag for tag, _ in before.elements)["script"]
    )
    assert not [tag for tag, _ in after.elements if tag == "b" and not after.all_of("data-spec")]
    assert NASTY in after.text["title"] and NASTY in after.text["code"]
    traced = transformer_plan()
    assert traced.trace is not None
    places = tuple((phase, NASTY) for phase, _ in traced.trace.places)
    hostile = replace(traced, trace=replace(traced.trace, places=places))
    told = parsed(hostile)
    known = json.loads(re.findall(r"\{.*\}", told.text["script"].splitlines()[0])[0].split('"use strict"')[0])
    assert any(NASTY in text for track in known.values() for text in track.get("texts", ()))


def test_rows_of_very_many_tasks_stay_small() -> None:
    timeline = simulate(build("1f1b", 2, 200), lambda task: 2.0 if task.phase == "backward" else 1.0, lambda a, b: 0.0)
    figure, known = pipeline_tracks(timeline, "it")
    assert all(len(told["at"]) <= 480 for told in known.values())
    assert len(written(figure)) < 60_000 and MAX_TASKS < 4 * 2000
    whole = known["it-0"]["whole"]
    covered = sum(ns for _, ns, _ in known["it-0"]["at"]) / whole
    assert covered == pytest.approx(1 - timeline.bubble_fractions[0], abs=0.02)


# -- predicted beside compiled ---------------------------------------------------------------


def verification_of(plan: AnyPlan) -> dict[str, Any]:
    """As `autopar verify --json` writes it, of figures of our own."""
    figure = {"name": "peak", "unit": "bytes", "predicted": 1e9, "compiled": 1.3e9, "measured": None}
    sent = {"kind": "all-reduce", "axes": ["data"], "predicted_count": 3, "compiled_count": 1, "combinable": 3}
    return {
        "format": "autopar-verification",
        "version": 1,
        "program": plan.program.name,
        "strategy": plan.strategy,
        "topology": "1x1x8",
        "compile_s": 12.5,
        "off": ["peak"],
        "memory": [figure | {"tolerance": 0.12, "holds": False}],
        "step_time": figure | {"name": "step time", "unit": "s", "compiled": None, "tolerance": None, "holds": True},
        "step_times": {
            "rows": [["step time", 2e-3, 3e-3, None, None], ["exposed all-gather", 0.0, 1e-5, None, None]],
            "estimate_errors": ["a loop"],
        },
        "collectives": [sent | {"predicted_bytes": 8e6, "compiled_bytes": 8e6, "causes": [], "holds": True}],
    }


def test_what_was_compiled_stands_beside() -> None:
    plan = make_plan()
    text = page(autopar.explain(plan), compiled_of(verification_of(plan), plan.program.name, plan.strategy))
    assert "Predicted against compiled" in text and "Off: peak" in text
    assert ">replayed<" in text and ">3.00 ms<" in text and "it is wrong for a loop" in text
    assert ">-23.1 %<" in text and ">OFF<" in text and "all-reduce over data" in text
    stages = {
        "format": "autopar-stages-verification",
        "program": plan.program.name,
        "strategy": plan.strategy,
        "stages": [verification_of(plan), verification_of(plan)],
    }
    both = compiled_of(stages, plan.program.name, plan.strategy)
    assert [one.name for one in both] == ["stage 0", "stage 1"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"program": "other_step"},
            "it belongs to another plan: its program is 'other_step', this plan's is 'train_step'",
        ),
        ({"strategy": "none"}, "it belongs to another plan: its strategy is 'none'"),
        ({"format": "autopar-plan"}, 'it is not a verification: its "format" is not'),
        ({"memory": [{"name": "peak"}]}, "is missing"),
        ({"off": 3}, "must be a list"),
        ({"step_times": {"rows": [["step time", 1.0]]}}, "must have 5 columns"),
        ({"step_times": {"rows": [["step time", "slow", None, None, None]]}}, "must be a number"),
    ],
)
def test_a_verification_that_does_not_fit_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    plan, file = make_plan(), tmp_path / "v.json"
    file.write_text(json.dumps(verification_of(plan) | change))
    with pytest.raises(VerifyError) as caught:
        autopar.write_report(plan, tmp_path / "r.html", verification=file)
    assert words in str(caught.value) and str(file) in str(caught.value) and "autopar verify" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.json"]


# -- the file --------------------------------------------------------------------------------


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    file.write_text("old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlotError, match="No space left on device"):
        autopar.write_report(make_plan(), file)
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, file = make_plan(), tmp_path / "r.html"
    plan.save(tmp_path / "p.json")
    (tmp_path / "v.json").write_text(json.dumps(verification_of(plan)))
    asked = ["explain", str(tmp_path / "p.json"), "--html", str(file)]
    assert main([*asked, "--verification", str(tmp_path / "v.json")]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "The page is written to" in err
    assert "Predicted against compiled" in file.read_text(encoding="utf-8")
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["memory"]["peak_bytes"] == plan.prediction.peak_bytes and "split" not in document["parameters"][0]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["p.json", "--html", "nowhere/r.html"], "there is no folder"),
        (["p.json", "--html", "."], "it is a folder"),
        (["damaged.json", "--html", "r.html"], "cannot use the plan file 'damaged.json': it is damaged"),
        (["p.json", "--html", "r.html", "--verification", "none.json"], "cannot use the verification 'none.json'"),
        (["p.json", "--html", "r.html", "--verification", "damaged.json"], "it is damaged"),
        (["p.json", "--verification", "p.json"], "is shown in the HTML page: add --html FILE"),
        (["p.json", "--timeline", "t.json"], "has no timeline"),
        (["traced.json", "--timeline", "t.svg"], "give a file that ends in .json"),
        (["traced.json", "--timeline", "nowhere/t.json"], "cannot write 'nowhere/t.json'"),
    ],
)
def test_mistakes_are_named(
    asked: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_plan().save("p.json")
    transformer_plan().save("traced.json")
    Path("damaged.json").write_text('{"format": "autopar-plan", "vers')
    assert main(["explain", *asked]) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["damaged.json", "p.json", "traced.json"]


def test_one_program_is_written_for_perfetto(tmp_path: Path) -> None:
    plan, file = transformer_plan(4), tmp_path / "t.json"
    autopar.explain(plan).draw(file)
    events = json.loads(file.read_text())["traceEvents"]
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(threads) == {"kernels", "collectives"}
    kernels = [event for event in events if event["ph"] == "X" and event["tid"] == threads["kernels"]]
    sent = [event for event in events if event["ph"] == "X" and event["tid"] == threads["collectives"]]
    exposed = sum(event["args"]["exposed_us"] for event in sent)
    whole = sum(event["dur"] for event in kernels) + exposed
    assert whole == pytest.approx(1e6 * plan.prediction.step_time_s, rel=1e-4)
    assert {event["args"]["iterations"] for event in kernels} == {1, 4}
    held = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(held) == plan.prediction.peak_bytes
