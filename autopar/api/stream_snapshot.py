"""Take a stream of batches in flight as arrays and JSON, and go on from it in another process.

In: a `Stream`. Out: `Snapshot`: every array that the pipeline has, of all live versions of the weights and all microbatches in flight,
with its sharding. Loading refuses a snapshot of other stages, so that a stream goes on with the numbers that it would have had.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.errors import CheckpointError, StoreError
from autopar.jax_interop.compat import retyped
from autopar.pipeline.run.stream import Stream, StreamedPipeline
from autopar.plans.plan import Plan
from autopar.versions.snapshot import Name, Snapshot, raw

#: What begins the names of arrays of the pipeline, and of results of the last batch.
_FLIGHT, _LAST = "flight", "last"


def stream_taken(stream: Stream, last: Mapping[int, Any]) -> Snapshot:
    """The snapshot of a stream. Arrays are copied to the host.

    Args:
        last: results of the last batch that the state needs, by position.

    Raises:
        CheckpointError: the batches in flight are lost, or an array has a sharding that no file can have.
    """
    stream.check()
    whole, devices = stream.whole, _devices(stream.whole)
    names = {base: repr(name) for name, base in whole.program.bases.items()}
    arrays: dict[Name, Any] = {}
    places: list[Any] = []
    for (base, number), array in stream.store.items():
        arrays[_FLIGHT, names[base], "" if number is None else number] = np.array(raw(array))
        places.append(_place(array, devices))
    for position, array in last.items():
        arrays[_LAST, position] = np.array(raw(array))
        places.append(_place(array, devices))
    about = {
        "stages": _digest(whole),
        "batches": stream.num_batches,
        "before": stream.num_before,
        "places": places,
    }
    return Snapshot(arrays, about)


def stream_loaded(snapshot: Snapshot, whole: StreamedPipeline) -> tuple[Stream, dict[int, Any]]:
    """The inverse of `stream_taken`.

    Args:
        whole: the pipeline of the same step and plan.

    Raises:
        StoreError: the snapshot is of another step or plan, or damaged.
    """
    try:
        return _loaded(snapshot, whole)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise StoreError(f"the snapshot of a stream is damaged: {type(error).__name__}: {error}") from error


def _loaded(snapshot: Snapshot, whole: StreamedPipeline) -> tuple[Stream, dict[int, Any]]:
    about, devices = snapshot.about, _devices(whole)
    if about["stages"] != _digest(whole):
        raise StoreError(
            "the snapshot is of a stream through other stages: give `parallelize` the plan with which it was saved, as `plan=`,"
            " and the same devices"
        )
    bases = {repr(name): base for name, base in whole.program.bases.items()}
    stream = Stream(whole, None, int(about["before"]))
    stream.num_batches = int(about["batches"])
    last: dict[int, Any] = {}
    for (name, array), place in zip(snapshot.arrays.items(), about["places"], strict=True):
        value = _placed(np.asarray(array), place, devices)
        if name[0] == _LAST:
            last[int(name[1])] = value
            continue
        _, base, number = name
        stream.store[bases[str(base)], None if number == "" else int(number)] = value
    return stream, last


# -- helpers -------------------------------------------------------------------------------------


def _devices(whole: StreamedPipeline) -> list[Any]:
    """The devices of all stages, in their order."""
    return list(dict.fromkeys(d for stage in whole.streamed.stages for d in stage.stage.mesh.devices.flat))


def _place(array: Any, devices: Sequence[Any]) -> dict[str, Any]:
    """The type and the sharding of an array, as JSON types."""
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    found: dict[str, Any] = {
        "weak": bool(getattr(array, "weak_type", False)),
        "key": str(jax.random.key_impl(array)) if is_key else None,
    }
    sharding = array.sharding
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return {**found, "device": devices.index(device)}
    if not isinstance(sharding, NamedSharding):
        raise CheckpointError(
            f"a value in flight has the sharding {sharding}, which a checkpoint cannot hold: take the state from `drain()`, and save"
            " that"
        )
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "arrays have devices"
    return {
        **found,
        "mesh": [
            list(map(str, mesh.axis_names)),
            list(mesh.devices.shape),
            [devices.index(d) for d in mesh.devices.flat],
        ],
        "spec": [[*part] if isinstance(part, tuple) else part for part in sharding.spec],
    }


def _placed(array: np.ndarray, place: Mapping[str, Any], devices: Sequence[Any]) -> Any:
    """An array with its type and sharding."""
    if "device" in place:
        sharding: Any = SingleDeviceSharding(devices[place["device"]])
    else:
        names, shape, positions = place["mesh"]
        mesh = Mesh(np.array([devices[n] for n in positions], object).reshape(shape), tuple(names))
        spec = [tuple(part) if isinstance(part, list) else part for part in place["spec"]]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
    if place["key"] is not None:
        return jax.device_put(jax.random.wrap_key_data(jax.numpy.asarray(array), impl=place["key"]), sharding)
    value = jax.device_put(array, sharding)
    if place["weak"]:
        value = retyped(value, jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=True))
    return value


def _digest(whole: StreamedPipeline) -> str:
    """A digest of the stages, their shardings, and the order of their instructions."""
    horizon = whole.program.horizon
    stages = [_shardings(stage.stage.plan) for stage in whole.streamed.stages]
    steps = [(type(one).__name__, one.reads, one.writes) for one in horizon.steps]
    parts = [whole.program.kind.name, whole.streamed.num_microbatches, stages, list(map(repr, horizon.names)), steps]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _shardings(plan: Plan) -> list[str]:
    return [
        repr(plan.mesh),
        *(repr((one.path, one.shape, one.dtype, one.sharding)) for one in (*plan.inputs, *plan.outputs)),
    ]
