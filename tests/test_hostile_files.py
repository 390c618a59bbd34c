"""Untrusted files: any plan, index or model file is read, or refused with one of autopar's own errors."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import vector_search
from autopar.cli.main import main
from autopar.errors import AutoparError, IndexFileError, ModelError, PlanFileError
from autopar.inference.model.safetensors import read_header
from autopar.pipeline.plan import AnyPlan
from autopar.pipeline.plan_files import load_plan
from autopar.report.diff import diff
from autopar.report.explain import explain, explain_json, render
from autopar.report.html.document import page
from autopar.system.text_tables import new_console

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r\x08"
#: What each place of a file is replaced by; `_GONE` is nothing.
_GONE = object()
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, -1e-300, 2**31, 2**53, 2**63, 10**40, -(10**40), 1e30, 1e308),
    *(float("inf"), float("nan"), "inf", "nan", "", "x", "data", ESCAPES, "\ud800", "x" * 100_000),
    *([], [1], [[]], ["data", "data"], {}, {"x": 1}, {ESCAPES: ESCAPES}, _GONE),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def changed(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    """The same with another value at a place."""
    if not at:
        return None if to is _GONE else to
    value = copy.copy(value)
    if len(at) == 1 and to is _GONE:
        del value[at[0]]
    else:
        value[at[0]] = changed(value[at[0]], at[1:], to)
    return value


def mutants(value: Any, share: float) -> Iterator[tuple[str, Any]]:
    """A share of all changes of one place, by a fresh seed, with what each is."""
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    every = [(at, n) for at in places(value) for n in range(len(HOSTILE))]
    for k in rng.permutation(len(every))[: max(1, round(share * len(every)))]:
        at, n = every[k]
        yield f"{at} = {str(HOSTILE[n])[:40]!r}", changed(value, at, HOSTILE[n])


def assert_all_are_said(mutants: Iterator[tuple[str, Any]], use: Callable[[Any], None]) -> tuple[int, int]:
    """How many were used, and how many refused by an error of ours; any other exception fails."""
    used, refused, raw = 0, 0, []
    for what, mutant in mutants:
        try:
            use(mutant)
            used += 1
        except AutoparError as error:
            refused += 1
            assert str(error)
        except Exception as error:
            raw.append(f"{what}: {type(error).__name__}: {str(error)[:150]}")
    assert not raw, f"{len(raw)} raw exceptions:\n" + "\n".join(raw[:40])
    return used, refused


# -- plans -----------------------------------------------------------------------------------


def one_program() -> AnyPlan:
    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    f32 = jnp.float32
    shapes = {"up": jax.ShapeDtypeStruct((64, 256), f32), "down": jax.ShapeDtypeStruct((256, 64), f32)}
    return autopar.plan(step, shapes, jax.ShapeDtypeStruct((32, 64), f32), mesh="2x4", hardware="h100-sxm")


@pytest.fixture(scope="module")
def plans() -> dict[str, AnyPlan]:
    folder = Path(__file__).parent / "plan_files"
    return {"one program": one_program(), "stages": load_plan(folder / "stages_version_4.json")}


FAST_AND_ALL = [0.003, pytest.param(1.0, marks=pytest.mark.slow)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", FAST_AND_ALL)
@pytest.mark.parametrize("kind", ["one program", "stages"])
def test_a_plan_that_anybody_wrote_is_explained_or_refused(
    kind: str, share: float, plans: dict[str, AnyPlan], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"

    def use(document: Any) -> None:
        file.write_text(json.dumps(document))
        plan = load_plan(file)
        told = explain(plan)
        assert_obeys_nothing(str(told))
        json.dumps(explain_json(plan), allow_nan=False)
        assert_obeys_nothing(page(told))
        assert_obeys_nothing(str(diff(plan, plans[kind])))
        plan.save(file)
        assert load_plan(file) == plan

    used, refused = assert_all_are_said(mutants(plans[kind].to_json(), share), use)
    print(used, "explained,", refused, "refused")


@pytest.mark.parametrize(
    ("place", "to"), [(("virtual",), 0), (("virtual",), -1), (("stages", -1, "last_layer"), 10**12)]
)
def test_sizes_of_a_pipeline_are_refused_at_once(
    place: tuple[Any, ...], to: int, plans: dict[str, AnyPlan], tmp_path: Path
) -> None:
    """A number of layers is not counted out in memory."""
    document = plans["stages"].to_json()
    last = len(document["stages"]) - 1
    at = tuple(last if key == -1 else key for key in place)
    (tmp_path / "plan.json").write_text(json.dumps(changed(document, at, to)))
    with pytest.raises(PlanFileError, match=r"virtual|starts"):
        load_plan(tmp_path / "plan.json")


def assert_obeys_nothing(text: str) -> None:
    text.encode()
    assert not any(character in text for character in "\x1b\x07\x9b\u202e\r\x08"), "a terminal would obey it"


def test_a_terminal_obeys_nothing_in_a_plan(
    plans: dict[str, AnyPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plans["one program"].to_json() | {"strategy": ESCAPES, "hardware": ESCAPES, "notes": [ESCAPES]}
    (tmp_path / "plan.json").write_text(json.dumps(document))
    plan = load_plan(tmp_path / "plan.json")
    assert plan.strategy == ESCAPES, "names stay as they are: a user's own parameter may hold whatever"
    assert main(["explain", str(tmp_path / "plan.json")]) == 0
    assert main(["diff", str(tmp_path / "plan.json"), str(tmp_path / "plan.json")]) == 0
    written = capsys.readouterr().out
    assert_obeys_nothing(written)
    assert r"\x1b]0;title\x1b[2J" in written
    terminal = new_console(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    render(plan, terminal)
    assert_obeys_nothing(terminal.file.getvalue())  # type: ignore[attr-defined]
    (tmp_path / "plan.json").write_text(json.dumps(document | {ESCAPES: 1}))
    assert main(["explain", str(tmp_path / "plan.json")]) == 2
    assert_obeys_nothing(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("step_time_s", 10**40, "must be a finite number of at most 1e[+]30, not 1000"),
        ("step_time_s", "inf", "must be a finite number"),
        ("step_time_s", "nan", "must be a finite number"),
        ("compute_s", -1.0, "must not be negative"),
    ],
)
def test_a_figure_of_a_plan_is_finite(
    field: str, value: Any, words: str, plans: dict[str, AnyPlan], tmp_path: Path
) -> None:
    document = changed(plans["one program"].to_json(), ("prediction", field), value)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=rf"its field `prediction\.{field}` {words}"):
        load_plan(tmp_path / "plan.json")
    document = changed(plans["one program"].to_json(), ("mesh", 0, 1), 2**40)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=r"its field `mesh` is of [\d,]+ devices, more than 1,000,000"):
        load_plan(tmp_path / "plan.json")


# -- indexes ---------------------------------------------------------------------------------


def one_device() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


@functools.cache
def saved_index(kind: str) -> bytes:
    """A saved index of a few vectors."""
    vectors = np.random.default_rng(0).standard_normal((80, 8)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        vector_search.build(vectors, index=kind, mesh=one_device(), hardware="cpu-host").save(f"{folder}/index")
        return Path(folder, "index").read_bytes()


_START = len(b"autopar index\n") + 8 + 16


def header_of(file: bytes) -> tuple[dict[str, Any], bytes]:
    """A header, and what follows it."""
    length = int.from_bytes(file[_START - 24 : _START - 16], "little")
    return json.loads(file[_START : _START + length]), file[_START + length :]


def forged(header: Any, rest: bytes) -> bytes:
    """A file whose digests are right."""
    if isinstance(header, dict) and isinstance(header.get("arrays"), list):
        header = header | {"arrays": [signed(entry, rest) for entry in header["arrays"]]}
    text = json.dumps(header).encode()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    return b"autopar index\n" + len(text).to_bytes(8, "little") + digest + text + rest


def signed(entry: Any, rest: bytes) -> Any:
    try:
        begin, size = entry["offset"], int(np.prod(entry["shape"])) * jnp.dtype(entry["dtype"]).itemsize
        return entry | {"digest": hashlib.blake2b(rest[begin : begin + size], digest_size=16).hexdigest()}
    except Exception:  # it is no entry
        return entry


@pytest.mark.parametrize("share", [0.02, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["exact", "ivf", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("graph", "ivfpq"))]
)
def test_an_index_that_anybody_wrote_is_searched_or_refused(kind: str, share: float, tmp_path: Path) -> None:
    header, rest = header_of(saved_index(kind))
    queries = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
    searched: list[Any] = []

    def use(mutant: Any) -> None:
        (tmp_path / "index").unlink(missing_ok=True)  # the one before is still mapped
        (tmp_path / "index").write_bytes(forged(mutant, rest))
        index = vector_search.load(tmp_path / "index", mesh=one_device(), hardware="cpu-host")
        if len(searched) == (1 if share < 1 else 30):  # each search is compiled
            return
        searched.append(mutant)
        index.search(np.resize(queries, (2, index.stats().dim)), k=3)

    used, refused = assert_all_are_said(mutants(header, share), use)
    print(used, "loaded,", refused, "refused")


@pytest.mark.slow
def test_arrays_of_an_index_that_point_elsewhere_are_refused(tmp_path: Path) -> None:
    for kind, name, words in (
        ("ivf", "positions", "`positions` points outside the 80 vectors"),
        ("graph", "edges", "`edges` points outside the 80 vectors"),
        ("graph", "entries", "`entries` points outside the 80 vectors"),
        ("ivf", "first_block", "`first_block` does not start at 0 and increase"),
    ):
        header, rest = header_of(saved_index(kind))
        (entry,) = (one for one in header["arrays"] if one["name"] == name)
        data = bytearray(rest)
        data[entry["offset"] : entry["offset"] + 4] = (12345).to_bytes(4, "little")
        (tmp_path / "index").write_bytes(forged(header, bytes(data)))
        with pytest.raises(IndexFileError, match=f"is damaged: {words}"):
            vector_search.load(tmp_path / "index", mesh=one_device(), hardware="cpu-host")


# -- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_safetensors_file_that_anybody_wrote_is_read_or_refused(share: float, tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I8", "shape": [0, 5], "data_offsets": [32, 32]},
        "d": {"dtype": "F16", "shape": [], "data_offsets": [32, 34]},
    }

    def use(mutant: Any) -> None:
        write(json.dumps(mutant))
        for tensor in read_header(tmp_path / "model").values():
            assert np.asarray(tensor.mapped()).size >= 0

    def write(text: str) -> None:
        (tmp_path / "model").unlink(missing_ok=True)
        (tmp_path / "model").write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(34))

    used, refused = assert_all_are_said(mutants(header, share), use)
    assert refused > used
    for text in ("[" * 100_000, '{"a":' * 100_000, "9" * 10_000):
        write(text)
        with pytest.raises(ModelError, match="its header cannot be read"):
            read_header(tmp_path / "model")
