"""The CPU seconds of a search for 24 models on 16 devices."""

from __future__ import annotations

import time
from typing import Any

from autopar.hardware.profile import load
from autopar.inference.model.config import DecoderConfig
from autopar.inference.schedule.requests import Options
from autopar.placement import Layout, ModelSpec, Slo, Traffic, synthetic_trace
from autopar.placement.estimate_times import ServedSpec, estimate_times
from autopar.placement.search import place
from benchmarks.inference.rows import row

Row = dict[str, Any]
#: (hidden size, layers, feed-forward width) of LLaMA-like models, and how many there are.
_SIZES = (((2048, 16, 8192), 12), ((3072, 28, 8192), 6), ((4096, 32, 14336), 6))
_LAYOUTS = (Layout(), Layout(2), Layout(4), Layout(8))


def measure() -> list[Row]:
    profile, options = load("h100-sxm"), Options(num_slots=16, max_length=2048)
    models: list[ModelSpec] = []
    traffic: list[Traffic] = []
    for (hidden, layers, width), num in _SIZES:
        config = DecoderConfig.of(
            {
                "model_type": "llama",
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "intermediate_size": width,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": hidden // 32,
                "vocab_size": 128256,
                "max_position_embeddings": 8192,
            }
        )
        times = estimate_times(ServedSpec(config=config, options=options), _LAYOUTS, profile)
        for _ in range(num):
            number = len(models)
            name = f"llama-{number + 1}"
            models.append(ModelSpec(name=name, slo=Slo(ttft_s=0.5, tpot_s=0.03), times=times))
            rate, cv = 4.0 * 0.85**number, (1.0, 2.0, 4.0)[number % 3]
            traffic.append(Traffic(model=name, rate_per_s=rate, cv=cv, prompt_tokens=600, output_tokens=100))
    trace = synthetic_trace(traffic, 60.0, 1)
    started = time.process_time()
    found = place(models, trace, 16, profile.usable_bytes * 0.95)
    seconds = time.process_time() - started
    return [
        row("requests of the trace", trace.num_requests),
        row("search, and the simulation of the whole trace", seconds, "CPU s", at_most=60.0),
        row("placements compared", found.num_placements),
        row("goodput", found.outcome.goodput),
        row("devices used", found.placement.num_devices),
    ]
