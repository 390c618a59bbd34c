"""Define the options that `generate` and `serve` share: how to serve a model.

In: option texts. Out: a group of options for `argparse`, and the arguments of `Engine.open` from their values.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autopar.cli.options import size
from autopar.errors import InferenceError


def add_serving_options(command: argparse.ArgumentParser) -> None:
    """Add the options to a command."""
    group = command.add_argument_group("how to serve it")
    group.add_argument(
        "--mesh", metavar="MESH", help="mesh of the devices: 8, 2x4 or data=2,model=4 (default: one axis)"
    )
    about = "memory per device: 40GB, 512MiB or bytes (default: all that the device has)"
    group.add_argument("--memory-budget", type=size, metavar="SIZE", help=about)
    group.add_argument(
        "--dtype", metavar="NAME", help="dtype of weights and KV cache, e.g. bfloat16 (default: the checkpoint's)"
    )
    about = "quantize float weights: int8 or int4, with a group of inputs as int8-g128 (default: as in the checkpoint)"
    group.add_argument("--quantize", metavar="NAME", help=about)
    group.add_argument("--slots", type=int, metavar="N", help="sequences in a batch (default: 16)")
    about = "maximum tokens of a text, with its prompt (default: the model's maximum, at most 4096)"
    group.add_argument("--max-length", type=int, metavar="N", help=about)
    about = "speculative decoding: n-gram, or the folder of a small draft model with the same tokenizer; the text is the same"
    group.add_argument("--propose", metavar="n-gram|MODEL_DIR", help=about)
    about = (
        "attention kernel: gather, blocks or pallas (default: the fastest of those with correct results on this device)"
    )
    group.add_argument("--attention", metavar="NAME", help=about)


def serving_of(
    model: str, options: argparse.Namespace, counts: Mapping[str, int | None] = MappingProxyType({})
) -> dict[str, Any]:
    """The arguments of `Engine.open` for a model.

    Args:
        counts: further options whose values must be positive, by name.

    Raises:
        InferenceError: a value is not valid for the model.
    """
    from autopar.inference import Options
    from autopar.inference.model.config import DecoderConfig
    from autopar.inference.serve.setup import options_for

    config = DecoderConfig.read(model)
    served = options_for(config, None)
    if options.max_length is not None:
        served = replace(served, max_length=options.max_length)
    if options.slots is not None:
        served = replace(served, num_slots=options.slots)
    counts = {"--slots": served.num_slots, "--max-length": served.max_length, **counts}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InferenceError(f"{name} is {value}: give 1 or more")
    assert isinstance(served, Options)
    return {
        "options": options_for(config, served),
        "mesh": options.mesh,
        "propose": options.propose,
        "attention": options.attention,
        "memory_budget_bytes": options.memory_budget,
        "dtype": _dtype(options.dtype),
        "quantize": options.quantize,
    }


def _dtype(name: str | None) -> Any:
    import jax.numpy as jnp

    if name is None:
        return None
    known = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
    if name not in known:
        raise InferenceError(f"--dtype {name!r} is none of {', '.join(known)}")
    return known[name]
