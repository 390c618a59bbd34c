"""A step cut between any two units of its forward pass, in blocks and in attention too, gives the results of plain `jax.jit`."""

from __future__ import annotations

import random
import traceback

import jax
import pytest
from pipelines import assert_alike, pipelined, tanh_layers
from staged_steps import staged_step
from test_staged_steps import assert_as_jit, first_seed

from autopar.errors import AutoparError
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.transforms.program import program_of

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def cut_anywhere(seed: int) -> str:
    """Run the step of a seed, cut at random units; what was run, or why it was refused."""
    drawn, draw = staged_step(seed), random.Random(seed)
    args, microbatches = (drawn.create(), drawn.batches[0]), drawn.options["num_microbatches"]
    units = len(Cuttable.of(program_of(drawn.step, args, carry=None, donate=None)).chain.units)
    count = min(draw.choice((2, 2, 3, 4)), units)
    starts = [0, *sorted(draw.sample(range(1, units), count - 1))]
    text = f"units {starts} of {units}, {microbatches} microbatches; {drawn.text}"
    try:
        options = {"num_microbatches": microbatches, "schedule": draw.choice(SCHEDULES), "starts": starts}
        run, _ = pipelined(drawn.step, args, num_stages=count, mesh=str(len(jax.devices()) // count), **options)
    except AutoparError as error:
        return f"refused: {error}"
    try:
        assert_as_jit(drawn, run)
    except Exception as error:
        raise AssertionError(text) from error
    return text


def check(count: int, at_least: int) -> None:
    first = first_seed()
    print(f"AUTOPAR_SEED={first}")
    failed, refused = [], []
    for seed in range(first, first + count):
        try:
            told = cut_anywhere(seed)
        except Exception:
            again = f"AUTOPAR_SEED={seed} pytest tests/test_any_cut.py -m 'not slow'"
            failed.append(f"{again}\n{traceback.format_exc(limit=-5)}")
        else:
            refused += [told] if told.startswith("refused") else []
    assert not failed, "\n\n".join([f"{len(failed)} of {count} steps from {first} on:", *failed])
    assert count - len(refused) >= at_least, "\n".join(refused)


def test_random_cuts() -> None:
    check(1, at_least=0)


@pytest.mark.slow
def test_many_random_cuts() -> None:
    check(24, at_least=16)


def test_each_cut_of_a_small_step() -> None:
    """Between a product and its activation, too."""
    params = [0.4 * jax.random.normal(key, (8, 8)) for key in jax.random.split(jax.random.key(0), 2)]
    units = len(Cuttable.of(program_of(tanh_layers, (params, params[0]), carry=None, donate=None)).chain.units)
    assert units >= 4
    for start in range(1, units):
        options = {"num_stages": 2, "num_microbatches": 2, "starts": [0, start]}
        assert_alike(
            tanh_layers, params, lambda seed: jax.random.normal(jax.random.key(seed), (8, 8)), steps=1, **options
        )
