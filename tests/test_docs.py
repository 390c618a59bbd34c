"""The documentation is correct: its programs run, its links resolve, and it covers everything public."""

from __future__ import annotations

import inspect
import json
import pickle
import pkgutil
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import pytest

import autopar
import autopar.extend
import autopar.inference
from autopar import errors
from scripts import architecture
from scripts.refresh_docs import outputs, refreshed, run, shown

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
QUICK = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}
_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    title: str  # the file it belongs to
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*match.groups(default="")) for match in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- programs --------------------------------------------------------------------------------


#: Pages whose outputs are held to the letter; but for the solver's seconds; and but for all figures, which are those of
#: a machine. What takes longer or is measured is refreshed, and not held.
EXACT = (
    "add-a-primitive",
    "add-a-schedule",
    "add-an-index",
    "collectives",
    "how-far-to-trust",
    "inference",
    "parameter-servers",
    "schedules",
)
IN_FIGURES = ("../README", "how-a-plan-is-made", "asynchronous-pipelines", "vector-search-on-paper")
IN_WORDS = ("tutorial", "reading-a-plan", "checkpoints")
NOT_HELD = (
    "replay",
    "verify",
    "diagnose",
    "pipelines",
    "plans-in-git",
    "vector-search",
    "graph-on-disk",
    "vector-search-on-disk",
    "vector-search-servers",
    "vector-search-updates",
    "api",
    "inference-on-paper",
    "many-models",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXACT)
def test_what_a_page_prints_is_what_it_shows(name: str, tmp_path: Path) -> None:
    for place, printed in outputs(DOCS / f"{name}.md", tmp_path, QUICK):
        assert place.text == printed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", IN_FIGURES)
def test_what_a_page_plans_is_what_it_shows(name: str, tmp_path: Path) -> None:
    for place, printed in outputs(DOCS / f"{name}.md", tmp_path, QUICK | {"XDG_CACHE_HOME": str(tmp_path / "cache")}):
        check_shown(place.text, printed, numbers=True)


@pytest.mark.slow
def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    """What the guide to the report is about is the plan of its section 7."""
    untitled = [block.text for block in blocks(DOCS / "tutorial.md") if block.language == "python" and not block.title]
    assert not untitled, "every Python block of the tutorial says which file it belongs to"
    for name in ("tutorial.md", "reading-a-plan.md"):
        for place, printed in outputs(DOCS / name, tmp_path, QUICK):
            check_shown(place.text, printed, numbers=False)


@pytest.mark.slow
def test_the_page_on_checkpoints_prints_what_it_shows(tmp_path: Path) -> None:
    """Its program is run on 8 devices, then on 4; then the two plans are compared."""
    for place, printed in outputs(DOCS / "checkpoints.md", tmp_path, QUICK):
        check_shown(place.text, printed, numbers=False)


def test_every_page_with_outputs_is_held() -> None:
    held = {(DOCS / f"{name}.md").resolve() for name in (*EXACT, *IN_FIGURES, *IN_WORDS, *NOT_HELD)}
    assert held == {page for page in PAGES if shown(page.read_text(encoding="utf-8"))}


def test_outputs_are_put_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        """\
```python title="a.py"
print("one\\ntwo\\nthree")
```

<!-- output | from two | lines 1 -->
```text
old
```

```python title="a.py"
print("last")
```

<!-- output -->
```text
old
```

<!-- output: python -c "print('| b |')" -->

| a |

<!-- output: python -c "import autopar; autopar.load_plan('none.json')" | fails -->
```text
old
```
""",
        encoding="utf-8",
    )
    (tmp_path / "run").mkdir()
    after = refreshed(page, tmp_path / "run")
    assert "-->\n```text\ntwo\n…\n```" in after
    assert "-->\n```text\nlast\n```" in after
    assert "-->\n\n| b |\n\n<!--" in after
    assert "autopar.errors.PlanFileError: " in after
    assert "More on this: docs/troubleshooting.md#planfileerror\n```" in after
    assert "old" not in after


def check_shown(shown: str, printed: str, *, numbers: bool) -> None:
    """Assert that this is what was printed, under the JAX that the README names.

    Times of the solver are passed over, and without `numbers` all numbers and the lengths of bars are.
    """
    version = re.search(r"JAX (\d[\d.]*\d)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert version, "the README says with which JAX its output was made"
    if version[1] == jax.__version__:
        assert _plain(shown, numbers) == _plain(printed, numbers), f"shown:\n{shown}\nprinted:\n{printed}"


def _plain(text: str, numbers: bool) -> str:
    text = re.sub(r"/\S*/(?=\w+\.py:\d)", "", text)  # the folder it is run in
    text = re.sub(r"solved\s+in\s+[\d.]+\s+\w+\)", "solved)", text)
    if not numbers:
        text = re.sub(r"#+", "", text)
        text = re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "0", text)
        text = re.sub(r"\b0( ([KMG]?B|[nmu]?s))?\b", "0", text)
    return re.sub(r"-{3,}", "---", re.sub(r"\s+", " ", text)).strip()


@pytest.mark.slow
def test_the_blocks_of_the_front_ends_are_one_program(tmp_path: Path) -> None:
    program = "\n".join(block.text for block in blocks(DOCS / "front-ends.md") if block.language == "python")
    (tmp_path / "front_ends.py").write_text(program, encoding="utf-8")
    run("python front_ends.py", tmp_path, QUICK)


def test_the_report_in_the_guide_is_of_a_program_that_runs(tmp_path: Path) -> None:
    """Its times are those of some machine; the rows are the same."""
    found = blocks(DOCS / "diagnose.md")
    (tmp_path / "report.py").write_text(next(b.text for b in found if b.title == "report.py"), encoding="utf-8")
    printed = run("python report.py", tmp_path, QUICK)
    shown = next(b.text for b in found if b.text.startswith("Report on"))
    for words in ("Report on train_step", "step time", "peak memory, as compiled", "MFU"):
        assert words in shown
        assert words in printed


@pytest.mark.slow
def test_the_step_sharded_by_hand_in_the_guide_is_read(tmp_path: Path) -> None:
    program = next(b.text for b in blocks(DOCS / "diagnose.md") if b.title == "gpt2_by_hand.py")
    check = "from autopar.diagnosis.hand_sharded import read_hand_sharded as read; step, args = make(); print(read(step, args).mesh)"
    (tmp_path / "gpt2_by_hand.py").write_text(f"{program}\n\n{check}\n", encoding="utf-8")
    assert run("python gpt2_by_hand.py", tmp_path, QUICK).strip() == "2x4"


# -- completeness ----------------------------------------------------------------------------


def test_every_public_name_is_documented() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    names = {*re.findall(r"import \w+ as (\w+)", Path(autopar.__file__).read_text(encoding="utf-8"))}
    assert names, "autopar/__init__.py imports what is public"
    missing = [name for name in sorted(names) if f"`autopar.{name}`" not in page]
    assert not missing, f"docs/api.md says nothing of {missing}"


@pytest.mark.parametrize("function", [autopar.plan, autopar.ParallelStep.init, autopar.ParallelStep.lower])
def test_every_option_is_documented(function: object) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert callable(function)
    options = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    missing = [name for name in options if name not in page]
    assert not missing, f"docs/api.md says nothing of {missing}"


def test_every_public_member_of_a_plan_and_a_step_is_documented() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for owner, prefix in ((autopar.Plan, "plan"), (autopar.ParallelStep, "step")):
        methods = [name for name, item in vars(owner).items() if not name.startswith("_") and callable(item)]
        missing = [name for name in methods if f"`{prefix}.{name}(" not in page]
        assert not missing, f"docs/api.md says nothing of {owner.__name__}'s {missing}"


EXTENSIONS = [import_module(f"autopar.extend.{found.name}") for found in pkgutil.iter_modules(autopar.extend.__path__)]


@pytest.mark.parametrize(
    "package", [autopar.vector_search, autopar.inference, *EXTENSIONS], ids=lambda package: package.__name__
)
def test_every_public_name_of_a_package_is_documented(package: ModuleType) -> None:
    page = re.sub(r"^```.*?^```$", "", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = " ".join(re.findall(r"`[^`]+`", page))
    names = re.findall(r"import \w+ as (\w+)", Path(str(package.__file__)).read_text(encoding="utf-8"))
    assert names, "it imports what is public"
    missing = [name for name in names if not re.search(rf"\b{name}\b", spans)]
    assert not missing, f"docs/api.md says nothing of {package.__name__}'s {missing}"


def test_an_error_names_its_section() -> None:
    class MineError(errors.PinError):
        pass

    for error in (errors.PinError("a pin"), MineError("another"), pickle.loads(pickle.dumps(errors.PinError("a pin")))):
        assert error.__notes__ == ["More on this: docs/troubleshooting.md#pinerror"]


def test_every_error_has_a_section() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    classes = [c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AutoparError)]
    missing = [name for name in classes if f"\n## {name}\n" not in page]
    assert not missing, f"docs/troubleshooting.md has no section on {missing}"


def test_the_architecture_is_what_packages_and_contracts_say() -> None:
    page = architecture.PAGE.read_text(encoding="utf-8")
    assert page == architecture.written(page), "run scripts/architecture.py"
    assert len(architecture.table().splitlines()) > 40


def test_the_picture_names_what_is_there() -> None:
    picture = (DOCS / "images" / "architecture.svg").read_text(encoding="utf-8")
    named = re.findall(r'class="module">([\w/]+(?:\.py|/))<', picture)
    assert len(named) > 8, "the picture names its modules"
    missing = [name for name in named if not (ROOT / "autopar" / name).exists() and not (ROOT / name).exists()]
    assert not missing, f"the picture shows {missing}"


# -- links -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"\s]+)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{id_of(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{id_of(page)} links to {target}"


def _anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page != DOCS / "README.md"]
    missing = [page for page in pages if f"({page})" not in index]
    assert not missing, f"docs/README.md does not list {missing}"


# -- the site --------------------------------------------------------------------------------


class Asked(HTMLParser):
    """What a browser fetches for a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        fetched = tag != "a" and own.get("rel") not in ("canonical", "prev", "next")
        self.found += [str(own[name]) for name in ("src", "srcset", "href") if fetched and own.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link or an anchor that leads nowhere, or a page in no menu, fails."""
    folder = tmp_path_factory.mktemp("site")
    run(f"python -m mkdocs build --quiet --strict -d {folder}", ROOT, {"NO_MKDOCS_2_WARNING": "1"})
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    pages = [page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md") if page != DOCS / "README.md"]
    tables = [path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "benchmarks" / "results").glob("*.md")]
    wanted = [Path("index.html"), *pages, *(Path("repository") / table for table in tables)]
    missing = [str(page) for page in wanted if not (site / page).exists()]
    assert not missing, f"not on the site: {missing}"


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for url in Asked(page.read_text(encoding="utf-8")).found:
            assert not re.match(r"(\w+:)?//", url) or url.startswith("data:"), f"{page.relative_to(site)} fetches {url}"
            there = (page.parent / url.partition("#")[0].partition("?")[0]).resolve()
            assert url.startswith("/") or there.exists(), f"{page.relative_to(site)} fetches {url}"
    for sheet in site.rglob("*.css"):
        elsewhere = re.findall(r"(?:url\(|@import)[\s\"']*((?:\w+:)?//[^\s)]*)", sheet.read_text(encoding="utf-8"))
        assert not elsewhere, f"{sheet.relative_to(site)} fetches {elsewhere}"


#: What engineers search for, and the page that must have it in a heading: Material's search ranks headings first.
SEARCHES = {
    "FSDP": "memory.html",
    "OOM": "memory.html",
    "rematerialization": "memory.html",
    "activation checkpointing": "memory.html",
    "gradient accumulation": "memory.html",
    "MFU": "diagnose.html",
    "overlap": "cost-model.html",
    "prefetch": "cost-model.html",
    "all-reduce": "collectives.html",
    "microbatches": "pipelines.html",
    "1F1B": "schedules.html",
    "latency hiding": "cost-model.html",
    "KV cache": "inference.html",
}


@pytest.mark.parametrize("term", SEARCHES)
def test_a_search_finds_the_page_on_a_term(site: Path, term: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    headings = [one["title"] for one in index["docs"] if one["location"].split("#")[0] == SEARCHES[term]]
    assert any(term.lower() in heading.lower() for heading in headings), f"no heading of {SEARCHES[term]} has {term}"


@pytest.mark.skipif(shutil.which("node") is None, reason="the site's search is JavaScript, and there is no Node")
def test_the_search_of_the_site_lists_that_page_first(site: Path) -> None:
    command = ["node", str(ROOT / "tests" / "search_site.js"), str(site), *SEARCHES, "remat"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    first = {term: locations[0].split("#")[0] for term, locations in found.items()}
    assert first == SEARCHES | {"remat": "memory.html"}


def test_every_error_has_an_anchor_on_the_site(site: Path) -> None:
    page = (site / "troubleshooting.html").read_text(encoding="utf-8")
    classes = [c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.AutoparError)]
    missing = [name for name in classes if f'id="{name.lower()}"' not in page]
    assert not missing, f"no anchor for {missing}"
