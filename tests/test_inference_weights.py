"""Test that engines sleep, wake up, and take other weights between two iterations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tiny_models import BAD, CONFIG, LENGTH, OPTIONS, is_idle, opened, write_model

from autopar.errors import InferenceError
from autopar.inference import Checkpoint, Decoder, DecoderConfig, Engine, Options, SamplingOptions
from autopar.inference.serve.runner import Runner
from autopar.inference.serve.weight_transfer import WeightTransfer, resharding_program
from autopar.pipeline.cut.wires import changes_between
from autopar.pipeline.run.transfers import split_of
from benchmarks.placement import update_weights

Params = Any
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Engine:
    return opened(folder)


@pytest.fixture
def engine(compiled: Engine) -> Engine:
    """An engine with an empty cache, and the programs and weights of `compiled`, on pages of its own."""
    runner = Runner(compiled.runner.served, compiled.runner.layout, compiled.runner._params)
    return Engine(runner, compiled.tokenizer)


_INIT = jax.jit(lambda key: Decoder(DecoderConfig.of(CONFIG)).init(key, jnp.zeros((1, 1), jnp.int32)))


def weights(seed: int) -> Params:
    return _INIT(jax.random.key(seed))


@pytest.fixture(scope="module")
def logits() -> Callable[[Params, list[int]], Any]:
    """A function to the logits after a sequence, without a cache."""
    model: Any = Decoder(DecoderConfig.of(CONFIG))
    run = jax.jit(lambda params, tokens: model.apply(params, tokens)[0])

    def of(params: Params, tokens: list[int]) -> Any:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return run(params, padded)[0, len(tokens) - 1]

    return of


# -- sleep -------------------------------------------------------------------------------------


def test_requests_go_on_after_a_sleep_as_if_there_had_been_none(engine: Engine) -> None:
    """Sampled, greedy, penalized and waiting requests; all pages and weights are gone meanwhile."""
    several: list[dict[str, Any]] = [
        {"prompt": [5] * 20, "max_tokens": 20},
        {"prompt": list(range(30)), "max_tokens": 25, "sampling": SamplingOptions(0.9, seed=3, presence_penalty=0.5)},
        *({"prompt": [n, 7, 9], "max_tokens": 9} for n in range(5)),
    ]
    expected = [engine.submit(**each).result().tokens for each in several]
    asked = [engine.submit(**each) for each in several]
    for _ in range(3):
        for _ in range(3):
            engine.step()
        engine.sleep()
        engine.sleep()  # has no effect
        assert engine.runner.is_asleep and not engine.runner.memory.pages
        engine.pool.check()
        assert engine.stats.free_pages == engine.pool.num_pages
        assert not engine.step()
        with pytest.raises(InferenceError, match="call `wake_up` first"):
            asked[0].result()
        engine.wake_up()
        engine.wake_up()  # has no effect
    assert [each.result().tokens for each in asked] == expected
    assert is_idle(engine)


def test_dropped_weights_are_read_again_from_the_folder(folder: Path) -> None:
    engine = opened(folder)
    expected = engine.submit([1, 2, 3], max_tokens=5).result().tokens
    engine.sleep("dropped")
    engine.wake_up()
    assert engine.submit([1, 2, 3], max_tokens=5).result().tokens == expected
    with pytest.raises(InferenceError, match="weights is 'disk': give 'host'"):
        engine.sleep("disk")  # pyright: ignore[reportArgumentType]


def test_dropped_weights_from_memory_must_be_given_again(engine: Engine, folder: Path) -> None:
    asked = engine.submit([1, 2, 3], max_tokens=5)
    engine.sleep("dropped")
    with pytest.raises(InferenceError, match="they came from memory: give them to `wake_up`"):
        engine.wake_up()
    with pytest.raises(InferenceError, match="`wake_up\\(params\\)` wakes it up"):
        engine.update_weights(weights(1))
    engine.wake_up(Checkpoint.open(folder).load())
    assert (engine.weights_version, len(asked.result().tokens), asked.versions) == (1, 5, [1] * 5)
    with pytest.raises(InferenceError, match="the engine is awake"):
        engine.wake_up(weights(1))


def test_pages_stay_while_another_engine_uses_them(folder: Path, engine: Engine) -> None:
    other = Engine(
        Runner(engine.runner.served, engine.runner.layout, engine.runner._params, engine.runner.memory),
        pages_of=engine,
    )
    expected = engine.submit([4] * 40, max_tokens=8).result().tokens
    running = other.submit([4] * 40, max_tokens=8)
    other.step()
    engine.sleep()
    assert engine.runner.memory.pages and running.result().tokens == expected
    other.sleep()
    assert not engine.runner.memory.pages
    other.wake_up()
    assert other.submit([4] * 40, max_tokens=8).result().tokens == expected
    engine.wake_up()
    assert engine.submit([4] * 40, max_tokens=8).result().tokens == expected


@pytest.mark.slow
def test_a_draft_model_sleeps_too(folder: Path) -> None:
    engine = opened(folder, propose=str(folder), options=Options(num_slots=2, max_length=LENGTH, chunks=((1, 32),)))
    expected = engine.submit([1, 2, 3], max_tokens=20).result().tokens
    asked = engine.submit([1, 2, 3], max_tokens=20)
    engine.step()
    engine.sleep()
    engine.wake_up()
    assert asked.result().tokens == engine.submit([1, 2, 3], max_tokens=20).result().tokens == expected


# -- other weights -----------------------------------------------------------------------------


def test_each_token_is_that_of_the_weights_in_force(engine: Engine, logits: Any) -> None:
    """Running, waiting and forked requests; the prefix that they share is computed again."""
    given = {number: weights(number) for number in range(1, 5)}
    asked = [engine.submit([9] * 33 + [number], max_tokens=24) for number in range(6)]
    for params in given.values():
        for _ in range(4):
            engine.step()
        engine.update_weights(params)
        engine.pool.check()
        assert not engine.stats.evictable_pages + engine.stats.held_pages
    engine.run()
    met = 0
    for each in asked:
        assert each.ended == "length" and sorted(each.versions) == each.versions
        tokens = list(each.request.prompt)
        for token, version in zip(each.tokens, each.versions, strict=True):
            if version:
                found = logits(given[version], tokens)
                assert found[token] >= found.max() - 1e-4
                met += token != int(jnp.argmax(logits(given[version % 4 + 1], tokens)))
            tokens.append(token)
    assert met > 20, "the weights differ in what they give"
    assert is_idle(engine)


@pytest.mark.slow
def test_a_hundred_updates_under_load_drop_no_request_and_give_no_wrong_token() -> None:
    engine, several = update_weights.opened(2)
    generations = update_weights.serve_and_update(engine, several, 100)
    wrong, stale = update_weights.wrong_tokens(several, generations)
    assert (engine.weights_version, wrong) == (100, 0)
    assert stale > 100
    assert {each.ended for each in generations} == {"length"}


@pytest.mark.parametrize(
    "spec",
    [
        ("data",),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in [(None, "data"), ("model", "data"), (("model", "data"),), ()]
        ),
    ],
)
def test_weights_arrive_from_any_shardings_and_are_copies(spec: tuple[Any, ...]) -> None:
    """Meshes of two and three axes, of other devices, of Explicit axes; wider and narrower floats."""
    devices = np.array(jax.devices())
    shape, params = (16, 24), np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    serving = NamedSharding(Mesh(devices, ("model",)), PartitionSpec(None, "model"))
    meshes = [
        Mesh(devices.reshape(4, 2), ("data", "model")),
        Mesh(devices.reshape(2, 2, 2), ("x", "data", "model")),
        Mesh(devices[:4].reshape(2, 2), ("data", "model")),
        Mesh(devices[4:6].reshape(1, 2), ("model", "data")),
        Mesh(devices.reshape(2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2),
    ]
    for mesh in meshes:
        source = jax.device_put(params, NamedSharding(mesh, PartitionSpec(*spec)))
        for dtype in (np.dtype("float32"), jnp.dtype("bfloat16")):
            transfer = WeightTransfer([jax.ShapeDtypeStruct(shape, dtype)], (serving,))
            ((leaf, move),) = transfer.prepare([source])
            moved = move(leaf)
            assert (moved.sharding, moved.dtype) == (serving, dtype)
            np.testing.assert_array_equal(moved, params.astype(dtype))
            assert transfer.prepare([source])[0][1] is move, "it is compiled once"
    same = jax.device_put(params, serving)
    for leaf, move in WeightTransfer([jax.ShapeDtypeStruct(shape, np.float32)], (serving,)).prepare([same]):
        moved = move(leaf)
        same.delete()
        np.testing.assert_array_equal(moved, params)


def test_the_planned_collectives_are_those_that_run() -> None:
    devices = np.array(jax.devices())
    source = NamedSharding(Mesh(devices.reshape(4, 2), ("data", "model")), PartitionSpec("data", "model"))
    target = NamedSharding(Mesh(devices, ("model",)), PartitionSpec(None, "model"))
    text = resharding_program((16, 24), np.dtype("float32"), np.dtype("float32"), source, target).as_text() or ""
    _, moves = changes_between((16, 24), 4, split_of(source, (16, 24)), split_of(target, (16, 24)))
    kinds = {move.kind for move in moves} - {"cut"}
    assert kinds and "all-gather" not in kinds
    for kind in COLLECTIVES:
        assert (kind in kinds) == bool(re.search(rf" {kind}(-start)?\(", text)), kind


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda params: params["params"], "is only in one of them"),
        (lambda params: jax.tree.map(lambda leaf: leaf[..., :-1], params), "but the served model's has"),
        (lambda params: jax.tree.map(lambda leaf: leaf.astype(jnp.int32), params), "only floats are converted"),
        (lambda params: jax.tree.map(lambda leaf: leaf.delete() or leaf, params), "was donated to a train step"),
    ],
)
def test_other_weights_are_refused_and_nothing_changes(engine: Engine, change: Any, text: str) -> None:
    expected = engine.submit([1, 2, 3], max_tokens=5).result().tokens
    asked = engine.submit([1, 2, 3], max_tokens=5)
    engine.step()
    with pytest.raises(InferenceError, match=text):
        engine.update_weights(change(weights(1)))
    assert (asked.result().tokens, asked.versions, engine.weights_version) == (expected, [0] * 5, 0)


def test_a_failed_transfer_ends_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the weights would be of either version."""
    asked = engine.submit([1, 2, 3], max_tokens=50)
    engine.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.runner, "place", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.update_weights(weights(1))
    assert asked.ended == "failed"
    with pytest.raises(InferenceError, match="Open the model again"):
        engine.submit([BAD], max_tokens=1)


@pytest.mark.slow
def test_weights_of_an_engine_from_memory_are_copies() -> None:
    params = jax.device_put(weights(1), NamedSharding(Mesh(np.array(jax.devices()[:1]), ("model",)), PartitionSpec()))
    engine = Engine.of(
        DecoderConfig.of(CONFIG), params, options=OPTIONS, mesh=params_mesh(params), num_pages=8, attention="gather"
    )
    expected = engine.submit([1, 2, 3], max_tokens=5).result().tokens
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert engine.submit([1, 2, 3], max_tokens=5).result().tokens == expected


def params_mesh(params: Params) -> Mesh:
    return jax.tree.leaves(params)[0].sharding.mesh
