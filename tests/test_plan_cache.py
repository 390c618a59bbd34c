"""The cache of plans and compiled steps: a second start plans nothing, and a wrong entry is never used."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.hardware import profile as hardware
from autopar.planner.cache import plans as plan_cache
from autopar.planner.cache.key import key_of
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Problem, Solution, Status
from autopar.system import checksummed_file as kept_file
from autopar.transforms.program import program_of

ROOT = Path(__file__).resolve().parent.parent
CACHE_HITS = "/jax/compilation_cache/cache_hits"


@pytest.fixture(scope="module")
def mlp() -> programs.Program:
    return programs.mlp(batch=32, width=64, num_layers=2, optimizer="adam")


def plan_of(program: programs.Program, cache: Any, **options: Any) -> autopar.Plan:
    options = {"mesh": "8", "hardware": "cpu-host"} | options
    return autopar.plan(program.step, *program.abstract_args(), cache=cache, **options)


@pytest.fixture
def no_solving(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing may be planned."""

    def refuse(self: Ilp, problem: Problem) -> Solution:
        raise AssertionError("it plans")

    monkeypatch.setattr(Ilp, "solve", refuse)


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "plans").glob("*"))


# -- the second start ------------------------------------------------------------------------


@pytest.mark.contract
def test_a_second_start_plans_nothing(mlp: programs.Program, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    first = plan_of(mlp, tmp_path)
    request.getfixturevalue("no_solving")
    again = programs.mlp(batch=32, width=64, num_layers=2, optimizer="adam")
    second = plan_of(again, tmp_path)
    assert second == first
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    assert jax.tree.structure(second.in_shardings(mesh)) == jax.tree.structure(again.abstract_args())
    with pytest.raises(AssertionError, match="it plans"):
        plan_of(mlp, False)


@pytest.mark.parametrize(
    "options", [{"num_microbatches": 4}, {"memory_budget_bytes": 75e3}], ids=["microbatches", "recomputed"]
)
def test_plans_that_rewrite_the_step_are_kept_and_run(
    mlp: programs.Program, tmp_path: Path, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    step = autopar.parallelize(mlp.step, mesh="8", hardware="cpu-host", cache=tmp_path, **options)
    first = step.plan(*mlp.abstract_args())
    request.getfixturevalue("no_solving")
    again = autopar.parallelize(mlp.step, mesh="8", hardware="cpu-host", cache=tmp_path, **options)
    assert again.plan(*mlp.abstract_args()) == first
    (_, loss), (_, expected) = again(*mlp.args()), jax.jit(mlp.step)(*mlp.args())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_said_or_not_a_default_is_the_same(mlp: programs.Program, tmp_path: Path) -> None:
    plan_of(mlp, tmp_path)
    autopar.parallelize(mlp.step, mesh="8", hardware="cpu-host", cache=tmp_path).plan(*mlp.abstract_args())
    plan_of(mlp, tmp_path, num_devices=8, time_limit_s=60.0, pin=None)
    assert len(entries(tmp_path)) == 1


def test_nothing_is_kept_where_it_is_off(
    mlp: programs.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan_of(mlp, False)
    autopar.plan(mlp.step, *mlp.abstract_args(), mesh="8", hardware="cpu-host")
    step = autopar.parallelize(mlp.step, mesh="8", hardware="cpu-host", cache=False)
    step(*mlp.args())
    assert not [*tmp_path.iterdir()]
    autopar.parallelize(mlp.step, mesh="8", hardware="cpu-host").plan(*mlp.abstract_args())
    assert len(entries(tmp_path / "autopar")) == 1, "a decorated step is kept unless it is said otherwise"


def test_what_a_solver_of_the_users_own_says_is_not_kept(mlp: programs.Program, tmp_path: Path) -> None:
    class Own:
        def solve(self, problem: Problem) -> Solution:
            return Ilp().solve(problem)

    plan_of(mlp, tmp_path, solver=Own())
    assert not entries(tmp_path)
    plan_of(mlp, tmp_path, solver=Ilp(seed=3))
    assert len(entries(tmp_path)) == 1


def test_the_plan_of_an_interrupted_solver_is_not_cached(
    mlp: programs.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = Ilp.solve

    def interrupted(self: Ilp, problem: Problem) -> Solution:
        return replace(solve(self, problem), status=Status.INTERRUPTED)

    with monkeypatch.context() as patched:
        patched.setattr(Ilp, "solve", interrupted)
        assert plan_of(mlp, tmp_path).outcome.status == Status.INTERRUPTED.value
    assert not entries(tmp_path)
    plan_of(mlp, tmp_path)
    assert len(entries(tmp_path)) == 1


# -- what it depends on ----------------------------------------------------------------------

MODEL = """
import jax
import jax.numpy as jnp


def loss_of(params, batch):
    return jnp.mean((jax.nn.relu(batch @ params["w1"]) @ params["w2"]) ** 2)


def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss
"""


def step_in(file: Path, text: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "model"}
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    exec(compile(text, str(file), "exec"), names)
    return names["train_step"]


def args_of(width: int = 64) -> tuple[Any, ...]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {"w1": array(width, 4 * width), "w2": array(4 * width, width)}, array(32, width)


@pytest.mark.contract
def test_lines_may_move_and_are_told_as_they_are_now(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    first = step_in(tmp_path / "one" / "model.py", MODEL)
    plan = autopar.plan(first, *args_of(), mesh="8", hardware="cpu-host", cache=tmp_path / "kept")
    assert any("model.py:7 " in decision.source for decision in plan.decisions)
    request.getfixturevalue("no_solving")
    moved = step_in(tmp_path / "two" / "model.py", "\n\n\n" + MODEL)
    plan = autopar.plan(moved, *args_of(), mesh="8", hardware="cpu-host", cache=tmp_path / "kept")
    sources = {decision.source for decision in plan.decisions} | {use.source for use in plan.collectives}
    assert any(source.startswith(str(tmp_path / "two" / "model.py:10")) for source in sources)
    assert not any("/one/" in source or "model.py:7 " in source for source in sources)


@pytest.mark.slow
def test_a_key_is_the_same_in_every_process(tmp_path: Path) -> None:
    text = (
        "import programs; from autopar.planner.cache.key import key_of; from autopar.transforms.program import program_of;"
        "from autopar.hardware.profile import load;"
        "p = programs.PROGRAMS['bert_layers']();"
        "program = program_of(p.step, p.abstract_args(), carry=None, donate=None);"
        "print(key_of(program, {'hardware': load('h100-sxm'), 'pin': {'b': 1, 'a': (2, None)}}).name)"
    )
    names = set()
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        names.add(done.stdout)
    assert len(names) == 1


def test_whatever_planning_reads_makes_another_key(mlp: programs.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = hardware.load("h100-sxm")

    def key(program: programs.Program, **asked: Any) -> str:
        traced = program_of(program.step, program.abstract_args(), carry=None, donate=None)
        return key_of(traced, {"hardware": profile, "meshes": ("8",)} | asked).name

    base = key(mlp)
    assert base == key(programs.mlp(batch=32, width=64, num_layers=2, optimizer="adam"))
    others = [
        key(programs.mlp(batch=64, width=64, num_layers=2, optimizer="adam")),
        key(programs.mlp(batch=32, width=128, num_layers=2, optimizer="adam")),
        key(programs.mlp(batch=32, width=64, num_layers=3, optimizer="adam")),
        key(programs.mlp(batch=32, width=64, num_layers=2, optimizer="sgd")),
        key(mlp, meshes=("2x4",)),
        key(mlp, hardware=replace(profile, hbm_bytes=profile.hbm_bytes + 1)),
        key(mlp, hardware=replace(profile, host_link=replace(profile.host_link, latency_s=1.0))),
        key(mlp, memory_budget_bytes=1e9),
        key(mlp, pin={"state/params/*": P("data")}),
        key(mlp, pin={"state/params/*": P(None, "data")}),
        key(mlp, num_microbatches=2),
        key(mlp, solver=Ilp(seed=1)),
    ]
    traced = program_of(mlp.step, mlp.abstract_args(), carry=None, donate=[])
    others.append(key_of(traced, {"hardware": profile, "meshes": ("8",)}).name)
    monkeypatch.setattr("autopar.rules.user_rules._registered", {})
    autopar.register_rule("some_primitive_of_mine", "a b -> a")
    others.append(key(mlp))
    monkeypatch.setattr("autopar.version.version", lambda name: "1.2.3")
    others.append(key(mlp))
    assert len({base, *others}) == 1 + len(others)


# -- entries that are damaged, stale or in the way -------------------------------------------


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[:-200] + bytes([data[-200] ^ 1]) + data[-199:]


def of_nothing(data: bytes) -> bytes:
    return b""


def without_head(data: bytes) -> bytes:
    return data.split(b"\n", 1)[1]


def of_another_kind(data: bytes) -> bytes:
    return b"\x00\xff\xfe" * 100


@pytest.mark.parametrize("damage", [truncated, flipped, of_nothing, without_head, of_another_kind])
def test_a_damaged_entry_is_said_and_made_anew(
    mlp: programs.Program,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    first = plan_of(mlp, tmp_path)
    (entry,) = entries(tmp_path)
    entry.write_bytes(damage(entry.read_bytes()))
    second = plan_of(mlp, tmp_path)
    assert replace(second, outcome=first.outcome) == first
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "is damaged" in said.getMessage() and str(entry) in said.getMessage()
    request.getfixturevalue("no_solving")
    assert plan_of(mlp, tmp_path) == second, "the entry is whole again"


def test_a_stale_entry_is_said(
    mlp: programs.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as other:
        other.setattr("autopar.version.version", lambda name: "0.9" if name == "jax" else "1.0")
        plan_of(mlp, tmp_path)
    assert not caplog.records
    plan_of(mlp, tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "is stale" in said and f"jax 0.9 -> {jax.__version__}" in said
    assert len(entries(tmp_path)) == 2
    caplog.clear()
    plan_of(mlp, tmp_path)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_folder_that_cannot_be_written_to_is_said_and_done_without(
    mlp: programs.Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    step = autopar.parallelize(mlp.step, mesh="8", hardware="cpu-host", cache=tmp_path / "file")
    step(*mlp.args())
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2 and all("cache=False" in line for line in said), "the plan, and the compiled step"


def test_many_may_write_one_entry_at_once(
    mlp: programs.Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = program_of(mlp.step, mlp.abstract_args(), carry=None, donate=None)
    plan = plan_of(mlp, False)
    counter = itertools.count()

    def use(_: int) -> autopar.Plan:
        request = {"which": next(counter) % 3}
        entry = plan_cache.entry_of(program, request, tmp_path, autopar.Plan.from_json)
        found = entry.read()
        entry.keep(plan)
        return found or plan

    with ThreadPoolExecutor(8) as pool:
        assert all(found == plan for found in pool.map(use, range(60)))
    assert len(entries(tmp_path)) == 3, "and nothing is left over"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_was_used_longest_ago_goes_first(
    mlp: programs.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 2)
    program = program_of(mlp.step, mlp.abstract_args(), carry=None, donate=None)
    plan = plan_of(mlp, False)

    def use(which: int) -> None:
        entry = plan_cache.entry_of(program, {"which": which}, tmp_path, autopar.Plan.from_json)
        if entry.read() is None:
            entry.keep(plan)

    use(0)
    use(1)
    first, second = sorted(entries(tmp_path), key=lambda path: key_place(path, program))
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    use(0)  # it is used again, so the other is older now
    use(2)
    assert first in entries(tmp_path) and second not in entries(tmp_path)


def key_place(path: Path, program: Any) -> int:
    names = [key_of(program, {"which": which}).name for which in range(3)]
    return names.index(path.stem)


# -- compiled steps --------------------------------------------------------------------------


@pytest.fixture
def compiled_events() -> Iterator[list[str]]:
    """Whatever takes how long to compile is kept, and JAX says what it finds."""
    seen: list[str] = []

    def listen(event: str, **_: Any) -> None:
        seen.append(event)

    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def run_once(mlp: programs.Program, cache: Any) -> np.ndarray:
    jax.clear_caches()
    step = autopar.parallelize(mlp.step, mesh="8", hardware="cpu-host", cache=cache)
    return np.asarray(step(*mlp.args())[1])


@pytest.mark.contract
def test_a_second_start_compiles_nothing(mlp: programs.Program, tmp_path: Path, compiled_events: list[str]) -> None:
    first = run_once(mlp, tmp_path)
    assert CACHE_HITS not in compiled_events
    assert [*(tmp_path / "compiled").glob("*/*-cache")]
    compiled_events.clear()
    assert run_once(mlp, tmp_path) == first
    assert CACHE_HITS in compiled_events


@pytest.mark.contract
def test_jax_is_left_as_it_was(mlp: programs.Program, tmp_path: Path, compiled_events: list[str]) -> None:
    run_once(mlp, tmp_path)
    assert jax.config.jax_compilation_cache_dir is None
    before = [*tmp_path.glob("compiled/*/*")]
    compiled_events.clear()
    jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((8, 8)))
    assert [*tmp_path.glob("compiled/*/*")] == before, "other programs are not kept"


def test_a_folder_of_the_users_own_is_used_instead(
    mlp: programs.Program, tmp_path: Path, compiled_events: list[str]
) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        compilation_cache.reset_cache()
        run_once(mlp, tmp_path / "cache")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
        assert [*(tmp_path / "own").glob("*-cache")] and not (tmp_path / "cache" / "compiled").exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.mark.slow
def test_a_damaged_compiled_step_is_said_and_compiled_anew(
    mlp: programs.Program, tmp_path: Path, compiled_events: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = run_once(mlp, tmp_path)
    for entry in tmp_path.glob("compiled/*/*-cache"):
        entry.write_bytes(truncated(entry.read_bytes()))
        os.utime(entry, (1, 1))
    compiled_events.clear()
    assert run_once(mlp, tmp_path) == first
    assert CACHE_HITS not in compiled_events
    assert "is damaged" in caplog.text
    run_once(mlp, tmp_path)
    assert CACHE_HITS in compiled_events, "it is whole again"


# -- what others may have written ----------------------------------------------------------------


@pytest.fixture(scope="module")
def kept_step(mlp: programs.Program, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """The cache of a first start, and what it returned, of a process in whose files a group may write."""
    cache = tmp_path_factory.mktemp("first") / "cache"
    before, mask = jax.config.jax_persistent_cache_min_compile_time_secs, os.umask(0o002)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        return cache, run_once(mlp, cache)
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
        os.umask(mask)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("what", "mode"),
    [("compiled/*/*-cache", 0o664), ("compiled/*", 0o775), (".", 0o777), ("compiled/*", "another's"), (".", 0o1777)],
)
def test_a_compiled_step_that_others_may_have_written_is_not_run(
    mlp: programs.Program,
    kept_step: tuple[Path, np.ndarray],
    what: str,
    mode: int | str,
    tmp_path: Path,
    compiled_events: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(kept_step[0], cache)
    for path in cache.glob(what) if what != "." else [cache]:
        if isinstance(mode, int):
            path.chmod(mode)
        elif os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert run_once(mlp, cache) == kept_step[1]
    if mode == 0o1777:  # nobody may replace what is another's, as in /tmp
        assert CACHE_HITS in compiled_events and not caplog.records
        return
    assert CACHE_HITS not in compiled_events
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said and all("its content is not run" in one for one in said)
    assert all("`chmod go-w`" in one or "another user" in one for one in said)


def test_who_may_have_written_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule, whatever is kept: the file, its folder and those above, all bits of a group and of the others."""
    kept_file.make_private(tmp_path / "cache" / "inner")
    file = tmp_path / "cache" / "inner" / "file"
    file.write_bytes(b"")
    (tmp_path / "linked").symlink_to(tmp_path / "cache")
    for path in (file, file.parent, tmp_path / "cache"):
        private = stat.S_IMODE(path.stat().st_mode) & ~0o022
        for more in range(0o100):
            path.chmod(private | more)
            for way in (file, tmp_path / "linked" / "inner" / "file"):
                if more & 0o022:
                    with pytest.raises(ValueError, match=rf"other users may write .* \(mode {private | more:o}\)"):
                        kept_file.refuse_of_others(way)
                else:
                    kept_file.refuse_of_others(way)
        path.chmod(private | 0o1022)
        if path == file:
            with pytest.raises(ValueError, match="other users may write it"):
                kept_file.refuse_of_others(file)
        else:
            kept_file.refuse_of_others(file)
        path.chmod(private)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    if file.stat().st_uid == 0:  # root's are trusted, as the system's own programs are
        kept_file.refuse_of_others(file)
        os.chown(tmp_path / "cache", 12345, -1)
    with pytest.raises(ValueError, match=r"belongs to another user, \d+, so its content is not run"):
        kept_file.refuse_of_others(file)


def test_the_folders_of_a_cache_are_of_its_user_alone(tmp_path: Path) -> None:
    mask = os.umask(0o002)
    try:
        kept_file.make_private(tmp_path / "a" / "b")
        kept_file.write_kept(tmp_path / "c" / "d" / "file", "format", b"body", {}, 10)
    finally:
        os.umask(mask)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "c", tmp_path / "c" / "d"]
    assert [stat.S_IMODE(one.stat().st_mode) for one in made] == [0o700] * 4
    assert kept_file.read_kept(tmp_path / "c" / "d" / "file", "format", runs=True) is not None


# -- the command line ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_line_keeps_plans_and_says_so(tmp_path: Path) -> None:
    target = tmp_path / "model.py"
    shapes = (
        "f = lambda *s: jax.ShapeDtypeStruct(s, 'float32')\n\n"
        "def make():\n    return train_step, ({'w1': f(64, 256), 'w2': f(256, 64)}, f(32, 64))\n"
    )
    target.write_text(f"{MODEL}\n{shapes}")

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autopar", "plan", f"{target}:make", "--mesh", "8", "--hardware", "cpu-host"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
        done = subprocess.run([*command, *more, "--json"], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    first, second, third = run(), run(), run("--no-cache")
    assert "from the cache" in second.stderr and "from the cache" not in first.stderr + third.stderr
    told = [json.loads(one.stdout) for one in (first, second)]
    for one in told:
        one["outcome"].pop("solve_time_s")  # of the run that planned
    assert told[0] == told[1]
