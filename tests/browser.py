"""Pages in a real browser without a window: Debian's chromium."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

SECONDS = 120
TOLD = '<script id="told" type="application/json">'


def answer(page: Path, script: str, folder: Path) -> Any:
    """What an expression of JavaScript gives in the page, once its plots are drawn; skips where there is no browser.

    Errors of the page's own scripts fail the test, and so do requests to a network: it has none.
    """
    browser = shutil.which("chromium")
    if browser is None:
        reason = os.environ.get("APPRENTICE_NO_CHROMIUM", "")  # .ci/run says why it could not be installed
        if "CI" in os.environ and not reason:
            pytest.fail("no chromium, though this is CI: .ci/run installs it")
        pytest.skip(reason or "no chromium to open the page in")
    asked = folder / "asked.html"
    heard = "<script>window.wrong = []; addEventListener('error', e => wrong.push(e.message))</script>"
    asking = f"""<script>setTimeout(() => {{
        const told = document.createElement("script")
        told.id = "told", told.type = "application/json"
        told.textContent = JSON.stringify({{wrong, answer: (() => {{ {script} }})()}})
        document.body.append(told)
    }}, 3000)</script>"""
    html = page.read_text("utf-8")
    asked.write_text(html.replace("<head>", f"<head>{heard}", 1).replace("</body>", f"{asking}</body>"), "utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", asked.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, encoding="utf-8", timeout=SECONDS)
    assert TOLD in done.stdout, f"{done.stderr[-2000:]}\n{done.stdout[-500:]}"
    found = json.loads(done.stdout.rpartition(TOLD)[2].partition("</script>")[0])
    assert not found["wrong"]
    return found["answer"]
