"""A second start of an engine: programs are loaded, nothing else is made, and nothing wrong or foreign is ever run."""

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
from autopar.inference.serve.program_cache import DamagedError, KeptPrograms
from autopar.inference.serve.setup import served_of
from autopar.planner.cache import key as plan_key
from autopar.solve.ilp import Ilp
from autopar.system import checksummed_file as kept_file

ROOT = Path(__file__).resolve().parent.parent
SMALL = Options(num_slots=2, max_length=64, chunks=((1, 32),), steps=2)
PROMPT = [*range(40)]


def start(folder: Path, cache: Any, **options: Any) -> Engine:
    return opened(folder, options=SMALL, num_pages=16, cache=cache, **options)


def said_by(engine: Engine) -> tuple[Any, ...]:
    generation = engine.submit(PROMPT, max_tokens=8).result()
    return generation.tokens, generation.logprobs


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "served").glob("*"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def first(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str, Any]:
    """What a first start keeps, under which name, and what it says."""
    cache = tmp_path_factory.mktemp("cache")
    told = said_by(start(folder, cache))
    (entry,) = entries(cache)
    return entry.read_bytes(), entry.name, told


@pytest.fixture
def cache(first: tuple[bytes, str, Any], tmp_path: Path) -> Path:
    """A cache after a first start."""
    (tmp_path / "served").mkdir(mode=0o700)
    place = tmp_path / "served" / first[1]
    place.write_bytes(first[0])
    place.chmod(0o600)
    return tmp_path


@pytest.fixture
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing may be traced or planned, and no attention tried."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is made anew")

    monkeypatch.setattr(Ilp, "solve", refuse)
    monkeypatch.setattr("autopar.api.planned_function.program_of", refuse)
    monkeypatch.setattr("autopar.inference.serve.setup.attention_for", refuse)


# -- the second start --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_made")
def test_a_second_start_makes_nothing(folder: Path, cache: Path, first: Any) -> None:
    compiled: list[str] = []

    def listen(event: str, *_: Any, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(about.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine = start(folder, cache)
        assert said_by(engine) == first[2]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [name for name in compiled if "iteration" in name or "copy" in name or "run" in name]
    assert engine.stats.num_compiled == len(SMALL.shapes) + 1
    with pytest.raises(AssertionError, match="made anew"):
        start(folder, False)


@pytest.mark.slow
@pytest.mark.contract
def test_another_process_says_the_same(folder: Path, tmp_path: Path) -> None:
    """On eight devices, with the fastest attention, whatever that is: as it was found by the first of two processes."""
    text = (
        "import sys, jax, json; from tiny_models import *; import test_inference_kept as t\n"
        "import autopar.inference.serve.setup as o\n"
        "if sys.argv[3] == 'second': o.planned_for = o.attention_for = None\n"
        "engine = t.opened(t.Path(sys.argv[1]), 8, options=t.SMALL, num_pages=16, cache=sys.argv[2], attention=None)\n"
        "print(json.dumps([engine.runner.served.attention, *map(list, t.said_by(engine))]))"
    )
    told = []
    for number in ("first", "second"):
        command = [sys.executable, "-c", text, str(folder), str(tmp_path), number]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": str(len(number))}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        told.append(json.loads(done.stdout))
    assert told[0] == told[1]


def test_whatever_programs_come_from_makes_another_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(folder)
    served = served_of(checkpoint.config, checkpoint.abstract_params(), OPTIONS, 16)
    short = checkpoint.abstract_params(jnp.bfloat16)
    asked = {"mesh": "model=8", "hardware": None, "memory_budget_bytes": 1e9, "num_pages": 48, "attention": None}

    def mesh(*devices: int) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(jax.devices())[list(devices)], ("model",))

    def name(served: Any = served, **more: Any) -> Path | None:
        return KeptPrograms.of(Path("cache"), served, asked | {"beside": None} | more).path

    base = name()
    assert base == name(replace(served, attention="blocks")), "which was chosen, not asked for"
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
        name(beside=(48, {"resident/pages/0/keys": jax.sharding.PartitionSpec("model")})),
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


# -- what is damaged, or others' ---------------------------------------------------------------


def with_programs(change: Callable[[bytes], bytes], data: bytes) -> bytes:
    """The same file with other bytes for its first program, and a checksum of these."""
    head, _, body = data.partition(b"\n")
    line, _, blobs = body.partition(b"\n")
    about = json.loads(line)
    plan, size = about["programs"][0][1]
    changed = change(blobs[plan : plan + size])
    about["programs"][0][1] = [plan, len(changed)]
    body = json.dumps(about).encode() + b"\n" + blobs[:plan] + changed + blobs[plan + size :]
    return json.dumps(json.loads(head) | {"sha256": kept_file._sha256(body)}).encode() + b"\n" + body


def without_its_functions(program: bytes) -> bytes:
    """As XLA serializes, on CPUs, what it has loaded: it is loaded again, and fails when it runs."""
    given, in_tree, out_tree = pickle.loads(program)
    devices = jax.devices()[:1]
    loaded = serialize_executable.deserialize_and_load(given, in_tree, out_tree, execution_devices=devices)
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
def test_a_damaged_file_is_said_and_not_used(
    damage: Callable[[bytes], bytes], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (entry,) = entries(cache)
    kept = KeptPrograms(entry, None)
    entry.write_bytes(damage(entry.read_bytes()))
    assert kept.read() is None
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(entry) in said and "made anew" in said


def test_bytes_that_are_no_program_are_refused(cache: Path) -> None:
    (entry,) = entries(cache)
    entry.write_bytes(with_programs(lambda _: pickle.dumps(3), entry.read_bytes()))
    found = KeptPrograms(entry, jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))).read()
    assert found is not None
    first, *others = found[1].programs.values()
    assert all(other.compiled().run is not None for other in others)
    with pytest.raises(DamagedError, match="TypeError"):
        first.compiled()


@pytest.mark.slow
def test_a_program_that_fails_when_it_runs_is_said_and_all_are_made_anew(
    folder: Path, cache: Path, first: Any, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    (entry,) = entries(cache)
    entry.write_bytes(with_programs(without_its_functions, entry.read_bytes()))
    assert said_by(start(folder, cache)) == first[2]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(entry) in said and "made anew" in said and "not found" in said
    request.getfixturevalue("nothing_made")
    assert said_by(start(folder, cache)) == first[2], "it is whole again"


@pytest.mark.parametrize("whose", ["anybody's", "a group's", "in a group's folder", "another's"])
def test_what_others_may_have_written_is_not_run(
    whose: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (entry,) = entries(cache)
    if whose == "anybody's":
        entry.chmod(0o666)
    elif whose == "a group's":
        entry.chmod(0o664)
    elif whose == "in a group's folder":
        entry.parent.chmod(0o775)
    elif os.geteuid() == 0:
        os.chown(entry, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(pickle, "load", lambda file: pytest.fail("it is read"))
    assert KeptPrograms(entry, None).read() is None
    assert "other users may write" in caplog.text or "belongs to another user" in caplog.text


def test_a_folder_that_cannot_be_written_to_is_said(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = KeptPrograms(entries(cache)[0], jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))).read()
    assert found is not None
    programs: dict[Key, Compiled] = {key: program.compiled() for key, program in found[1].programs.items()}
    layout = Layout(found[1].num_pages, found[1].page_bytes, programs)
    (tmp_path / "file").write_text("in the way")
    KeptPrograms(tmp_path / "file" / "served" / "a.programs", None).write(found[0], layout)
    assert "programs cannot be kept" in caplog.text and "cache=False" in caplog.text


# -- weights, read meanwhile -------------------------------------------------------------------


def test_weights_are_read_beside_and_their_reader_tells() -> None:
    told: list[tuple[str, float, int]] = []
    go_on = threading.Event()

    def load(shardings: Any, part_read: Callable[[int], None]) -> Any:
        part_read(30)
        go_on.wait(10)
        return shardings, threading.get_ident(), jnp.asarray(1.0).dtype

    def progress(stage: str, fraction: float) -> None:
        told.append((stage, fraction, threading.get_ident()))
        go_on.set()

    for wide in (False, True):
        with jax.enable_x64(wide), BackgroundLoad(load, "where", 100) as reading:
            reading.check()
            shardings, thread, dtype = reading.result(progress)
        assert shardings == "where" and thread != threading.get_ident()
        assert dtype == (jnp.float64 if wide else jnp.float32), "JAX's settings are a thread's own"
    assert set(told) == {("read weights", 0.3, threading.get_ident())}


def test_who_stops_opening_does_not_wait_for_the_weights() -> None:
    read: list[int] = []

    def load(_: Any, part_read: Callable[[int], None]) -> None:
        for part in range(1000):
            read.append(part)
            part_read(1)
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt), BackgroundLoad(load, None, 1000):
        raise KeyboardInterrupt
    assert len(read) < 100
    num = len(read)
    time.sleep(0.05)
    assert len(read) == num, "its thread has ended"


def test_what_is_wrong_with_weights_is_said_before_all_is_compiled() -> None:
    def load(*_: Any) -> None:
        raise InferenceError("they are of no use")

    with pytest.raises(InferenceError, match="of no use"), BackgroundLoad(load, None, 1) as reading:
        for _ in range(1000):
            reading.check()
            time.sleep(0.01)
