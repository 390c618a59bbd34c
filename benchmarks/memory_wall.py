"""Find the GPUs that can train large language models, and the least number of them.

BERT-large, GPT-2 (1.5 B), Turing-NLG (17.2 B) and GPT-3 (175 B) are Hugging Face's Flax BERT and GPT-2 at their
published sizes, with their layers in one `nn.scan`, dropout, and textbook mixed precision: fp16 parameters and
gradients, fp32 master copy and Adam moments, 16 bytes per parameter. `lecture_gb` is 16 bytes times the rounded number
of parameters; `state_gb` is what autopar reads from the step's arguments. `autopar compare` plans each model for V100s
of 16 and 32 GB and A100s of 40 and 80 GB. `usable_gb` is the memory that a plan may fill (75 %, which is JAX's default,
less a margin of 5 %). `state_fits` is the state over that, rounded up: the number of GPUs that the state alone would
fill. `least` is the least number of 1, 2, 4, 8 GPUs, or 1, 2, 4, ... hosts of 8, with a plan. `before` is the memory
per GPU that the next smaller number would need. Batches (of the whole job) are in the rows; a plan may use gradient
accumulation and rematerialization. No GPU is used, and nothing is compiled: peaks and step times are predictions.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.cli.main import main
from benchmarks.zoo import language
from benchmarks.zoo.mixed_precision import mixed_precision
from benchmarks.zoo.stacked import BERT, GPT2, stacked
from benchmarks.zoo.training import Batch, Field, Target, cross_entropy, next_token_loss

# isort: split
import jax
import jax.numpy as jnp
from transformers import BertConfig, FlaxBertForPreTraining, FlaxGPT2LMHeadModel, GPT2Config

HARDWARE = ("v100-sxm-16", "v100-sxm-32", "a100-sxm-40", "a100-sxm-80")
BYTES_A_PARAMETER = 16


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the lecture.

    Args:
        billions: number of parameters, as the lecture rounds them.
        examples, tokens: examples per batch, and tokens per example.
        target: the step and its arguments.
    """

    billions: float
    examples: int
    tokens: int
    target: Callable[[], Target]


def bert_large() -> Target:
    """24 layers of 1,024: masked words and the next sentence."""
    model = MODELS["bert_large"]
    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=model.tokens,
    )
    bert: Any = FlaxBertForPreTraining(config, _do_init=False, dtype=jnp.dtype(jnp.float16))

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = bert(batch["tokens"], batch["mask"], batch["segments"], params=params, dropout_rng=rng, train=True)
        words = cross_entropy(out.prediction_logits, batch["labels"])
        masked = jnp.where(batch["labels"] > 0, words, 0).sum() / jnp.maximum((batch["labels"] > 0).sum(), 1)
        return masked + cross_entropy(out.seq_relationship_logits, batch["next"]).mean()

    tokens = Field((model.examples, model.tokens), below=config.vocab_size)
    bits = Field((model.examples, model.tokens))
    fields = {"tokens": tokens, "mask": bits, "segments": bits, "labels": tokens, "next": Field((model.examples,))}
    return stacked(mixed_precision(language.initialiser(bert), loss_of, fields), BERT).target


def gpt2_xl() -> Target:
    """48 layers of 1,600."""
    return _gpt(MODELS["gpt2_xl"], n_layer=48, n_embd=1600, n_head=25)


def turing_nlg() -> Target:
    """78 layers of 4,256."""
    return _gpt(MODELS["turing_nlg"], n_layer=78, n_embd=4256, n_head=28)


def gpt3() -> Target:
    """96 layers of 12,288."""
    return _gpt(MODELS["gpt3"], n_layer=96, n_embd=12288, n_head=96)


def _gpt(model: Model, **sizes: Any) -> Target:
    config = GPT2Config(n_positions=model.tokens, **sizes)
    gpt: Any = FlaxGPT2LMHeadModel(config, _do_init=False, dtype=jnp.dtype(jnp.float16))

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        logits = gpt(batch["tokens"], params=params, train=True, dropout_rng=rng).logits
        return next_token_loss(logits, batch["tokens"])

    fields = {"tokens": Field((model.examples, model.tokens), below=config.vocab_size)}
    return stacked(mixed_precision(language.initialiser(gpt), loss_of, fields), GPT2).target


MODELS = {
    "bert_large": Model(0.32, 32, 512, bert_large),
    "gpt2_xl": Model(1.5, 32, 1024, gpt2_xl),
    "turing_nlg": Model(17.2, 128, 1024, turing_nlg),
    "gpt3": Model(175.0, 256, 2048, gpt3),
}


def measure(program: str) -> list[dict[str, Any]]:
    """A row for each kind of GPU, from the command line's report."""
    started, used, out = time.perf_counter(), time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["compare", f"benchmarks.memory_wall:{program}", "--hardware", ",".join(HARDWARE), "--json"])
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - used
    if code:
        raise RuntimeError(f"`autopar plan` ended with {code}")
    (report,) = json.loads(out.getvalue())["targets"]
    model, state = MODELS[program], report["training_state"]
    about = {
        "parameters_b": state["num_parameters"] / 1e9,
        "lecture_gb": BYTES_A_PARAMETER * model.billions,
        "state_gb": state["total_bytes"] / 1e9,
        "batch": f"{model.examples} x {model.tokens}",
    }
    return [about | _row(fit, state["total_bytes"]) | _times(seconds, cpu_seconds) for fit in report["hardware"]]


def _row(fit: dict[str, Any], state_bytes: float) -> dict[str, Any]:
    plan, refused = fit["plan"], fit["refused"]
    return {
        "hardware": fit["name"],
        "usable_gb": fit["budget_bytes"] / 1e9,
        "on_one": fit["fits_on_one"],
        "state_fits": math.ceil(state_bytes / fit["budget_bytes"]),
        "least": fit["least_num_devices"] or "none",
        **(_planned(plan) if plan else dict.fromkeys(("mesh", "step_s", "peak_gb", "plan"), "")),
        "before": _before(refused[-1]) if refused else "",
    }


def _planned(plan: dict[str, Any]) -> dict[str, Any]:
    again = sum(one["time_s"] for one in plan["recomputed"])
    step_s = plan["prediction"]["step_time_s"]
    parts = [
        plan["strategy"] if math.prod(plan["mesh"].values()) > 1 else "",
        f"{plan['num_microbatches']} microbatches" if plan["num_microbatches"] > 1 else "",
        f"values computed again in {100 * again / step_s:.0f} % of the step" if again else "",
    ]
    return {
        "mesh": "x".join(map(str, plan["mesh"].values())),
        "step_s": step_s,
        "peak_gb": plan["prediction"]["peak_bytes"] / 1e9,
        "plan": "; ".join(part for part in parts if part),
    }


def _before(refused: dict[str, Any]) -> str:
    need = "no figure" if refused["least_bytes"] is None else f"{refused['least_bytes'] / 1e9:.4g} GB"
    why = "" if refused["planned"] else ", parameters and optimizer state alone"
    return f"{refused['num_devices']}: {need}{why}"


def _times(seconds: float, cpu_seconds: float) -> dict[str, Any]:
    return {"all_four_s": seconds, "all_four_cpu_s": cpu_seconds}
