"""Write a plan's explanation as one HTML page that needs neither a network nor a server.

In: an explanation, and compiled figures if there are any. Out: `page`, the text; `write_report`, the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from autopar.errors import OptionError, PlotError
from autopar.pipeline.plan import AnyPlan
from autopar.plans.workers_plan import WorkersPlan
from autopar.report.breakdown import efficiency_text, number_of_devices, replicated_text, tie_text
from autopar.report.considered import TITLE
from autopar.report.explain import explain
from autopar.report.explain_program import Explanation
from autopar.report.explain_stages import StagesExplanation, stages_replicated
from autopar.report.html.figures import at_peak, memory_curve, time_bar
from autopar.report.html.markup import Child, Element, data, el, in_code, written
from autopar.report.html.module_tree import module_view
from autopar.report.html.stages import (
    same_stages,
    stages_table,
    submesh_memory,
    submesh_times,
    tried_table,
    versions_table,
)
from autopar.report.html.tables import (
    collectives_table,
    compiled_view,
    considered_table,
    decisions_table,
    meshes_table,
)
from autopar.report.html.timeline import HATCH, pipeline_tracks, step_tracks
from autopar.report.html.workers import (
    costs_view,
    histograms,
    parts_table,
    plan_cards,
    run_cards,
    workers_table,
)
from autopar.report.predicted_vs_compiled import Compiled, compiled_of, read_compiled
from autopar.report.workers import WorkersReport
from autopar.system.atomic_file import write_whole
from autopar.system.text_tables import share_text
from autopar.system.units import human_bytes, human_seconds
from autopar.version import __version__


def write_report(
    plan: AnyPlan | WorkersPlan | WorkersReport, path: str | os.PathLike[str], *, verification: Any = None
) -> None:
    """Write the report of a plan as an HTML page, which a browser opens without a network.

    Args:
        plan: a plan of one program, of pipeline stages or of workers; or the report on a run of workers.
        path: the file. It is written atomically.
        verification: the result of `verify` for this plan, or the file that `autopar verify --json` wrote. It is shown
            next to the predictions.

    Raises:
        PlotError: the file cannot be written.
        VerifyError: the verification cannot be read, or belongs to another plan.
        OptionError: a verification for workers, of which there is none.
    """
    check_can_write(path)
    if isinstance(plan, WorkersPlan | WorkersReport):
        if verification is not None:
            raise OptionError("a verification belongs to the plan of one part: write a page of `plan.parts['worker']`")
        text = workers_page(plan)
    else:
        text = page(explain(plan), _compiled(plan, verification))
    try:
        write_whole(text, path)
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from error


def _compiled(plan: AnyPlan, verification: Any) -> Sequence[Compiled]:
    """The compiled figures of a plan."""
    if verification is None:
        return ()
    if isinstance(verification, str | os.PathLike):
        return read_compiled(verification, plan.program.name, plan.strategy)
    document = json.loads(json.dumps(verification.to_json()))  # as if read from a file: lists, not tuples
    return compiled_of(document, plan.program.name, plan.strategy)


def check_can_write(path: str | os.PathLike[str]) -> None:
    """Check before planning that a file can be written.

    Raises:
        PlotError: the file cannot be written; the text gives the reason.
    """
    target = Path(path)
    folder = target.resolve().parent
    if target.is_dir():
        raise _cannot_write(path, "it is a folder")
    if not folder.is_dir():
        raise _cannot_write(path, f"there is no folder {str(folder)!r}")
    if not os.access(folder, os.W_OK):
        raise _cannot_write(path, f"the folder {str(folder)!r} cannot be written to")


def _cannot_write(path: str | os.PathLike[str], reason: str) -> PlotError:
    return PlotError(
        f"cannot write the page {os.fspath(path)!r}: {reason}. Give a file in an existing folder that can be written to"
    )


def page(explained: Explanation | StagesExplanation, compiled: Sequence[Compiled] = ()) -> str:
    """The text of the page."""
    known: dict[str, Any] = {}
    body = (
        _stages_body(explained, known) if isinstance(explained, StagesExplanation) else _program_body(explained, known)
    )
    if compiled:
        body.append(_section("compiled", "Predicted against compiled", compiled_view(compiled)))
    body += _closing(explained)
    title = f"Plan of {explained.plan.program.name} for {explained.plan.num_devices} {explained.plan.hardware}"
    return _document(title, _headline(explained), body, known)


def workers_page(shown: WorkersPlan | WorkersReport) -> str:
    """The text of the page of a plan for workers, or of their run."""
    plan = shown.plan if isinstance(shown, WorkersReport) else shown
    body: list[Child] = []
    if isinstance(shown, WorkersReport):
        about = "How often a worker read weights with the slowest worker how many clocks behind. A clock is a pull and a push."
        body = [
            _section("staleness", "Staleness of each worker's reads", histograms(shown), about=about),
            _section("workers", "What each worker has done", workers_table(shown)),
        ]
    body += [
        _section("costs", "What the policy costs, predicted", costs_view(plan)),
        _section("parts", "The plans of the parts", parts_table(plan)),
        el("footer", el("p", f"Page by autopar {__version__}.")),
    ]
    devices = f"{plan.num_workers} workers, each on {plan.devices_per_worker} x {plan.hardware}"
    figures = run_cards(shown) if isinstance(shown, WorkersReport) else plan_cards(plan)
    what = "Run of " if isinstance(shown, WorkersReport) else "Plan of "
    headline = el(
        "header",
        el("h1", what, el("code", plan.program), " under ", el("code", plan.policy)),
        el("p", devices, class_="about"),
        el("div", *_cards(figures), class_="cards"),
    )
    return _document(f"{what}{plan.program} under {plan.policy}", headline, body, {})


def _document(title: str, headline: Element, body: Sequence[Child], known: dict[str, Any]) -> str:
    style, script = (
        (files("autopar.report.html") / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", style),
    )
    links = [el("a", name, href=f"#{key}") for key, name in _titles(body)]
    parts = [
        HATCH,
        headline,
        el("nav", *links, aria_label="Sections"),
        el("main", *body),
        el("div", id="shown", role="status", hidden=True),
        data("known", known),
        el("script", script),
    ]
    return "<!DOCTYPE html>\n" + written(el("html", head, el("body", *parts), lang="en")) + "\n"


def _cards(figures: Sequence[tuple[str, str, str]]) -> list[Element]:
    return [
        el("div", el("span", name), el("strong", value), el("small", about), class_="card")
        for name, value, about in figures
    ]


def _section(key: str, title: str, *inside: Child, about: str = "") -> Element:
    return el("section", el("h2", title), el("p", about, class_="about") if about else None, *inside, id=key)


def _titles(body: Sequence[Child]) -> list[tuple[str, str]]:
    """The keys and titles of the page's top-level sections."""
    titles = []
    for part in body:
        if isinstance(part, str | None):
            continue
        for section in [part] if part.tag == "section" else part.findall("section"):
            title = section.find("h2")
            titles.append((section.get("id", ""), title.text or "" if title is not None else ""))
    return titles


# -- the head --------------------------------------------------------------------------------


def _headline(explained: Explanation | StagesExplanation) -> Element:
    plan = explained.plan
    budget, peak = plan.memory_budget_bytes, plan.prediction.peak_bytes
    share = f"{share_text(peak, budget)} of {human_bytes(budget)}" if budget else "no budget given"
    if isinstance(explained, StagesExplanation):
        shape = f"{len(explained.plan.stages)} stages, {explained.plan.num_microbatches} microbatches"
        third = ("bubble", f"{100 * explained.plan.prediction.bubble_fraction:.0f} %", "of all devices' time")
    else:
        shape = f"mesh {explained.plan.mesh.describe()}"
        exposed = sum(one.exposed_s for one in explained.time.collectives)
        third = ("exposed communication", share_text(exposed, explained.time.step_time_s) or "0 %", "of the step time")
    estimate_s = None if isinstance(explained, StagesExplanation) else explained.plan.prediction.xla_step_time_s
    estimate = "" if estimate_s is None else f"XLA's estimator would predict {human_seconds(estimate_s)}"
    figures = (
        (
            "step time",
            human_seconds(plan.prediction.step_time_s),
            "; ".join(filter(None, ("by the cost model, not measured", estimate))),
        ),
        ("peak memory", human_bytes(peak), f"per device, {share}"),
        third,
        ("certainty", *_certainty(explained)),
    )
    return el(
        "header",
        el("h1", "Plan of ", el("code", plan.program.name), f" for {number_of_devices(plan)} x {plan.hardware}"),
        el("p", *in_code(plan.strategy), class_="strategy"),
        *(el("p", *in_code(text), class_="replicated") for text in _replicated(explained)),
        *(el("p", *in_code(f"A tie: {text}."), class_="about") for text in _tie(explained)),
        el("p", shape, class_="about"),
        *(el("p", text, class_="about") for text in _efficiency(explained)),
        el("div", *_cards(figures), class_="cards"),
    )


def _replicated(explained: Explanation | StagesExplanation) -> list[str]:
    """The operations that run replicated because they have no sharding rule."""
    if isinstance(explained, Explanation):
        return list(filter(None, [replicated_text(explained.plan)]))
    return stages_replicated(explained.plan)


def _tie(explained: Explanation | StagesExplanation) -> list[str]:
    return list(filter(None, [tie_text(explained.plan)])) if isinstance(explained, Explanation) else []


def _efficiency(explained: Explanation | StagesExplanation) -> list[str]:
    return list(filter(None, [efficiency_text(explained.plan)]))


def _certainty(explained: Explanation | StagesExplanation) -> tuple[str, str]:
    outcome, scope = explained.plan.outcome, "in the solver's model"
    if isinstance(explained, StagesExplanation):
        among = explained.plan.outcome.among if len(explained.plan.stages) > 1 else ""
        scope = f"among {among}, by the costs of layers" if among else "by the costs of layers"
    if _replicated(explained):
        scope += ", among the strategies of the known sharding rules"
    if outcome.gap <= 1e-6:
        return "optimal", f"proven to one part in a million, {scope}"
    if math.isfinite(outcome.gap):
        return f"within {100 * outcome.gap:.2g} %", f"of the optimum, {scope}"
    return "not bounded", str(outcome.status)


# -- the sections ----------------------------------------------------------------------------


def _program_body(explained: Explanation, known: dict[str, Any]) -> list[Child]:
    body: list[Child] = [
        el(
            "div",
            _section("time", "Where the step time goes", time_bar(explained.time)),
            _section("memory", "Memory of one device over a step", _memory(explained)),
            class_="pair",
        )
    ]
    live = at_peak(explained.memory, explained.modules.activations_under)
    if live is not None:
        body.append(_section("peak", "Live at the peak", live))
    return [*body, *_program_details(explained, known, "")]


def _memory(explained: Explanation) -> Element:
    if not explained.memory.over_step:
        return el("p", "This plan's file is too old: plan again to see memory over the step.", class_="under")
    return memory_curve(explained.memory, explained.time)


def _program_details(explained: Explanation, known: dict[str, Any], key: str, first_device: int = 0) -> list[Child]:
    """The sections of one program.

    Args:
        key: a suffix of the sections' names, on a page of several programs.
        first_device: the number of the mesh's first device.
    """
    mesh, sections = explained.plan.mesh, list[Child]()
    known[f"mesh{key}"] = {"axes": mesh.axis_names, "sizes": mesh.axis_sizes, "first": first_device}
    if explained.plan.trace is not None:
        tracks, texts = step_tracks(explained.plan.trace, explained.time.step_time_s, f"tracks{key}")
        known |= texts
        sections.append(_section(f"trace{key}", "Timeline of one device", tracks))
    model = el("div", module_view(explained.modules, mesh), data_mesh=f"mesh{key}")
    sections.append(_section(f"modules{key}", "The model and its shardings", model))
    about = (
        "The runner-up is the next best sharding of a tensor, with all others fixed, and the time that it would add."
    )
    sections.append(
        _section(
            f"decisions{key}",
            "Decisions and runners-up",
            el("div", decisions_table(explained, mesh), data_mesh=f"mesh{key}"),
            about=about,
        )
    )
    if explained.collectives:
        sections.append(
            _section(
                f"collectives{key}",
                "Collectives and their causes",
                collectives_table(explained.collectives, explained.modules.activations_under),
            )
        )
    others = None if explained.plan.considered else meshes_table(explained)
    if others is not None:
        sections.append(_section(f"meshes{key}", "Other meshes, planned and rejected", others))
    return sections


def _stages_body(explained: StagesExplanation, known: dict[str, Any]) -> list[Child]:
    tracks, texts = pipeline_tracks(explained.timeline, "pipeline")
    known |= texts
    streams = bool(explained.plan.weight_versions)
    name = explained.plan.schedule
    of = f"The first batches of a stream by {name}" if streams else f"One step of the {name} schedule"
    schedule = f"{of}, simulated. A row is a submesh, a bar is one microbatch in a stage."
    body: list[Child] = [
        _section("timeline", "The pipeline", tracks, about=schedule),
        el(
            "div",
            _section(
                "time", "Where the time goes" if streams else "Where the step time goes", submesh_times(explained)
            ),
            _section("memory", "Memory of one device of each submesh", submesh_memory(explained)),
            class_="pair",
        ),
        _section("stages", "Stages", stages_table(explained)),
    ]
    if streams:
        about = "What passes read of the weights, on one device. A gradient is late by the updates between the version that it is computed from and the one that it is applied to."
        body.append(_section("versions", "Versions of the weights", versions_table(explained), about=about))
    tried = None if explained.plan.considered else tried_table(explained)
    if tried is not None:
        body.append(_section("tried", "Alternatives that were tried", tried))
    for group in same_stages(explained):
        first = explained.stages[group[0]]
        names = ", ".join(map(str, group))
        title = f"Stage {names}" if len(group) == 1 else f"Stages {names}, identical"
        inside = el(
            "details",
            el("summary", *in_code(first.plan.strategy), f"; mesh {first.plan.mesh.describe()}"),
            el(
                "div",
                el("section", el("h3", "Where the time of its program goes"), time_bar(first.time)),
                el("section", el("h3", "Memory of its program"), _memory(first)),
                class_="pair",
            ),
            el("h3", "Live at its peak"),
            at_peak(first.memory, first.modules.activations_under),
            *_program_details(first, known, f"-{group[0]}", explained.plan.stages[group[0]].devices.start),
            class_="stage",
            open=group[0] == 0,
        )
        anchors = [el("a", id=f"stage-{number}") for number in group]
        about = "The program that this stage runs for each microbatch."
        body.append(_section(f"part-{group[0]}", title, *anchors, inside, about=about))
    return body


def _closing(explained: Explanation | StagesExplanation) -> list[Child]:
    plan = explained.plan
    sections: list[Child] = []
    considered = considered_table(plan.considered)
    if considered is not None:
        sections.append(_section("considered", TITLE, considered))
    if plan.notes:
        sections.append(_section("notes", "Notes", el("ul", *(el("li", *in_code(note)) for note in plan.notes))))
    versions = ", ".join(f"{name} {number}" for name, number in sorted(plan.versions.items()))
    about = f"Figures are predictions of the cost model. Planned by {versions or 'an unknown version'}; page by autopar {__version__}."
    return [*sections, el("footer", el("p", about), el("p", "Program ", el("code", plan.program.fingerprint)))]
