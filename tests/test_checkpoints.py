"""Checkpoints: saved under one plan, restored bit for bit under another; a killed save leaves the last complete one."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from checkpoint_programs import (
    abstract_batch,
    bits,
    filled,
    mixed_state,
    mixed_step,
    mlp,
    step_on,
)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api.checkpoint import array_digest
from autopar.cli.main import main
from autopar.errors import CheckpointError, StepSignatureError

ROOT = Path(__file__).resolve().parent.parent


def train(step: autopar.ParallelStep, program: programs.Program, steps: int) -> Any:
    state = step.init(program.create_state, jax.random.key(0), batch=abstract_batch(program))
    for number in range(steps):
        state, _ = step(state, program.make_batch(number))
    return state


def restore(checkpoints: autopar.Checkpoints, program: programs.Program, **options: Any) -> Any:
    batch = abstract_batch(program)
    return checkpoints.restore(program.create_state, jax.random.key(0), batch=batch, **options)


class Saved:
    """A run on eight devices, two steps long, and its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.program = folder, mlp()
        self.step = step_on(self.program, 8, "blocks")
        self.state = train(self.step, self.program, 2)
        with autopar.Checkpoints(folder, self.step) as checkpoints:
            checkpoints.save(2, self.state, extra={"next_batch": 2})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved") / "checkpoints")


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Iterator[Path]:
    """The same checkpoint, to damage."""
    yield Path(shutil.copytree(saved.folder, tmp_path / "copy"))


# -- under another plan ----------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.contract
@pytest.mark.parametrize(("num_devices", "how"), [(4, "rows"), (6, "columns"), (6, "blocks"), (8, "rows"), (1, "rows")])
def test_a_checkpoint_of_eight_devices_restores_on_others_bit_by_bit(saved: Saved, num_devices: int, how: str) -> None:
    step = step_on(saved.program, num_devices, how)
    checkpoints = autopar.Checkpoints(saved.folder, step)
    state = restore(checkpoints, saved.program)
    assert bits(state) == bits(saved.state)
    assert jax.tree.structure(state) == jax.tree.structure(saved.state)
    plan = step.plan(state, saved.program.make_batch(2))
    by_path = {tensor.path: tensor for tensor in plan.inputs}
    kernel = state.params["Dense_0"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {
        by_path["state/params/Dense_0/kernel"].sharding.local_shape(kernel.shape, plan.mesh)
    }
    assert len(kernel.addressable_shards) == num_devices
    told = checkpoints.last_map
    assert told is not None and not told.same_state
    assert (told.before, told.after) == (checkpoints.plan(), plan)
    # It trains on as it would have.
    (_, loss), (_, expected) = (
        step(state, saved.program.make_batch(2)),
        jax.jit(saved.program.step)(jax.device_get(saved.state), saved.program.make_batch(2)),
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_restored_state_needs_no_second_compile(saved: Saved) -> None:
    """It is typed as what `init` makes, weakly where that is: the step is compiled for both alike."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration") and about.get("fun_name") == "jit(run)":
            compiled.append(event)

    batch = saved.program.make_batch(0)
    step, fresh = (step_on(saved.program, 4, "rows", cache=False) for _ in range(2))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        state = step.init(saved.program.create_state, jax.random.key(0), batch=abstract_batch(saved.program))
        step(state, batch)
        step(restore(autopar.Checkpoints(saved.folder, step), saved.program), batch)
        assert len(compiled) == 1
        state, _ = fresh(restore(autopar.Checkpoints(saved.folder, fresh), saved.program), batch)
        fresh(state, batch)
        assert len(compiled) == 2
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


SCRIPT = """
import pickle, sys
import jax
import checkpoint_programs as c
import autopar
folder, how, out = sys.argv[1:]
program = c.mlp()
step = c.step_on(program, jax.device_count(), how)
checkpoints = autopar.Checkpoints(folder, step)
state = checkpoints.restore(program.create_state, jax.random.key(0), batch=c.abstract_batch(program))
with open(out, "wb") as file:
    pickle.dump((jax.device_count(), c.bits(state), checkpoints.last_map.summary), file)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_devices", "how"), [(4, "rows"), (6, "columns")])
def test_a_process_with_fewer_devices_restores_it(saved: Saved, tmp_path: Path, num_devices: int, how: str) -> None:
    import pickle

    out = tmp_path / "out"
    env = environment(num_devices)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(saved.folder), how, str(out)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    there, found, words = pickle.loads(out.read_bytes())
    assert there == num_devices
    assert found == bits(saved.state)
    assert f"2x4 -> {num_devices}" in words


def environment(num_devices: int) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices} --xla_backend_optimization_level=0",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }


def test_no_more_is_read_than_the_state(saved: Saved) -> None:
    """Each device reads its part of the files, not all of them read all."""
    import tensorstore

    def read() -> int:
        metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for metric in metrics for value in metric["values"])

    step = step_on(saved.program, 6, "columns")
    restore(autopar.Checkpoints(saved.folder, step), saved.program)
    before = read()
    restore(autopar.Checkpoints(saved.folder, step), saved.program)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(saved.state))
    assert read() - before < 3 * size, "eight parts as they were written, and six others as they are read, overlap"


# -- what a state is made of -----------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("mesh", ["8", "2x2"])
def test_every_kind_of_leaf_comes_back_as_it_was(tmp_path: Path, mesh: str) -> None:
    devices = np.array(jax.devices()[: 8 if mesh == "8" else 4])
    grid = Mesh(devices.reshape(2, 2), ("data", "model")) if mesh == "2x2" else Mesh(devices, ("data",))
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    first = autopar.parallelize(mixed_step, mesh="8", hardware="cpu-host")
    state = mixed_state(jax.random.key(0))  # not by `init`: numbers are still Python's
    first.abstract_state(state, x=x)
    with autopar.Checkpoints(tmp_path, first) as checkpoints:
        checkpoints.save(0, state)
    other = autopar.parallelize(mixed_step, mesh=grid, hardware="cpu-host")
    again = autopar.Checkpoints(tmp_path, other).restore(state, x=x)
    assert bits(again) == bits(state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert (type(again.count), type(again.scale), type(again.done)) == (int, float, bool)
    assert again.averages.nothing is None and again.name == "mixed"
    assert str(jax.random.key_impl(again.keys)) == "rbg"
    # The shapes alone will do, and numbers are arrays then, as `init` makes them.
    from_shapes = autopar.Checkpoints(tmp_path, other).restore(mixed_state, jax.random.key(0), x=x)
    laid = other.init(mixed_state, jax.random.key(0), x=x)
    assert types(from_shapes) == types(laid)
    stepped, _ = other(from_shapes, np.ones((8, 16), np.float32))
    assert bits(stepped) == bits(jax.jit(mixed_step)(mixed_from(state), np.ones((8, 16), np.float32))[0])


def mixed_from(state: Any) -> Any:
    """The same with arrays in place of numbers."""
    return jax.tree.map(jnp.asarray, state)


def types(state: Any) -> list[Any]:
    return [(one.dtype, getattr(one, "weak_type", False), one.sharding) for one in jax.tree.leaves(state)]


def test_several_arguments_are_saved_as_a_tuple(tmp_path: Path) -> None:
    def step_of(params: Any, moments: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - m, params, moments), moments

    def create(rng: jax.Array) -> Any:
        w = jax.random.normal(rng, (16, 16))
        return {"w": w}, {"w": jnp.zeros_like(w)}

    x = np.ones((8, 16), np.float32)
    step = autopar.parallelize(step_of, mesh="8", hardware="cpu-host")
    params, moments = step(*step.init(create, jax.random.key(0), x=x), x)
    with autopar.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(1, (params, moments))
        again = checkpoints.restore(create, jax.random.key(0), x=x)
    assert bits(again) == bits((params, moments))
    with pytest.raises(StepSignatureError, match="let `create_state` return them as a tuple"):
        step.init(lambda rng: create(rng)[0], jax.random.key(0), x=x)


def test_orbax_reads_it_without_autopar(saved: Saved) -> None:
    import orbax.checkpoint as ocp

    read = ocp.StandardCheckpointer().restore(saved.folder / "2" / "state")
    np.testing.assert_array_equal(
        read["params"]["Dense_1"]["kernel"], np.asarray(saved.state.params["Dense_1"]["kernel"])
    )


def test_what_orbax_wrote_restores_into_the_abstract_state(saved: Saved, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "own", saved.state)
    step = step_on(saved.program, 4, "rows")
    abstract = step.abstract_state(saved.program.create_state, jax.random.key(0), batch=abstract_batch(saved.program))
    assert bits(ocp.StandardCheckpointer().restore(tmp_path / "own", abstract)) == bits(saved.state)


# -- which there are -------------------------------------------------------------------------


def test_the_newest_are_kept(saved: Saved, tmp_path: Path) -> None:
    with autopar.Checkpoints(tmp_path / "run", saved.step, keep=2) as checkpoints:
        assert checkpoints.latest is None and checkpoints.steps == ()
        for number in (1, 5, 7):
            checkpoints.save(number, filled(saved.state, number), extra=None if number == 7 else {"at": number})
        checkpoints.wait()
        assert checkpoints.steps == (5, 7) and checkpoints.latest == 7
        assert bits(restore(checkpoints, saved.program)) == bits(filled(saved.state, 7))
        assert bits(restore(checkpoints, saved.program, at=5)) == bits(filled(saved.state, 5))
        assert checkpoints.extra() is None and checkpoints.extra(5) == {"at": 5}
    with autopar.Checkpoints(tmp_path / "run", saved.step, keep=None) as checkpoints:
        checkpoints.save(np.int64(9), saved.state, wait=True)
        assert checkpoints.steps == (5, 7, 9)


def test_it_starts_afresh_where_there_is_none(saved: Saved, tmp_path: Path) -> None:
    program, step = saved.program, step_on(saved.program, 4, "rows")
    with autopar.Checkpoints(tmp_path / "new" / "folder", step) as checkpoints:
        fresh = checkpoints.restore_or_init(program.create_state, jax.random.key(0), batch=abstract_batch(program))
        assert bits(fresh) == bits(step.init(program.create_state, jax.random.key(0), batch=abstract_batch(program)))
        checkpoints.save(0, filled(fresh, 3), wait=True)
        again = checkpoints.restore_or_init(program.create_state, jax.random.key(0), batch=abstract_batch(program))
        assert bits(again) == bits(filled(fresh, 3))


def test_the_plan_beside_the_state_can_be_compared_and_run(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = autopar.Checkpoints(saved.folder, saved.step).plan()
    assert plan == saved.step.plans[-1]
    four = step_on(saved.program, 4, "rows")
    four.plan(*saved.program.abstract_args()).save(tmp_path / "four.json")
    assert main(["diff", str(saved.folder / "2"), str(tmp_path / "four.json")]) == 0
    assert "2x4 -> 4" in capsys.readouterr().out
    step = autopar.parallelize(
        saved.program.step, plan=plan, mesh=Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    )
    state = restore(autopar.Checkpoints(saved.folder, step), saved.program)
    assert bits(state) == bits(saved.state)


def test_the_map_is_logged(saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="autopar")
    restore(autopar.Checkpoints(saved.folder, step_on(saved.program, 4, "rows")), saved.program)
    assert "restored step 2" in caplog.text and "mesh 2x4 -> 4" in caplog.text


# -- mistakes --------------------------------------------------------------------------------


def refused(checkpoints: autopar.Checkpoints, program: programs.Program, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        restore(checkpoints, program, **options)
    return str(error.value)


def test_another_programs_checkpoint_is_refused_by_name(saved: Saved) -> None:
    def others(**sizes: Any) -> str:
        program = programs.mlp(**({"batch": 48, "width": 48, "num_layers": 3, "optimizer": "adamw"} | sizes))
        step = autopar.parallelize(program.step, mesh="8", hardware="cpu-host")
        return refused(autopar.Checkpoints(saved.folder, step), program)

    assert "it lacks `params/Dense_3/bias`, float32[48]" in others(num_layers=4)
    assert "which the state here lacks" in others(num_layers=2)
    text = others(width=96)
    assert "`params/Dense_0/kernel` is float32[48,48] there, float32[96,96] here" in text and "more" in text
    assert "opt_state" in others(optimizer="sgd")


def test_no_checkpoint_says_what_there_is(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        text = refused(autopar.Checkpoints(folder, saved.step), saved.program)
        assert "there is none" in text and "restore_or_init" in text
    assert not (tmp_path / "nowhere").exists(), "reading makes no folder"
    assert "there are 2" in refused(autopar.Checkpoints(saved.folder, saved.step), saved.program, at=3)


@pytest.mark.parametrize("part", ["about", "plan", "state"])
def test_a_damaged_checkpoint_is_said(saved: Saved, copy: Path, part: str) -> None:
    checkpoints = autopar.Checkpoints(copy, saved.step)
    files = [file for file in (copy / "2" / part).rglob("*") if file.is_file()]
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    text = refused(checkpoints, saved.program)
    assert "checkpoint 2" in text and "is damaged" in text and "there is no other" in text


def test_an_array_that_has_changed_is_named_with_its_file_and_the_last_good_one(saved: Saved, tmp_path: Path) -> None:
    with autopar.Checkpoints(tmp_path / "run", saved.step) as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(number, saved.state, wait=True)
    files = [*(tmp_path / "run" / "3" / "state" / "ocdbt.process_0" / "d").iterdir()]
    largest = max(files, key=lambda file: file.stat().st_size)
    shutil.rmtree(tmp_path / "run" / "2" / "digests")
    for part in range(
        2, 9
    ):  # a flip in the head of a block is found by what reads it; one in a node points to another file
        flip(largest, largest.stat().st_size // part, 3)
        text = refused(checkpoints, saved.program)
        if "another digest" in text and largest.name in text:
            break
        flip(largest, largest.stat().st_size // part, 3)
    for number in (6, 8):  # of another plan too
        step = step_on(saved.program, number, "columns")
        text = refused(autopar.Checkpoints(tmp_path / "run", step), saved.program)
        assert re.search(
            r"checkpoint 3 in .* is damaged: `[\w/]*kernel` is not what was written \(another digest\)", text
        )
        files_named = text.partition("(another digest), in ")[2].partition(". Remove its folder; ")[0]
        assert f"state/ocdbt.process_0/d/{largest.name}" in files_named, "an array may lie in several files"
        assert text.endswith("the last good one is 1: restore it with `at=1`")
    assert bits(restore(checkpoints, saved.program, at=1)) == bits(saved.state)


def flip(file: Path, byte: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[byte] ^= 1 << bit
    file.write_bytes(data)


def damages(folder: Path, rng: np.random.Generator) -> list[tuple[str, Path, bytes | None]]:
    """Each file of a folder, and what damage leaves of it; None is nothing."""
    found: list[tuple[str, Path, bytes | None]] = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = file.read_bytes()
        for _ in range(3 if data else 0):
            changed = bytearray(data)
            changed[rng.integers(len(data))] ^= 1 << rng.integers(8)
            found.append(("flip", file, bytes(changed)))
        cut = data[: rng.integers(len(data) + 1)]
        found += [("cut", file, cut), ("empty", file, b""), ("zeros", file, bytes(len(data))), ("gone", file, None)]
    return found


@pytest.mark.parametrize("share", [0.1, pytest.param(1.0, marks=pytest.mark.slow)])
def test_whatever_is_damaged_is_said_or_does_no_harm(saved: Saved, copy: Path, share: float) -> None:
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    checkpoints = autopar.Checkpoints(copy, saved.step)
    expected, plan, said = bits(saved.state), saved.step.plans[-1], 0
    every = damages(copy, rng)
    for n in rng.choice(len(every), round(share * len(every)), replace=False):
        what, file, data = every[n]
        whole = file.read_bytes()
        file.unlink() if data is None else file.write_bytes(data)
        try:
            assert bits(restore(checkpoints, saved.program)) == expected, (what, file)
            assert checkpoints.extra() == {"next_batch": 2} or (what, file.parts[-2]) == ("gone", "extra"), what
            assert checkpoints.plan() == plan, (what, file)
        except CheckpointError:
            said += 1
        file.write_bytes(whole)
    assert said > 0
    assert bits(restore(checkpoints, saved.program)) == expected


def test_a_checkpoint_of_before_digests_is_restored(saved: Saved, copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = copy / "2" / "about" / "metadata"
    about = json.loads(file.read_text())
    file.write_text(json.dumps({name: item for name, item in about.items() if not name.startswith("digest")}))
    shutil.rmtree(copy / "2" / "digests")
    caplog.set_level(logging.INFO, logger="autopar")
    checkpoints = autopar.Checkpoints(copy, saved.step)
    assert bits(restore(checkpoints, saved.program)) == bits(saved.state)
    assert checkpoints.extra() == {"next_batch": 2} and checkpoints.plan() == saved.step.plans[-1]
    assert "checkpoint 2 was saved without digests" in caplog.text


@pytest.mark.slow
def test_a_digest_is_of_the_whole_array_however_it_is_split() -> None:
    rng = np.random.default_rng(0)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    specs = [P(), P("a"), P(None, "b"), P("a", "b"), P(("b", "a")), P(None, "a", "b")]
    names = ["bool", "int4", "uint4", "int8", "uint16", "int32", "bfloat16", "float8_e4m3fn", "float32", "complex64"]
    for name, shape in [(name, (8, 8, 4)) for name in names] + [("float32", shape) for shape in [(), (5,), (16, 3)]]:
        dtype, size = jnp.dtype(name), int(np.prod(shape))
        if name in ("int4", "uint4", "bool"):
            whole = rng.integers(0, 2 if name == "bool" else 8, shape).astype(dtype)
        else:
            whole = np.frombuffer(rng.bytes(size * dtype.itemsize), dtype).reshape(shape)
        expected = array_digest._of_host(whole, (0,) * whole.ndim, shape)
        on_device = jax.device_put(whole, jax.devices()[0])
        assert int(array_digest._of_device(on_device, np.uint32(0), shape=shape)) == expected, name
        for spec in specs if whole.ndim == 3 else specs[:1]:
            split = jax.device_put(whole, NamedSharding(mesh, spec))
            for once in (True, False):
                assert array_digest.total(array_digest.parts_of(split, once=once)) == expected, (name, spec)
            part = split.addressable_shards[-1]
            starts = [one.indices(size)[0] for one, size in zip(part.index, shape, strict=True)]
            first = array_digest._first(starts, shape, array_digest._num_words(dtype)) % 2**32
            found = array_digest._of_device(part.data, np.uint32(first), shape=shape)
            assert int(found) == array_digest._of_host(np.asarray(part.data), starts, shape), (name, spec)
        for position in rng.integers(0, size * dtype.itemsize, 5) if name not in ("int4", "uint4", "bool") else ():
            changed = bytearray(whole.tobytes())
            changed[position] ^= 1 << rng.integers(8)
            other = np.frombuffer(bytes(changed), dtype).reshape(shape)
            assert array_digest._of_host(other, (0,) * whole.ndim, shape) != expected


def test_a_checkpoint_without_its_state_is_said(saved: Saved, copy: Path) -> None:
    shutil.rmtree(copy / "2" / "state")
    assert "is damaged" in refused(autopar.Checkpoints(copy, saved.step), saved.program)
    shutil.rmtree(copy / "2" / "about")
    assert "was not saved by `autopar.Checkpoints`" in refused(autopar.Checkpoints(copy, saved.step), saved.program)


def test_a_checkpoint_of_a_later_format_is_said(saved: Saved, copy: Path) -> None:
    file = copy / "2" / "about" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99}))
    assert "of version 99" in refused(autopar.Checkpoints(copy, saved.step), saved.program)


def test_saving_what_is_no_state_is_refused(saved: Saved, tmp_path: Path) -> None:
    checkpoints = autopar.Checkpoints(tmp_path, saved.step)

    def refusal(*args: Any, **options: Any) -> str:
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(*args, **options)
        return str(error.value)

    assert "is neither an argument of `train_step`" in refusal(0, saved.state.params)
    assert "whole number" in refusal(-1, saved.state)
    assert "whole number" in refusal(saved.state, 3)
    assert "what JSON takes" in refusal(0, saved.state, extra={"array": saved.state.params})
    fresh = autopar.parallelize(saved.program.step, mesh="8", hardware="cpu-host")
    with pytest.raises(CheckpointError, match="has no plan yet"):
        autopar.Checkpoints(tmp_path, fresh).save(0, saved.state)
    assert not [*tmp_path.iterdir()]
    given, _ = saved.step(filled(saved.state, 1), saved.program.make_batch(0))
    saved.step(given, saved.program.make_batch(0))
    assert "was donated to the step" in refusal(0, given)
    checkpoints.save(4, saved.state, wait=True)
    assert "it is there already" in refusal(4, saved.state)
    assert "it comes before step 4" in refusal(3, saved.state)
    checkpoints.close()


def test_a_folder_that_cannot_be_written_to_is_said(saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="is a file"):
        autopar.Checkpoints(tmp_path / "file", saved.step)
    within = autopar.Checkpoints(tmp_path / "file" / "run", saved.step)
    with pytest.raises(CheckpointError, match="could not be written"):
        within.save(0, saved.state, wait=True)


def test_senseless_options_are_refused(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="`keep` is 0"):
        autopar.Checkpoints(tmp_path, saved.step, keep=0)
    with pytest.raises(TypeError, match=r"made by `autopar\.parallelize`"):
        autopar.Checkpoints(tmp_path, saved.program.step)  # type: ignore[arg-type]


# -- killed saves ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_save_killed_at_any_moment_leaves_the_last_good_one(tmp_path: Path) -> None:
    """Twenty processes in a row restore what the one before left, hold it against what it must be, and save on until
    they are killed."""
    script = ROOT / "tests" / "checkpoint_killed.py"
    command = [sys.executable, str(script), str(tmp_path / "run"), "20"]
    done = subprocess.run(command, env=environment(2), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"] == 20 and told["latest"] > 0
    assert told["in_a_save"] > 0, "some were killed while a save was under way"


# -- several processes -----------------------------------------------------------------------

TOGETHER = """
import sys
import jax
number, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
import numpy as np
import autopar
import checkpoint_programs as c


def laid_on(how):
    program = c.mlp()
    step = c.step_on(program, 4, how)
    return step, (program.create_state, jax.random.key(0)), {"batch": c.abstract_batch(program)}


def check(state, whole):
    for leaf, expected in zip(jax.tree.leaves(state), whole, strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


step, create, batch = laid_on("rows")
state = step.init(*create, **batch)
whole = c.values_of(state, 5)
filled = jax.tree.unflatten(jax.tree.structure(state), [
    jax.make_array_from_callback(one.shape, leaf.sharding, lambda index, one=one: one[index])
    for one, leaf in zip(whole, jax.tree.leaves(state))
])
with autopar.Checkpoints(folder, step) as checkpoints:
    checkpoints.save(5, filled, extra={"by": "both"})
    assert checkpoints.restore_or_init(*create, **batch) is not None
step, create, batch = laid_on("blocks")
checkpoints = autopar.Checkpoints(folder, step)
assert checkpoints.latest == 5 and checkpoints.extra() == {"by": "both"}
state = checkpoints.restore(*create, **batch)
assert not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(state))
check(state, whole)
print("restored", checkpoints.last_map.summary)
"""


@pytest.mark.slow
def test_two_processes_save_together_and_either_number_restores(saved: Saved, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    folder = tmp_path / "run"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(number), port, str(folder)],
            env=environment(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        assert "mesh 4 -> 2x2" in out
    alone = restore(autopar.Checkpoints(folder, step_on(saved.program, 6, "columns")), saved.program)
    assert bits(alone) == bits(filled(alone, 5))
