"""Learn a policy that places layers one after another, from the objective alone.

After Placeto (Addanki et al. 2019). The policy visits the layers in order, sees features of the current layer, and
decides. The reward is the objective of the finished partition, relative to a running mean; the parameters follow the
policy gradient (REINFORCE, Williams 1992). Placeto's graph network would see a chain here, so a few sums replace its
embedding: the shares of the FLOPs since the stage began, before it and after it, of the devices left, and of the next
layer. A layer either stays in the stage, or begins a new one on the next submesh of some size. The policy is a NumPy
network with one hidden layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.pipeline.partition.cluster import Line, lines
from autopar.pipeline.partition.price_tables import Prices
from autopar.pipeline.partition.problem import Partition, PartitionProblem, Stage
from benchmarks.baselines.stages_equal import best, on_places

_HIDDEN = 16
_RATE = 0.05
_MEAN = 0.9  # decay of the running mean of rewards
_ENTROPY = 0.01
_WORST = -3.0  # reward of a partition that does not fit


@dataclass(frozen=True, slots=True)
class Reinforce:
    """A `Partitioner`.

    Args:
        flops: FLOPs of each layer.
        num_episodes: number of partitions to draw.
        batch: partitions per gradient step.
        seed: seed of its random numbers.
    """

    flops: Sequence[float]
    num_episodes: int = 1000
    batch: int = 10
    seed: int = 0

    def partition(self, problem: PartitionProblem) -> Partition:
        """The best partition found."""
        prices, rng = Prices(problem), np.random.default_rng(self.seed)
        every = lines(problem.cluster, problem.all_shapes)
        policy = _Policy(1 + len(problem.all_shapes), rng)
        scale, mean = 0.0, 0.0
        met: dict[tuple[Stage, ...], None] = {}
        for number in range(self.num_episodes // self.batch):
            episodes = [self._episode(problem, every[(number + i) % len(every)], policy) for i in range(self.batch)]
            met |= dict.fromkeys(stages for stages, _ in episodes)
            costs = [prices.evaluate(stages) for stages, _ in episodes]
            finite = [cost for cost in costs if math.isfinite(cost)]
            scale = scale or min(finite, default=0.0)
            rewards = np.array([-cost / scale if math.isfinite(cost) and scale else _WORST for cost in costs])
            rewards = np.maximum(rewards, _WORST)
            mean = rewards.mean() if number == 0 else _MEAN * mean + (1 - _MEAN) * rewards.mean()
            policy.learn([steps for _, steps in episodes], rewards - mean)
        return best(prices, list(met))

    def _episode(self, problem: PartitionProblem, line: Line, policy: _Policy) -> tuple[tuple[Stage, ...], list[_Step]]:
        """A partition drawn from the policy, with the observations and actions."""
        work = np.asarray(self.flops, float) / np.sum(self.flops)
        num_devices = problem.cluster.num_devices
        starts: list[int] = []
        places: list[int] = []
        steps: list[_Step] = []
        at, since = 0, 0.0
        for layer in range(problem.num_layers):
            next_places = {int(line.shape[p]): p for p in np.flatnonzero(line.start == at).tolist()}
            allowed = np.zeros(1 + len(problem.all_shapes), bool)
            allowed[0] = bool(places)
            if len(places) < problem.most_stages:
                allowed[[1 + shape for shape in next_places]] = True
            size = (line.end[places[-1]] - line.start[places[-1]]) / num_devices if places else 0.0
            left = 1 - at / num_devices
            seen = np.array(
                [1.0, work[:layer].sum(), work[layer] * problem.num_layers, since, size, left, since - size]
            )
            step = policy.act(seen, allowed)
            steps.append(step)
            if step.action:
                place = next_places[step.action - 1]
                places.append(place)
                starts.append(layer)
                at, since = int(line.end[place]), 0.0
            since += float(work[layer])
        return on_places(line, places, starts, problem.num_layers), steps


@dataclass(frozen=True, slots=True)
class _Step:
    seen: np.ndarray
    hidden: np.ndarray
    chances: np.ndarray
    action: int


class _Policy:
    """Probabilities of actions: softmax over one hidden layer."""

    def __init__(self, num_actions: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self._first = rng.normal(0, 0.3, (7, _HIDDEN))
        self._second = rng.normal(0, 0.1, (_HIDDEN, num_actions))
        self._bias = np.zeros(num_actions)
        self._bias[0] = math.log(num_actions)  # most layers stay in the current stage

    def act(self, seen: np.ndarray, allowed: np.ndarray) -> _Step:
        """Draw one of the allowed actions."""
        hidden = np.tanh(seen @ self._first)
        scores = np.where(allowed, hidden @ self._second + self._bias, -np.inf)
        chances = np.exp(scores - scores.max())
        chances /= chances.sum()
        return _Step(seen, hidden, chances, int(self._rng.choice(len(chances), p=chances)))

    def learn(self, episodes: Sequence[Sequence[_Step]], advantages: np.ndarray) -> None:
        """One gradient step on the expected reward, plus a small entropy bonus."""
        first, second, bias = (np.zeros_like(a) for a in (self._first, self._second, self._bias))
        for steps, advantage in zip(episodes, advantages.tolist(), strict=True):
            for step in steps:
                known = np.log(np.maximum(step.chances, 1e-12))
                score = -advantage * step.chances - _ENTROPY * step.chances * (known - (step.chances * known).sum())
                score[step.action] += advantage
                bias += score
                second += np.outer(step.hidden, score)
                first += np.outer(step.seen, (self._second @ score) * (1 - step.hidden**2))
        for weights, gradient in ((self._first, first), (self._second, second), (self._bias, bias)):
            weights += _RATE * gradient / max(1.0, float(np.linalg.norm(gradient)))
