"""Serve an engine over HTTP until SIGTERM; then print the number of programs that were compiled while it served.

    python server_program.py STEPS|model

With a number of steps in a call, the engine has a device of 10 ms a step and 64 slots; `model` is a small model of random weights on the
CPU. Run by `server`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from autopar.inference import Engine, Options
from autopar.serving import Limits
from autopar.serving.server import serve
from benchmarks.inference.models import config_of, params_of
from benchmarks.inference.timed_device import timed_engine, vocabulary_of

STEP_S, SLOTS, LENGTH = 0.01, 64, 512
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}


def opened(kind: str) -> Engine:
    """The engine to serve."""
    if kind != "model":
        return timed_engine(SLOTS, LENGTH, STEP_S, steps=int(kind))
    config = config_of(TINY)
    options = Options(num_slots=32, max_length=128, chunks=((4, 32),), steps=4)
    tokenizer = vocabulary_of(TINY["vocab_size"])
    return Engine.of(config, params_of(config), tokenizer, options=options, mesh="1", cache=False, attention="gather")


def main() -> None:
    """Serve, and count."""
    engine = opened(sys.argv[1])
    compiled: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    limits = Limits(max_queued_tokens=10_000_000, max_connections=2000)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(
            serve(
                [("model", Path(folder))],
                lambda _: engine,
                limits,
                host="127.0.0.1",
                port=0,
                on_ready=lambda address: print(address, flush=True),
            )
        )
    print(json.dumps({"compiled": len(compiled)}), flush=True)


if __name__ == "__main__":
    main()
