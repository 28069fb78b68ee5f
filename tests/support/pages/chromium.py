"""Chromium that tests drive: real pointer and keys, at any width, with every error that a page reports.

It speaks the DevTools protocol over a pipe (https://chromedevtools.github.io/devtools-protocol/).
"""

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path

from support.oracles import CHROMIUM, require

HEIGHT = 900
# Seconds in which the scripts of a page must have drawn it.
TIMEOUT_S = 60
# Seconds in which the browser must answer. One that draws no frame, or whose page never returns, would be waited for
# without end.
ANSWER_S = 120
KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
# Puts what a page's policy refuses on the console.
WATCH = """addEventListener("securitypolicyviolation", (e) =>
  console.error(`CSP refuses ${e.violatedDirective} ${e.blockedURI} ${e.sample}`));"""
# Whether a page is drawn; one without data has no script that says so.
READY = """location.protocol === "file:" && (document.getElementById("data")
  ? document.documentElement.dataset.ready === "yes" : document.readyState === "complete")"""


class NoAnswer(RuntimeError):
    """The browser did not answer a command within ANSWER_S seconds."""


class Browser:
    """Chromium without a window, driven over a pipe; one process shows any number of pages. A context manager."""

    def __init__(self, folder: Path):
        require("chromium")
        self.folder, self.started = folder, 0
        self._start()

    def _start(self):
        self.number, self.events, self.hangs = 0, [], False
        self.started += 1
        # The shell gives the browser both ends of the pipe as the file descriptors 3 and 4.
        self.process = subprocess.Popen(
            [
                "sh",
                "-c",
                'exec "$@" 3<&0 4>&1 1>&2',
                "sh",
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                # No window is ever in front, and Chromium draws less, or nothing, of a page that nobody sees.
                "--disable-background-timer-throttling",
                "--disable-backgrounding-occluded-windows",
                "--disable-renderer-backgrounding",
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-pipe",
                f"--user-data-dir={self.folder / f'profile-{self.started}'}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.rest, self.session = b"", None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        # Without smooth scrolling, which goes on beside what a test does next.
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def send(self, method: str, **params) -> dict:
        """The result of a command; events that come before it are kept. Raises RuntimeError if it fails, and NoAnswer
        after ANSWER_S seconds without an answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        ends = time.monotonic() + ANSWER_S
        while True:
            answer = self._read(method, ends)
            if answer.get("id") != self.number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def _read(self, method: str, ends: float) -> dict:
        pipe = self.process.stdout.fileno()
        while b"\0" not in self.rest:
            if not select.select([pipe], [], [], max(0, ends - time.monotonic()))[0]:
                self.hangs = True
                raise NoAnswer(f"{method}: no answer within {ANSWER_S} s")
            more = os.read(pipe, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self.rest += more
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, expression: str):
        """The JSON value of an expression in the page; a promise is awaited. Raises RuntimeError for an exception."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def open(self, text: str, width: int, height: int = HEIGHT) -> None:
        """Shows a page in a window of `width` x `height` pixels, once its scripts have drawn it. A browser that did not
        answer an earlier command is replaced."""
        if self.hangs:
            self.process.kill()
            self.__exit__()
            self._start()
        path = self.folder / "page.html"
        path.write_text(text, encoding="utf-8")
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.move(0, 0)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=path.as_uri())
        ends = time.monotonic() + TIMEOUT_S
        while not self.call(READY):
            if time.monotonic() > ends:
                raise RuntimeError(f"the page's scripts did not end: {self.errors()}")
            time.sleep(0.02)

    def errors(self) -> list[str]:
        """Every error and warning of the console and every uncaught exception since the page was opened."""
        said = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                said.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                said.append(details.get("exception", {}).get("description") or details["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                said.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        return said

    def move(self, x: float, y: float, kind: str = "mouseMoved", button: str = "none", clicks: int = 0) -> None:
        """Moves the pointer, or presses and releases a button with `kind`."""
        self.send(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button=button,
            clickCount=clicks,
            buttons=int(button == "left" and kind != "mouseReleased"),
        )

    def click(self, x: float, y: float, clicks: int = 1) -> None:
        self.move(x, y)
        for count in range(1, clicks + 1):
            self.move(x, y, "mousePressed", "left", count)
            self.move(x, y, "mouseReleased", "left", count)

    def press(self, *keys: str) -> None:
        """Presses keys by their names in KeyboardEvent.key."""
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            fields = {"key": key, "windowsVirtualKeyCode": KEY_CODES.get(key, ord(key[0].upper()))}
            self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **fields)
            self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
