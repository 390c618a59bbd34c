"""Train published models in stages that `autopar.parallelize` plans, and compare them with the unsharded step.

Each row is a model at a small size and SGD, on 2 or 4 of eight virtual CPU devices, after two steps. *Borders*: where
stages begin, as units (single equations, loops) of the forward pass. *Loss*: the largest relative error of the
losses. *Parameters*: the largest error of a parameter or running statistic in norm, relative to its norm, or to a thousandth of
what the steps added to all if that is more. *Rounding*: the latter, of the unsharded step with its examples in reverse order.
Models that normalize over examples run in *float64*: they divide small differences by small deviations, so that in float32 the
order of the examples alone changes their parameters by more than 1e-5, often by 1. The U-Net runs in both. Statistics of *each microbatch* are compared with plain JAX that takes one step from
the same state for each microbatch and averages the states, which is gradient accumulation with SGD; all else with `jax.jit` of
the step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar.pipeline.plan import PipelinePlan
from benchmarks.zoo import diffusion, language, stacked, vision
from benchmarks.zoo.patches_and_branches import GOOGLENET, inception, mlp_mixer
from benchmarks.zoo.training import Training

# isort: split
from transformers import BartConfig, GPT2Config, ResNetConfig

STEPS, BATCH = 2, 8
#: Its rate is so low that float32 does not make the second step of a deep model with batch normalization another one.
SGD = optax.sgd(0.01)


@dataclass(frozen=True, slots=True)
class Case:
    """How a model is run.

    Args:
        own: whether each microbatch has its own batch statistics.
    """

    stages: int
    microbatches: int
    schedule: str
    devices: int
    own: bool = False

    def options(self) -> dict[str, Any]:
        """Those of `parallelize`."""
        return {
            "stages": self.stages,
            "num_microbatches": self.microbatches,
            "schedule": self.schedule,
            "per_microbatch_statistics": self.own,
            "mesh": jax.sharding.Mesh(jax.devices()[: self.devices], ("all",)),
            "hardware": "cpu-host",
            "cache": False,
        }


CASES = (Case(2, 4, "1f1b", 4), Case(4, 4, "zb-h1", 4))
#: Of models whose examples meet in batch normalization.
NORMED_CASES = (
    Case(2, 1, "1f1b", 4),
    Case(4, 1, "gpipe", 4),
    Case(2, 4, "zb-h1", 2, True),
    Case(4, 2, "1f1b", 4, True),
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's training, and the cases to run it in."""

    of: Training
    cases: tuple[Case, ...] = CASES
    dtype: str = "float32"

    def state(self) -> Any:
        """A new state on the host, the same at each call, for each run to donate."""
        return jax.tree.map(self._cast, jax.device_get(jax.jit(self.of.create_state)(jax.random.key(0))))

    def batch(self, seed: int) -> Any:
        """A batch."""
        return jax.tree.map(self._cast, self.of.make_batch(seed))

    def _cast(self, array: Any) -> Any:
        return array.astype(self.dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def measure(name: str) -> list[dict[str, Any]]:
    """The rows of one model."""
    jax.config.update("jax_enable_x64", name in WIDE)  # each model is measured in a process of its own
    model, rows = MODELS[name](), []
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        for case in model.cases:
            losses, parameters, step = errors(model, case)
            plan = step.latest_plan
            assert isinstance(plan, PipelinePlan), plan
            rows.append(
                {
                    "model": name,
                    "dtype": model.dtype,
                    "stages": len(plan.stages),
                    "devices": case.devices,
                    "microbatches": case.microbatches,
                    "statistics": "each microbatch" if case.own else "batch",
                    "schedule": case.schedule,
                    "borders": ", ".join(map(str, borders(plan))),
                    "loss": losses,
                    "parameters": parameters,
                    "rounding": rounding(model, case),
                }
            )
    return rows


def borders(plan: PipelinePlan) -> list[int]:
    """Where stages begin, without the first."""
    return [plan.starts[stage.first_layer] for stage in plan.stages][1:]


def errors(model: Model, case: Case, **more: Any) -> tuple[float, float, Any]:
    """The errors of the losses and of the parameters, and the planned step.

    Args:
        more: further options of `parallelize`.
    """
    options = case.options() | more
    step = autopar.parallelize(model.of.step, **options)
    there, expected = trained(model, unsharded(model.of.step, case))
    here, found = trained(model, step)
    return *apart(found, here, expected, there, model.state()), step


def unsharded(step: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """The step on one device."""
    plain = jax.jit(step)
    if not case.own:
        return plain

    def accumulated(state: Any, batch: Any) -> Any:
        count = case.microbatches  # a microbatch has every count-th example
        parts = [{name: array[first::count] for name, array in batch.items()} for first in range(count)]
        return jax.tree.map(_mean, *(plain(state, part) for part in parts))

    return accumulated


def _mean(*each: Any) -> Any:
    return sum(each) / len(each) if jnp.issubdtype(each[0].dtype, jnp.floating) else each[0]


def rounding(model: Model, case: Case) -> float:
    """The error of the parameters by the order of the examples alone."""
    plain = unsharded(model.of.step, case)
    one, losses = trained(model, plain)
    other, others = trained(model, lambda state, batch: plain(state, {name: x[::-1] for name, x in batch.items()}))
    return apart(others, other, losses, one, model.state())[1]


def trained(model: Model, step: Callable[..., Any]) -> tuple[Any, list[float]]:
    """The state after the steps, on the host, and the losses."""
    state, losses = model.state(), []
    for seed in range(STEPS):
        state, loss = step(state, model.batch(seed))
        losses.append(float(loss))
    return jax.tree.map(np.asarray, state), losses


def apart(
    losses: list[float], state: Any, expected_losses: list[float], expected: Any, before: Any
) -> tuple[float, float]:
    """The largest relative error of the losses, and of the floats of the state in norm."""
    of_losses = [abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True)]
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    every = zip(*map(jax.tree.leaves, (state, expected, before)), strict=True)
    each = [leaves for leaves in every if np.issubdtype(leaves[1].dtype, np.floating)]
    least = 1e-3 * np.sqrt(sum(np.square(b - start).sum() for _, b, start in each))
    of_state = [np.linalg.norm(a - b) / max(np.linalg.norm(b), least) for a, b, _ in each]
    return max(of_losses), float(max(of_state))


def by_sgd(of: Training) -> Training:
    """The same training with another optimizer."""

    def create_state(rng: jax.Array) -> Any:
        state = of.create_state(rng)
        return state.replace(tx=SGD, opt_state=SGD.init(state.params))

    return Training(of.step, create_state, of.batch)


# -- models ----------------------------------------------------------------------------------


def _resnet(depths: list[int], layer_type: str) -> Model:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "num_labels": 10}
    config = ResNetConfig(depths=depths, layer_type=layer_type, **sizes)
    return Model(vision.resnet(config, BATCH, 32, jnp.float64, tx=SGD), NORMED_CASES, "float64")


def _gpt2() -> Training:
    return language.gpt2(GPT2Config(vocab_size=251, n_positions=32, n_embd=32, n_layer=4, n_head=4), BATCH, 15)


def _bart() -> Training:
    config = BartConfig(
        vocab_size=263,
        max_position_embeddings=32,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    return language.bart(config, BATCH, 12)


def _inception() -> Model:
    return Model(
        inception([group[:2] for group in GOOGLENET], BATCH, 48, 10, SGD, share=1 / 16), NORMED_CASES, "float64"
    )


MODELS: Mapping[str, Callable[[], Model]] = {
    "ResNet-18": lambda: _resnet([2, 2, 2, 2], "basic"),
    "ResNet-50": lambda: _resnet([3, 4, 6, 3], "bottleneck"),
    "U-Net": lambda: Model(by_sgd(diffusion.unet((8, 16), 1, BATCH, 16))),
    "U-Net in float64": lambda: Model(by_sgd(diffusion.unet((8, 16), 1, BATCH, 16)), dtype="float64"),
    "Inception": _inception,
    "BART": lambda: Model(by_sgd(_bart())),
    "GPT-2": lambda: Model(by_sgd(_gpt2())),
    "GPT-2 scanned": lambda: Model(by_sgd(stacked.stacked(_gpt2(), stacked.GPT2))),
    "MLP-Mixer": lambda: Model(by_sgd(mlp_mixer(32, 16, 4, 4, BATCH, 16, 10))),
}
#: Those that run in float64.
WIDE = frozenset({"ResNet-18", "ResNet-50", "Inception", "U-Net in float64"})
