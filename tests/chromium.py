"""Drive a headless Chromium by its own protocol over a pipe.

In: a page. Out: `Tab`: results of scripts, console messages, screenshots. It needs neither a driver nor a port: the
protocol is JSON, and a NUL byte ends each message.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: As Debian, Ubuntu, and others call it.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_PATIENCE_S = 60.0


def find_chromium() -> str | None:
    """The command, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page at a time. `said` is what its console and its errors have said since it was opened."""

    def __init__(self, to: int, out: int) -> None:
        self._to, self._out, self._numbers = to, out, itertools.count(1)
        self._session: str | None = None
        self._unread = b""
        self.said: list[str] = []
        self.asked_for: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._out], [], [], _PATIENCE_S)
            more = os.read(self._out, 1 << 20) if ready else b""
            assert more, "Chromium says nothing more"
            self._unread += more
        text, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(text)
        method, params = message.get("method", ""), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(params["exceptionDetails"]["exception"].get("description", "an error"))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked_for.append(params["request"]["url"])
        return message

    def open(
        self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = ""
    ) -> None:
        """Open a page and wait until it has loaded.

        Args:
            page: a file, or an address.
            media: `print` shows it as it would be printed.
        """
        self.said, self.asked_for = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, script: str) -> Any:
        """What an expression is, as JSON types."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Scroll to an element and move the pointer to its middle."""
        box = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for x, y in ((1, 1), box):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """A key, as `Tab` or `ArrowRight`."""
        code = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Escape": 27, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, or of the window."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def pdf(self) -> bytes:
        """What a printer would get."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextlib.contextmanager
def chromium(command: str) -> Iterator[Tab]:
    """Start it, without a network and with a profile of its own; gone at the end."""
    read_by_it, to = os.pipe()
    out, written_by_it = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol is spoken over the file descriptors 3 and 4.
        script = f'exec "$0" "$@" 3<&{read_by_it} 4>&{written_by_it}'
        process = subprocess.Popen(
            ["bash", "-c", script, command, *flags, f"--user-data-dir={profile}"],
            pass_fds=(read_by_it, written_by_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_it)
        os.close(written_by_it)
        try:
            yield Tab(to, out)
        finally:
            process.terminate()
            process.wait(timeout=30)
            os.close(to)
            os.close(out)
