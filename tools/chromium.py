# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by its DevTools protocol over a WebSocket: for tests of pages, and pictures of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
from typing import TYPE_CHECKING, Any, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_PATIENCE_S: Final = 120.0
_FLAGS: Final = (
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-port=0", "--force-color-profile=srgb", "--lang=en-US", "--no-proxy-server"),
    # a page that nobody sees would get its timers late
    *("--disable-renderer-backgrounding", "--disable-background-timer-throttling"),
)


class PageFailed(Exception):
    """A command that the browser refused, or a script that raised."""


class Page:
    """One tab. ``complaints``: what its console got: errors, and what the page's policy has blocked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self) -> None:
        """Take messages until the tab is closed."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["source"] != "network":
                self.complaints.append(told["params"]["entry"]["text"])

    async def command(self, method: str, **parameters: object) -> dict[str, Any]:
        """Its result; raises PageFailed."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_PATIENCE_S):
            told = await answer
        if "error" in told:
            raise PageFailed(f"{method}: {told['error']}")
        result: dict[str, Any] = told["result"]
        return result

    async def run(self, script: str) -> Any:  # noqa: ANN401 - whatever the script's value is
        """The value of a JavaScript expression, awaited; raises PageFailed."""
        told = await self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise PageFailed(json.dumps(told["exceptionDetails"]))
        return told["result"].get("value")

    async def show(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Open ``url`` at this size, in this colour scheme."""
        await self.resize(width, height, dark=dark)
        await self.command("Page.navigate", url=url)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """As if on another screen."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.command("Emulation.setEmulatedMedia", features=scheme)
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def picture(self) -> bytes:
        """What is seen, as PNG."""
        told = await self.command("Page.captureScreenshot", format="png")
        return base64.b64decode(told["data"])


@contextlib.asynccontextmanager
async def browser_page(program: str, folder: Path) -> AsyncIterator[Page]:
    """A page of a browser of its own. ``program``: of Chromium. ``folder``: for its profile; it must be empty."""
    # a sandbox cannot be made by root, as in containers
    flags = [*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else []), f"--user-data-dir={folder}"]
    # in a session of its own, so that all of its processes can be ended
    process = await asyncio.create_subprocess_exec(
        program, *flags, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        port = await _port_of(folder / "DevToolsActivePort", process)
        async with (
            aiohttp.ClientSession() as client,
            client.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer,
            client.ws_connect((await answer.json())["webSocketDebuggerUrl"], max_msg_size=0) as socket,
        ):
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            for domain in ("Page", "Runtime", "Log"):
                await page.command(f"{domain}.enable")
            try:
                yield page
            finally:
                reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


async def _port_of(file: Path, process: asyncio.subprocess.Process) -> int:
    """The browser writes it when it listens; raises PageFailed if it ends before."""
    async with asyncio.timeout(_PATIENCE_S):
        while process.returncode is None:
            lines = await asyncio.to_thread(lambda: file.read_text().splitlines() if file.exists() else [])
            if len(lines) > 1:
                return int(lines[0])
            await asyncio.sleep(0.05)
    raise PageFailed(f"the browser ended with status {process.returncode}")
