"""Test the cache of an engine's programs.

A second start loads the programs and plans nothing. A damaged program, or one that others could have written, is never
run. Weights are read in the background.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from tiny_models import OPTIONS, opened, write_model

from autopar.api.planned_function import Compiled
from autopar.errors import InferenceError
from autopar.inference import Checkpoint, Engine, Options
from autopar.inference.model.async_load import BackgroundLoad
from autopar.inference.serve.layout import Key, Layout
from autopar.inference.serve.program_cache import DamagedError, ProgramCache
from autopar.inference.serve.setup import served_of
from autopar.planner.cache import key as plan_key
from autopar.solve.ilp import Ilp
from autopar.system import checksummed_file as kept_file

ROOT = Path(__file__).resolve().parent.parent
SMALL = Options(num_slots=2, max_length=64, chunks=((1, 32),), steps=2)
PROMPT = [*range(40)]


def start(folder: Path, cache: Any, **options: Any) -> Engine:
    return opened(folder, options=SMALL, num_pages=16, cache=cache, **options)


def output_of(engine: Engine) -> tuple[Any, ...]:
    generation = engine.submit(PROMPT, max_tokens=8).result()
    return generation.tokens, generation.logprobs


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "served").glob("*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def first(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str, Any]:
    """The cache file of a first start, its name, and the engine's output."""
    cache = tmp_path_factory.mktemp("cache")
    output = output_of(start(folder, cache))
    (entry,) = entries(cache)
    return entry.read_bytes(), entry.name, output


@pytest.fixture
def cache(first: tuple[bytes, str, Any], tmp_path: Path) -> Path:
    """A cache after a first start."""
    (tmp_path / "served").mkdir(mode=0o700)
    file = tmp_path / "served" / first[1]
    file.write_bytes(first[0])
    file.chmod(0o600)
    return tmp_path


@pytest.fixture
def no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on tracing, planning and the selection of attention fail."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is planned again")

    monkeypatch.setattr(Ilp, "solve", refuse)
    monkeypatch.setattr("autopar.api.planned_function.program_of", refuse)
    monkeypatch.setattr("autopar.inference.serve.setup.select_attention", refuse)


# -- the second start --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("no_planning")
def test_a_second_start_compiles_nothing(folder: Path, cache: Path, first: Any) -> None:
    compiled: list[str] = []

    def listen(event: str, *_: Any, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(about.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine = start(folder, cache)
        assert output_of(engine) == first[2]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [name for name in compiled if "iteration" in name or "copy" in name or "run" in name]
    assert engine.stats.num_compiled == len(SMALL.shapes) + 2
    with pytest.raises(AssertionError, match="planned again"):
        start(folder, False)


@pytest.mark.slow
@pytest.mark.contract
def test_another_process_gives_the_same_output(folder: Path, tmp_path: Path) -> None:
    """On eight devices, the second process uses the attention backend that the first has selected."""
    text = (
        "import sys, jax, json; from tiny_models import *; import test_inference_program_cache as t\n"
        "import autopar.inference.serve.setup as setup\n"
        "if sys.argv[3] == 'second': setup.planned_for = setup.select_attention = None\n"
        "engine = t.opened(t.Path(sys.argv[1]), 8, options=t.SMALL, num_pages=16, cache=sys.argv[2], attention=None)\n"
        "print(json.dumps([engine.runner.served.attention, *map(list, t.output_of(engine))]))"
    )
    outputs = []
    for number in ("first", "second"):
        command = [sys.executable, "-c", text, str(folder), str(tmp_path), number]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": str(len(number))}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1]


def test_the_file_name_depends_on_every_input_of_the_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(folder)
    served = served_of(checkpoint.config, checkpoint.abstract_params(), OPTIONS, 16)
    short = checkpoint.abstract_params(jnp.bfloat16)
    options = {"mesh": "model=8", "hardware": None, "memory_budget_bytes": 1e9, "num_pages": 48, "attention": None}

    def mesh(*devices: int) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(jax.devices())[list(devices)], ("model",))

    def name(served: Any = served, **more: Any) -> Path | None:
        return ProgramCache.of(Path("cache"), served, options | {"shared": None} | more).path

    base = name()
    assert base == name(replace(served, attention="blocks")), "the selected backend is not part of the key"
    others = [
        name(replace(served, params=short)),
        name(replace(served, dtype=jnp.bfloat16)),
        name(replace(served, page_size=8)),
        name(replace(served, options=SMALL)),
        name(replace(served, options=replace(OPTIONS, num_proposals=2))),
        name(replace(served, model=replace(served.model, config=replace(checkpoint.config, norm_epsilon=1e-3)))),
        name(num_pages=47),
        name(attention="gather"),
        name(memory_budget_bytes=2e9),
        name(shared=(48, {"resident/pages/0/keys": jax.sharding.PartitionSpec("model")})),
        name(mesh="model=4,data=2"),
        name(mesh=mesh(0)),
        name(mesh=mesh(1)),
        name(mesh=mesh(0, 1)),
        name(mesh=mesh(1, 0)),
    ]
    with jax.default_matmul_precision("highest"):
        others.append(name())
    with jax.enable_x64(True):
        others.append(name())
    monkeypatch.setattr(plan_key, "_own_code", lambda: "another planner")
    others.append(name())
    monkeypatch.setattr("autopar.version.version", lambda package: "1.2.3" if package == "flax" else "1")
    others.append(name())
    assert None not in others
    assert len({base, *others}) == 1 + len(others)


# -- damaged files, and files of other users ---------------------------------------------------


def with_programs(change: Callable[[bytes], bytes], data: bytes) -> bytes:
    """The same file with other bytes for its first program, and a valid checksum."""
    head, _, body = data.partition(b"\n")
    line, _, blobs = body.partition(b"\n")
    header = json.loads(line)
    plan, size = header["programs"][0][1]
    changed = change(blobs[plan : plan + size])
    header["programs"][0][1] = [plan, len(changed)]
    body = json.dumps(header).encode() + b"\n" + blobs[:plan] + changed + blobs[plan + size :]
    return json.dumps(json.loads(head) | {"sha256": kept_file._sha256(body)}).encode() + b"\n" + body


def without_its_functions(program: bytes) -> bytes:
    """Serialize a loaded program again. On CPUs, XLA then leaves out its functions: the result loads, and fails to run."""
    payload, in_tree, out_tree = pickle.loads(program)
    devices = jax.devices()[:1]
    loaded = serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)
    return pickle.dumps(serialize_executable.serialize(loaded))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-200] + bytes([data[-200] ^ 1]) + data[-199:],
        lambda data: b"",
        lambda data: b"\x00\xff\n" * 100,
        lambda data: data.split(b"\n", 1)[1],
    ],
    ids=["truncated", "flipped", "empty", "of another kind", "without head"],
)
def test_a_damaged_file_is_reported_and_not_used(
    damage: Callable[[bytes], bytes], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (entry,) = entries(cache)
    programs = ProgramCache(entry, None)
    entry.write_bytes(damage(entry.read_bytes()))
    assert programs.read() is None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(entry) in warning and "compiled again" in warning


def test_bytes_that_are_not_a_program_are_refused(cache: Path) -> None:
    (entry,) = entries(cache)
    entry.write_bytes(with_programs(lambda _: pickle.dumps(3), entry.read_bytes()))
    found = ProgramCache(entry, jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))).read()
    assert found is not None
    first, *others = found[1].programs.values()
    assert all(other.compiled().run is not None for other in others)
    with pytest.raises(DamagedError, match="TypeError"):
        first.compiled()


@pytest.mark.slow
def test_a_program_that_fails_when_it_runs_is_reported_and_all_are_compiled_again(
    folder: Path, cache: Path, first: Any, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    (entry,) = entries(cache)
    entry.write_bytes(with_programs(without_its_functions, entry.read_bytes()))
    assert output_of(start(folder, cache)) == first[2]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(entry) in warning and "compiled again" in warning and "not found" in warning
    request.getfixturevalue("no_planning")
    assert output_of(start(folder, cache)) == first[2], "the file is intact again"


@pytest.mark.parametrize("writer", ["anybody", "a group", "a group, by its folder", "another user"])
def test_a_file_that_others_may_have_written_is_not_read(
    writer: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (entry,) = entries(cache)
    if writer == "anybody":
        entry.chmod(0o666)
    elif writer == "a group":
        entry.chmod(0o664)
    elif writer == "a group, by its folder":
        entry.parent.chmod(0o775)
    elif os.geteuid() == 0:
        os.chown(entry, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(pickle, "load", lambda file: pytest.fail("it is read"))
    assert ProgramCache(entry, None).read() is None
    assert "other users may write" in caplog.text or "belongs to another user" in caplog.text


def test_a_folder_that_cannot_be_written_is_reported(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = ProgramCache(entries(cache)[0], jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))).read()
    assert found is not None
    programs: dict[Key, Compiled] = {key: program.compiled() for key, program in found[1].programs.items()}
    layout = Layout(found[1].num_pages, found[1].page_bytes, programs)
    (tmp_path / "file").write_text("in the way")
    ProgramCache(tmp_path / "file" / "served" / "a.programs", None).write(found[0], layout)
    assert "programs cannot be cached" in caplog.text and "cache=False" in caplog.text


# -- weights read in the background ------------------------------------------------------------


def test_weights_are_read_in_a_thread_and_progress_is_reported_in_the_callers() -> None:
    reports: list[tuple[str, float, int]] = []
    go_on = threading.Event()

    def load(shardings: Any, on_read: Callable[[int], None]) -> Any:
        on_read(30)
        go_on.wait(10)
        return shardings, threading.get_ident(), jnp.asarray(1.0).dtype

    def progress(stage: str, fraction: float) -> None:
        reports.append((stage, fraction, threading.get_ident()))
        go_on.set()

    for wide in (False, True):
        with jax.enable_x64(wide), BackgroundLoad(load, "shardings", 100) as weights:
            weights.check()
            shardings, thread, dtype = weights.result(progress)
        assert shardings == "shardings" and thread != threading.get_ident()
        assert dtype == (jnp.float64 if wide else jnp.float32), "JAX keeps its settings per thread"
    assert set(reports) == {("read weights", 0.3, threading.get_ident())}


def test_leaving_the_block_cancels_the_load() -> None:
    read: list[int] = []

    def load(_: Any, on_read: Callable[[int], None]) -> None:
        for part in range(1000):
            read.append(part)
            on_read(1)
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt), BackgroundLoad(load, None, 1000):
        raise KeyboardInterrupt
    assert len(read) < 100
    num = len(read)
    time.sleep(0.05)
    assert len(read) == num, "the thread has ended"


def test_check_raises_the_error_of_the_load() -> None:
    def load(*_: Any) -> None:
        raise InferenceError("the weights are damaged")

    with pytest.raises(InferenceError, match="damaged"), BackgroundLoad(load, None, 1) as weights:
        for _ in range(1000):
            weights.check()
            time.sleep(0.01)
