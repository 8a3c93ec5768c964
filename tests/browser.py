"""Pages in headless Chromium, for tests: what a reader of a file would see, with the network denied.

Talks the browser's own protocol (Chrome DevTools Protocol) through its pipe: no port, no library.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from numpy.typing import NDArray

DEADLINE_S = 90.0
"""For a browser that hangs, which then fails; no test waits for it otherwise."""
WIDTH = 1200
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync"),
    "--enable-unsafe-swiftshader",  # draws without a graphics card, which some of plotly's pictures need
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
_LOOK = """(() => {
  const seen = [...document.querySelectorAll('svg[role=img], .js-plotly-plot')];
  const boxes = seen.map(e => e.getBoundingClientRect());
  return {
    text: document.body.innerText, title: document.title,
    pictures: seen.map((e, i) => ({
      name: e.getAttribute('aria-label') || '', width: boxes[i].width,
      height: boxes[i].height, xy: [boxes[i].x, boxes[i].y + window.scrollY],
      marks: e.querySelectorAll('path, rect, image, text, canvas').length,
    })),
    scroll_width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
    scripts: document.scripts.length,
  };
})()"""


@dataclass(frozen=True)
class Seen:
    """A page as it was shown: ``problems`` are console errors, exceptions and refused loads, ``requests`` all addresses
    asked for but its own, ``screenshot`` is ``(height, width, 3)`` from 0 to 1."""

    text: str
    title: str
    pictures: list[dict[str, Any]]
    scroll_width: int
    scripts: int
    problems: list[str]
    requests: list[str]
    screenshot: NDArray[np.float64]
    png: bytes

    def part(self, picture: dict[str, Any]) -> NDArray[np.float64]:
        """A picture's pixels."""
        x, y = (int(v) for v in picture["xy"])
        return self.screenshot[y : y + int(picture["height"]), x : x + int(picture["width"])]


class Browser:
    """A Chromium that runs; one page at a time."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._numbers, self._left, self._events = itertools.count(1), b"", list[dict[str, Any]]()

    def look(self, path: Path) -> Seen:
        """Show a file, wait until it is quiet, and tell what there is."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable", session)
        self._call("Network.emulateNetworkConditions", session, offline=True, latency=0, downloadThroughput=0,
                   uploadThroughput=0)  # fmt: skip
        self._resize(session, 900)
        self._events.clear()
        self._call("Page.navigate", session, url=path.resolve().as_uri())
        self._wait("Page.loadEventFired", session)
        self._call("Runtime.evaluate", session, awaitPromise=True,
                   expression="new Promise(d => requestAnimationFrame(() => requestAnimationFrame(d)))")  # fmt: skip
        found = self._call("Runtime.evaluate", session, expression=_LOOK, returnByValue=True)["result"]["value"]
        self._resize(session, found["height"])
        png = base64.b64decode(self._call("Page.captureScreenshot", session, format="png")["data"])
        events = [e for e in self._events if e.get("sessionId") == session]
        self._call("Target.closeTarget", targetId=target)
        pixels = np.asarray(image.imread(io.BytesIO(png), format="png"), np.float64)[..., :3]
        return Seen(
            *(found[key] for key in ("text", "title", "pictures", "scroll_width", "scripts")),
            problems=[p for e in events if (p := _problem(e))],
            requests=[r for e in events if (r := _request(e)) and r != path.resolve().as_uri()],
            screenshot=pixels,
            png=png,
        )

    def _resize(self, session: str, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", session, width=WIDTH, height=height, deviceScaleFactor=1,
                   mobile=False)  # fmt: skip

    def _call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result = answer["result"]
        assert isinstance(result, dict)
        return result

    def _wait(self, event: str, session: str) -> None:
        while not any(e.get("method") == event and e.get("sessionId") == session for e in self._events):
            self._events.append(self._next())

    def _next(self) -> dict[str, Any]:
        end_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(end_s - time.monotonic(), 0.0))
            piece = os.read(self._read, 1 << 20) if ready else b""
            assert piece, f"the browser says nothing more (exit code {self._process.poll()})"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        found = json.loads(message)
        assert isinstance(found, dict)
        return found


def _problem(event: dict[str, Any]) -> str:
    """What is wrong, or nothing; how fast a graphics driver is, which it warns of, is no matter here."""
    method, p = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
        return str(p["exceptionDetails"])
    if method == "Log.entryAdded":
        entry = p["entry"]
        return str(entry) if entry["level"] in {"error", "warning"} and entry["source"] != "rendering" else ""
    if method == "Runtime.consoleAPICalled" and p["type"] in {"error", "assert"}:
        return str(p["args"])
    return f"failed: {p['errorText']}" if method == "Network.loadingFailed" else ""


def _request(event: dict[str, Any]) -> str:
    """The address that an event asks for, unless it is in the page itself."""
    address = event["params"]["request"]["url"] if event.get("method") == "Network.requestWillBeSent" else ""
    return "" if address.startswith(("data:", "blob:")) else str(address)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty ``profile``; where there is none the test is skipped, except in CI."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium here (apt-get install chromium)")
        pytest.skip("no chromium here (apt-get install chromium)")
    theirs_read, write = os.pipe()
    read, theirs_write = os.pipe()
    command = f'exec "$@" 3<&{theirs_read} 4>&{theirs_write}'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", program, *_OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_read, theirs_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        yield Browser(process, write, read)
    finally:
        os.close(write)  # a browser whose pipe is closed ends
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read)


def check_shown(seen: Seen, pictures: list[str]) -> None:
    """A page that is whole: pictures drawn, nothing wrong, nothing asked of the network, as wide as the window."""
    assert seen.problems == []
    assert seen.requests == []
    assert seen.scroll_width <= WIDTH
    assert [picture["name"] for picture in seen.pictures] == pictures
    for picture in seen.pictures:
        assert picture["marks"] > 10, picture
        assert picture["width"] > 700
        pixels = seen.part(picture)
        assert pixels.std() > 0.02, f"{picture['name']} is blank"
