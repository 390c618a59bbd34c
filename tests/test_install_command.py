"""The command that error messages give for a missing extra."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from autopar.system import install_command as module


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        ({"url": "file:///no/such%20folder", "dir_info": {"editable": True}}, "autopar[disk]"),
        (
            {"url": "https://host/autopar.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "autopar[disk] @ git+https://host/autopar.git@c0ffee",
        ),
        ({"url": "file:///tmp/autopar.whl", "archive_info": {}}, "autopar[disk]"),
        (None, "autopar[disk]"),
    ],
)
def test_an_extra_comes_from_where_autopar_came_from(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None, wanted: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(module, "distribution", lambda name: Installed())
    assert module.install_command("disk") == f"pip install '{wanted}'"


def test_a_folder_may_have_a_space_in_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout = tmp_path / "my autopar"
    checkout.mkdir()

    class Installed:
        def read_text(self, name: str) -> str:
            return json.dumps({"url": checkout.as_uri(), "dir_info": {}})

    monkeypatch.setattr(module, "distribution", lambda name: Installed())
    assert module.requirement("plot") == f"{checkout}[plot]"


def test_autopar_that_is_not_installed_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", missing)
    assert module.requirement("plot") == "autopar[plot]"
