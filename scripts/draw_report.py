"""Draw the README's picture: a part of a plan's real page, light and dark, as Chromium shows it.

Usage, from the repository root: `.venv/bin/python scripts/draw_report.py`, after a change to the page of `explain
--html`. Plans GPT-2 small for 8 absent H100s with 6 GB each (two minutes; needs the extra `bench`), and writes
`docs/images/report-light.webp` and `report-dark.webp`. Sections between those in the picture are left out.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # has the module that opens pages in Chromium

from chromium import Tab, chromium, find_chromium  # noqa: E402

PLAN = "benchmarks/models.py:gpt2_small_target --hardware h100-sxm --mesh 2x4 --memory-budget 6GB"
FOLDED = ["wte", "mlp"]  # modules that are collapsed, as by a click
IMAGES = ROOT / "docs" / "images"
WIDTH = 1040  # CSS width of the page; the picture has two pixels per CSS pixel
LEFT_OUT = "nav, #peak, #trace, #decisions, #collectives, footer"


def main() -> None:
    command = find_chromium()
    assert command, "no Chromium: scripts/chromium.sh installs it"
    with tempfile.TemporaryDirectory() as folder, chromium(command) as tab:
        plan, page = Path(folder, "plan.json"), Path(folder, "page.html")
        _autopar(f"plan {PLAN} -o {plan}")
        _autopar(f"explain {plan} --html {page}")
        for name, dark in (("light", False), ("dark", True)):
            tab.open(page, width=WIDTH, height=2400, dark=dark)
            (IMAGES / f"report-{name}.webp").write_bytes(_picture(tab))
            print(f"drew docs/images/report-{name}.webp")


def _autopar(arguments: str) -> None:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "USE_TORCH": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "autopar", *arguments.split()], cwd=ROOT, env=env, check=True)


def _picture(tab: Tab) -> bytes:
    """The top of the page, down to the first tensor with the most sharded dims, with the pointer on it to show its shards."""
    tab.value(f"document.querySelectorAll({LEFT_OUT!r}).forEach(e => e.style.display = 'none')")
    tab.value("document.querySelector('header').style.marginBottom = '1rem'")  # the same margin as the links below it
    tab.value(
        "[...document.querySelectorAll('#modules details')]"
        f".filter(e => {FOLDED!r}.includes(e.querySelector('.module-name')?.textContent)).forEach(e => e.open = false);"
        "const open = [...document.querySelectorAll('#modules .blocks')].filter(e => !e.closest('details:not([open])'));"
        "const most = Math.max(...open.map(e => e.querySelectorAll('.split').length));"
        "open.find(e => e.querySelectorAll('.split').length == most).id = 'shards'"
    )
    tab.point_at("#shards")
    bottom = tab.value("document.getElementById('shown').getBoundingClientRect().bottom")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": bottom + 16, "scale": 2}
    capture = tab.call("Page.captureScreenshot", format="webp", quality=85, clip=clip, captureBeyondViewport=True)
    return base64.b64decode(capture["data"])


if __name__ == "__main__":
    main()
