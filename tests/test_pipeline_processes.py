"""A step in stages over several processes computes what the step computes."""

from __future__ import annotations

import pytest
from several_processes import run


def check(*arguments: str, processes: int, devices: int) -> None:
    """Every process has the losses, and of the state what its devices hold."""
    ended = run("pipelined", *arguments, processes=processes, devices=devices)
    assert [one.code for one in ended] == [0] * processes, ended[-1].errors[-3000:]
    assert [list(one.last) for one in ended] == [list(arguments[3:])] * processes
    for one in ended:
        for name, told in one.last.items():
            assert told["losses"] == pytest.approx(told["expected"], rel=1e-5), (name, told)
            assert told["shards"] and told["off"] <= 1, (name, told)


@pytest.mark.slow
def test_each_process_runs_its_stages() -> None:
    check("2", "2", "4", "none", "gpipe", "1f1b", "zb-h1", "interleaved:2", processes=2, devices=2)


@pytest.mark.slow
def test_four_processes() -> None:
    check("1", "4", "4", "gpipe", "1f1b", "zb-h1", processes=4, devices=1)


@pytest.mark.slow
def test_a_submesh_of_two_processes() -> None:
    check("2", "2", "4", "1f1b", "interleaved:2", processes=4, devices=1)


@pytest.mark.slow
def test_two_stages_in_each_process() -> None:
    check("1", "4", "4", "1f1b", processes=2, devices=2)
