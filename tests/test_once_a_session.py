"""Tests share results only if the results are equal."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from once_a_session import FOLDER, once_a_session
from same_steps import but_for_names, name_of


def test_a_result_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    made: list[int] = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"x": np.arange(3)}

    first, second = once_a_session("it", make), once_a_session("it", make)
    np.testing.assert_array_equal(first["x"], second["x"])
    assert once_a_session("another", lambda: 5) == 5
    assert len(made) == 1
    with pytest.raises(KeyError):
        once_a_session("failed", lambda: {}["no"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["another", "it"]


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER)
    assert [once_a_session("it", lambda n=n: n) for n in range(2)] == [0, 1]


def lowered(axes: dict[str, int], spec: P, factor: float = 2.0) -> jax.stages.Lowered:
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return jax.jit(lambda x: jnp.sin(x) * factor, in_shardings=NamedSharding(mesh, spec)).lower(x)


def test_programs_are_the_same_but_for_the_names_of_axes() -> None:
    names = [
        {but_for_names(lowered(axes, spec).as_text()) for axes, spec in same}
        for same in (
            [({"data": 8}, P("data")), ({"data": 1, "model": 8}, P("model")), ({"model": 8, "data": 1}, P("model"))],
            [({"data": 8}, P(None, "data")), ({"a": 8}, P(None, "a"))],
            [({"data": 2, "model": 4}, P("data", "model"))],
            [({"data": 2, "model": 4}, P("model", "data"))],
            [({"data": 4, "model": 2}, P("data", "model"))],
        )
    ]
    assert [len(one) for one in names] == [1] * len(names)
    assert len(set.union(*names)) == len(names)


def test_other_numbers_are_another_result() -> None:
    program, other = (lowered({"data": 8}, P("data"), factor) for factor in (2.0, 3.0))
    given = np.ones((16, 16), np.float32)
    names = {
        name_of(program, [given]),
        name_of(other, [given]),
        name_of(program, [2 * given]),
        name_of(program, [given.astype(np.int32)]),
        name_of(program, [given.reshape(8, 32)]),
    }
    assert len(names) == 5
    assert name_of(program, [given.copy()]) in names
