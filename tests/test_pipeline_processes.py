"""A step in stages over several processes computes what the step computes."""

from __future__ import annotations

import pytest
from several_processes import run


def check(*cases: str, processes: int, devices: int) -> None:
    """Every process has the losses, and of the state what its devices hold."""
    ended = run("pipelined", *cases, processes=processes, devices=devices)
    assert [one.code for one in ended] == [0] * processes, ended[-1].errors[-3000:]
    for one in ended:
        assert list(one.last) == list(cases)
        for case, told in one.last.items():
            assert told["losses"] == pytest.approx(told["expected"], rel=1e-5), case
            assert told["shards"] and told["off"] <= 1, case


@pytest.mark.slow
@pytest.mark.contract
def test_two_processes() -> None:
    """A stage in each, by every schedule; two stages in each."""
    schedules = ["none", "gpipe", "1f1b", "zb-h1", "interleaved 2"]
    check(*(f"2 2 {schedule}" for schedule in schedules), "4 1 1f1b", processes=2, devices=2)


@pytest.mark.slow
def test_four_processes() -> None:
    """A stage in each; stages of two processes."""
    check("4 1 1f1b", "4 1 zb-h1", "2 2 gpipe", "2 2 interleaved 2", processes=4, devices=1)
