"""The settings of the comparison with replication, fixed before the first run.

Eight GPT models of 1.3 billion weights (24 layers, width 2,048) in float16 on 8 V100 of 16 GB. A device has memory for one model, as in
AlpaServe's motivating example (Li et al., OSDI 2023, section 3.1). A request is a prompt of 2,000 tokens and one token of output, and
is computed in one iteration, as the models that AlpaServe serves. All models have the same rate, at which replication serves 0.6 to
0.7 of the requests at CV 4 and a bound of 5 times the latency. That rate was found with replication alone, on traces of other seeds.

Placements are found on one trace and measured on another one.
"""

from __future__ import annotations

from autopar.hardware.profile import load
from autopar.inference.model.config import DecoderConfig
from autopar.inference.schedule.requests import Options
from autopar.placement import Group, Layout, ModelSpec, Placement, Slo, StepTimes, Trace, Traffic, synthetic_trace
from autopar.placement.estimate_times import ServedSpec, estimate_times

NUM_MODELS, NUM_DEVICES, BUDGET_BYTES = 8, 8, 6e9
NAMES = tuple(f"gpt-{number}" for number in range(1, NUM_MODELS + 1))
CVS, BOUNDS = (1.0, 2.0, 4.0, 8.0), (2.0, 3.0, 5.0, 10.0, 20.0)
PROMPT, OUTPUT = 2000, 1
RATE_PER_S, DURATION_S = 0.8, 500.0
SEARCH_SEED, MEASURE_SEED = 1, 2

CONFIG = {"model_type": "gpt2", "n_embd": 2048, "n_layer": 24, "n_head": 32, "vocab_size": 51200, "n_positions": 2048}
OPTIONS = Options(num_slots=4, max_length=2048, chunks=((1, 2048),), steps=1)
LAYOUTS = tuple(Layout(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= NUM_DEVICES)


def predicted_times() -> dict[Layout, StepTimes]:
    """The times of the model on all layouts, predicted."""
    spec = ServedSpec(config=DecoderConfig.of(CONFIG), options=OPTIONS, dtype="float16")
    return estimate_times(spec, LAYOUTS, load("v100-sxm-16"))


def models_with(times: dict[Layout, StepTimes], bound: float) -> list[ModelSpec]:
    """The models, with a latency of at most `bound` times that on one device."""
    alone = times[Layout()].latency_s(PROMPT, OUTPUT)
    return [ModelSpec(name=name, slo=Slo(latency_s=bound * alone), times=times) for name in NAMES]


def trace_with(cv: float, seed: int, rate_per_s: float = RATE_PER_S, duration_s: float = DURATION_S) -> Trace:
    """Requests for all models at one rate."""
    traffic = [
        Traffic(model=name, rate_per_s=rate_per_s, cv=cv, prompt_tokens=PROMPT, output_tokens=OUTPUT) for name in NAMES
    ]
    return synthetic_trace(traffic, duration_s, seed)


def replication() -> Placement:
    """One model on each device: the only way to serve all models without model parallelism."""
    return Placement(tuple(Group(Layout(), (name,)) for name in NAMES))
