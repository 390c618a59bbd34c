"""Measure the step time of autopar's plan against hand-written shardings, on 8 virtual CPU devices.

The model is the demo's GPT (`examples/train_gpt.py`). All contenders take turns in one process; medians count. The
baseline is the fastest of the recipes in `benchmarks/baselines/by_hand.py`.
"""

from __future__ import annotations

import jax

import autopar
from benchmarks.baselines import by_hand
from benchmarks.models import demo
from benchmarks.timing import TimedLoop, medians, take_turns

Row = dict[str, str | float | bool]

ROUNDS = 15
LIMIT_RATIO = 1.05


def measure(program: str) -> list[Row]:
    """One row per contender, autopar's first."""
    assert program == "demo_gpt"
    module = demo()
    batch = module.sample_batch(module.standard_library(), 0)
    step = autopar.parallelize(module.train_step)
    state = step.init(module.create_state, jax.random.key(0), batch=batch)
    plan = step.plan(state, batch)
    loops = {"autopar": TimedLoop(step, state, batch)}
    recipes = by_hand.recipes(jax.device_count())
    for name, recipe in recipes.items():
        loops[name] = TimedLoop(*by_hand.apply(recipe, module.train_step, module.create_state, batch), batch)
    times = medians(take_turns({name: loop.run for name, loop in loops.items()}, ROUNDS, warmup=2))
    ratio = times["autopar"] / min(times[name] for name in recipes)
    return [
        {
            "sharding": name,
            "median_s": times[name],
            "autopar_over_this": times["autopar"] / times[name],
            "words": plan.strategy if name == "autopar" else "by hand",
            "autopar_over_best": ratio,
            "limit": LIMIT_RATIO,
            "met": ratio <= LIMIT_RATIO,
        }
        for name in loops
    ]
