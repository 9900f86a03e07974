"""A headless Chromium, driven over the DevTools protocol through a pipe: no port, no client library.

    with Chromium() as browser:
        browser.open(path)
        browser.evaluate("document.title")

The protocol (https://chromedevtools.github.io/devtools-protocol/) is JSON messages with a NUL byte after
each; the browser reads file descriptor 3 and writes 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome binary; None where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    return None


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are far from 3 and 4, lest one redirection overwrite the other's source."""
    ends = os.pipe()
    far = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return far[0], far[1]


class Chromium:
    """A browser process and one page in it. Collects what the page logs, throws, or asks the network for."""

    def __init__(self, width: int = 1280, height: int = 800, timeout: float = 60.0) -> None:
        binary = find_chromium()
        if binary is None:
            raise RuntimeError("no Chromium binary on the PATH")
        self.timeout = timeout
        self.log: list[str] = []
        self.requests: list[str] = []
        self._next = 0
        self._session: str | None = None
        self._buffer = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        browser_in, self._to = _pipe()
        self._from, browser_out = _pipe()
        script = f'exec 3<&{browser_in} 4>&{browser_out}; exec "$@"'
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        options += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "bash",
                binary,
                *options,
                f"--window-size={width},{height}",
                "about:blank",
            ],
            pass_fds=(browser_in, browser_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_in)
        os.close(browser_out)
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)  # the browser ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result. RuntimeError: it refused; TimeoutError: silence."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.timeout
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path: Path) -> None:
        """Load a file and wait until it is loaded and painted twice."""
        self.log.clear()
        self.requests.clear()
        self.command("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + self.timeout
        while self.evaluate("location.href + document.readyState") != path.resolve().as_uri() + "complete":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} did not finish loading within {self.timeout:g} s")
            time.sleep(0.05)
        self.settle()

    def settle(self) -> None:
        """Wait for two animation frames, so that what was asked for is drawn."""
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression (a promise is awaited). RuntimeError if it throws."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event: "mouseMoved", "mousePressed", "mouseReleased" or "mouseWheel"."""
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str) -> None:
        """One key press on whatever has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path: Path, whole: bool = False) -> bytes:
        """Write a PNG of the window (or of the whole page) and return its bytes."""
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        data = base64.b64decode(answer["data"])
        path.write_bytes(data)
        return data

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{method}: no answer within {self.timeout:g} s")
            piece = os.read(self._from, 1 << 16)
            if not piece:
                raise RuntimeError(f"{method}: the browser ended (exit status {self._process.poll()})")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.log.append(f"{message['params']['type']}: {message['params']['args']}")
            case "Runtime.exceptionThrown":
                self.log.append(f"exception: {message['params']['exceptionDetails']}")
            case "Log.entryAdded":
                self.log.append(
                    f"{message['params']['entry']['level']}: {message['params']['entry']['text']}"
                )
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return message
