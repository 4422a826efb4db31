"""Pages in a real browser without a window: Debian's chromium, told what to do through a pipe."""

import base64
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS = 120


class Page:
    """A page that is open in a browser, by the protocol of Chrome's developer tools."""

    def __init__(self, requests: Any, answers: Any) -> None:
        self.requests, self.answers, self.calls, self.session = requests, answers, 0, {}
        self.faults: list[str] = []

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of a method; what the page did wrong meanwhile goes to `faults`."""
        self.calls += 1
        request = {"id": self.calls, "method": method, "params": parameters, **self.session}
        self.requests.write(json.dumps(request).encode() + b"\0")
        self.requests.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self.calls:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._watch(answer.get("method"), answer.get("params", {}))

    def _read(self) -> Any:
        letters = bytearray()
        while (letter := self.answers.read(1)) != b"\0":
            assert letter, "the browser ended"
            letters += letter
        return json.loads(letters)

    def _watch(self, event: str | None, facts: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.faults.append(str(facts["exceptionDetails"]))
        if event == "Runtime.consoleAPICalled" and facts["type"] in {"error", "warning"}:
            self.faults.append(str(facts["args"]))
        if event == "Network.requestWillBeSent" and not facts["request"]["url"].startswith(("file:", "data:", "blob:")):
            self.faults.append(facts["request"]["url"])

    def open(self, page: Path, width: int) -> None:
        """Open a page in a window of so many pixels, and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self.evaluate("document.readyState === 'complete'"):
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key: Tab or Enter."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **facts)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        png = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(png))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start a browser without a network that keeps its files in a folder; skips where there is none.

    Errors and warnings of a page's scripts fail the test, and so does a request to a network.
    """
    program = shutil.which("chromium")
    if program is None:
        reason = os.environ.get("APPRENTICE_NO_CHROMIUM", "")  # .ci/run says why it could not be installed
        if "CI" in os.environ and not reason:
            pytest.fail("no chromium, though this is CI: .ci/run installs it")
        pytest.skip(reason or "no chromium to open the page in")
    (theirs, requests), (answers, their_answers) = os.pipe(), os.pipe()
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", "about:blank",
    ]  # fmt: skip
    line = f"exec timeout {SECONDS} {shlex.join(command)} 3<&{theirs} 4>&{their_answers}"
    with subprocess.Popen(["bash", "-c", line], pass_fds=(theirs, their_answers), stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        os.close(their_answers)
        with os.fdopen(requests, "wb") as writer, os.fdopen(answers, "rb") as reader:
            page = Page(writer, reader)
            target = next(t for t in page.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
            session = page.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
            page.session = {"sessionId": session}
            for part in ("Page", "Runtime", "Network"):
                page.call(f"{part}.enable")
            yield page
            page.call("Browser.close")
        process.wait()
    assert page.faults == []


# What is wrong with a page's looks: parts that stick out of the window, plots that
# their surroundings leave no room, and texts of a plot that lie on one another.
FAULTS = """(() => {
    const faults = [], seen = e => e.getClientRects().length
    const scrolls = e => e && (getComputedStyle(e).overflowX === "auto" || scrolls(e.parentElement))
    if (document.documentElement.scrollWidth > innerWidth) faults.push(`${document.documentElement.scrollWidth} pixels`)
    for (const element of document.querySelectorAll("body *"))
        if (element.getBoundingClientRect().right > innerWidth + 1 && !scrolls(element.parentElement))
            faults.push(`${element.tagName}: ${element.textContent.slice(0, 60)}`)
    for (const plot of document.querySelectorAll(".plot > svg")) {
        const upright = [...plot.querySelectorAll("text")].filter(e => seen(e) && Math.abs(e.getScreenCTM().b) < 1e-6)
        const boxes = upright.map(text => [text.textContent, text.getBoundingClientRect()])
        boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
            const apart = a.left >= b.right || b.left >= a.right || a.top + 2 >= b.bottom || b.top + 2 >= a.bottom
            if (!apart && one + a.x + a.y !== other + b.x + b.y)  // a text is drawn twice, at the same place
                faults.push(`${one} on ${other}`)
        }))
        if (!boxes.length) faults.push("a plot without texts")
        if (plot.getBoundingClientRect().width < 300) faults.push("a plot without room")
    }
    return faults
})()"""
