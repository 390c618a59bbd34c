"""The programs and the faults of the replay's benchmark are what they say."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest

from autopar.xla_compiler.hlo_text import parse_module
from autopar.xla_replay import rates as replay_rates
from autopar.xla_replay.device_prices import DevicePrices
from autopar.xla_replay.program import replay_module
from autopar.xla_replay.run import replay
from benchmarks.replay import faults, page
from benchmarks.replay.llama import Llama, attention_kernels
from benchmarks.replay.published import RUNS, Run, compiled

PROGRAM = """\
HloModule m, is_scheduled=true, num_partitions=8

%body (t: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {
  %t = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[4096,4096]{1,0} get-tuple-element(%t), index=1
  %g = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%s), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %s = bf16[512,4096]{1,0} slice(%x), slice={[0:512], [0:4096]}
  %d = bf16[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %e = bf16[4096,4096]{1,0} all-gather-done(%g)
  ROOT %r = (s32[], bf16[4096,4096]{1,0}) tuple(%i, %e)
}

%condition (t: (s32[], bf16[4096,4096])) -> pred[] {
  %t = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (p: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {
  %p = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  ROOT %w = (s32[], bf16[4096,4096]{1,0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""


def test_a_loop_is_repeated_and_a_collective_made_synchronous() -> None:
    module, rates = parse_module(PROGRAM), replay_rates.load("h100-sxm")

    def step_s(module: faults.Module) -> float:
        return replay_module(module, DevicePrices(rates, 8)).step_time_s

    loop = module.main.root
    times = [step_s(faults._with(module, module.main, faults._repeated(module.main, loop, n))) for n in (1, 2, 32)]
    assert times[2] - times[0] == pytest.approx(31 * (times[1] - times[0]), rel=1e-6)
    serial = faults._synchronous(module)
    order = [one.name for one in serial.computations["body"].instructions]
    assert order.index("e") == order.index("g") + 1
    assert step_s(serial) > step_s(module)
    body = module.computations["body"]
    doubled = faults._doubled(body, body.by_name["g"])
    assert {"g.again", "e.again"} <= {one.name for one in doubled.instructions}
    assert step_s(faults._with(module, body, doubled)) > step_s(module)


def test_attention_counts_the_work_of_its_mask() -> None:
    whole = Llama(batch=2, length=8192, saved=())
    kernels = attention_kernels(whole, 1)
    assert kernels["mha_own_forward"].flops == pytest.approx(4 * 2 * 32 * 8192**2 * 128 / 2, rel=1e-3)
    assert kernels["mha_own_backward"].flops == pytest.approx(2.5 * kernels["mha_own_forward"].flops)
    eighth = attention_kernels(whole, 8)
    parallel = eighth["mha_own_forward"].flops + 7 * eighth["mha_part_forward"].flops
    assert parallel == pytest.approx(kernels["mha_own_forward"].flops / 8, rel=1e-3)


def test_the_published_runs() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)
    by_name = {run.name: run for run in RUNS}
    seventy = by_name["MaxText 70B, 128 H100 SXM"]
    assert seventy.tokens / seventy.tokens_per_s == pytest.approx(15.57)
    sizes = [math.prod(shape) for shape in seventy.model.shapes()["layers"].values()]
    assert sum(sizes) + 2 * 128_256 * 8192 == pytest.approx(70.6e9, rel=1e-3)
    contexts = [run for run in RUNS if "CP" in run.name]
    assert all(run.tokens == 32768 and run.fsdp * run.cp == 8 for run in contexts)
    assert all(one.tokens_per_s > two.tokens_per_s for one, two in pairwise(contexts))
    for run in RUNS:
        assert replay_rates.load(run.rates).device.hbm_bytes_per_s > 0


def test_the_page_shows_every_kind_of_row() -> None:
    rows = [
        {"run": "a", "published": 2, "replayed": 3, "error": 0.5, "exposed_ms": {"all-gather": 1.5}},
        {"run": "b", "published": 1, "replayed": 1, "error": 0.0, "exposed_ms": {}},
        {"group": "sound", "programs": 0, "median_difference": None, "meets_target": False},
        {"fault": "f", "holds": True},
    ]
    text = page.summary(rows)
    assert "Kendall's tau 1.00" in text
    assert "0 programs, none apart" in text
    assert "1 of 1 change" in text
    assert "| a | 2 | 3 | 0.5 | all-gather 1.5 |" in page.page_table(rows)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"float8": True}, {"eager": True}, {"repeats_keys": False, "one_hot": True}])
def test_a_small_llama_compiles_for_absent_gpus(
    changes: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("AUTOPAR_PROOF_CACHE", str(tmp_path_factory.mktemp("compiled")))
    small = Llama(
        batch=2, length=2048, saved=("attention",), layers=6, width=1024, hidden=2048, heads=8, vocabulary=4096
    )
    run = Run(
        name="small", model=dataclasses.replace(small, **changes), rates="h100-sxm", tokens_per_s=1.0, fsdp=4, cp=2
    )
    text = compiled(run).hlo_text
    assert ("$f8" in text) == run.model.float8
    found = replay(text, hardware="h100-sxm", custom_kernels=attention_kernels(run.model, run.cp))
    attention = [one for one in found.operations if one.kind == "attention"]
    once = sum(one.flops for one in attention_kernels(run.model, run.cp).values())  # two devices: one part of another
    assert sum(one.flops for one in attention) == pytest.approx(6 * once)
    assert not any("custom call" in note for note in found.notes)
