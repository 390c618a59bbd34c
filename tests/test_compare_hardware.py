"""The fewest devices for a step: minimality, reasons for smaller numbers, interruption."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.cli.main import main
from autopar.comparison import least_devices
from autopar.comparison.by_hardware import Compared, Comparison, compare, profiles_of
from autopar.comparison.by_hardware_text import comparison_json, render_comparison
from autopar.comparison.least_devices import Fit, fits, meshes_of, numbers_of_devices, state_of
from autopar.errors import HardwareError
from autopar.hardware.profile import HardwareProfile, load
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.mesh_search import Found, search_meshes
from autopar.planner.request import PlanRequest
from autopar.planner.ways_out import NothingFitsError
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Problem, Solution, Status
from autopar.system.text_tables import plain_text
from autopar.transforms.program import Program, program_of

WIDTH = 512
H100 = Path(__file__).parents[1] / "cost_models" / "hardware" / "h100-sxm.toml"

#: The same step, with few examples or many, as a target of the command line.
TARGET = """\
from test_compare_hardware import step_and_args

def few():
    return step_and_args(64)

def broken():
    raise RuntimeError("no such model")
"""


def step_and_args(examples: int, *, layers: int = 3) -> tuple[Any, Any]:
    """Mixed precision: f16 parameters with an f32 master copy and moments, which only the update reads."""
    tx = optax.adam(1e-3)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return (x.astype(jnp.float32) ** 2).mean()

    def train_step(state: Any, batch: Any) -> Any:
        params, master, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = tx.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), moments, master)
        master = optax.apply_updates(master, updates)
        return (jax.tree.map(lambda m: m.astype(jnp.float16), master), master, moments), loss

    train_step.__qualname__ = "train_step"  # the name in reports
    master = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    half = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float16)] * layers
    batch = {"x": jax.ShapeDtypeStruct((examples, WIDTH), jnp.float16)}
    return train_step, ((half, master, jax.eval_shape(tx.init, master)), batch)


def program(examples: int = 64) -> Program:
    step, args = step_and_args(examples)
    return program_of(step, args, carry=None, donate=None)


def profile(mb: float, name: str = "tiny", *, host: int = 4) -> HardwareProfile:
    """An H100 with a given number of megabytes for a plan."""
    size = int(MemoryBudget.with_room_for(mb * 1e6).total_bytes)
    return replace(load("h100-sxm"), name=name, hbm_bytes=size, usable_fraction=1.0, devices_per_host=host)


def least(result: Program, hardware: HardwareProfile, **options: Any) -> Fit:
    (fit,) = fits(result, [hardware], **options)
    return fit


def refuses(mesh: str, hardware: HardwareProfile, count: int) -> bool:
    """Whether the planner itself finds no plan on a mesh."""
    try:
        search_meshes(program().in_microbatches(count), PlanRequest(mesh=mesh, hardware=hardware))
    except NothingFitsError:
        return True
    return False


# Training state.


def test_state_is_read_off_the_arguments() -> None:
    size = 3 * WIDTH * WIDTH
    state = state_of(program())
    assert state.num_parameters == size
    assert state.parameter_bytes == 2 * size
    assert state.gradient_bytes == 2 * size
    assert state.optimizer_bytes == 12 * size + 4  # and Adam's count
    assert state.total_bytes == 16 * size + 4


def test_state_in_full_precision() -> None:
    """A step without optimizer state counts only its parameters."""

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return w - 0.1 * grad, loss

    args = (jax.ShapeDtypeStruct((WIDTH, 8), jnp.float32), jax.ShapeDtypeStruct((4, WIDTH), jnp.float32))
    state = state_of(program_of(step, args, carry=None, donate=None))
    assert (state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes) == (4 * WIDTH * 8, 4 * WIDTH * 8, 0)


# The fewest devices.


def test_fits_on_one() -> None:
    fit = least(program(), profile(200))
    assert fit.on_one
    assert fit.num_devices == 1
    assert fit.refused == ()
    assert fit.plan is not None
    assert fit.plan.prediction.peak_bytes <= fit.budget_bytes


@pytest.mark.parametrize("mb", [11.5, 5])
def test_the_fewest_devices_are_minimal(mb: float) -> None:
    hardware = profile(mb)
    fit = least(program(), hardware, max_devices=16)
    assert fit.plan is not None
    assert fit.plan.prediction.peak_bytes <= fit.budget_bytes
    numbers = numbers_of_devices(hardware, 16)
    assert fit.num_devices in numbers[1:]
    assert tuple(one.num_devices for one in fit.refused) == numbers[: numbers.index(fit.num_devices)]
    for one in fit.refused:
        assert one.least_bytes > fit.budget_bytes
    for mesh in meshes_of(fit.refused[-1].num_devices, hardware):
        assert refuses(str(mesh), hardware, 1)
        assert refuses(str(mesh), hardware, 64 // mesh.axis_sizes[0])


def test_state_too_large_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = watch(monkeypatch)
    result = program()
    fit = least(result, profile(5), max_devices=8)
    kept = state_of(result).kept_bytes
    for one in fit.refused:
        if kept / one.num_devices > fit.budget_bytes:
            assert not one.planned
            assert one.least_bytes == kept / one.num_devices
    assert [one.num_devices for one in fit.refused if not one.planned][:2] == [1, 2]
    assert min(num for num, _ in planned) >= kept / fit.budget_bytes


def test_no_number_up_to_the_maximum_fits() -> None:
    fit = least(program(), profile(1), max_devices=4)
    assert fit.plan is None
    assert fit.num_devices is None
    assert not fit.on_one
    assert [one.num_devices for one in fit.refused] == [1, 2, 4]


def test_fewest_microbatches_that_fit() -> None:
    """The activations of a large batch fit on one device by gradient accumulation or rematerialization."""
    result, hardware = program(65536), profile(90)
    fit = least(result, hardware, max_devices=1, rematerialize=False)
    assert fit.plan is not None
    assert fit.plan.microbatches is not None
    count = fit.plan.microbatches.count
    assert count > 1
    halved = least(result, hardware, max_devices=1, rematerialize=False, num_microbatches=count // 2)
    assert halved.plan is None
    same = least(result, hardware, max_devices=1, rematerialize=False, num_microbatches=count)
    assert same.plan is not None
    assert same.plan.prediction == fit.plan.prediction


@pytest.mark.slow
def test_a_smaller_memory_skips_known_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles together give the results of each alone, without planning again what failed with more memory."""
    profiles = [profile(mb, f"tiny-{mb}") for mb in (2.7, 8.4, 4)]
    step, args = step_args = step_and_args(64, layers=2)
    result = program_of(step, args, carry=None, donate=None)
    alone = [least(result, one, max_devices=8).num_devices for one in profiles]
    assert alone == [8, 2, 4]
    planned = watch(monkeypatch)
    (one,) = compare({"few": lambda: step_args}, profiles, max_devices=8).compared
    assert [fit.profile.name for fit in one.fits] == [one.name for one in profiles]
    assert [fit.num_devices for fit in one.fits] == alone
    by_memory = sorted(one.fits, key=lambda fit: -fit.budget_bytes)
    numbers = [fit.num_devices for fit in by_memory]
    assert numbers == sorted(number for number in numbers if number is not None)
    for before, after in itertools.pairwise(by_memory):
        again = {number for number, name in planned if name == after.profile.name}
        assert before.num_devices is not None
        assert min(again) >= before.num_devices


def test_numbers_are_whole_hosts() -> None:
    six = profile(100, host=6)
    assert numbers_of_devices(six, 50) == (1, 2, 4, 6, 12, 24, 48)
    assert numbers_of_devices(six, 3) == (1, 2)
    assert numbers_of_devices(profile(100, host=1), 5) == (1, 2, 4)
    assert [str(mesh) for mesh in meshes_of(12, six)] == ["2x6", "12"]
    assert [str(mesh) for mesh in meshes_of(4, six)] == ["4"]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Record the number of devices and the hardware of every plan from here on."""
    planned: list[tuple[int, str]] = []
    search = least_devices.search_meshes

    def watched(program: Program, request: PlanRequest) -> Found:
        planned.append((request.meshes[0].num_devices, request.profile.name))
        return search(program, request)

    monkeypatch.setattr(least_devices, "search_meshes", watched)
    return planned


# Interrupted.


def interrupt_on(monkeypatch: pytest.MonkeyPatch, hardware: str) -> None:
    search = least_devices.search_meshes

    def interrupted(program: Program, request: PlanRequest) -> Found:
        if request.profile.name == hardware:
            raise KeyboardInterrupt
        return search(program, request)

    monkeypatch.setattr(least_devices, "search_meshes", interrupted)


def test_interrupted_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_on(monkeypatch, "small")
    step_args = step_and_args(64)
    targets = {"first": lambda: step_args, "second": lambda: step_args}
    result = compare(targets, [profile(20, "small"), profile(200, "large")])
    assert result.interrupted
    (one,) = result.compared
    assert one.target == "first"
    assert [(fit.profile.name, fit.num_devices) for fit in one.fits] == [("large", 1)]
    assert "large" in plain_text(lambda console: render_comparison(result, console))


def test_a_solver_that_was_interrupted_ends_the_comparison() -> None:
    """An interrupted solver returns its best solution, but the comparison stops."""

    class Interrupted:
        def solve(self, problem: Problem) -> Solution:
            return replace(Ilp().solve(problem), status=Status.INTERRUPTED)

    step_args = step_and_args(64)
    result = compare({"few": lambda: step_args}, [profile(200)], solver=Interrupted())
    assert result.interrupted
    assert result.compared[0].fits == ()


def test_a_solver_timeout_is_no_proof_of_infeasibility() -> None:
    """A number of devices is not recorded as too small when the time ran out; the reason is reported."""

    class Late:
        def solve(self, problem: Problem) -> Solution:
            return Solution((), float("inf"), 0.0, Status.NOT_FOUND)

    fit = least(program(), profile(200), max_devices=2, solver=Late())
    assert fit.plan is None
    assert all("no assignment found within the time limit" in one.without_plan for one in fit.refused)
    result = Comparison(compared=(Compared(target="few", state=state_of(program()), fits=(fit,)),), max_devices=2)
    assert json.loads(json.dumps(comparison_json(result), allow_nan=False))["targets"][0]["hardware"][0]["plan"] is None


# The command line.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a target, one profile on whose device it fits, and one on which it does not."""
    (tmp_path / "train.py").write_text(TARGET)
    for name, size in (("small", 12e6), ("large", 200e6)):
        text = H100.read_text().replace('name = "h100-sxm"', f'name = "{name}"', 1)
        text = re.sub(r"^hbm_bytes = .*$", f"hbm_bytes = {int(size)}", text, flags=re.MULTILINE)
        (tmp_path / f"{name}.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    yield tmp_path


def test_command_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "train.py:few", "--hardware", "small.toml,large.toml", "--max-devices", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("train.py:few: `train_step`, 786,432 parameters; training state 12.6 MB: parameters 1.57 MB,")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip().startswith(("small", "large"))}
    assert rows["large"][3:6] == ["yes", "1", "1"]
    assert rows["small"][3] == "no"
    assert "for parameters and optimizer" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100


def test_command_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "train.py:few", "--hardware", "small.toml,large.toml", "--max-devices", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["format"], result["interrupted"], result["max_devices"]) == ("autopar-comparison", False, 8)
    (target,) = result["targets"]
    assert target["error"] is None
    assert target["training_state"]["total_bytes"] == 16 * 786_432 + 4
    small, large = target["hardware"]
    assert (small["name"], small["fits_on_one"]) == ("small", False)
    assert small["plan"]["prediction"]["peak_bytes"] <= small["budget_bytes"]
    assert small["refused"][0]["num_devices"] == 1
    assert (large["fits_on_one"], large["least_num_devices"], large["refused"]) == (True, 1, [])
    assert large["plan"]["mesh"] == {"data": 1}


def test_one_target_that_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "train.py:broken", "train.py:few", "--hardware", "large.toml"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("train.py:few: `train_step`")
    assert err.startswith("autopar: train.py:broken: `broken` failed at ")
    assert "no such model" in err


def test_a_batch_that_does_not_split_into_the_microbatches(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "train.py:few", "--hardware", "large.toml", "--num-microbatches", "7"]) == 2
    out, err = capsys.readouterr()
    assert "7" in err
    assert "training state 12.6 MB" in out


def test_interrupted_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    interrupt_on(monkeypatch, "small")
    assert main(["compare", "train.py:few", "--hardware", "small.toml,large.toml"]) == 130
    out, err = capsys.readouterr()
    assert "large" in out
    assert err == "autopar: interrupted; the tables above show the plans made until then\n"


def exit_code(argv: list[str]) -> Any:
    """Also where argparse refuses the arguments."""
    try:
        return main(argv)
    except SystemExit as refused:
        return refused.code


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hardware", "h101"], "unknown hardware 'h101'"),
        (
            ["--hardware", " ,"],
            "there is no hardware to compare: give profiles, separated by commas, from a100-pcie-80,",
        ),
        (["--hardware", "h200=8"], "`compare` plans one kind at a time"),
        (["--hardware", "h200", "--devices", "4", "--max-devices", "8"], "give one"),
        (["--hardware", "h200", "--plot", "p.svg"], "add --devices N,N"),
        ([], "the following arguments are required: --hardware"),
        (["--hardware", "h200", "-o", "p.json"], "unrecognized arguments: -o"),
    ],
)
def test_invalid_options_are_errors(
    folder: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["compare", "train.py:few", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_profiles_are_distinct() -> None:
    assert [one.name for one in profiles_of(["h200", " v100-sxm-16", "h200"])] == ["h200", "v100-sxm-16"]
    with pytest.raises(HardwareError, match="Did you mean 'v100-sxm-16' or 'v100-sxm-32'"):
        profiles_of(["v100"])
