"""A headless Chromium, driven by its DevTools protocol: enough to open a page, move things, and look."""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the page must not need the internet
)  # fmt: skip
WAIT_S = 60.0


def chromium() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


class Tab:
    """A tab of the browser. errors: what its console and its network complained of."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return dict(message["result"])
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        method, said = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(said["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
            self.errors.append(json.dumps(said["args"])[:500])

    def js(self, code: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        got = self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def open(self, address: str, width: int = 1440, height: int = 900) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Page.navigate", url=address)

    def wait(self, code: str, seconds: float = WAIT_S) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(f"(() => {{ try {{ return !!({code}) }} catch (error) {{ return false }} }})()"):
            assert time.monotonic() < end, f"never true: {code}; the page complained: {self.errors}"
            time.sleep(0.02)

    def text(self, name: str) -> str:
        """Of the element with this data-name."""
        return str(self.js(f"document.querySelector('[data-name=\"{name}\"]')?.innerText ?? ''"))

    def click(self, name: str) -> None:
        self.wait(f"document.querySelector('[data-name=\"{name}\"]')")
        self.js(f"document.querySelector('[data-name=\"{name}\"]').click()")

    def arrow(self, name: str, key: str = "ArrowRight") -> None:
        """One step of a slider, as with the keyboard."""
        code = {"ArrowRight": 39, "ArrowLeft": 37}[key]
        self.js(
            f"(() => {{ const e = document.querySelector('[data-name=\"{name}\"]'); (e.matches('[tabindex]') ? e : "
            "e.querySelector('[tabindex]')).focus(); })()"
        )
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path, whole: bool = False) -> None:
        if whole:
            height = int(self.js("document.documentElement.scrollHeight"))
            width = int(self.js("innerWidth"))
            self.send(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            time.sleep(0.4)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Callable[[], Tab]]:
    """Makes tabs, each with its own cookies. folder: of its profile and its downloads."""
    program = chromium()
    assert program is not None
    command = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    environment = {**os.environ, "HOME": str(folder)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    open_ones = ExitStack()
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"ws://127\.0\.0\.1:\d+/devtools/browser/\S+", line):
                break
        else:
            raise AssertionError(f"{program} did not start: {''.join(lines)}")
        root = open_ones.enter_context(connect(found[0], max_size=None))
        place = found[0].partition("/devtools")[0]

        def ask(method: str, **parameters: Any) -> dict[str, Any]:
            root.send(json.dumps({"id": 1, "method": method, "params": parameters}))
            while (message := json.loads(root.recv(timeout=WAIT_S))).get("id") != 1:
                pass
            return dict(message["result"])

        def tab() -> Tab:
            context = ask("Target.createBrowserContext")["browserContextId"]
            ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), browserContextId=context)
            target = ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
            return Tab(open_ones.enter_context(connect(f"{place}/devtools/page/{target}", max_size=None)))

        yield tab
    finally:
        open_ones.close()
        process.terminate()
        process.wait(10)
