"""A compiled program as bytes and back, and what tells where these bytes can run.

In: a program that JAX has compiled ahead of time. Out: bytes, from which a later process has it again without a trace, a
plan or a compiler. They are machine code in Python's pickle: whoever can write them can do what the user can. So they are
taken from files alone that nobody else may write (`kept_file`), as is JAX's own cache of compiled programs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

from autopar.jax_interop import compilation


def serialized(compiled: jax.stages.Compiled) -> bytes:
    """A program as bytes.

    Raises:
        ValueError: it cannot be: JAX says what it is of that cannot.
    """
    try:
        return pickle.dumps(serialize_executable.serialize(compiled))
    except (ValueError, TypeError, NotImplementedError, pickle.PicklingError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def deserialized(data: bytes, devices: Sequence[Any]) -> jax.stages.Compiled:
    """The program, loaded on the devices that it was compiled for.

    Raises:
        ValueError: the bytes are no such program.
    """
    try:
        payload, in_tree, out_tree = pickle.load(io.BytesIO(data))
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, devices[0].client, execution_devices=list(devices)
        )
    except Exception as error:  # of pickle, JAX or XLA, whichever meets what is wrong first
        raise ValueError(f"{type(error).__name__}: {error}") from error


def place_key(devices: Sequence[Any]) -> str:
    """What a compiled program depends on besides its function: JAX's settings, its compiler, and the devices."""
    which = [(device.id, device.process_index, device.platform, device.device_kind) for device in devices]
    return f"{compilation.tracing_key()} {compilation.compiler_key(devices)} {which}"
