"""A real browser for tests: headless Chromium, spoken to in its DevTools protocol over aiohttp, which the library needs
anyway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE = 60.0
"""Seconds for any answer of the browser."""


def find_browser() -> str | None:
    """The Chromium of this machine (Debian package `chromium`), or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One page in the browser; what its console complains of is in `complaints`."""

    def __init__(self, port: int) -> None:
        self._port, self._number = port, 0
        self._loop = asyncio.new_event_loop()
        self._replies: dict[int, dict[str, Any]] = {}
        self.complaints: list[str] = []
        self._loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{self._port}/json/list") as answer:
            target = next(t for t in await answer.json(content_type=None) if t["type"] == "page")
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)

    def close(self) -> None:
        """Leave the browser."""
        self._loop.run_until_complete(self._session.close())
        self._loop.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What a method of the protocol answers."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), PATIENCE))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive()).data)
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        details = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(details["exceptionDetails"])[:2000])
        if message.get("method") == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(details["args"]))
        if message.get("method") == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(details["entry"]["text"])
        if message.get("method") == "Network.requestWillBeSent":
            url = details["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.complaints.append(f"asked the network for {url}")

    def open(self, path: Path) -> float:
        """Open a report and wait until it is drawn; the seconds that this took."""
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        self.complaints.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            with contextlib.suppress(AssertionError):  # the page before it is just going away
                if self.get("document.body && document.body.dataset.ready") == "yes":
                    return time.monotonic() - began
            time.sleep(0.02)
        raise AssertionError(f"the page was not drawn: {self.complaints}")

    def get(self, script: str) -> Any:
        """The JSON value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def set(self, selector: str, value: str) -> None:
        """Give an input or a choice a value, as a person would."""
        self.get(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
            "e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change', {bubbles: "
            "true})); })()"
        )

    def hover(self, selector: str) -> None:
        """Move the pointer to the middle of an element."""
        place = self.get(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: "
            f"'center'}});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def photograph(self, path: Path) -> None:
        """A picture of the visible part of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A running browser with an empty page; ended at the end."""
    program = find_browser()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1440,1000"]
        command = [program, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            file, began = Path(profile) / "DevToolsActivePort", time.monotonic()
            while not (file.is_file() and "\n" in file.read_text()):
                assert process.poll() is None and time.monotonic() - began < PATIENCE, "the browser did not start"
                time.sleep(0.05)
            page = Page(int(file.read_text().splitlines()[0]))
            try:
                yield page
            finally:
                page.close()
        finally:
            process.kill()
            process.wait(PATIENCE)
