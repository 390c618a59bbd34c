"""The command line: the planner's inputs, the output, and every error in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P
from test_plan import make_plan

import autopar
from autopar.cli import doctor
from autopar.cli.main import main
from autopar.cli.old_spellings import modern
from autopar.cli.options import parse_pin
from autopar.cli.target import load_target
from autopar.errors import BudgetError, PinError, TargetError
from autopar.hardware.profile import known_names
from autopar.pipeline.plan_files import load_plan
from autopar.report.explain import explain
from autopar.system.install_command import install_command
from autopar.system.text_tables import TEXT_WIDTH
from autopar.system.units import parse_size

PACKAGE_PATH = str(Path(autopar.__file__).parent.parent)
PLAN_FILES = Path(__file__).parent / "plan_files"
TARGET = """\
def step(state, batch):
    return state, batch

def make():
    return step, ("the state", "the batch")
"""


class FakePlanner:
    """Stands in for `autopar.api.make_plan`: remembers its arguments, returns the hand-made plan."""

    def __init__(self) -> None:
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        self.failure: BaseException | None = None

    def plan(self, *args: Any, progress: Callable[[str, float], None] | None = None, **options: Any) -> Any:
        self.args, self.options = args, options
        if progress is not None:
            progress("trace", 0.5)
        if self.failure is not None:
            raise self.failure
        return make_plan()


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> FakePlanner:
    fake = FakePlanner()
    monkeypatch.setitem(sys.modules, "autopar.api.make_plan", SimpleNamespace(plan=fake.plan))
    return fake


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a target in it; what loading it does to the process is undone."""
    (tmp_path / "train.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one message a wrong command line gives: on standard error, exit code 2, no traceback."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("autopar: ")
    assert "Traceback" not in err
    return err


def refuses(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The same, where argparse refuses the arguments."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


# Commands.


def test_plan_passes_its_options_and_saves(planner: FakePlanner, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mesh", "2x4", "--hardware", "h100-sxm", "--memory-budget", "40GB", "--time-limit", "5"]
    pins = ["--pin", 'state/params/*/kernel=P(None,"model")', "--pin", "batch/x=P('data')"]
    assert main(["plan", "train.py:make", *options, *pins, "-o", "gpt.plan.json"]) == 0
    step, *args = planner.args
    assert step.__name__ == "step"
    assert args == ["the state", "the batch"]
    assert planner.options == {
        "mesh": "2x4",
        "num_devices": None,
        "hardware": "h100-sxm",
        "memory_budget_bytes": 40e9,
        "pin": {"state/params/*/kernel": P(None, "model"), "batch/x": P("data")},
        "time_limit_s": 5.0,
        "cache": True,
    }
    assert load_plan("gpt.plan.json") == make_plan()
    out, err = capsys.readouterr()
    assert out.startswith("Plan of `train_step` for 8 h100-sxm devices, mesh 2x4 (data=2, model=4)\n")
    assert out.endswith("Saved to gpt.plan.json; `autopar explain gpt.plan.json` says why.\n")
    assert "Parameters:" not in out
    assert err == ""


def test_a_consistency_is_planned_as_its_schedule(planner: FakePlanner) -> None:
    for given, schedule in (("2bw", "2bw"), ("pipemare(10, 0.2)", "pipemare"), ("pipemare(10, None)", "ampnet")):
        assert main(["plan", "train.py:make", "--stages", "4", "--consistency", given]) == 0
        assert planner.options["schedule"] == schedule


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--stages", "4", "--consistency", "auto"), "--consistency auto needs --max-delay N"),
        (("--stages", "4", "--max-delay", "1"), "--max-delay is the bound of --consistency auto"),
        (("--consistency", "2bw"), "--consistency '2bw' is an asynchronous pipeline: add --stages N"),
        (("--stages", "4", "--consistency", "bsp"), "the command line plans the asynchronous pipelines pipedream, "),
        (("--stages", "4", "--consistency", "2bw", "--schedule", "gpipe"), "leave --schedule 'gpipe' out"),
        (("--stages", "4", "--consistency", "pipemare(x)"), "which cannot be read"),
    ],
)
def test_a_consistency_that_cannot_be_planned(
    argv: tuple[str, ...], words: str, planner: FakePlanner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "train.py:make", *argv]) != 0
    assert words in capsys.readouterr().err
    assert not planner.args


def test_defaults_are_the_planners(planner: FakePlanner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train.py:make", "--devices", "8"]) == 0
    unsaid = dict.fromkeys(["mesh", "hardware", "memory_budget_bytes", "pin"])
    assert planner.options == unsaid | {"num_devices": 8, "cache": True}  # what is planned is kept
    assert capsys.readouterr().out.endswith("The plan was not saved: add -o FILE.\n")


@pytest.mark.parametrize(("said", "cache"), [(["--no-cache"], False), (["--cache", "kept"], "kept")])
def test_where_plans_are_kept_can_be_said(planner: FakePlanner, said: list[str], cache: object) -> None:
    assert main(["plan", "train.py:make", "--devices", "8", *said]) == 0
    assert planner.options["cache"] == cache


def test_explain_plans_a_target(planner: FakePlanner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "train.py:make", "--devices", "8"]) == 0
    assert planner.options["num_devices"] == 8
    assert "Parameters: 7 tensors" in capsys.readouterr().out


def test_explain_reads_a_saved_plan(planner: FakePlanner, capsys: pytest.CaptureFixture[str]) -> None:
    make_plan().save("p.json")
    assert main(["explain", "p.json"]) == 0
    assert planner.args == ()
    assert capsys.readouterr().out == f"{explain(load_plan('p.json'))}\n"


def test_estimate_collectives_prints_a_table_for_each_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "collectives", "--mesh", "2x16", "--hardware", "h100-sxm"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= TEXT_WIDTH
    assert "Axis `data`: 2 devices on 2 hosts, 1 in each" in out
    assert "Axis `model`: 16 devices on 2 hosts, 8 in each" in out
    rows = {line[:23].strip(): line for line in out.split("Axis `model`")[1].splitlines()[1:]}
    assert {"naive, all to all", "sharded server", "ring", "NCCL tree", "hierarchical, ring"} <= rows.keys()
    assert rows["hierarchical, ring"].count("*") + rows["ring per network card"].count("*") == 7
    assert rows["counted in plans"].count("s") >= 7
    assert "yes" not in rows["naive, all to all"]


def test_estimate_collectives_as_json_and_of_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "collectives", "--devices", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (axis,) = told["axes"]
    assert told["hardware"] == "cpu-host"
    assert axis["backend"] == "gloo"
    assert set(axis["chosen"]) == {"ring"}
    assert axis["workers"]["num_local"] == 4
    assert main(["estimate", "collectives", "--mesh", "1", "--hardware", "cpu-host"]) == 0
    assert "nothing is reduced" in capsys.readouterr().out


@pytest.mark.slow
def test_estimate_collectives_draws(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    options = ["estimate", "collectives", "--mesh", "2x8", "--hardware", "h100-sxm"]
    assert main([*options, "--plot", "a.png"]) == 0
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "Drawn into a.png." in capsys.readouterr().out
    assert main([*options, "--plot", "b.svg", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == "h100-sxm"
    assert "give --plot a file in a folder that can be written to" in fails(capsys, *options, "--plot", "no/a.png")
    assert "cannot draw into 'a.what'" in fails(capsys, *options, "--plot", "a.what")


def test_a_plot_without_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    err = fails(capsys, "estimate", "collectives", "--devices", "8", "--hardware", "h100-sxm", "--plot", "a.png")
    message, where = err.splitlines()
    assert message == f"autopar: --plot draws with matplotlib, which is missing: {install_command('plot')}"
    assert where == "More on this: docs/troubleshooting.md#ploterror"


def test_all_reduces_are_timed_message_by_message(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["estimate", "collectives", "--mesh", "4", "--hardware", "h100-sxm", "--messages"]
    assert main(options) == 0
    assert "message by message" in capsys.readouterr().out
    assert main([*options, "--json"]) == 0
    (axis,) = json.loads(capsys.readouterr().out)["axes"]
    for row in axis["rows"]:
        if row["name"] in ("naive", "ring", "sharded-parameter-server", "halving-doubling", "tree"):
            assert row["by_messages_s"] == pytest.approx(row["seconds"], rel=1e-3), row["name"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("plan --for search --corpus 9x4:int8", "estimate search --corpus 9x4:int8"),
        ("plan --for=inference Llama --devices 8", "estimate inference Llama --devices 8"),
        ("plan a.py:f b.py:f --compare h100-sxm,h200", "compare a.py:f b.py:f --hardware h100-sxm,h200"),
        ("plan a.py:f --compare=h200 --devices 64", "compare a.py:f --hardware h200 --max-devices 64"),
        ("plan a.py:f --compare --hardware h200 --devices 4,8", "compare a.py:f --hardware h200 --devices 4,8"),
        ("plan a.py:f --hardware h200 --devices 4,8 --compare", "compare a.py:f --hardware h200 --devices 4,8"),
        ("explain --collectives --mesh 2x8", "estimate collectives --mesh 2x8"),
        ("explain a.py:f --why params/up --mesh 8", "why params/up a.py:f --mesh 8"),
        ("explain p.json --why params/up --of a.py:f --json", "why params/up a.py:f --plan p.json --json"),
        ("verify a.py:f --as-is --no-check", "diagnose a.py:f --no-check"),
    ],
)
def test_an_old_spelling_is_translated(old: str, new: str) -> None:
    assert modern(old.split()) == (new.split(), f"autopar {new}")
    assert modern(new.split()) == (new.split(), None)


def test_an_old_spelling_works_and_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--collectives", "--mesh", "1", "--hardware", "cpu-host"]) == 0
    out, err = capsys.readouterr()
    assert "nothing is reduced" in out
    assert err.endswith("write: autopar estimate collectives --mesh 1 --hardware cpu-host\n")


def test_the_doctor_finds_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["jax"]["state"] == "ok"
    assert jax.__version__ in found["jax"]["found"]
    assert "hardware profile cpu-host" in found["devices"]["found"]
    assert main(["doctor"]) == 0
    assert "XLA's GPU compiler" in capsys.readouterr().out


def test_the_doctor_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"jax": "0.9.2", "rich": None, "matplotlib": None}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, real(name)))
    assert main(["doctor", "--json"]) == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert (found["jax"]["state"], found["rich"]["state"]) == ("broken", "broken")
    assert "pip install 'jax" in found["jax"]["advice"]
    assert found["autopar[plot]"]["state"] == "missing"
    assert found["autopar[plot]"]["advice"].endswith(install_command("plot"))


def test_piped_text_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    make_plan(12).save("p.json")
    assert main(["explain", "p.json"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= TEXT_WIDTH


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_json(planner: FakePlanner, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "train.py:make", "--devices", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "autopar-explanation"
    assert told["strategy"] == make_plan().strategy


def test_progress_goes_to_a_terminal(
    planner: FakePlanner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["plan", "train.py:make", "--devices", "8"]) == 0
    out, err = capsys.readouterr()
    assert "trace" in err
    assert "trace" not in out


def test_interrupted_leaves_nothing(planner: FakePlanner, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    planner.failure = KeyboardInterrupt()
    assert main(["plan", "train.py:make", "-o", "p.json"]) == 130
    assert capsys.readouterr() == ("", "autopar: interrupted\n")
    assert not list(folder.glob("*p.json*"))


def test_planners_error_is_a_message(planner: FakePlanner, capsys: pytest.CaptureFixture[str]) -> None:
    planner.failure = BudgetError("no plan fits 1 GB per device; the least is 2 GB")
    assert fails(capsys, "plan", "train.py:make").splitlines() == [
        "autopar: no plan fits 1 GB per device; the least is 2 GB",
        "More on this: docs/troubleshooting.md#budgeterror",
    ]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("autopar 0.")
    for argv in (["--help"], ["plan", "--help"], ["explain", "--help"], ["estimate", "search", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert "  autopar " in out, "it has examples"
        assert ("returns\n(step, args)" in out) == (argv[0] in ("plan", "explain"))


@pytest.mark.parametrize("command", ["plan", "verify", "compare"])
def test_help_names_every_hardware_profile(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    help_text = re.sub(r"\s+", " ", re.sub(r"-\n +", "-", capsys.readouterr().out))
    assert ", ".join(known_names()) in help_text
    assert {*re.findall(r"([\w-]+)=\d+[,;) ]", help_text)} <= {*known_names(), "data", "model"}, (
        "and its examples are profiles"
    )


def test_program_runs_piped(folder: Path) -> None:
    """The real program, in a process of its own: plain text, and quiet when its reader leaves."""
    make_plan(12).save("p.json")
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PATH}
    command = f"'{sys.executable}' -m autopar explain p.json"
    done = subprocess.run(f"{command} | head -1", shell=True, env=environment, capture_output=True, text=True)
    assert done.stdout == "Plan of `train_step` for 8 h100-sxm devices, mesh 2x4 (data=2, model=4)\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    "argv", [["--help"], ["explain", "p.json"], ["explain", str(PLAN_FILES / "stages_version_4.json")]]
)
def test_help_and_saved_plans_load_no_jax(folder: Path, argv: list[str]) -> None:
    make_plan(12).save("p.json")
    source = f"""
import contextlib, io, sys
from autopar.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
    main({argv!r})
assert len(said.getvalue().splitlines()) > 20
assert "jax" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": PACKAGE_PATH}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True)


# Arguments.


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("40GB", 40e9),
        ("40 gb", 40e9),
        ("512MiB", 512 * 2**20),
        ("1.5KiB", 1536.0),
        ("2TB", 2e12),
        ("1TiB", 2**40),
        ("123", 123.0),
        ("123B", 123.0),
        ("1e9", 1e9),
        (".5GB", 5e8),
    ],
)
def test_size(text: str, num_bytes: float) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "40XB", "-1GB", "0", "forty", "1e", "1 G B", "inf", "nan"])
def test_wrong_size(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"is not a size: write e\.g\. 40GB \(10\^9 bytes\)"):
        parse_size(text)
    assert "is not a size" in refuses(capsys, "plan", "train.py:make", f"--memory-budget={text}")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--devices", "0"), "invalid device count '0': write a whole number, 1 or more"),
        (("--devices", "many"), "invalid device count 'many'"),
        (("--time-limit", "nan"), "invalid time 'nan': write seconds, above 0"),
    ],
)
def test_wrong_argument(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refuses(capsys, "plan", "train.py:make", *argv)


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("a/*/k=P(None,'model')", ("a/*/k", P(None, "model"))),
        ("x = PartitionSpec(('data', 'model'), None)", ("x", P(("data", "model"), None))),
        ("x=P()", ("x", P())),
    ],
)
def test_pin(text: str, pin: tuple[str, Any]) -> None:
    assert parse_pin(text) == pin


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "=P()",
        "x=",
        "x='data'",
        "x=P(data)",
        "x=P(1)",
        "x=P(['a'])",
        "x=P(a='b')",
        "x=P(*['a'])",
        "x=P(__import__('os').abort())",
        "x=open('pwned', 'w')",
        "x=P('a'",
    ],
)
def test_wrong_pin(text: str, planner: FakePlanner, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with pytest.raises(PinError):
        parse_pin(text)
    err = fails(capsys, "plan", "train.py:make", "--pin", text)
    assert f"cannot read the pin {text!r}: write PATH=P(...)" in err
    assert not (folder / "pwned").exists()


def test_output_is_checked_before_planning(planner: FakePlanner, capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, "plan", "train.py:make", "-o", "no/such/p.json")
    assert "cannot write 'no/such/p.json': give -o a file in a folder that can be written to" in err
    assert planner.args == ()


def test_saved_plan_is_already_decided(capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, "explain", "p.json", "--mesh", "2x4", "--pin", "x=P()")
    assert "'p.json' is a saved plan, which fixes these options: drop --mesh, --pin, or explain a TARGET" in err


def test_damaged_plan(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "p.json").write_text("{")
    assert "cannot use the plan file 'p.json': it is damaged" in fails(capsys, "explain", "p.json")
    assert "cannot use the plan file 'q.json': it cannot be read" in fails(capsys, "explain", "q.json")


# Targets.


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        ("train.py", "", "cannot read the target 'train.py': write path/file.py:function or package.module:function"),
        ("t.py:", "", "cannot read the target 't.py:'"),
        ("none.py:make", "", "there is no file 'none.py' (in "),
        ("no.such.module:make", "", "module 'no.such.module' cannot be imported: ModuleNotFoundError: No module named"),
        ("t.py:make", "def other(): pass", "t.py has no function 'make'; it has other"),
        ("t.py:make", "make = 3", "t.py has no function 'make'; it has none"),
        ("t.py:make", "x = 1\ny = x / 0", "'t.py' cannot be imported at {here}/t.py:2 (y = x / 0): ZeroDivisionError"),
        ("t.py:make", "x = 1\ndef make(:", "'t.py' cannot be imported at {here}/t.py:2: SyntaxError: "),
        ("t.py:make", "import sys; sys.exit('bye')", "'t.py' cannot be imported at {here}/t.py:1"),
        (
            "t.py:make",
            "def make():\n    return {}['a']",
            "`make` failed at {here}/t.py:2 (return {}['a']): KeyError: 'a'",
        ),
        (
            "t.py:make",
            "def make(size): pass",
            "({here}/t.py:1) must take nothing and return (step, args), but calling it",
        ),
        ("t.py:make", "def make(): pass", "`make` ({here}/t.py:1) returned a NoneType; it must return (step, args)"),
        ("t.py:make", "def make(): return 1, 2, 3, 4", "returned a tuple of 4; it must return (step, args)"),
        ("t.py:make", "def make(): return 1, ()", "returned a int as its step, which cannot be called"),
        ("t.py:make", "def make(): return print, {}", "returned its args as a dict; it must return (step, args)"),
    ],
)
def test_wrong_target(
    target: str, source: str, words: str, planner: FakePlanner, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "t.py").write_text(source)
    assert words.replace("{here}", str(folder)) in fails(capsys, "plan", target)


def test_a_parallelized_step_is_no_target(folder: Path) -> None:
    (folder / "t.py").write_text("import autopar\n@autopar.parallelize\ndef step(x): return x")
    with pytest.raises(TargetError, match=rf"{folder}/t.py:2\) must take nothing and return \(step, args\)"):
        load_target("t.py:step")


def test_what_a_target_prints_is_not_the_commands_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "t.py").write_text("print('imported')\ndef make():\n    print('called')\n    return max, (1, 2)")
    load_target("t.py:make")
    out, err = capsys.readouterr()
    assert out == "" and err == "imported\ncalled\n"


def test_target_imports_its_neighbours_and_packages(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "neighbour.py").write_text("args = (1, 2)")
    (folder / "sub" / "main.py").write_text("import neighbour\ndef make(): return max, neighbour.args")
    assert load_target("sub/main.py:make") == (max, (1, 2))
    assert load_target("train:make")[1] == ("the state", "the batch")


def test_dataclasses_in_a_target(folder: Path) -> None:
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    (folder / "t.py").write_text(source + "def make(): return A, [3]")
    assert load_target("t.py:make")[1] == (3,)


def test_parallel_step_is_unwrapped(folder: Path) -> None:
    source = """\
import functools
class Parallel:
    def __init__(self, step): functools.update_wrapper(self, step)
    def __call__(self, *args): raise RuntimeError
    def plan(self, *args): raise RuntimeError
def plain(x): return x
@functools.wraps(plain)
def wrapped(x): return x
def make(): return Parallel(plain), (1,)
def keep(): return wrapped, (1,)
"""
    (folder / "t.py").write_text(source)
    assert load_target("t.py:make")[0].__name__ == "plain"
    assert hasattr(load_target("t.py:keep")[0], "__wrapped__")


def test_target_error_keeps_its_cause(folder: Path) -> None:
    (folder / "t.py").write_text("def make(): raise OSError('disk')")
    with pytest.raises(TargetError) as caught:
        load_target("t.py:make")
    assert isinstance(caught.value.__cause__, OSError)
