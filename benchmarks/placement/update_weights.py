"""Update the weights of an engine under load, and compare every token with that of the weights in force when it was computed.

A trainer has its weights on two devices, split by rows over an axis of its own, and one thread gives the engine the next ones as soon as
a few more iterations have run. The engine serves on the same two devices in shardings of its own plan. Another thread submits a request
whenever a slot becomes free, half of them with a common prefix. In the end each token is compared with the most probable one by the whole
sequence before it, without a cache, and with the weights of its version.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.inference import Decoder, DecoderConfig, Engine, Generation, Options
from benchmarks.inference.rows import row

Row = dict[str, Any]
_FIELDS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
_LENGTH, _NUM_UPDATES, _NUM_WEIGHTS = 96, 100, 10
_OPTIONS = Options(num_slots=4, max_length=_LENGTH, chunks=((2, 16), (1, 48)), steps=4)
#: Logits within this of the largest count as equal: a sum in another order differs by less.
_TIE = 1e-4


def measure() -> list[Row]:
    engine, weights = opened(2)
    generations = serve_and_update(engine, weights, 1)
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        generations += serve_and_update(engine, weights, _NUM_UPDATES)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    wrong, stale = wrong_tokens(weights, generations)
    crossed = sum(len(set(each.versions)) > 1 for each in generations)
    ended = sum(each.ended == "length" for each in generations)
    return [
        row("updates of the weights", engine.weights_version, "", at_least=_NUM_UPDATES),
        row("requests", len(generations)),
        row("requests that an update met", crossed),
        row("tokens", sum(len(each.tokens) for each in generations)),
        row("wrong tokens", wrong, "", at_most=0),
        row("tokens that the weights before would not have given", stale),
        row("requests that were dropped", len(generations) - ended, "", at_most=0),
        row("programs compiled after the first update", len(compiled), "", at_most=0),
    ]


def opened(num_devices: int) -> tuple[Engine, list[Any]]:
    """An engine, and several weights of its model in the shardings of a trainer. The engine has the first of them."""
    config, devices = DecoderConfig.of(_FIELDS), np.array(jax.devices()[:num_devices])
    trainer = Mesh(devices, ("data",))

    def placed(leaf: jax.Array) -> jax.Array:
        spec = PartitionSpec("data") if leaf.shape[0] % num_devices == 0 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(trainer, spec))

    init = jax.jit(lambda key: Decoder(config).init(key, jnp.zeros((1, 1), jnp.int32)))
    weights = [jax.tree.map(placed, init(jax.random.key(number))) for number in range(_NUM_WEIGHTS)]
    more: dict[str, Any] = {"options": _OPTIONS, "mesh": Mesh(devices, ("model",)), "hardware": "cpu-host"}
    return Engine.of(config, weights[0], num_pages=40, attention="gather", cache=False, **more), weights


def serve_and_update(engine: Engine, weights: Sequence[Any], num_updates: int, seed: int = 0) -> list[Generation]:
    """Keep an engine busy while a thread updates its weights. Returns all requests, which have ended."""
    chance, generations = random.Random(seed), list[Generation]()
    prefix = [chance.randrange(256) for _ in range(40)]
    failures: list[BaseException] = []

    def train() -> None:
        try:
            for number in range(engine.weights_version + 1, engine.weights_version + num_updates + 1):
                until = engine.stats.num_iterations + chance.randrange(1, 6)
                while engine.stats.num_iterations < until:
                    threading.Event().wait(0.0005)
                engine.update_weights(weights[number % len(weights)])
        except BaseException as error:
            failures.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    while trainer.is_alive():
        while engine.stats.num_waiting < 2:
            own = [chance.randrange(256) for _ in range(chance.randrange(1, 40))]
            prompt = prefix + own[:8] if chance.random() < 0.5 else own
            generations.append(engine.submit(prompt, max_tokens=chance.randrange(1, 30)))
        engine.step()
    engine.run()
    if failures:
        raise failures[0]
    engine.pool.check()
    return generations


def wrong_tokens(weights: Sequence[Any], generations: Sequence[Generation]) -> tuple[int, int]:
    """The number of tokens that the weights of their version do not give, and of those that the version before does not give."""
    model: Any = Decoder(DecoderConfig.of(_FIELDS).for_length(_LENGTH))
    logits_of = jax.jit(lambda params, tokens: model.apply(params, tokens)[0][0])
    wrong = stale = 0
    for each in generations:
        tokens = np.zeros((1, _LENGTH), np.int32)
        whole = [*each.request.prompt, *each.tokens]
        tokens[0, : len(whole)] = whole
        found = partial(_is_largest, tokens[0], len(each.request.prompt), len(each.tokens))
        versions = np.array(each.versions)
        for version in set(each.versions):
            is_of = versions == version
            wrong += int((~found(np.asarray(logits_of(weights[version % len(weights)], tokens))))[is_of].sum())
            if version:
                before = np.asarray(logits_of(weights[(version - 1) % len(weights)], tokens))
                stale += int((~found(before))[is_of].sum())
    return wrong, stale


def _is_largest(tokens: np.ndarray, num_prompt: int, num: int, logits: np.ndarray) -> np.ndarray:
    """Whether each generated token is the most probable one."""
    before = logits[num_prompt - 1 : num_prompt - 1 + num]
    own = np.take_along_axis(before, tokens[num_prompt : num_prompt + num, None], 1)[:, 0]
    return own >= before.max(1) - _TIE
