"""Copies of shards in the memory of agents: any sharding is restored from any other, and damage is noticed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api.elastic.background_copies import BackgroundCopies
from autopar.api.elastic.carried_state import CarriedState
from autopar.api.elastic.device_probe import DeviceProbe
from autopar.api.elastic.shards import PeerCopies, in_bytes, shards_of
from autopar.errors import CheckpointError, ProcessError, StepSignatureError
from autopar.membership import wire
from autopar.membership.peer_memory import PeerMemory
from autopar.membership.records import Place, Restore

TOKEN = "token"


@contextmanager
def served(memory: PeerMemory) -> Iterator[str]:
    """Serve a memory from a thread; the address."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    address: list[str] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await wire.greeted(reader, TOKEN) is not None:
                await memory.serve(reader, writer, asyncio.Event())
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def listen() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        address.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()

    def run() -> None:
        loop.run_until_complete(listen())
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    yield address[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def sharding(count: int, spec: P, shape: tuple[int, ...] = ()) -> NamedSharding:
    devices = np.array(jax.devices()[:count])
    return NamedSharding(Mesh(devices.reshape(shape or (count,)), tuple("ab"[: len(shape or (1,))])), spec)


def arrays(place: Callable[[P], NamedSharding]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    large = rng.normal(size=(24, 48)).astype(np.float32)
    values = {
        "rows": (large, P("a")),
        "columns": (large.astype(jnp.bfloat16), P(None, "a")),
        "whole": (np.arange(7, dtype=np.int8), P()),
        "number": (np.float64(3.5).astype(np.float32), P()),
        "flags": (large > 0, P("a")),
        "keys": (np.arange(48, dtype=np.uint32).reshape(24, 2), P("a")),
    }
    return {name: jax.device_put(value, place(spec)) for name, (value, spec) in values.items()}


def kept(memory: PeerMemory, address: str, given: dict[str, Any], step: int = 10) -> Restore:
    copies = BackgroundCopies(Place(1, 0, 1, "", None, (address,), 5, 5.0), TOKEN)
    copies.take(step, given)
    copies.wait()
    assert memory.held == ((1, step, 0, 1),)
    assert copies.num_bytes == memory.num_bytes == sum(array.nbytes for array in given.values())
    return Restore(1, step, ((address,),))


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8])
def test_arrays_are_restored_in_another_sharding(count: int) -> None:
    given = arrays(lambda spec: sharding(8, spec, (4, 2)))  # replicated over one axis: each shard is copied once
    memory = PeerMemory()
    with served(memory) as address:
        copies = PeerCopies(kept(memory, address, given), TOKEN)
        copies.read_index()
        for name, array in arrays(lambda spec: sharding(count, spec)).items():
            wanted = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            made = copies.array(name, wanted)
            assert made.sharding == array.sharding and made.dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(made), np.asarray(given[name]))
        copies.close()


def test_another_program_is_refused() -> None:
    given = arrays(lambda spec: sharding(2, spec))
    memory = PeerMemory()
    with served(memory) as address:
        copies = PeerCopies(kept(memory, address, given), TOKEN)
        copies.read_index()
        for name, shape, text in (
            ("rows", (24, 47), r"`rows` is \(\(24, 48\), 'float32'\) there"),
            ("new", (1,), "missing"),
        ):
            with pytest.raises(CheckpointError, match=text):
                copies.array(name, jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(1, P())))


def test_a_damaged_copy_is_dropped_and_another_one_read() -> None:
    given = arrays(lambda spec: sharding(4, spec))
    first, second = PeerMemory(), PeerMemory()
    with served(first) as one, served(second) as two:
        kept(first, one, given)
        kept(second, two, given)
        ((index, data),) = first._copies.values()
        first.put((1, 10, 0, 1), index, b"\x01" + data[1:])
        copies = PeerCopies(Restore(1, 10, ((one, two),)), TOKEN)
        copies.read_index()
        wanted = jax.ShapeDtypeStruct((24, 48), jnp.float32, sharding=sharding(4, P("a")))
        np.testing.assert_array_equal(np.asarray(copies.array("rows", wanted)), np.asarray(given["rows"]))
        assert not first.held and second.held
        second.drop_below((1, 11))
        lost = PeerCopies(Restore(1, 10, ((one, two),)), TOKEN)
        with pytest.raises(ProcessError, match="no peer has the shards of worker 0 of generation 1 at step 10"):
            lost.read_index()


def test_an_index_that_is_damaged_or_lacks_a_shard_is_refused() -> None:
    given = {"rows": arrays(lambda spec: sharding(4, spec))["rows"]}
    memory = PeerMemory()
    wanted = jax.ShapeDtypeStruct((24, 48), jnp.float32, sharding=sharding(2, P("a")))
    with served(memory) as address:
        restore = kept(memory, address, given)
        ((index, data),) = memory._copies.values()
        memory.put((1, 10, 0, 1), index[:3], data)
        copies = PeerCopies(restore, TOKEN)
        copies.read_index()
        with pytest.raises(
            CheckpointError, match=r"have 288 of 576 elements of a part of `rows`: a worker did not send"
        ):
            copies.array("rows", wanted)
        copies.close()
        first = index[0]
        for damaged in (
            None,
            [[1]],
            [[*first[:3], [[0, 6], [0, 49]], *first[4:]]],
            [[*first[:4], -1, *first[5:]]],
            [[*first[:5], 7, first[6]]],
            [[first[0], [24, "x"], *first[2:]]],
            [[*first[:2], "float99", *first[3:]]],
        ):
            memory.put((1, 10, 0, 1), damaged, data)
            with pytest.raises(ProcessError, match=r"the index of the shards of worker 0, of step 10, is damaged"):
                PeerCopies(restore, TOKEN).read_index()


def test_a_memory_keeps_nothing_that_is_older_than_a_complete_copy() -> None:
    memory = PeerMemory()
    for step in (10, 20):
        memory.put((1, step, 0, 2), None, b"x")
    memory.drop_below((1, 20))
    memory.put((1, 10, 1, 2), None, b"late")
    assert memory.held == ((1, 20, 0, 2),) and memory.num_bytes == 1


def step_and_state() -> tuple[Any, Any, dict[str, Any]]:
    optimizer = optax.adam(0.1)

    def create(rng: jax.Array) -> Any:
        params = {"a/b": jax.random.normal(rng, (24, 8)), "c": {"d": jnp.ones(8)}}
        return {
            "params": params,
            "moments": optimizer.init(params),
            "rng": jax.random.key(3),
            "empty": jnp.zeros((0, 4)),
        }

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean((batch @ p["a/b"] + p["c"]["d"]) ** 2))(state["params"])
        updates, moments = optimizer.update(grads, state["moments"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "moments": moments, "rng": jax.random.split(state["rng"])[0], "empty": state["empty"]}
        return new, batch.sum()

    return step, create, {"batch": jnp.ones((16, 24))}


@pytest.mark.parametrize("shape", [(8,), (2,), (2, 2)])
def test_a_state_is_found_in_the_results_and_made_again(shape: tuple[int, ...]) -> None:
    step, create, others = step_and_state()
    devices = np.array(jax.devices())
    mesh = Mesh(devices[: np.prod(shape)].reshape(shape), ("data", "model")[: len(shape)])
    first = autopar.parallelize(step, mesh=mesh, cache=False)
    state = first.init(create, jax.random.key(0), **others)
    carried = CarriedState(first, first.abstract_state(create, jax.random.key(0), **others))
    returned: list[Any] = []
    first.observer = returned.append
    state, _ = first(state, **others)
    index, data = in_bytes(shards_of(carried.arrays(returned[-1]), True))
    assert sum(part.nbytes for part in data) == sum(entry[5] for entry in index)

    second = autopar.parallelize(step, mesh=Mesh(devices[:4], ("data",)), cache=False)
    target = CarriedState(second, second.abstract_state(create, jax.random.key(0), **others))
    memory = PeerMemory()
    with served(memory) as address:
        copies = PeerCopies(kept(memory, address, carried.arrays(returned[-1])), TOKEN)
        copies.read_index()
        made = target.made(copies.array)
    assert jax.tree.structure(made) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(state), strict=True):
        assert ours.dtype == theirs.dtype
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        assert ours.weak_type == theirs.weak_type
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    expected, _ = first(state, **others)
    np.testing.assert_allclose(second(made, **others)[0]["params"]["a/b"], expected["params"]["a/b"], rtol=1e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves(target.zeros())} == {leaf.dtype for leaf in jax.tree.leaves(made)}


def test_a_step_that_loses_a_part_of_its_state_is_refused() -> None:
    @autopar.parallelize(cache=False)
    def step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] * batch.mean()}, batch.sum()

    state = {"w": jnp.ones(8), "frozen": jnp.ones(3)}
    with pytest.raises(StepSignatureError, match="does not return `state/frozen` of its state"):
        CarriedState(step, step.abstract_state(state, batch=jnp.ones(8)))


def test_a_probe_of_devices_is_seldom_and_needs_several() -> None:
    probe = DeviceProbe()
    assert probe.seconds() == 0.0 and probe.seconds() == 0.0
    assert len(probe._last) == 1, "the second came too early"
    for _ in range(3):
        probe._due_s = 0.0
        assert probe.seconds() == 0.0
    probe._due_s = 0.0
    assert min(probe._last) <= probe.seconds() <= max(probe._last)
