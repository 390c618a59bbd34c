"""A pipeline step over several processes computes what the step computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from several_processes import run

from autopar.errors import ProcessError
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.run.stacked_leaves import StackedLeaf, as_arrays


def check(*cases: str, processes: int, devices: int) -> list[Any]:
    """Every process has the losses, and of the state what its devices hold."""
    ended = run("pipelined", *cases, processes=processes, devices=devices)
    assert [one.code for one in ended] == [0] * processes, ended[-1].errors[-3000:]
    for one in ended:
        assert list(one.last) == list(cases)
        for case, told in one.last.items():
            assert told["losses"] == pytest.approx(told["expected"], rel=1e-5), case
            assert told["shards"] and told["off"] <= 1, case
    return [one.last for one in ended]


@pytest.mark.slow
@pytest.mark.contract
def test_two_processes() -> None:
    """A stage in each, by every schedule; two stages in each."""
    schedules = ["none", "gpipe", "1f1b", "zb-h1", "interleaved 2", "zb-v 2", "dualpipe-v 2"]
    check(*(f"2 2 {schedule}" for schedule in schedules), "4 1 1f1b", processes=2, devices=2)


@pytest.mark.slow
def test_four_processes() -> None:
    """A stage in each; stages of two processes."""
    cases = ["4 1 1f1b", "4 1 zb-h1", "2 2 gpipe", "2 2 interleaved 2", "2 2 zb-v 2"]
    told = check(*cases, processes=4, devices=1)
    for case in cases[:2]:  # each move is one of two processes
        (whole,) = {one[case]["moves"] + one[case]["counted"] for one in told}
        assert sum(one[case]["moves"] for one in told) == 2 * whole
        assert [one[case]["calls"] for one in told] == [[0], [1], [2], [3]]
        assert sum(one[case]["counting calls"] for one in told) < sum(one[case]["counted"] for one in told)


@pytest.mark.slow
@pytest.mark.contract
def test_three_processes_of_two_devices_each() -> None:
    """A process counts the moves of the two others, as each JAX does."""
    cases = ["3 2 1f1b", "3 2 zb-h1"]
    told = check(*cases, processes=3, devices=2)
    for case in cases:
        assert len({one[case]["moves"] + one[case]["counted"] for one in told}) == 1
        assert all(one[case]["moves"] and one[case]["counted"] for one in told)


@pytest.mark.slow
def test_stages_out_of_order_return_to_a_process() -> None:
    ended = run("out_of_order", processes=2, devices=4)
    assert [one.code for one in ended] == [0, 0], ended[-1].errors[-3000:]
    for one in ended:
        assert one.last["devices"] == [[0, 1], [4, 5, 6, 7], [2, 3]]
        assert one.last["losses"] == pytest.approx(one.last["expected"], rel=1e-5)


@pytest.mark.slow
def test_a_state_over_processes_is_saved_and_restored(tmp_path: Path) -> None:
    """Saved by two; restored by two, in stages and as one program, and by one alone: bit by bit."""
    folder = str(tmp_path / "kept")
    two = run("kept", folder, "save", "restore", "whole", processes=2, devices=1)
    assert [one.code for one in two] == [0, 0], two[-1].errors[-3000:]
    (alone,) = run("kept", folder, "restore", processes=1, devices=2)
    assert alone.code == 0, alone.errors[-3000:]
    saved: dict[str, str] = {}
    again: dict[str, str] = {}
    for one in two:
        assert one.last["save"]["state"] and not saved.keys() & one.last["save"]["state"].keys(), "each has its own"
        saved |= one.last["save"]["state"]
        again |= one.last["restore"]["state"]
    assert len(saved) == 4 + 1 + 2 * 4 + 3 and saved == again == alone.last["restore"]["state"]
    told: list[dict[str, Any]] = [*(one.last[action] for one in two for action in ("save", "restore", "whole"))]
    for one in [*told, alone.last["restore"]]:
        assert one["rest"] == pytest.approx(two[0].last["save"]["rest"], rel=1e-5)
        assert one.get("rate", True), "a weakly typed number stays one"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "cases"), [(2, 2, ["2 2 1f1b", "4 1 zb-h1"]), (4, 1, ["2 2 1f1b"])])
def test_pins_and_a_step_like_another(processes: int, devices: int, cases: list[str]) -> None:
    """Parameters are as pinned, on the stages of both steps, in one process or in two."""
    ended = run("fixed_in_stages", *cases, processes=processes, devices=devices)
    assert [one.code for one in ended] == [0] * processes, ended[-1].errors[-3000:]
    for one in ended:
        for case, told in one.last.items():
            assert told["losses"] == pytest.approx(told["expected"], rel=1e-5), case
            assert told["specs"] == ["P(None, 'data')", "P('data',)", "P(None, 'data')", "P(None, 'data')"]
            assert all(held in told["stages"] for held in told["devices"])
            assert told["devices"] == ended[0].last[case]["devices"] and told["shards"]


@pytest.mark.slow
def test_branches_side_by_side_in_two_processes() -> None:
    ended = run("branches", "4", "6", processes=2, devices=2)
    assert [one.code for one in ended] == [0, 0], ended[-1].errors[-3000:]
    for one in ended:
        for number, told in one.last.items():
            assert told["stages"] == int(number) and told["forks"], told["plan"]
            assert told["losses"] == pytest.approx(told["expected"], rel=1e-5) and told["shards"]


@pytest.mark.slow
def test_each_process_gives_its_share_of_a_batch() -> None:
    two = run("shares_in_stages", processes=2, devices=1)
    assert [one.code for one in two] == [0, 0], two[-1].errors[-3000:]
    for one in two:
        told = one.last
        assert told["shares"] == told["whole"] == two[0].last["whole"]
        assert "`batch/x` has shape (7, 32)" in told["messages"]["uneven"]
        assert "(8, 32), the share of each of 2 processes, or the whole, (16, 32)" in told["messages"]["uneven"]
        assert "`batch/z`" in told["messages"]["other paths"]
        assert "int32, and the plan was made for float32" in told["messages"]["dtype"]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 1)])
def test_shares_come_to_submeshes_of_one_process_and_of_several(processes: int, devices: int) -> None:
    ended = run("gathered", processes=processes, devices=devices)
    assert [one.code for one in ended] == [0] * processes, ended[-1].errors[-3000:]
    for one in ended:
        assert len(one.last) > 3 * 5 * 2
        assert "words" in one.last
        assert all(same and shape for same, _, shape in one.last.values())
    held = [sum(number for _, number, _ in one.last.values()) for one in ended]
    assert all(held)


def test_a_stack_in_unequal_parts_of_several_processes_is_refused() -> None:
    parts: Any = {
        Rows(0, start, stop): SimpleNamespace(shape=(stop - start, 3), dtype="float32", is_fully_addressable=start > 0)
        for start, stop in ((0, 1), (1, 3))
    }
    with pytest.raises(ProcessError, match=r"layers 0:1, 1:3\) is in unequal parts .* divides its layers"):
        as_arrays({"kernels": StackedLeaf(parts)})
