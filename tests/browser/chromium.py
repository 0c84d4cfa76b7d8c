"""Headless Chromium, driven over its DevTools protocol with the HTTP client that transom has anyway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage",
    "--disable-default-apps", "--mute-audio", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Space": 32}


def find_chromium() -> str | None:
    """Return the browser's path, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def running_chromium(executable: str, folder: Path) -> Iterator[str]:
    """Run a browser with a new profile in `folder`; yield the URL of its DevTools."""
    command = [executable, *_FLAGS, f"--user-data-dir={folder}"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses to run as root with it
    with (folder / "stderr").open("wb") as log:
        process = subprocess.Popen([*command, "about:blank"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{_port(process, folder)}"
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], folder: Path) -> int:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((folder / "DevToolsActivePort").read_text().split()[0])
        time.sleep(0.05)
    raise RuntimeError(f"Chromium did not start: {(folder / 'stderr').read_text()[-2000:]}")


class Page:
    """One tab. `problems` gathers uncaught errors and what the content policy blocked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.problems: list[str] = []

    async def listen(self) -> None:
        """Take answers and events until the socket closes."""
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                future = self._waiting.pop(event["id"])
                if not future.done():
                    future.set_result(event)
            elif event["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                # Answers of 4xx are logged as network errors; the page shows them by itself.
                if entry["level"] == "error" and entry["source"] != "network":
                    self.problems.append(str(entry["text"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Run a DevTools command."""
        id = next(self._ids)
        future = self._waiting[id] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": id, "method": method, "params": params})
        answer = await future
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        """Load a page; return when it has said that all of it is there."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE_S):
            await self._loaded.wait()

    async def js(self, expression: str) -> Any:
        """Return the JSON value of an expression; a promise is awaited."""
        done = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    async def until(self, condition: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until an expression is true; the page looks at it before each frame that it draws."""
        limit_ms = timeout_s * 1000
        met = await self.js(
            f"new Promise((tell) => {{ const end = performance.now() + {limit_ms}; const look = () => {{"
            f" if ({condition}) tell(true); else if (performance.now() > end) tell(false);"
            " else setTimeout(look, 30); }; look(); })"
        )
        if not met:
            shown = await self.js("document.body.innerText")
            raise AssertionError(f"not within {timeout_s:g} s: {condition}\n{shown}")

    async def text(self, selector: str) -> str:
        """Return the text of the last element that a selector finds."""
        found = await self.js(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.innerText")
        return str(found)

    async def write(self, text: str) -> None:
        """Type into the focused field."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        code = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        typed = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **typed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def click(self, selector: str) -> None:
        """Click the middle of an element."""
        where = await self.js(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'nearest'}); const box = node.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        mouse = {"x": where[0], "y": where[1], "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **mouse)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **mouse)

    async def drop(self, *files: Path) -> None:
        """Drag files from outside onto the page and let go."""
        data = {"items": [], "files": [str(path) for path in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            await self.call("Input.dispatchDragEvent", type=kind, x=200, y=200, data=data)

    async def shape(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the window and the colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """Return what is seen as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def new_page(devtools: str) -> AsyncIterator[Page]:
    """Open a tab; close it afterwards."""
    async with aiohttp.ClientSession() as http:
        async with http.put(f"{devtools}/json/new?about:blank") as response:
            target = await response.json(content_type=None)
        async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            listener = asyncio.create_task(page.listen())
            try:
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.shape(1280, 900)
                yield page
            finally:
                listener.cancel()
                async with http.get(f"{devtools}/json/close/{target['id']}") as response:
                    await response.read()
