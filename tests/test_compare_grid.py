"""Comparison of kinds and numbers of devices: step time, price, and the fewest devices that fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_compare_hardware import H100, profile, step_and_args

from autopar.cli.main import main
from autopar.cli.options import device_counts
from autopar.comparison.by_hardware import Cell, compare_grid
from autopar.comparison.by_hardware_plot import plot_grid
from autopar.comparison.by_hardware_text import grid_json, render_grid
from autopar.comparison.device_curve import curves
from autopar.comparison.page import write_grid_page
from autopar.system.text_tables import plain_text
from autopar.transforms.program import program_of
from tests.planned import plan_program

SMALL, LARGE = replace(profile(5, "small"), usd_per_device_hour=3.6), profile(200, "large")


def grid() -> Any:
    step_args = step_and_args(64)
    (one,) = compare_grid({"few": lambda: step_args}, [SMALL, LARGE], [1, 4, 8]).grids
    return one


def test_each_number_is_planned_and_the_fewest_that_fit_are_named() -> None:
    one = grid()
    assert [(cell.profile.name, cell.num_devices) for cell in one.cells] == [
        (name, number) for name in ("small", "large") for number in (1, 4, 8)
    ]
    least = {fit.profile.name: fit.num_devices for fit in one.fits}
    assert least["large"] == 1
    for cell in one.cells:
        number = least[cell.profile.name]
        assert (cell.plan is not None) == (number is not None and cell.num_devices >= number)
        if cell.plan is not None:
            assert cell.plan.mesh.num_devices == cell.num_devices
            assert cell.plan.prediction.peak_bytes <= cell.profile.usable_bytes
    step, args = step_and_args(64)
    program = program_of(step, args, carry=None, donate=None)
    alone = plan_program(program, mesh="4", hardware=LARGE)
    cell = next(cell for cell in one.cells if (cell.profile.name, cell.num_devices) == ("large", 4))
    assert cell.plan is not None
    assert cell.plan.prediction == alone.prediction


def test_the_price_of_a_step_is_that_of_its_devices() -> None:
    for cell in grid().cells:
        if cell.profile is SMALL and cell.plan is not None:
            seconds = cell.plan.prediction.step_time_s
            assert cell.usd_per_step == pytest.approx(seconds * cell.num_devices * 0.001)
        else:
            assert cell.usd_per_step is None


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    step_args = step_and_args(64)
    result = compare_grid({"few": lambda: step_args}, [SMALL, LARGE], [1, 8])
    text = plain_text(lambda console: render_grid(result, console))
    assert re.search(r"^ +small +1 +- .* does not fit", text, re.MULTILINE)
    assert re.search(r"^ +8 .*\$\d", text, re.MULTILINE)
    assert "Least that fit: small " in text
    pytest.importorskip("matplotlib")
    plot_grid(result, str(tmp_path / "g.svg"))
    drawn = (tmp_path / "g.svg").read_text()
    assert drawn.startswith("<?xml")
    assert "<svg" in drawn


def test_the_curve_falls_and_names_the_devices_that_help(tmp_path: Path) -> None:
    """With few examples a host of 8 is slower than fewer of its devices."""
    step_args = step_and_args(8)
    result = compare_grid({"<few>": lambda: step_args}, [LARGE], [1, 2, 4, 8])
    (curve,) = curves(result.grids[0])
    times = [point.step_time_s for point in curve.points]
    assert times == sorted(times, reverse=True)
    assert [point.num_devices for point in curve.points] == [1, 2, 4, 8]
    last = curve.points[-1]
    assert not last.uses_all
    assert last.used.prediction.step_time_s <= last.on_all.prediction.step_time_s
    text = plain_text(lambda console: render_grid(result, console))
    assert "Step time over the devices, large" in text
    assert f"uses {last.used.num_devices} of 8; on all 8: " in " ".join(text.split())
    (cell,) = [one for one in grid_json(result)["targets"][0]["cells"] if one["num_devices"] == 8]
    assert cell["used_num_devices"] == last.used.num_devices
    write_grid_page(result, str(tmp_path / "curve.html"))
    page = (tmp_path / "curve.html").read_text()
    assert "<h2>&lt;few&gt;</h2>" in page
    assert page.count("<circle") == 4
    assert f"uses {last.used.num_devices} of 8" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_counts_up_to_a_number_are_powers_of_two() -> None:
    assert device_counts("..20") == (1, 2, 4, 8, 16)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(
        "from test_compare_hardware import step_and_args\n\ndef few():\n    return step_and_args(64)\n"
    )
    text = H100.read_text().replace('name = "h100-sxm"', 'name = "rented"', 1)
    (tmp_path / "rented.toml").write_text(f"{text}\n[price]\nusd_per_device_hour = 2.5\n")
    monkeypatch.chdir(tmp_path)
    command = ["compare", "train.py:few", "--hardware", "rented.toml,h200", "--devices", "1,2", "--json"]
    assert main(command) == 0
    (one,) = json.loads(capsys.readouterr().out)["targets"]
    assert one["least"] == {"rented": 1, "h200": 1}
    assert [(cell["hardware"], cell["num_devices"], cell["fits"]) for cell in one["cells"]] == [
        ("rented", 1, True),
        ("rented", 2, True),
        ("h200", 1, True),
        ("h200", 2, True),
    ]
    assert one["cells"][0]["usd_per_step"] > 0
    assert one["cells"][2]["usd_per_step"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["plan", "train.py:few", "--devices", "4,8"],
            "invalid device count '4,8': write a whole number, 1 or more; `autopar",
        ),
        (["compare", "train.py:few", "--devices", "4,8"], "required: --hardware"),
        (["compare", "train.py:few", "--hardware", "h200", "--devices", "4,x"], "invalid device count 'x'"),
        (
            ["compare", "train.py:few", "--hardware", "h200", "--devices", "12"],
            "12 devices of 'h200' are not whole hosts of 8",
        ),
    ],
)
def test_invalid_options_are_errors(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(options)
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_cell_without_a_plan_has_no_price() -> None:
    assert Cell(profile=SMALL, num_devices=1, plan=None).usd_per_step is None
