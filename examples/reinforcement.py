"""Reinforcement learning in one process: an engine samples, a verifier scores, a train step learns in the gaps.

    python examples/reinforcement.py
    python examples/reinforcement.py --rounds 20

A decoder with random weights learns to sort three digits. In each round the engine samples eight answers to each of sixteen questions
(`best_of`), and a verifier gives each the share of its digits that are right. The answers of the round before are trained on meanwhile, in
microbatches between the engine's iterations (`engine.lend`); then the engine takes the new weights (`engine.update_weights`), without a restart.
An answer is of the weights of its round, so its logprob is known exactly, and the ratio of policies in the loss corrects that it is one round old.
"""

from __future__ import annotations

import os

# Before JAX is imported: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar.inference import Answers, Chain, Decoder, DecoderConfig, Engine, Options, SamplingOptions, best_of

DIGITS, MARK = 3, 10  # a question is three digits and the mark
QUESTIONS, CHAINS = 16, 8
CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
}
OPTIONS = Options(num_slots=CHAINS, max_length=32, chunks=((2, 8),), steps=1)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(3e-3, 3e-4, 150)))


def verify(chain: Chain) -> float:
    """The share of an answer's digits that are right."""
    right = sorted(chain.prompt[:DIGITS])
    return sum(one == other for one, other in zip(chain.tokens, right, strict=True)) / DIGITS


def train_step(state: Any, batch: Any) -> Any:
    """One step on answers: those that are better than the others to the same question become more probable."""
    model: Any = Decoder(DecoderConfig.of(CONFIG))

    def loss_of(params: Any) -> jax.Array:
        tokens = batch["tokens"]
        logits = model.apply(params, tokens[:, :-1])[0]
        logprobs = -optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        ratio = jnp.exp(logprobs[:, DIGITS:].sum(1) - batch["logprob"])  # of this policy to the one that sampled
        advantage = batch["advantage"]
        return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()

    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def sample(engine: Engine, chance: np.random.Generator, number: int) -> list[Answers]:
    """Several answers to each question of a round."""
    return [
        best_of(
            engine,
            [*map(int, chance.integers(0, 10, DIGITS)), MARK],
            CHAINS,
            verify,
            sampling=SamplingOptions(1.0, seed=CHAINS * (QUESTIONS * number + question)),
            max_tokens=DIGITS,
            stop_tokens=(),
        )
        for question in range(QUESTIONS)
    ]


def batch_of(answers: list[Answers]) -> dict[str, np.ndarray]:
    """A batch to train on: how much better each answer is than the mean of its question."""
    scores = np.array([[chain.score or 0.0 for chain in each.chains] for each in answers], np.float32)
    advantage = (scores - scores.mean(1, keepdims=True)) / (scores.std(1, keepdims=True) + 0.1)
    chains = [chain for each in answers for chain in each.chains]
    return {
        "tokens": np.array([[*chain.prompt, *chain.tokens] for chain in chains], np.int32),
        "logprob": np.array([chain.logprob for chain in chains], np.float32),
        "advantage": advantage.reshape(-1),
    }


def main() -> None:
    """Learn, and show the reward."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150, help="how many (default: 150)")
    asked = parser.parse_args()
    config, chance = DecoderConfig.of(CONFIG), np.random.default_rng(0)
    params = Decoder(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    engine = Engine.of(config, params, options=OPTIONS, num_pages=64, page_size=8)
    step = autopar.MicrobatchedStep(train_step, 4, mesh=engine.runner.mesh)
    state: Any = (params, OPTIMIZER.init(params))

    started, rewards, in_gaps = time.perf_counter(), list[float](), 0
    answers = sample(engine, chance, 0)
    for number in range(1, asked.rounds + 1):
        training = engine.lend(step, state, [batch_of(answers)], tpot_s=0.5)
        answers = sample(engine, chance, number)
        in_gaps += training.num_microbatches
        state = training.finish()
        engine.update_weights(state[0])
        rewards.append(float(np.mean([chain.score or 0.0 for each in answers for chain in each.chains])))
        best = float(np.mean([each.best.score or 0.0 for each in answers]))
        if number % max(1, asked.rounds // 10) == 0 or number == 1:
            print(f"round {number:3}: reward {rewards[-1]:.2f}, best of {CHAINS} {best:.2f}")
    took, share = time.perf_counter() - started, in_gaps / (4 * asked.rounds)
    few = max(1, asked.rounds // 10)
    print(f"{asked.rounds} rounds in {took:.0f} s; {share:.0%} of the microbatches ran while answers were sampled.")
    print(f"reward: {np.mean(rewards[:few]):.2f} at first, {np.mean(rewards[-few:]):.2f} at last")


if __name__ == "__main__":
    main()
