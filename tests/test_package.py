"""The package's structure: few names at its root, a docstring for each package, and no imports before use."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import autopar
from autopar.system.moved_modules import MOVED
from scripts import architecture

PACKAGE = Path(autopar.__file__).parent
#: What plans, prices and explains: importable where JAX is not.
WITHOUT_JAX = ("solve", "hardware", "rules", "cost", "ir", "formulate", "plans", "report", "system")
BLOCKED = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocked())
package = importlib.import_module(f"autopar.{sys.argv[1]}")
for module in pkgutil.walk_packages(package.__path__, f"autopar.{sys.argv[1]}."):
    importlib.import_module(module.name)
    print(module.name)
"""


def run(program: str, *arguments: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def folders() -> list[Path]:
    return [file.parent for file in PACKAGE.rglob("__init__.py")]


def test_the_root_holds_four_modules() -> None:
    assert {file.name for file in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py", "version.py"}


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_package_says_what_it_is_and_no_prefix_stands_for_a_package(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    if folder != PACKAGE:
        assert all(f"\n{field}: " in text for field in ("In", "Out", "Imported by")), f"{folder}: {text!r}"
    first_words = Counter(file.stem.partition("_")[0] for file in folder.glob("*.py") if file.stem[:1] != "_")
    assert max(first_words.values(), default=0) <= 3, first_words


@functools.cache
def imported(file: Path) -> frozenset[str]:
    """The packages of autopar that a module imports, anywhere in it."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found.update(name.split(".")[1] for name in names if name.startswith("autopar."))
    return frozenset(found)


@pytest.mark.parametrize("folder", sorted(file.parent for file in PACKAGE.glob("*/__init__.py")), ids=lambda f: f.name)
def test_a_package_is_imported_by_whom_it_names(folder: Path) -> None:
    _, fields = architecture.docstring(folder)
    if fields["Imported by"].startswith("every package"):
        return
    files = (file for file in PACKAGE.glob("*/**/*.py") if file.relative_to(PACKAGE).parts[0] != folder.name)
    importers = {file.relative_to(PACKAGE).parts[0] for file in files if folder.name in imported(file)} - {"extend"}
    assert importers <= set(re.findall(r"\w+", fields["Imported by"]))


def test_importing_autopar_loads_neither_jax_nor_the_planner() -> None:
    loaded = run("import autopar, sys; print(*sys.modules)").split()
    assert not {"jax", "numpy", "flax", "ortools", "numba", "autopar.planner"} & set(loaded)


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_a_package_is_imported_without_jax(name: str) -> None:
    assert len(run(BLOCKED, name).split()) >= 1


def test_public_names_are_where_type_checkers_find_them() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    packages = {name for name, module in imported.items() if module == "autopar"}
    assert packages == set(autopar._PACKAGES)
    assert {name: module for name, module in imported.items() if name not in packages} == autopar._DEFINED_IN
    for name in imported:
        assert getattr(autopar, name) is not None
        assert name in dir(autopar)
        if name not in packages:
            assert not (PACKAGE / f"{name}.py").exists() and not (PACKAGE / name).exists(), f"{name} shadows a module"


def test_an_unknown_name_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'parallelise'"):
        autopar.parallelise  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_that_the_guides_taught_is_the_module_and_warns(old: str) -> None:
    new = import_module(MOVED[old])
    spec = new.__spec__
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"`{old}` is `{MOVED[old]}` now"):
        assert import_module(old) is new
    assert new.__spec__ is spec
    assert new.__name__ == MOVED[old]
