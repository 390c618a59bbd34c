"""The page in a browser: an empty console, shards on hover, light and dark, narrow, printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from chromium import Tab
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_explained_values import transformer_plan
from test_stages import plan as staged_plan

import autopar


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    plans = {"program": transformer_plan(), "microbatches": transformer_plan(4), "stages": staged_plan()}
    for name, plan in plans.items():
        autopar.write_report(plan, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in plans}


@pytest.mark.parametrize("name", ["program", "microbatches", "stages"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_loads_alone_and_in_silence(tab: Tab, pages: dict[str, Path], name: str, dark: bool) -> None:
    tab.open(pages[name], dark=dark)
    assert tab.value("document.querySelectorAll('section').length") >= 5
    assert tab.said == [] and tab.asked_for == [pages[name].as_uri()]


def test_the_shards_drawn_are_those_of_jax(tab: Tab, pages: dict[str, Path]) -> None:
    """Of every tensor, by JAX's own map from devices to indices."""
    tab.open(pages["program"])
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    drawn = tab.value(
        "[...new Map([...document.querySelectorAll('.blocks')].map(e => [e.dataset.shape + e.dataset.spec, e])).values()]"
        ".map(e => { showShards(e); return [e.dataset.shape, e.dataset.spec, drawnDims(shardsOf(e)),"
        " [...shown.querySelectorAll('.shard')].map(s => s.dataset.devices)]; })"
    )
    compared = 0
    for shape_text, spec_text, dims, cells in drawn:
        if not shape_text:
            continue
        shape = tuple(map(int, shape_text.split(",")))
        spec = [tuple(filter(None, axes.split(","))) for axes in spec_text.split("|")]
        if sum(map(bool, spec)) > len(dims) or not any(spec):
            continue
        places: dict[Any, list[int]] = {}
        for device, index in NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(shape).items():
            places.setdefault(tuple(index[dim].start or 0 for dim in dims), []).append(device.id)
        expected = [",".join(map(str, sorted(ids))) for _, ids in sorted(places.items())]
        assert cells == expected, (shape, spec)
        compared += 1
    assert compared >= 8


def test_a_stage_s_shards_are_on_its_own_devices(tab: Tab, pages: dict[str, Path]) -> None:
    """Four devices each: two stages on eight, numbered through."""
    tab.open(pages["stages"])
    for stage, own in ((0, {0, 1, 2, 3}), (1, {4, 5, 6, 7})):
        drawn = tab.value(
            f"[...document.querySelectorAll('#decisions-{stage} .blocks')].flatMap(e => {{ showShards(e);"
            " return [...shown.querySelectorAll('.shard')].flatMap(s => s.dataset.devices.split(',').map(Number)); })"
        )
        assert set(drawn) == own


def test_shards_are_shown_by_pointer_and_by_keyboard(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["program"])
    assert tab.value("shown.hidden")
    tab.point_at(".tree .blocks:has(.split)")
    assert not tab.value("shown.hidden") and tab.value("shown.querySelectorAll('.shard').length") >= 2
    box = tab.value("(() => { const b = shown.getBoundingClientRect(); return [b.left, b.right, b.width] })()")
    assert box[0] >= 0 and box[1] <= 1280 and box[2] > 100, "inside the window"
    tab.press("Escape")
    assert tab.value("shown.hidden")
    tab.value("document.querySelector('.tree .blocks').focus()")
    first = tab.value("shown.textContent")
    tab.press("Tab")
    tab.press("Tab")
    assert tab.value("document.activeElement !== document.body")
    assert first and not tab.value("document.querySelector('.tree .blocks') === document.activeElement")


def test_rows_over_time_are_gone_through_with_arrows(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["stages"])
    tab.value("document.querySelector('[data-track=pipeline-0]').focus()")
    assert "F0: forward of microbatch 0 on stage 0" in tab.value("shown.textContent")
    tab.press("ArrowRight")
    assert "microbatch 1" in tab.value("shown.textContent")
    tab.press("ArrowLeft")
    tab.press("ArrowLeft")
    assert "microbatch 0" in tab.value("shown.textContent")
    tab.open(pages["program"])
    tab.point_at("[data-track=tracks-kernels]")
    assert any(phase in tab.value("shown.textContent") for phase in ("forward", "backward"))


CONTRAST = """(() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return ['h1', '.about', '.under', 'section h2', 'nav a'].map((selector) => {
    const e = document.querySelector(selector);
    const ground = getComputedStyle(e.closest('section') || document.body).backgroundColor;
    const [a, b] = [light(getComputedStyle(e).color), light(ground)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
})()"""


def test_light_dark_and_print_can_be_read(tab: Tab, pages: dict[str, Path], tmp_path: Path) -> None:
    grounds = []
    for dark, media in ((False, ""), (True, ""), (True, "print")):
        tab.open(pages["program"], dark=dark, media=media)
        assert min(tab.value(CONTRAST)) >= 4.5, (dark, media)
        grounds.append(tab.value("getComputedStyle(document.body).backgroundColor"))
        tab.picture(tmp_path / "it.png", whole=False)
        assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 27)", "rgb(255, 255, 255)"]
    assert tab.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.value("document.querySelector('.module').open = false")
    tab.value("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.value("document.querySelector('.module').open"), "what is folded is printed"
    tab.value("window.dispatchEvent(new Event('afterprint'))")
    assert not tab.value("document.querySelector('.module').open")
    assert tab.pdf().startswith(b"%PDF") and tab.said == []


@pytest.mark.parametrize("name", ["program", "stages"])
def test_a_narrow_screen_scrolls_one_way(tab: Tab, pages: dict[str, Path], name: str) -> None:
    tab.open(pages[name], width=360, height=700)
    assert tab.value("document.documentElement.scrollWidth") <= 360


def test_tables_are_sorted_and_filtered(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["program"])
    column = "[...document.querySelectorAll('#decisions tbody tr')].map(r => Number(r.cells[4].dataset.value))"
    head = "document.querySelectorAll('#decisions th button')[4].click()"
    before = tab.value(column)
    tab.value(head)
    assert tab.value(column) == sorted(before, reverse=True)
    tab.value(head)
    assert tab.value(column) == sorted(before)
    assert tab.value("document.querySelector('#decisions th[aria-sort]').ariaSort") == "ascending"
    tab.value(
        "(() => { const f = document.querySelector('.filter'); f.value = 'qkv'; f.dispatchEvent(new Event('input')) })()"
    )
    left = tab.value("[...document.querySelectorAll('#decisions tbody tr:not([hidden])')].map(r => r.textContent)")
    assert left and len(left) < len(before) and all("qkv" in text.lower() for text in left)


def test_a_folded_layer_is_shown_one_by_one(tab: Tab, pages: dict[str, Path]) -> None:
    tab.open(pages["program"])
    places = "[...document.querySelectorAll('.unfolded > details')].map(d => [...d.querySelectorAll('[data-place]')].map(e => [e.dataset.place, Number(e.querySelector('[data-count]').dataset.count)]))"
    assert tab.value("document.querySelectorAll('.unfolded').length") == 0
    folded = tab.value(
        "[...document.querySelector('details[data-members]').querySelectorAll('[data-place]')]"
        ".map(e => Number(e.querySelector('[data-count]').dataset.count))"
    )
    tab.value("document.querySelector('.unfold').click()")
    layers = tab.value(places)
    assert len(layers) == 3
    for number, rows in enumerate(layers):
        assert rows and all(place.startswith(f"PostNormLayer_{number}") for place, _ in rows)
    assert sum(count for rows in layers for _, count in rows) == sum(folded), "each tensor in one of them"
    tab.value("document.querySelector('.unfold').click()")
    assert tab.value("document.querySelectorAll('.unfolded').length") == 0 and tab.said == []
