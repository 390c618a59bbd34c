"""Test `autopar estimate inference`: figures from plans, the steady state against the scheduler, invalid arguments."""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autopar.api.planned_function import Planned
from autopar.cli.main import main
from autopar.errors import BudgetError, InferenceError
from autopar.hardware.profile import load
from autopar.inference.estimate.estimate import InferenceOnPaper, PaperInference, choose, inference_on_paper, verdict
from autopar.inference.estimate.layout_text import describe_layout
from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.model.config import DecoderConfig
from autopar.inference.schedule.requests import Iteration, Options, Request, Results, Shape
from autopar.inference.schedule.scheduler import Scheduler
from autopar.inference.schedule.steady_state import steady_state
from autopar.pipeline.plan_files import load_plan
from autopar.plans.plan import Plan
from autopar.xla_compiler import hlo_collectives as hlo

#: Two layers of the size of LLaMA 3.1 8B.
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
#: A small model.
SMALL = {
    **FIELDS,
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
}


def case(fields: dict[str, Any] = FIELDS, **more: Any) -> PaperInference:
    return PaperInference(config=DecoderConfig.of(fields), **more)


@cache
def estimate() -> InferenceOnPaper:
    """The figures for the default objective on two devices."""
    return inference_on_paper(case(), num_devices=2, hardware="h100-sxm")


# -- the steady state --------------------------------------------------------------------------


def simulated(options: Options, prompt: int, output: int, num_requests: int) -> tuple[float, float]:
    """Simulate the scheduler, and return the sequences that end per iteration and the share of iterations with chunks.

    Outputs have 50 % to 150 % of `output` tokens. The first quarter of the iterations is left out, and so are those after
    the last request has started.
    """
    scheduler = Scheduler(PagedCache(PagePool(100_000), 16, shares_prefixes=False), options)
    for n in range(num_requests):
        length = output // 2 + n * 7919 % (output + 1)
        scheduler.submit(Request(str(n), (n,) * prompt, length))
    sent: list[Iteration] = []
    ended: list[int] = []
    in_flight: deque[Iteration] = deque()
    while scheduler.num_waiting:
        iteration = scheduler.next()
        if iteration is not None:
            sent.append(iteration)
            in_flight.append(iteration)
        if len(in_flight) > (iteration is not None):  # one iteration ahead, as in the engine
            done = in_flight.popleft()
            rows = options.num_slots + done.shape.rows
            results = Results(np.ones((rows, 1), np.int32), np.ones(rows, np.int32), np.ones(rows, bool))
            ended += [len(sent)] * len(scheduler.update(done, results).ended)
    first = len(sent) // 4
    num = len(sent) - first
    return sum(at > first for at in ended) / num, sum(bool(each.chunks) for each in sent[first:]) / num


@pytest.mark.parametrize(
    ("prompt", "output", "slots", "within"),
    [(500, 120, 8, 0.05), (128, 100, 16, 0.05), (1000, 10, 16, 0.05), (2048, 128, 16, 0.1)],
    ids=["few prompts", "short prompts", "prompts alone", "nearly all prompts"],
)
def test_the_steady_state_equals_that_of_the_scheduler(prompt: int, output: int, slots: int, within: float) -> None:
    options = Options(num_slots=slots, max_length=4096, steps=1)
    formula = steady_state(options, prompt, output, slots)
    ended, mixed = simulated(options, prompt, output, 8 * slots)
    assert formula.ended == pytest.approx(ended, rel=within)
    assert formula.mixed == pytest.approx(mixed, rel=within, abs=0.02)


# -- figures -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_bytes_equal_those_of_the_weights_and_pages() -> None:
    """On two devices all weights but the norms are split. A page has keys and values of 16 tokens in both layers."""
    layer = 4096 * (32 * 128 * 2 + 8 * 128 * 2 + 14336 * 3)
    norms = 5 * 4096
    one, two = estimate().options
    assert one.figures is not None
    assert two.figures is not None
    weights = 2 * (2 * 128256 * 4096 + 2 * layer)
    assert two.figures.weight_bytes == weights + 2 * norms
    assert one.figures.weight_bytes == weights / 2 + 2 * norms
    page = 2 * 2 * 16 * 8 * 128 * 2
    assert two.figures.cache_bytes == (two.figures.num_pages + 1) * page
    assert one.figures.cache_bytes == (one.figures.num_pages + 1) * page / 2
    assert two.figures.num_tokens == 16 * two.figures.num_pages
    assert two.figures.num_longest == two.figures.num_pages // 125  # of 2,000 tokens
    for each in (one, two):
        assert each.layout is not None
        assert each.layout.peak_bytes < 0.75 * 84942979072


@pytest.mark.slow
def test_times_are_predictions_of_the_plans() -> None:
    one, _ = estimate().options
    assert one.layout is not None
    assert one.figures is not None
    seconds = {key: made.plan.prediction.step_time_s for key, made in one.layout.programs.items()}
    chunk = seconds[Shape(rows=1, length=256)]
    assert one.figures.tpot_s == seconds[Shape()] < chunk
    assert one.figures.tpot_many_s == seconds[Shape(steps=8)] / 8
    assert one.figures.ttft_s == 4 * chunk
    ended = 16 / (4 + 999 + 1)
    between = 4 * ended * chunk + (1 - 4 * ended) * seconds[Shape()]
    assert one.figures.tpot_loaded_s == pytest.approx(between)
    assert one.figures.tokens_per_s == pytest.approx(1000 * ended / between)
    parts = one.figures.parts
    assert parts.collectives_s + max(parts.memory_s, parts.arithmetic_s) + parts.rest_s == pytest.approx(
        one.figures.tpot_s
    )
    assert one.figures.per_layer == {"all-reduce": 2.0}


@pytest.mark.slow
def test_latency_chooses_one_replica_and_throughput_one_per_device() -> None:
    one, two = estimate().options
    fast, many = case(), case(objective="throughput")
    assert choose(fast, [one, two]) == (one, "")
    assert choose(many, [one, two]) == (two, "")
    assert estimate().chosen is one
    assert estimate().verdicts == {2: verdict(fast, two, one)}
    assert "x the TPOT" in verdict(fast, two, one)
    assert "x the tokens/s" in verdict(many, one, two)
    assert verdict(fast, replace(two, figures=None, refused="too large"), one) == "too large"


def test_a_candidate_that_misses_a_bound_is_not_chosen_if_another_meets_it() -> None:
    one, two = estimate().options
    assert one.figures is not None
    bounded = case(objective="throughput", tpot_s=1.05 * one.figures.tpot_loaded_s)
    assert choose(bounded, [one, two]) == (one, "")
    assert verdict(bounded, two, one).startswith("TPOT is")
    nearest, missed = choose(case(ttft_s=1e-6), [one, two])
    assert nearest is one
    assert "no number of replicas meets the bounds" in missed


def test_a_model_that_does_not_fit_is_an_error_with_the_number_of_devices_needed() -> None:
    with pytest.raises(BudgetError, match=r"not even as one replica on 2: .*at least 4 devices"):
        inference_on_paper(case(), num_devices=2, hardware="h100-sxm", memory_budget_bytes=1e9)


def test_describe_layout() -> None:
    one, two = estimate().options
    assert one.layout is not None
    assert two.layout is not None
    shardings = dict(describe_layout(one.layout.programs[Shape()].plan))
    assert shardings["cache: keys, values"] == "heads over 2"
    assert shardings["logits"] == "vocabulary over 2"
    assert shardings["weights: attention_norm, mlp_norm, norm"] == "replicated"
    assert set(dict(describe_layout(two.layout.programs[Shape()].plan)).values()) == {"replicated"}


@pytest.mark.slow
def test_a_compiled_decode_step_has_two_all_reduces_per_layer_and_gathers_no_cache_and_no_vocabulary() -> None:
    served = case(prompt=1024, output=1024).served
    function, arguments = served.program(Shape(), 2048)
    profile = load("h100-sxm")
    planned = Planned.of(function, arguments, {"mesh": "model=8", "hardware": profile}, ("resident",))
    compiled = planned.run.lower(*planned.arguments).compile().as_text()
    found = hlo.collectives(compiled, ignore_up_to=1)
    large = Counter(one.kind for one in found if one.num_elements >= 16 * 4096 / 8)
    assert large["all-reduce"] == 2 * 2
    gathered = [one.num_elements for one in found if one.kind == "all-gather"]
    assert max(gathered) <= 16 * 4096  # the input of the first layer
    assert jax.device_count() == 8


# -- the command line --------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    return tmp_path


def run(model: Path | str, *arguments: str) -> int:
    return main(["estimate", "inference", str(model), "--devices", "1", "--hardware", "h100-sxm", *arguments])


@pytest.mark.slow
def test_the_command_prints_tables_or_json_and_saves_the_plan(model: Path, capsys: Any, tmp_path: Path) -> None:
    plan = str(tmp_path / "decode.plan.json")
    small = ("--prompt-tokens", "20", "--output-tokens", "10", "--batch", "2")
    assert run(model, *small, "-o", plan) == 0
    text = capsys.readouterr().out
    for part in (
        "Replicas",
        "TPOT",
        "Shardings of a replica on 1 device",
        "sequences of 32 at once",
        "Time of a decode step",
    ):
        assert part in text
    saved = load_plan(plan)
    assert isinstance(saved, Plan)
    assert saved.mesh.num_devices == 1
    assert run(model / "config.json", *small, "--dtype", "float32", "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["inference"]["batch"] == 2
    assert read["inference"]["dtype"] == "float32"
    assert read["chosen"] == 1
    weights = 8192 * 256 * 2 + 256 * (256 * 2 + 128 * 2 + 512 * 3) + 3 * 256
    assert read["num_weights"] == weights
    assert read["replicas"][0]["figures"]["weight_bytes"] == 4 * weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hardware", "h200=8"), "devices of one kind"),
        (("--prompt-tokens", "8000"), "the model has 8,192 positions: shorten either"),
        (("--max-length", "9000"), "max_length is 9,000"),
        (("--max-length", "100"), "prompt and output have 2,000 tokens"),
        (("--dtype", "int3"), "`dtype` is 'int3'"),
        (("--objective", "joy"), "`objective` is 'joy'"),
        (("--memory-budget", "100KB"), "does not fit on h100-sxm"),
    ],
)
def test_invalid_arguments_are_refused_by_name(
    model: Path, capsys: Any, arguments: tuple[str, ...], message: str
) -> None:
    assert run(model, *arguments) == 2
    assert message in capsys.readouterr().err


def test_options_of_other_targets_are_refused(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    for more in (["other"], ["--corpus", "10x10:int8"], ["--stages", "2"], ["--pin", "a=P()"]):
        with pytest.raises(SystemExit):
            main(["estimate", "inference", "one", *more])
        assert "unrecognized arguments" in capsys.readouterr().err
    with pytest.raises(InferenceError, match="`batch` is 0"):
        case(batch=0)
