"""Test that models with pages of different shapes share one pool of bytes on the devices, and give the tokens that they give alone."""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_models import BAD, LENGTH, OPTIONS, opened, write_model

from autopar.cli import serve
from autopar.errors import InferenceError
from autopar.inference import Checkpoint, Engine, KVPool, Options, SamplingOptions
from autopar.serving import Limits, ServedModel, fields

#: Two head sizes, and two numbers of layers and heads.
OTHER: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL = Options(num_slots=3, max_length=LENGTH, chunks=((2, 16),), steps=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("models")
    return [write_model(place / "one"), write_model(place / "other", **OTHER)]


def mesh(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), ("model",))


def in_pool(folders: list[Path], num_devices: int, num_bytes: float, **more: Any) -> tuple[KVPool, list[Engine]]:
    pool = KVPool.of(folders, num_bytes, mesh=mesh(num_devices), **more)
    engines = [
        Engine.open(folder, options=SMALL, pool=pool, quota=0.4, priority=number, attention="gather")
        for number, folder in enumerate(folders)
    ]
    return pool, engines


def prompts(num: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    stem = [chance.randrange(BAD) for _ in range(25)]
    return [
        (stem if chance.random() < 0.5 else []) + [chance.randrange(BAD) for _ in range(chance.randrange(1, 60))]
        for _ in range(num)
    ]


def alone(folder: Path, **options: Any) -> Engine:
    return opened(folder, options=SMALL, **options)


def check(pool: KVPool) -> None:
    pool.pages.check()
    assert all(not model.num_held for model in pool.pages.models)


@pytest.mark.slow
def test_two_head_sizes_give_the_tokens_that_they_give_alone(folders: list[Path]) -> None:
    """So many requests that both run out of pages, share prefixes, fork and are preempted; on one device."""
    pool, engines = in_pool(folders, 1, 5e5)
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    asked = [
        [
            engine.submit(prompt, max_tokens=20, sampling=SamplingOptions(0.5 * (n % 2), seed=n))
            for n, prompt in enumerate(given)
        ]
        for engine, given in zip(engines, (prompts(12, 1), prompts(12, 2)), strict=True)
    ]
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        while sum(engine.step() for engine in engines):
            pool.pages.check()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not compiled
    assert sum(engine.stats.num_preempted for engine in engines)
    check(pool)
    for folder, each in zip(folders, asked, strict=True):
        engine = alone(folder)
        for generation in each:
            expected = engine.submit(generation.request.prompt, max_tokens=20, sampling=generation.sampling).result()
            assert generation.tokens == expected.tokens


@pytest.mark.slow
def test_on_several_devices_a_device_has_its_heads_or_its_part_of_each(folders: list[Path]) -> None:
    """On four devices one model splits 8 KV heads, the other the 16 elements of its 2."""
    pool, engines = in_pool(folders, 4, 5e5)
    asked = [[engine.submit(prompt, max_tokens=12) for prompt in prompts(5, 3)] for engine in engines]
    while sum(engine.step() for engine in engines):
        pass
    for folder, each in zip(folders, asked, strict=True):
        engine = alone(folder)
        assert [g.tokens for g in each] == [g.tokens for g in engine.generate(prompts(5, 3), max_tokens=12)]
    check(pool)


@pytest.mark.slow
def test_the_programs_write_the_pool_in_place(folders: list[Path]) -> None:
    """A copy of it in each iteration would cost more than the iteration."""
    pool, (engine, _) = in_pool(folders, 1, 64e6)
    for key, program in engine.runner.layout.programs.items():
        if key not in ("start", "sample"):
            memory: Any = program.run.memory_analysis()
            assert memory.temp_size_in_bytes < pool.memory.pages[0].keys.nbytes / 4, key


@pytest.mark.slow
def test_weights_without_a_place_wait_on_the_host_and_come_by_priority(folders: list[Path]) -> None:
    """There is room for one model's weights. Both have requests; the one with the lower number displaces the other."""
    pool, (first, second) = in_pool(folders, 1, 5e5)
    most = 1.2 * max(first.runner.weight_bytes, second.runner.weight_bytes)
    pool, (first, second) = in_pool(folders, 1, 5e5, weights_bytes=most)
    assert first.runner.is_asleep and not second.runner.is_asleep
    slow = [second.submit(prompt, max_tokens=30) for prompt in prompts(3, 4)]
    for _ in range(6):
        second.step()
    fast = [first.submit(prompt, max_tokens=10) for prompt in prompts(3, 5)]
    first.step()
    assert second.runner.is_asleep and not first.runner.is_asleep
    assert all(each.ended is None for each in slow)
    while sum(engine.step() for engine in (first, second)):
        assert first.runner.is_asleep or second.runner.is_asleep
    for folder, each in zip(folders, (fast, slow), strict=True):
        engine = alone(folder)
        for generation in each:
            expected = engine.submit(generation.request.prompt, max_tokens=generation.request.max_tokens).result()
            assert generation.result().tokens == expected.tokens
    check(pool)


@pytest.mark.slow
def test_engines_that_are_woken_up_updated_or_closed_keep_the_budget(folders: list[Path]) -> None:
    pool, (first, second) = in_pool(folders, 1, 5e5, weights_bytes=6e5)
    expected = second.submit([1, 2, 3], max_tokens=5).result().tokens
    first.wake_up()
    assert second.runner.is_asleep and not first.runner.is_asleep
    second.update_weights(Checkpoint.open(folders[1]).load())
    assert first.runner.is_asleep and not second.runner.is_asleep
    assert second.submit([1, 2, 3], max_tokens=5).result().tokens == expected
    second.sleep()
    assert first.submit([1, 2, 3], max_tokens=5).result().ended == "length"
    with pytest.raises(InferenceError, match="call `wake_up` first"):
        second.submit([1, 2, 3], max_tokens=5).result()
    second.wake_up()
    assert first.runner.is_asleep
    running = second.submit([1, 2, 3], max_tokens=50)
    second.step()
    second.close()
    assert running.ended == "aborted"
    assert first.submit([4] * 90, max_tokens=30).result().ended == "length"
    pool.pages.check()
    assert [len(model.slabs) for model in pool.pages.models] == [pool.pages.num_slabs - pool.pages.num_free]


@pytest.mark.slow
def test_a_server_runs_models_that_take_turns(folders: list[Path]) -> None:
    """Each has a thread of its own, and there is room for the weights of one."""
    _, engines = in_pool(folders, 1, 5e5, weights_bytes=6e5)

    async def serve_both() -> list[list[list[int]]]:
        limits = Limits()
        models = [ServedModel(str(number), engine, limits) for number, engine in enumerate(engines)]
        wanted = fields.generate({"temperature": 0}, limits, max_tokens=12, num_best=None)
        found = []
        for model in models:
            found.append([await model.submit([tuple(each)], wanted, f"r{n}") for n, each in enumerate(prompts(4, 6))])
        tokens: list[list[list[int]]] = []
        for each in found:
            tokens.append([])
            for running in each:
                tokens[-1].append([])
                while True:
                    new = await asyncio.wait_for(running.box.take(), 60)
                    tokens[-1][-1] += [token for one in new for token in one.tokens]
                    if new[-1].ended is not None:
                        break
        for model in models:
            await model.close()
        return tokens

    for folder, tokens in zip(folders, asyncio.run(serve_both()), strict=True):
        assert tokens == [each.tokens for each in alone(folder).generate(prompts(4, 6), max_tokens=12)]


@pytest.mark.slow
def test_a_model_that_waits_long_takes_the_place_of_an_equal_one(folders: list[Path]) -> None:
    pool = KVPool.of(folders, 5e5, mesh=mesh(1), weights_bytes=6e5)
    engines = [Engine.open(folder, options=SMALL, pool=pool, quota=0.4, attention="gather") for folder in folders]
    busy = [engines[1].submit([n], max_tokens=100) for n in range(40)]
    waiting = engines[0].submit([1, 2, 3], max_tokens=5)
    assert waiting.result().ended == "length"
    assert any(each.ended is None for each in busy)
    assert all(each.result().ended == "length" for each in busy)


def test_what_does_not_go_with_a_pool_is_refused(folders: list[Path], tmp_path: Path) -> None:
    pool = KVPool.of(folders, 5e5, mesh=mesh(1), weights_bytes=1000)
    given: dict[str, Any] = {"options": OPTIONS, "pool": pool}
    with pytest.raises(InferenceError, match="`num_pages` and `pool` are given"):
        Engine.open(folders[0], num_pages=5, **given)
    with pytest.raises(InferenceError, match="the model's cache has the dtype bfloat16, and the pool float32"):
        Engine.open(folders[0], dtype="bfloat16", **given)
    with pytest.raises(InferenceError, match="the quota is 2 of the pool"):
        Engine.open(folders[0], quota=2.0, **given)
    with pytest.raises(InferenceError, match="raise `weights_bytes`"):
        Engine.open(folders[0], **given)
    assert not pool.pages.models
    third = write_model(tmp_path / "third", num_attention_heads=7, num_key_value_heads=7, head_dim=10)
    with pytest.raises(InferenceError, match="Name all models when the pool is made"):
        Engine.open(third, **given)
    with pytest.raises(InferenceError, match="are needed for a few pages of these models"):
        KVPool.of(folders, 5e4, mesh=mesh(1))


def test_the_command_of_the_server_makes_a_pool(folders: list[Path]) -> None:
    parser = argparse.ArgumentParser()
    serve.add_command(parser.add_subparsers())
    given = ["serve", str(folders[0]), f"judge={folders[1]}", "--mesh", "model=8"]
    options = parser.parse_args([*given, "--kv-pool", "500kB", "--weights-memory", "1MB"])
    pool = serve.pool_of([(None, folders[0]), ("judge", folders[1])], options)
    assert (pool.mesh.size, pool.dtype) == (8, "float32")
    assert 3e5 < pool.pages.num_slabs * pool.pages.slab_bytes * 2 <= 5e5
    with pytest.raises(InferenceError, match="give `--kv-pool SIZE` too"):
        serve.run(parser.parse_args([*given, "--weights-memory", "1MB"]))
