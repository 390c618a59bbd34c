"""`python -m benchmarks.gpu`: every piece runs on CPUs without a solver, failures are recorded, results are kept."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from benchmarks.gpu import prepared, records, runner
from benchmarks.gpu.__main__ import CARDS, main
from benchmarks.gpu.child import MARK
from benchmarks.gpu.kernels import family
from benchmarks.gpu.models import MODELS, ON_SEVERAL
from benchmarks.gpu.pieces import LIMIT_S, PIECES
from benchmarks.gpu.quick_keys import quick_key
from benchmarks.gpu.report import page
from benchmarks.gpu.runner import PieceError, Run
from benchmarks.gpu.setting import OutOfTimeError, Setting
from benchmarks.gpu.train import host_copy, plain_jit, train

ROOT = Path(__file__).parents[1]
HOST = {
    "card": "NVIDIA H100 80GB HBM3",
    "platform": "gpu",
    "num_devices": 1,
    "profile": "h100-sxm",
    "driver": {"driver_version": "570.1"},
    "versions": {"jax": "0.11.2"},
    "machine": {"cpu": "a CPU", "cores": 16, "memory_gb": 128},
    "date": "2026-11-25",
}


def a_run(folder: Path, said: list[str], **more: Any) -> Run:
    return Run(folder / "plans", folder, "full", {"JAX_PLATFORMS": "cpu"}, said.append, **more)


class Children:
    """In place of the processes: pieces that fail, and which were run in what order."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.failing, self.order = set(failing), []
        self.records: dict[str, dict[str, Any]] = {}

    def __call__(self, run: Run, name: str, seconds: float, limit_s: float) -> dict[str, Any]:
        if name == "host":
            return {"host": HOST}
        self.order.append(name)
        if name in self.failing:
            raise PieceError("Traceback …\nValueError: no such kernel")
        return self.records.get(name, {"host": HOST, "found": {"rows": []}})


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    found = Children()
    monkeypatch.setattr(Run, "child", lambda run, *given: found(run, *given))
    monkeypatch.setattr(records, "sources", lambda: "the same")
    return found


def test_a_piece_that_fails_is_kept_and_the_next_one_runs(tmp_path: Path, children: Children) -> None:
    said: list[str] = []
    children.failing = {"train/bert"}
    assert a_run(tmp_path, said).measure("train", False, 1e9) == ["train/bert"]
    assert children.order == [f"train/{name}" for name in MODELS]
    kept = {record["piece"]: record for record in records.read(tmp_path)}
    assert list(kept) == children.order
    assert "no such kernel" in kept["train/bert"]["error"]
    assert any("train/bert: failed: ValueError: no such kernel" in line for line in said)
    assert "ValueError: no such kernel" in page([kept["train/bert"]])


def test_a_second_run_measures_what_is_missing_and_what_failed_last(tmp_path: Path, children: Children) -> None:
    children.failing = {"calibration"}
    a_run(tmp_path, []).measure("a", False, 1e9)
    with (tmp_path / f"{records.slug(HOST)}.jsonl").open("a") as file:
        file.write('{"piece": "train/vit", "ho')  # a line that was cut off
    children.order.clear()
    children.failing = set()
    said: list[str] = []
    a_run(tmp_path, said).measure("", False, 1e9)
    assert children.order[-1] == "calibration", "what failed comes last"
    assert not {"train/llama_1b", "inference/attention"} & set(children.order)
    assert "train/llama_1b: measured already (--again to repeat)" in said
    one_device = {name for name, piece in PIECES.items() if piece.least_devices == 1}
    assert {record["piece"] for record in records.read(tmp_path)} == one_device
    children.order.clear()
    a_run(tmp_path, []).measure("", False, 1e9)
    assert children.order == []
    a_run(tmp_path, []).measure("search", True, 1e9)
    assert children.order == ["search/exact", "search/ivf", "search/graph"]


def test_other_sources_jax_or_card_are_measured_again(tmp_path: Path) -> None:
    record = {"piece": "calibration", "sources": "a", "host": HOST, "found": {}}
    others = [
        record | {"sources": "b"},
        record | {"host": HOST | {"card": "NVIDIA H200"}},
        record | {"host": HOST | {"num_devices": 2}},
        record | {"host": HOST | {"versions": {"jax": "0.12.0"}}},
    ]
    assert records.key(record) not in {records.key(other) for other in others}


def test_a_record_of_other_sources_is_measured_again_and_reported_until_then(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    children.records["inference/host"] = {"host": HOST, "found": {"rows": [{"step_s": 0.125}]}}
    a_run(tmp_path, []).measure("inference/host", False, 1e9)
    monkeypatch.setattr(records, "sources", lambda: "others")
    children.order.clear()
    children.failing = {"inference/host"}
    a_run(tmp_path, []).measure("inference/host", False, 1e9)
    assert children.order == ["inference/host"]
    assert "0.125" in page(records.read(tmp_path)), "an error does not replace a figure"
    children.failing = set()
    children.records["inference/host"] = {"host": HOST, "found": {"rows": [{"step_s": 0.25}]}}
    a_run(tmp_path, []).measure("inference/host", False, 1e9)
    assert "0.25" in page(records.read(tmp_path))


def test_nine_minutes_hold_the_calibration_and_four_train_steps() -> None:
    names = list(PIECES)
    assert names[:5] == ["calibration", "train/gpt2", "train/vit", "train/llama_1b", "train/experts"]
    assert sum(PIECES[name].seconds for name in names[:5]) <= 9 * 60
    assert PIECES["calibration"].seconds <= 90


def test_pieces_that_do_not_fit_into_the_minutes_are_left(tmp_path: Path, children: Children) -> None:
    said: list[str] = []
    a_run(tmp_path, said).measure("", False, 40.0)
    assert not {"calibration", "train/gpt2"} & set(children.order)
    assert "inference/host" in children.order
    assert any(line.startswith("calibration: left for another run") for line in said)


ENDINGS = {
    "fails": ("raise SystemExit('no GPU here')", "no GPU here"),
    "crashes": ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    "hangs": ("import time; time.sleep(1000)", "stopped after 1 s"),
}


def in_a_process(program: str, run: Run, monkeypatch: pytest.MonkeyPatch, limit_s: float) -> dict[str, Any]:
    """What a run takes from a process with this program in place of a piece."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        runner.subprocess, "Popen", lambda command, **more: popen([sys.executable, "-c", program], **more)
    )
    return run.child("calibration", 1.0, limit_s)


@pytest.mark.contract
@pytest.mark.parametrize("kind", [*ENDINGS, "says nothing"])
def test_how_a_process_can_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    program, words = ENDINGS.get(kind, ("", "said nothing"))
    with pytest.raises(PieceError, match=words):
        in_a_process(program, a_run(tmp_path, []), monkeypatch, 1.0 if kind == "hangs" else 60.0)


def test_a_record_has_no_folders_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"raise SystemExit('File {ROOT}/benchmarks/x.py, {sys.prefix}/lib/jax.py')"
    with pytest.raises(PieceError, match=r"^File benchmarks/x\.py, lib/jax\.py$"):
        in_a_process(program, a_run(tmp_path, []), monkeypatch, 60.0)


@pytest.mark.contract
@pytest.mark.parametrize("kind", ENDINGS)
def test_what_a_process_kept_before_its_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    program, words = ENDINGS[kind]
    lines = [MARK + json.dumps({"host": HOST, "found": {"rows": [number]}}) for number in (1, 2)]
    program = f"print({lines[0]!r}, flush=True); print({lines[1]!r}, flush=True); {program}"
    record = in_a_process(program, a_run(tmp_path, []), monkeypatch, 1.0 if kind == "hangs" else 60.0)
    assert record["found"] == {"rows": [2]}
    assert words in record["partial"]


def test_a_piece_measured_in_part_is_shown_and_measured_again_last(tmp_path: Path, children: Children) -> None:
    partial: dict[str, Any] = {"host": HOST, "found": {"rows": []}, "partial": "…\nstopped after 60 s"}
    children.records["inference/decode"] = partial
    said: list[str] = []
    assert a_run(tmp_path, said).measure("inference", False, 1e9) == [], "it has not failed"
    assert any("inference/decode: measured in part: stopped after 60 s" in line for line in said)
    assert "### Measured in part" in page(records.read(tmp_path))
    children.order.clear()
    children.records.clear()
    a_run(tmp_path, []).measure("inference", False, 1e9)
    assert children.order == ["inference/decode"]
    assert "### Measured in part" not in page(records.read(tmp_path))


def test_the_newest_figure_is_shown_and_no_error_replaces_it() -> None:
    rows = {"rows": [{"batch": 1, "step_s": 0.001}]}
    first = {"piece": "inference/host", "sources": "a", "host": HOST, "found": rows}
    later = first | {"found": {"rows": [{"batch": 1, "step_s": 0.002}]}}
    failed: dict[str, Any] = {key: value for key, value in first.items() if key != "found"} | {"error": "it broke"}
    text = page([first, later, failed])
    assert "0.002" in text
    assert "0.001" not in text
    assert "it broke" not in text
    assert "No GPU has been measured yet" in page([])


def test_errors_are_of_the_time_in_a_row() -> None:
    found = {
        "predicted_s": 0.09,
        "predicted_peak_bytes": 1e9,
        "xla": None,
        "median_s": 0.15,
        "in_a_row_s": 0.1,
        "plan_of": "h100-sxm",
    }
    lines = page([{"piece": "train/gpt2", "sources": "a", "host": HOST, "found": found}]).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| model | predicted"))
    columns, cells = ([cell.strip() for cell in lines[number].split("|")] for number in (head, head + 2))
    row = dict(zip(columns, cells, strict=True))
    assert (row["measured"], row["error"], row["waited for"]) == ("100 ms", "-10%", "150 ms")


@pytest.mark.parametrize(
    ("kernel", "kind"),
    {
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN": "matmul",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32": "convolution",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "collective",
        "input_convert_reduce_fusion_3": "reduction",
        "loop_convert_fusion": "elementwise",
    }.items(),
)
def test_a_kernel_is_classified_by_its_name(kernel: str, kind: str) -> None:
    assert family(kernel) == kind


def test_what_json_has_no_number_for_is_kept_as_text() -> None:
    from benchmarks.gpu.child import finite

    assert finite({"loss": (1.0, float("nan")), 3: float("inf")}) == {"loss": [1.0, "nan"], "3": "inf"}


# -- what a piece runs ----------------------------------------------------------------------------


@pytest.mark.slow
def test_plain_jit_compiles_the_step_once(caplog: pytest.LogCaptureFixture) -> None:
    training = MODELS["gpt2"]["tiny"](1)
    state = jax.jit(training.create_state)(quick_key(0))
    initial = host_copy(state)
    batch = jax.device_put(training.make_batch(0), jax.local_devices()[0])
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        found = plain_jit(training, initial, batch, 0.1)
    assert caplog.text.count("Finished XLA compilation of jit(train_step)") == 1
    assert "create_state" not in caplog.text
    assert found["in_a_row_s"] > 0
    unchanged = jax.tree.map(lambda one, other: np.array_equal(one, other), initial, jax.device_get(state))
    assert all(jax.tree.leaves(unchanged)), "no step has overwritten it"
    _, loss = training.step(state, batch)
    assert found["first_loss"] == pytest.approx(float(loss), rel=1e-2)


def test_a_train_piece_keeps_the_planned_step_when_no_time_is_left_for_plain_jit(tmp_path: Path) -> None:
    prepared.prepare(tmp_path, ["cpu-host"], "tiny", (), estimate=False, report=lambda _: None, only="gpt2")
    kept: list[dict[str, Any]] = []
    setting = Setting(
        plans=tmp_path,
        results=tmp_path,
        scale="tiny",
        host=HOST | {"profile": "cpu-host"},
        seconds=1.0,
        ends_at=time.monotonic(),
        keep=lambda record: kept.append(dict(record)),
    )
    with pytest.raises(OutOfTimeError, match="no plain `jit`"):
        train("gpt2", setting)
    assert kept[0]["in_a_row_s"] > 0
    assert kept[-1]["profile"]["kernels"]
    assert "jit" not in kept[-1]


def test_quick_keys_draw_independent_normal_numbers() -> None:
    shape = (300, 300)
    one, two = jax.random.split(quick_key(0))
    keys = [quick_key(0), quick_key(1), one, two, jax.random.fold_in(one, 1), jax.random.fold_in(one, 2)]
    drawn = np.stack([np.asarray(jax.random.normal(key, shape)).ravel() for key in keys])
    assert np.abs(drawn.mean(1)).max() < 0.02
    assert drawn.std(1) == pytest.approx(np.ones(len(keys)), abs=0.01)
    assert np.abs(np.corrcoef(drawn) - np.eye(len(keys))).max() < 0.02
    rows = drawn[0].reshape(shape)
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 0.35


# -- the plans that travel -----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.10", "0.11", "0.12"])
def test_every_plan_is_there(version: str) -> None:
    folder = prepared.FOLDER / f"jax-{version}"
    wanted = {
        f"{card}/{name}-{num}.json.gz"
        for card in CARDS
        for name in MODELS
        for num in (1, *(prepared.SEVERAL if name in ON_SEVERAL else ()))
    }
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.json.gz")} == wanted
    assert prepared.num_bytes(prepared.FOLDER) <= prepared.MOST_BYTES


def test_another_card_runs_the_plan_of_the_first_and_says_so() -> None:
    _, _, card = prepared.saved(prepared.FOLDER, "a100-80gb", "gpt2", 1)
    assert card == CARDS[0]
    _, xla, card = prepared.saved(prepared.FOLDER, "h200", "gpt2", 1)
    assert card == "h200"
    assert xla is not None
    assert xla["step_s"] > 0


def test_no_plan_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run `python -m benchmarks\.gpu prepare`"):
        prepared.saved(tmp_path, "h200", "gpt2", 1)


@pytest.mark.slow
@pytest.mark.contract
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_of_the_step_that_is_traced_here(name: str) -> None:
    """Replayed over the whole program, as on the GPU host."""
    step, args = MODELS[name]["full"](1).target
    for card in CARDS:
        saved, _, _ = prepared.saved(prepared.FOLDER, card, name, 1)
        plan, program = autopar.parallelize(step, plan=saved, cache=False).planned(*args)
        assert isinstance(plan, Plan)
        jitted = execute.jit_plan(plan, program.trace, execute.abstract_mesh(plan.mesh))
        assert execute.lower_for("cuda", jitted, program.trace.arguments)


# -- the whole -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.contract
def test_a_dry_run_measures_every_piece(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--results", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = records.read(tmp_path)
    assert {record["piece"] for record in found} == set(PIECES)
    assert not [record["piece"] for record in found if "error" in record]
    for record in found:
        if record["piece"].startswith("train/"):
            one = record["found"]
            assert one["in_a_row_s"] > 0
            assert one["median_s"] > 0
            assert one["profile"]["kernels"]
            assert one["first_loss"] == pytest.approx(one["jit"]["first_loss"], rel=2e-2)
    text = page(found)
    assert all(title in text for title in ("### Constants", "### Train steps on one", "### Inference", "on all GPUs"))
    assert "### Failed" not in text


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process_and_what_was_measured_is_kept(tmp_path: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--results", str(tmp_path), "--only", "inference"]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not records.read(tmp_path) and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(sent)
    assert "the same command goes on from there" in process.communicate()[1]
    assert process.returncode == 130
    kept = records.read(tmp_path)
    assert kept
    assert not [record for record in kept if "error" in record], "a piece that was stopped has not failed"
    stopped = [record for record in kept if "partial" in record]
    assert all("SIGKILL" in record["partial"] and record["found"]["rows"] for record in stopped)
    running = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nothing"], "no piece has 'nothing' in its name"),
        (["--minutes", "0"], "takes a number above 0"),
        (["measured"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        code = main()
    except SystemExit as exit:
        code = exit.code
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_piece_takes_at_most_8_minutes() -> None:
    assert LIMIT_S <= 480
