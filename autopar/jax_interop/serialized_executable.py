"""Serialize compiled programs, and compute the key of the environment that they run in.

In: a program that JAX has compiled ahead of time. Out: bytes, from which a later process loads the program without
tracing, planning or compiling. The bytes are machine code in a pickle, so whoever can write them can run code as the
user. Callers therefore load them only from files that nobody else may write (`checksummed_file`).
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
    """Serialize a program.

    Raises:
        ValueError: JAX cannot serialize it; the message has JAX's reason.
    """
    try:
        return pickle.dumps(serialize_executable.serialize(compiled))
    except (ValueError, TypeError, NotImplementedError, pickle.PicklingError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def deserialized(data: bytes, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Load a program on the devices that it was compiled for.

    Raises:
        ValueError: the bytes are not a valid program.
    """
    try:
        payload, in_tree, out_tree = pickle.load(io.BytesIO(data))
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, devices[0].client, execution_devices=list(devices)
        )
    except Exception as error:  # from pickle, JAX or XLA, whichever fails first
        raise ValueError(f"{type(error).__name__}: {error}") from error


def place_key(devices: Sequence[Any]) -> str:
    """A key of JAX's settings, the compiler and the devices, which a compiled program depends on."""
    which = [(device.id, device.process_index, device.platform, device.device_kind) for device in devices]
    return f"{compilation.tracing_key()} {compilation.compiler_key(devices)} {which}"
