"""Compile the pieces that the pipeline's executor runs for absent H100s, and compare predicted with replayed times.

Each model is planned by `autopar.plan(step, stages=k, schedule="1f1b")` for eight H100s in one host. `autopar.verify`
then compiles every piece with XLA's GPU compiler and replays it by the rates of `cost_models/replay`. A row is a model
and a number of stages. For each task of each stage: predicted / replayed time. *median off*, *worst off*: of |predicted -
replayed| / replayed over these tasks, the gate being 15 % in the median; the same over the forward and backward passes
alone, which run once per microbatch. *step*: the time of the step, simulated with predicted and with replayed times.
*peaks off*: the largest |predicted - compiled| / compiled peak memory of a submesh. Both columns of times are estimates;
nothing is measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from transformers import BartConfig, GPT2Config, LlamaConfig, ResNetConfig

import autopar
from autopar.errors import AutoparError
from autopar.system.units import human_seconds
from autopar.verification.verify_stages import StagesVerification
from autopar.xla_compiler.compiler import Compiler
from benchmarks.zoo import diffusion, language, vision
from benchmarks.zoo.training import BF16, Training

_RESNET18: dict[str, Any] = {
    "layer_type": "basic",
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "num_labels": 1000,
}
_LLAMA: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 32_000,
}
_BART: dict[str, Any] = {
    "d_model": 768,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
#: Each model, and the options of its plan.
MODELS: dict[str, tuple[Callable[[], Training], dict[str, Any]]] = {
    "GPT": (lambda: language.gpt2(GPT2Config(n_layer=8), 64, 1024, BF16), {"num_microbatches": 8}),
    "GPT scanned": (lambda: language.llama_scanned(LlamaConfig(**_LLAMA), 64, 1024, BF16), {"num_microbatches": 8}),
    "BART": (lambda: language.bart(BartConfig(**_BART), 64, 512, BF16), {"num_microbatches": 8}),
    "ResNet-18": (
        lambda: vision.resnet(ResNetConfig(**_RESNET18), 512, 224, BF16),
        {"num_microbatches": 8, "per_microbatch_statistics": True},
    ),
    "U-Net": (lambda: diffusion.unet((64, 128, 256), 2, 256, 64), {"num_microbatches": 8}),
}
#: The numbers of stages of each model.
STAGES = (2, 4)


def measure(model: str) -> list[dict[str, Any]]:
    """A row for each number of stages of a model."""
    with Compiler(platform=None) as compiler:
        return [_row(model, stages, compiler) for stages in STAGES]


def _row(model: str, stages: int, compiler: Compiler) -> dict[str, Any]:
    made, options = MODELS[model]
    step, args = made().target
    started = time.process_time()
    options |= {"stages": stages, "schedule": "1f1b", "num_devices": 8, "hardware": "h100-sxm"}
    try:
        plan = autopar.plan(step, *args, **options)
        planned = time.process_time() - started
        found: Any = autopar.verify(step, *args, plan=plan, hardware="h100-sxm", compiler=compiler)
    except AutoparError as error:
        return {"stages": stages, "outcome": str(error)}
    return {"stages": stages, "devices": _devices(found), **figures(found), "planning CPU s": planned}


def figures(found: StagesVerification) -> dict[str, Any]:
    """The figures of a verification, and a text with every task."""
    tasks = [(n, one) for n, stage in enumerate(found.stages) for one in stage.times]
    offs = [abs(one.off) for _, one in tasks if one.off is not None]
    passes = [abs(one.off) for _, one in tasks if one.off is not None and one.phase != "update"]
    step = found.step_time
    return {
        "median off": _percent(median(offs)),
        "worst off": _percent(max(offs)),
        "passes: median off": _percent(median(passes)),
        "passes: worst off": _percent(max(passes)),
        "step predicted": human_seconds(step.predicted),
        "step replayed": "-" if step.compiled is None else human_seconds(step.compiled),
        "step off": "-" if step.off is None else f"{100 * step.off:+.1f} %",
        "peaks off": _percent(max(abs(figure.off or 0.0) for figure in found.memory)),
        "XLA s": found.compile_s,
        "tasks, predicted / replayed": ", ".join(_task(n, one) for n, one in tasks),
        "outcome": "holds" if found.holds else "off: " + ", ".join(found.off),
    }


def _devices(found: StagesVerification) -> str:
    return " + ".join(str(len(stage.devices)) for stage in found.plan.stages)


def _task(stage: int, one: Any) -> str:
    replayed = "-" if one.replayed_s is None else human_seconds(one.replayed_s)
    return f"{one.phase[0].upper()}{stage} {human_seconds(one.predicted_s)} / {replayed}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
